// Would catch: a value taken from the wrong source, a mistyped name or value accepted in silence, a message that
// doesn't say where and what, a secret printed, a size or duration off by its unit.
#include "base/config.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <string>

#include "base/log.h"

namespace terrace::config {
namespace {

Schema TestSchema() {
  return {
      .program = "terrace test",
      .summary = "for tests",
      .options = {
          {.name = "ram", .type = Type::kBytes, .default_value = "2GiB", .help = "RAM for KV", .metavar = "SIZE"},
          {.name = "shared", .help = "Shared directory", .metavar = "DIR"},
          {.name = "strict", .type = Type::kBool, .default_value = "false", .help = "No decode KV"},
          {.name = "chunk", .type = Type::kInt, .default_value = "256", .help = "Tokens of a chunk", .metavar = "N"},
          {.name = "load-deadline", .type = Type::kDuration, .default_value = "5s", .help = "Give up after"},
          {.name = "kv-type",
           .type = Type::kChoice,
           .default_value = "f16",
           .help = "KV type",
           .choices = {"f16", "q8_0"}},
          {.name = "api-key", .type = Type::kSecret, .help = "Key", .environment = "VLLM_API_KEY"},
          {.name = "backends", .type = Type::kTextList, .help = "URLs", .metavar = "URLS"},
          {.name = "max-cpu-size", .type = Type::kBytes, .help = "RAM"},
      }};
}

using Environment = std::map<std::string, std::string>;

Result<Parsed> LoadWith(const std::vector<std::string>& args, const Environment& environment = {},
                        Schema schema = TestSchema()) {
  return Load(schema, args, [&](const std::string& name) -> std::optional<std::string> {
    const auto found = environment.find(name);
    if (found == environment.end()) return std::nullopt;
    return found->second;
  });
}

std::string ErrorOf(const Result<Parsed>& result) { return result ? "(no error)" : result.error().what; }

// A file that goes away with the test.
class TempFile {
 public:
  explicit TempFile(const std::string& text) {
    path_ = (std::filesystem::temp_directory_path() / "terrace-config-XXXXXX").string();
    const int fd = mkstemp(path_.data());
    EXPECT_GE(fd, 0);
    close(fd);
    std::ofstream(path_) << text;
  }
  ~TempFile() { std::filesystem::remove(path_); }
  TempFile(const TempFile&) = delete;
  TempFile& operator=(const TempFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// D14.
TEST(Config, BoolsAreReadInEveryUsualSpelling) {
  for (const char* text : {"false", "0", "no", "off", " OFF ", "No", "FALSE"}) {
    const auto value = ParseBool(text);
    ASSERT_TRUE(value) << text;
    EXPECT_FALSE(*value) << text;
  }
  for (const char* text : {"true", "1", "yes", "on", " On\t", "TRUE"}) {
    const auto value = ParseBool(text);
    ASSERT_TRUE(value) << text;
    EXPECT_TRUE(*value) << text;
  }
  for (const char* text : {"flase", "", " ", "2", "truefalse", "y", "n", "t", "00", "01", "-1", "0.0", "null", "~",
                           "none", "off off", "true,", "\"true\""}) {
    EXPECT_FALSE(ParseBool(text)) << text;
  }
}

// D14.
TEST(Config, AMistypedBoolIsAnErrorThatNamesTheOption) {
  EXPECT_EQ(ErrorOf(LoadWith({"--strict=flase"})),
            "--strict: \"flase\" is neither true nor false; write true, 1, yes, on or false, 0, no, off");
  EXPECT_EQ(ErrorOf(LoadWith({}, {{"TERRACE_STRICT", "flase"}})),
            "TERRACE_STRICT: strict: \"flase\" is neither true nor false; write true, 1, yes, on or false, 0, no, off");
}

// D15.
TEST(Config, SizesHaveDecimalAndBinaryUnits) {
  const std::pair<const char*, uint64_t> cases[] = {
      {"5GiB", 5368709120},
      {"5GB", 5000000000},
      {"512MiB", 536870912},
      {"123", 123},
      {"1.5GiB", 1610612736},
      {"0", 0},
      {" 64 KiB ", 65536},
      {"2tib", 2199023255552},
      {"0.29GB", 290000000},
      {"7B", 7},
      {"18446744073709551615", 18446744073709551615ull},
      {"5GiB\n", 5368709120},
      {"5gb", 5000000000},
      {"0.5KiB", 512},
      {"0GiB", 0},
      {"16777215TiB", 16777215ull << 40},
  };
  for (const auto& [text, bytes] : cases) {
    const auto parsed = ParseBytes(text);
    ASSERT_TRUE(parsed) << text;
    EXPECT_EQ(*parsed, bytes) << text;
  }
  for (const char* text : {"5 apples",
                           "-1",
                           "",
                           "GiB",
                           "1.2.3GB",
                           ".",
                           "1e9",
                           "0x10",
                           "inf",
                           "nan",
                           "18446744073709551616",
                           "17179869184GiB",
                           "16777216.5TiB",
                           "5GiB5",
                           "5 GiB apples",
                           "5G",
                           "5Gi",
                           "5K",
                           "+5GiB",
                           "-0.5GiB",
                           "5,5GiB",
                           "5.GiB",
                           ".5GiB",
                           "1.5",
                           "0.5B",
                           "010",
                           "0400MiB",
                           "00",
                           "5e0GB",
                           "1_000",
                           "5\xC2\xA0GiB",
                           "five",
                           "5GiBGiB",
                           "GiB5",
                           "99999999999999999999999999TiB"}) {
    EXPECT_FALSE(ParseBytes(text)) << text;
  }
}

TEST(Config, DurationsAreMillisecondsUnlessTheyHaveAUnit) {
  const std::pair<const char*, int64_t> cases[] = {
      {"250ms", 250}, {"5s", 5000},   {"2m", 120000}, {"1h", 3600000},
      {"40", 40},     {"1.5s", 1500}, {"0", 0},       {"876000h", 3153600000000}};
  for (const auto& [text, ms] : cases) {
    const auto parsed = ParseDurationMs(text);
    ASSERT_TRUE(parsed) << text;
    EXPECT_EQ(*parsed, ms) << text;
  }
  for (const char* text : {"-5s", "5 parsecs", "", "9223372036854775808", "9223372036854775807h", "1e3s", "0.5ms",
                           "08s", "101000000h", "5s5", "1d", "inf", "5 s m"}) {
    EXPECT_FALSE(ParseDurationMs(text)) << text;
  }
}

// D16.
TEST(Config, AnUnknownNameIsAnErrorWithTheNearestKnownOne) {
  EXPECT_EQ(ErrorOf(LoadWith({"--max-cpu-sizee", "5GiB"})),
            "unknown flag --max-cpu-sizee; did you mean --max-cpu-size?");
  EXPECT_EQ(ErrorOf(LoadWith({"--sharde=/mnt"})), "unknown flag --sharde; did you mean --shared?");
  EXPECT_EQ(ErrorOf(LoadWith({"--entirely-else", "1"})), "unknown flag --entirely-else; see --help");
  const TempFile file("chunk: 64\n\nmax_cpu_sizee: 5GiB\n");
  EXPECT_EQ(ErrorOf(LoadWith({"--config", file.path()})),
            file.path() + ":3: unknown key \"max_cpu_sizee\"; did you mean \"max_cpu_size\"?");
  const TempFile words("ram_sise: 5GiB\n");
  EXPECT_EQ(ErrorOf(LoadWith({"--config", words.path()})),
            words.path() + ":1: unknown key \"ram_sise\"; did you mean \"ram\"?");
}

// D16.
TEST(Config, AnUnreadableFileIsAnError) {
  EXPECT_EQ(ErrorOf(LoadWith({"--config", "/nowhere/node.yaml"})),
            "--config: cannot read /nowhere/node.yaml: No such file or directory");
  EXPECT_EQ(ErrorOf(LoadWith({"--config", "/"})), "--config: cannot read /: Is a directory");
  EXPECT_EQ(ErrorOf(LoadWith({}, {{"TERRACE_CONFIG_FILE", "/nowhere/node.yaml"}})),
            "TERRACE_CONFIG_FILE: cannot read /nowhere/node.yaml: No such file or directory");
  const TempFile file("chunk: 64\n");
  EXPECT_EQ(LoadWith({"--config", file.path()}, {{"TERRACE_CONFIG_FILE", "/nowhere"}})->values.Int("chunk"), 64);
}

// D17: whichever of flag, environment, file and another program's configuration are there, for every type.
TEST(Config, FlagBeatsEnvironmentBeatsFileBeatsWhatIsBroughtBeatsDefault) {
  struct Case {
    const char *name, *flag, *environment, *file, *brought, *absent;
  };
  const Case cases[] = {
      {"chunk", "128", "512", "64", "320", "256"},
      {"ram", "1MiB", "2MiB", "3MiB", "4MiB", "2GiB"},
      {"shared", "/flag", "/env", "/file", "/brought", ""},
      {"strict", "on", "yes", "true", "1", "false"},
      {"load-deadline", "1s", "2s", "3s", "4s", "5s"},
      {"api-key", "flag", "env", "file", "brought", ""},
      {"backends", "a,b", "c", "d", "e", ""},
      {"kv-type", "q8_0", "f16", "q8_0", "f16", "f16"},
  };
  for (const Case& c : cases) {
    const std::string name = c.name;
    std::string variable = "TERRACE_" + name;
    for (char& letter : variable) letter = letter == '-' ? '_' : static_cast<char>(std::toupper(letter));
    const TempFile file(name + ": " + c.file + "\n");
    for (int given = 0; given < 16; ++given) {
      std::vector<std::string> args;
      Environment environment;
      std::vector<Preset> brought;
      std::string wins = c.absent, origin = "(default)";
      if (given & 8) {
        brought = {{name, c.brought, "theirs.yaml:1 theirs"}};
        wins = c.brought;
        origin = "(file theirs.yaml:1 theirs)";
      }
      if (given & 4) {
        args = {"--config", file.path()};
        wins = c.file;
        origin = "(file " + file.path() + ":1)";
      }
      if (given & 2) {
        environment[variable] = c.environment;
        wins = c.environment;
        origin = "(env " + variable + ")";
      }
      if (given & 1) {
        args.push_back("--" + name + "=" + c.flag);
        wins = c.flag;
        origin = "(flag --" + name + ")";
      }
      const auto parsed = Load(
          TestSchema(), args,
          [&](const std::string& asked) -> std::optional<std::string> {
            const auto found = environment.find(asked);
            if (found == environment.end()) return std::nullopt;
            return found->second;
          },
          brought);
      ASSERT_TRUE(parsed) << ErrorOf(parsed);
      const std::string dump = "\n" + parsed->values.Dump();
      if (name == "strict" && given != 0) wins = "true";
      const std::string shown = name == "api-key" && !wins.empty() ? "***" : wins;
      const size_t line = dump.find("\n" + name + " = " + shown + " ");
      ASSERT_NE(line, std::string::npos) << given << dump;
      EXPECT_TRUE(dump.substr(0, dump.find('\n', line + 1)).ends_with(origin)) << given << dump;
      if (name == "api-key") {
        EXPECT_EQ(parsed->values.Text(name), wins);
      }
    }
  }
}

// D17.
TEST(Config, DumpShowsEveryValueWithItsOriginAndNoSecret) {
  const TempFile file("\nram: 64MiB\napi_key: hush\n");
  const auto parsed = LoadWith({"--print-config", "--config", file.path(), "--strict"}, {{"TERRACE_CHUNK", "512"}});
  ASSERT_TRUE(parsed) << ErrorOf(parsed);
  EXPECT_TRUE(parsed->print_config);
  EXPECT_EQ(parsed->values.Text("api-key"), "hush");
  EXPECT_EQ(parsed->values.Dump(), "api-key = ***                           (file " + file.path() + ":3)\n" +
                                       "backends =                              (default)\n"
                                       "chunk = 512                             (env TERRACE_CHUNK)\n"
                                       "kv-type = f16                           (default)\n"
                                       "load-deadline = 5s                      (default)\n"
                                       "max-cpu-size =                          (default)\n"
                                       "ram = 64MiB                             (file " +
                                       file.path() + ":2)\n" +
                                       "shared =                                (default)\n"
                                       "strict = true                           (flag --strict)\n");
}

TEST(Config, ASecretInAFileOthersMayReadIsWarnedOf) {
  const TempFile file("api-key: hush\n");
  std::vector<std::string> lines;
  log::SetSink([&](log::Level, std::string_view line) { lines.emplace_back(line); });
  std::filesystem::permissions(file.path(), std::filesystem::perms(0600));
  ASSERT_TRUE(LoadWith({"--config", file.path()}));
  EXPECT_TRUE(lines.empty());
  std::filesystem::permissions(file.path(), std::filesystem::perms(0644));
  ASSERT_TRUE(LoadWith({"--config", file.path()}));
  log::SetSink(nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("event=config_secret_readable"), std::string::npos) << lines[0];
  EXPECT_EQ(lines[0].find("hush"), std::string::npos) << lines[0];
}

TEST(Config, AnOptionMayHaveAVariableOfAnotherProgram) {
  EXPECT_EQ(LoadWith({}, {{"VLLM_API_KEY", "theirs"}})->values.Text("api-key"), "theirs");
  EXPECT_EQ(LoadWith({}, {{"VLLM_API_KEY", "theirs"}, {"TERRACE_API_KEY", "ours"}})->values.Text("api-key"), "ours");
  EXPECT_FALSE(LoadWith({}, {{"VLLM_API_KEY", ""}})->values.IsSet("api-key"));
}

TEST(Config, FlagsTakeTheirValueAfterABlankOrAnEqualsSign) {
  const auto parsed = LoadWith({"--shared=/a=b", "--chunk", "-3", "--strict=off"});
  ASSERT_TRUE(parsed) << ErrorOf(parsed);
  EXPECT_EQ(parsed->values.Text("shared"), "/a=b");
  EXPECT_EQ(parsed->values.Int("chunk"), -3);
  EXPECT_FALSE(parsed->values.Bool("strict"));
  EXPECT_EQ(LoadWith({"--chunk=1", "--chunk=2"})->values.Int("chunk"), 2);
  EXPECT_EQ(ErrorOf(LoadWith({"--shared"})), "--shared needs a value");
  EXPECT_EQ(ErrorOf(LoadWith({"--shared", "--strict"})), "--shared needs a value");
  EXPECT_EQ(ErrorOf(LoadWith({"--strict", "false"})), "unexpected argument \"false\"; did you mean --strict=false?");
  EXPECT_EQ(ErrorOf(LoadWith({"serve"})), "unexpected argument \"serve\"; see --help");
}

TEST(Config, ListsComeFromCommasFromRepeatedFlagsAndFromYaml) {
  const std::vector<std::string> expected = {"http://a", "http://b"};
  EXPECT_EQ(LoadWith({"--backends", "http://a, http://b"})->values.List("backends"), expected);
  EXPECT_EQ(LoadWith({"--backends=http://a", "--backends=http://b"})->values.List("backends"), expected);
  const TempFile file("backends:\n  - http://a\n  - http://b\n");
  EXPECT_EQ(LoadWith({"--config", file.path()})->values.List("backends"), expected);
  EXPECT_TRUE(LoadWith({})->values.List("backends").empty());
}

TEST(Config, AFileThatIsNotRightIsAnErrorWithItsLine) {
  const std::pair<std::string, std::string> cases[] = {
      {"ram: 1GiB\nchunk: many\n", ":2: chunk: \"many\" is not a whole number"},
      {"chunk:\n  a: 1\n", ":1: chunk: expected one value, found a map"},
      {"chunk: [1, 2]\n", ":1: chunk: expected one value, found a list"},
      {"shared:\n", ":1: shared: expected one value, found nothing"},
      {"ram: 1GiB\nstrict: true\nram: 2GiB\n", ":3: \"ram\" is set a second time (first: FILE:1); remove one"},
      {"load_deadline: 1s\nload-deadline: 2s\n",
       ":2: \"load-deadline\" is set a second time (first: FILE:1); remove one"},
      {"- ram\n", ":1: expected `name: value` lines"},
      {"ram: 1GiB\n\"chunk: 3\n", ":2: "},
      {"shared: \"/mnt\n", ":1: illegal EOF in scalar"},
      {"ram: 1GiB\nshared: '/mnt\n\n \n", ":2: illegal EOF in scalar"},
      {"backends:\n  - a\n  - b: c\n", ":3: backends: an item must be text without a comma"},
      {"kv_type: f32\n", ":1: kv-type: \"f32\" is none of f16, q8_0"},
      {"help: true\n", ":1: unknown key \"help\"; see --help"},
      {"? [a]\n: 1\n", ":1: a name must be plain text"},
      {"ram: 1GiB\n---\nram: 2GiB\n", ":2: a configuration is one YAML document; it ends here"},
  };
  for (const auto& [text, expected] : cases) {
    const TempFile file(text);
    std::string error = ErrorOf(LoadWith({"--config", file.path()}));
    ASSERT_TRUE(error.starts_with(file.path())) << error;
    error.erase(0, file.path().size());
    if (const size_t at = error.find(file.path()); at != std::string::npos)
      error.replace(at, file.path().size(), "FILE");
    EXPECT_TRUE(error == expected || (expected == ":2: " && error.starts_with(expected))) << text << "->" << error;
  }
  const TempFile empty("# nothing\n");
  EXPECT_TRUE(LoadWith({"--config", empty.path()}));
  const TempFile marked("%YAML 1.2\n---\n# one document\nram: 1GiB\n");
  EXPECT_EQ(LoadWith({"--config", marked.path()})->values.Bytes("ram"), 1u << 30);
  EXPECT_NE(ErrorOf(LoadWith({"--config", TempFile(std::string(2 << 20, '#')).path()})).find("larger than 1 MiB"),
            std::string::npos);
}

// Whatever YAML makes of it elsewhere: a value is what stands there, or an error.
TEST(Config, YamlsOwnReadingsOfAValueChangeNothing) {
  const std::pair<std::string, std::string> bad[] = {
      {"chunk: 0400\n", ":1: chunk: \"0400\" begins with a zero, which some read as octal; leave it out"},
      {"chunk: 0x100\n", ":1: chunk: \"0x100\" is not a whole number"},
      {"chunk: 0o400\n", ":1: chunk: \"0o400\" is not a whole number"},
      {"chunk: 1e3\n", ":1: chunk: \"1e3\" is not a whole number"},
      {"chunk: 256.0\n", ":1: chunk: \"256.0\" is not a whole number"},
      {"chunk: 1_024\n", ":1: chunk: \"1_024\" is not a whole number"},
      {"chunk: 4:16\n", ":1: chunk: \"4:16\" is not a whole number"},
      {"chunk: yes\n", ":1: chunk: \"yes\" is not a whole number"},
      {"chunk: 9223372036854775808\n", ":1: chunk: \"9223372036854775808\" is not a whole number"},
      {"chunk: ''\n", ":1: chunk: \"\" is not a whole number"},
      {"ram: .inf\n", ":1: ram: \".inf\" is not a size; write 512MiB, 5GB or a number of bytes"},
      {"ram: 1.0e+9\n", ":1: ram: \"1.0e+9\" is not a size; write 512MiB, 5GB or a number of bytes"},
      {"shared: ~\n", ":1: shared: expected one value, found nothing"},
      {"shared: null\n", ":1: shared: expected one value, found nothing"},
      {"shared: ''\n", ":1: shared: empty; give a value, or leave the option out"},
      {"shared: \"/mnt\\n\"\n", ":1: shared: a line break or another control character is in it; remove it"},
      {"shared: \"/mnt\\0/kv\"\n", ":1: shared: a line break or another control character is in it; remove it"},
      {"shared: !vault /mnt\n", ":1: shared: a tag means nothing here; quote the value"},
      {"<<: {ram: 1GiB}\n", ":1: unknown key \"<<\"; see --help"},
      {"Ram: 1GiB\n", ":1: unknown key \"Ram\"; did you mean \"ram\"?"},
      {"ram: *nobody\n", ":1: "},
      {"strict: \"flase\"\n",
       ":1: strict: \"flase\" is neither true nor false; write true, 1, yes, on or false, 0, no, off"},
  };
  for (const auto& [text, expected] : bad) {
    const TempFile file(text);
    const std::string error = ErrorOf(LoadWith({"--config", file.path()}));
    EXPECT_TRUE(error.starts_with(file.path() + expected)) << text << "->" << error;
    EXPECT_TRUE(expected.size() <= 4 || error == file.path() + expected) << text << "->" << error;
  }
  const TempFile file("ram: &size !!str 64MiB\r\nmax_cpu_size: *size\r\nstrict: ON\r\napi_key: 1e3\r\nshared: yes\r\n");
  const auto parsed = LoadWith({"--config", file.path()});
  ASSERT_TRUE(parsed) << ErrorOf(parsed);
  EXPECT_EQ(parsed->values.Bytes("max-cpu-size"), 64u << 20);
  EXPECT_TRUE(parsed->values.Bool("strict"));
  EXPECT_EQ(parsed->values.Text("api-key"), "1e3");
  EXPECT_EQ(parsed->values.Text("shared"), "yes");
}

// A variable that a script has not set must not switch something off.
TEST(Config, AnEmptyFlagIsAnErrorAndAnEmptyVariableIsNone) {
  EXPECT_EQ(ErrorOf(LoadWith({"--shared="})), "--shared: empty; give a value, or leave the option out");
  EXPECT_EQ(ErrorOf(LoadWith({"--api-key", ""})), "--api-key: empty; give a value, or leave the option out");
  EXPECT_EQ(ErrorOf(LoadWith({}, {{"TERRACE_API_KEY", " \n"}})),
            "TERRACE_API_KEY: api-key: empty; give a value, or leave the option out");
  EXPECT_EQ(LoadWith({}, {{"TERRACE_CHUNK", ""}})->values.Int("chunk"), 256);
}

// D14, D15: and the dump shows what was understood.
TEST(Config, BlanksAroundAValueAreNotOfItUnlessItIsText) {
  const auto parsed =
      LoadWith({"--ram= 64 MiB\n", "--kv-type", " q8_0"}, {{"TERRACE_STRICT", " ON "}, {"TERRACE_CHUNK", " 64\n"}});
  ASSERT_TRUE(parsed) << ErrorOf(parsed);
  const std::string dump = "\n" + parsed->values.Dump();
  for (const char* line : {"\nram = 64 MiB ", "\nkv-type = q8_0 ", "\nstrict = true ", "\nchunk = 64 "}) {
    EXPECT_NE(dump.find(line), std::string::npos) << line << dump;
  }
  EXPECT_EQ(LoadWith({"--shared", "/a b "})->values.Text("shared"), "/a b ");
}

// As files and variables that hold a secret end, in containers as a rule.
TEST(Config, BlanksAroundASecretAreNotOfIt) {
  EXPECT_EQ(LoadWith({}, {{"TERRACE_API_KEY", " hush\r\n"}})->values.Text("api-key"), "hush");
  EXPECT_EQ(ErrorOf(LoadWith({}, {{"TERRACE_API_KEY", "hu\nsh"}})),
            "TERRACE_API_KEY: api-key: a line break or another control character is in it; remove it");
}

TEST(Config, NoSecretIsShownByAnErrorOrADump) {
  for (const std::vector<std::string>& args : {std::vector<std::string>{"--api-key=", "sesame"},
                                               {"--api-key=open", "sesame"},
                                               {"--api-key", "open", "sesame"},
                                               {"--api-key", "open", "sesame", "more"},
                                               {"--api-kye", "sesame"},
                                               {"--api-kye=sesame"},
                                               {"--api-key=sesame\n1"}}) {
    const std::string error = ErrorOf(LoadWith(args));
    EXPECT_NE(error, "(no error)");
    EXPECT_EQ(error.find("sesame"), std::string::npos) << error;
  }
  for (const char* text : {"api_key: [sesame]\n", "api_key: {sesame: 1}\n", "api_key sesame\n", "api_key: sesame: 1\n",
                           "api_key: sesame\napi_key: sesame\n", "api_key: !x sesame\n", "api_key: !sesame\n",
                           "api_key: *sesame\n", "api_key: \"sesame\n"}) {
    const std::string error = ErrorOf(LoadWith({"--config", TempFile(text).path()}));
    EXPECT_NE(error, "(no error)") << text;
    EXPECT_EQ(error.find("sesame"), std::string::npos) << error;
  }
  const auto parsed =
      LoadWith({"--shared=https://AK:ses/ame@host/p", "--backends=http://u:sesame@a,http://b,u:sesame@c,/mnt/x:1@d"});
  const std::string dump = parsed->values.Dump();
  EXPECT_NE(dump.find("shared = https://***@host/p "), std::string::npos) << dump;
  const auto signed_url = LoadWith({"--shared=https://AK:SK@host/p?X-Amz-Signature=sesame,x"});
  EXPECT_NE(signed_url->values.Dump().find("shared = https://***@host/p?*** "), std::string::npos);
  EXPECT_NE(dump.find("backends = http://***@a,http://b,***@c,/mnt/x:1@d "), std::string::npos) << dump;
}

TEST(Config, AValueThatLosesIsStillChecked) {
  EXPECT_EQ(ErrorOf(LoadWith({"--ram=1GiB"}, {{"TERRACE_RAM", "5 apples"}})),
            "TERRACE_RAM: ram: \"5 apples\" is not a size; write 512MiB, 5GB or a number of bytes");
}

TEST(Config, AChoiceListsWhatItCouldBe) {
  EXPECT_EQ(ErrorOf(LoadWith({"--kv-type", "f32"})), "--kv-type: \"f32\" is none of f16, q8_0");
}

TEST(Config, ANeededOptionIsAskedForButNotByHelpOrPrintConfig) {
  Schema schema = TestSchema();
  schema.options.push_back({.name = "model", .help = "GGUF file", .required = true});
  EXPECT_EQ(ErrorOf(LoadWith({}, {}, schema)), "--model is needed: GGUF file");
  EXPECT_EQ(ErrorOf(LoadWith({"--model="}, {}, schema)), "--model: empty; give a value, or leave the option out");
  EXPECT_TRUE(LoadWith({"--model", "m.gguf"}, {}, schema));
  EXPECT_TRUE(LoadWith({"--help", "--nonsense"}, {}, schema)->help);
  EXPECT_TRUE(LoadWith({"--print-config"}, {}, schema)->print_config);
}

TEST(Config, IsSetTellsADefaultOfNothingFromAValue) {
  const auto parsed = LoadWith({"--strict=false"});
  EXPECT_TRUE(parsed->values.IsSet("strict"));
  EXPECT_TRUE(parsed->values.IsSet("ram"));
  EXPECT_FALSE(parsed->values.IsSet("shared"));
  EXPECT_EQ(parsed->values.DurationMs("load-deadline"), 5000);
  EXPECT_EQ(parsed->values.Bytes("ram"), 2147483648u);
}

TEST(Config, HelpNamesEveryOptionWithItsDefaultAndChoices) {
  const std::string help = Help(TestSchema());
  for (const Option& option : TestSchema().options)
    EXPECT_NE(help.find("--" + option.name), std::string::npos) << option.name;
  EXPECT_NE(help.find("--ram SIZE"), std::string::npos);
  EXPECT_NE(help.find("RAM for KV (default 2GiB)"), std::string::npos);
  EXPECT_NE(help.find("KV type (one of f16, q8_0; default f16)"), std::string::npos);
  EXPECT_NE(help.find("Key (also from VLLM_API_KEY)"), std::string::npos);
  EXPECT_NE(help.find("--print-config"), std::string::npos);
}

TEST(Config, TheReferenceHasARowForEveryOption) {
  const std::string page = Reference(TestSchema());
  for (const char* row :
       {"\n`--ram` | `TERRACE_RAM` | `ram` | size | 2GiB | RAM for KV\n",
        "\n`--load-deadline` | `TERRACE_LOAD_DEADLINE` | `load_deadline` | time | 5s | Give up after\n",
        "\n`--kv-type` | `TERRACE_KV_TYPE` | `kv_type` | f16, q8_0 | f16 | KV type\n",
        "\n`--api-key` | `TERRACE_API_KEY`, `VLLM_API_KEY` | `api_key` | secret |  | Key\n",
        "\n`--config` | `TERRACE_CONFIG_FILE` |  | text |  | "}) {
    EXPECT_NE(page.find(row), std::string::npos) << row << page;
  }
  EXPECT_EQ(static_cast<size_t>(std::count(page.begin(), page.end(), '\n')), 2 + TestSchema().options.size() + 3);
}

TEST(Config, NearestIsASlipAwayOrNothing) {
  const std::vector<std::string> known = {"host", "port", "ram", "engine-kv-tokens"};
  EXPECT_EQ(Nearest("prot", known), "port");
  EXPECT_EQ(Nearest("Engine_KV_token", known), "engine-kv-tokens");
  EXPECT_EQ(Nearest("engine", known), "engine-kv-tokens");
  EXPECT_EQ(Nearest("ram-size", known), "ram");
  EXPECT_EQ(Nearest("engine_tokenss", known), "engine-kv-tokens");
  EXPECT_EQ(Nearest("verbose", known), std::nullopt);
  EXPECT_EQ(Nearest("x", {}), std::nullopt);
}

}  // namespace
}  // namespace terrace::config
