// Would catch: a key of LMCache that we don't know, or take in silence; a value of the wrong type that passes; a cap or
// a directory that ends up in the wrong option; a variable that does not win over the file; a secret in a message.
#include "lmcache/translate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "lmcache/known.h"

namespace terrace::lmcache {
namespace {

using testing::Contains;
using testing::ElementsAre;
using testing::EndsWith;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

class File {
 public:
  explicit File(const std::string& text) {
    path_ = (std::filesystem::temp_directory_path() / "terrace-lmcache-XXXXXX").string();
    close(mkstemp(path_.data()));
    std::ofstream(path_) << text;
  }
  ~File() { std::filesystem::remove(path_); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// "option=value" in order of the options' appearance.
std::vector<std::string> Options(const Translation& translation) {
  std::vector<std::string> options;
  for (const config::Preset& preset : translation.presets) options.push_back(preset.name + "=" + preset.value);
  return options;
}

Translation Good(const std::string& yaml, Variables variables = {}) {
  const File file(yaml);
  variables["LMCACHE_CONFIG_FILE"] = file.path();
  auto translation = Translate(variables);
  EXPECT_TRUE(translation) << (translation ? "" : translation.error().what);
  return translation ? *translation : Translation{};
}

// The message, without the path of the file.
std::string Bad(const std::string& yaml, Variables variables = {}) {
  const File file(yaml);
  variables["LMCACHE_CONFIG_FILE"] = file.path();
  const auto translation = Translate(variables);
  if (translation) return "(no error)";
  std::string what = translation.error().what;
  const size_t at = what.find(file.path());
  return at == std::string::npos ? what : what.substr(0, at) + "F" + what.substr(at + file.path().size());
}

// The deployment guide's first sample, the operator's own values filled in.
constexpr const char* kGuideS3 = R"(local_cpu: True
max_local_cpu_size: 100
save_decode_cache: True
remote_url: "s3://kv.s3.example.com:10443"
remote_serde: "naive"
extra_config:
  s3_num_io_threads: 320
  s3_prefer_http2: False
  s3_enable_s3express: False
  save_chunk_meta: False
  disable_tls: False
  aws_access_key_id: "AKIDEXAMPLE"
  aws_secret_access_key: "wJalrXUtnFEMI"
  s3_region: "us-east-1"
)";

TEST(Lmcache, TheGuidesS3SampleIsTakenAsItIs) {
  const Translation got = Good(kGuideS3);
  EXPECT_THAT(Options(got),
              ElementsAre("save-decode-cache=True", "ram=107374182400", "s3-endpoint=s3://kv.s3.example.com:10443",
                          "s3-region=us-east-1", "s3-disable-tls=False", "s3-http2=False",
                          "s3-access-key-id=AKIDEXAMPLE", "s3-secret-access-key=wJalrXUtnFEMI"));
  EXPECT_THAT(got.unknown, IsEmpty());
  EXPECT_EQ(got.notes.size(), 4u) << testing::PrintToString(got.notes);
  EXPECT_THAT(got.notes, Contains(EndsWith(":7: s3_num_io_threads: nothing to tune: requests in flight follow what the "
                                           "storage takes")));
  EXPECT_THAT(got.presets[1].where, EndsWith(":2 max_local_cpu_size"));
}

TEST(Lmcache, TheGuidesNasSampleIsTakenAsItIs) {
  const Translation got = Good(R"(local_cpu: true
max_local_cpu_size: 100
save_decode_cache: true
remote_storage_plugins: ["fs"]
extra_config:
  remote_storage_plugin.fs.base_path: /mnt/kvcache
  save_chunk_meta: false
)");
  EXPECT_THAT(Options(got), ElementsAre("save-decode-cache=true", "ram=107374182400", "shared=/mnt/kvcache"));
  EXPECT_THAT(got.unknown, IsEmpty());
}

TEST(Lmcache, AVariableWinsOverTheFile) {
  const Translation got =
      Good(kGuideS3, {{"LMCACHE_MAX_LOCAL_CPU_SIZE", "0.5"},
                      {"LMCACHE_CHUNK_SIZE", "128"},
                      {"LMCACHE_EXTRA_CONFIG", R"({"s3_region": "eu-central-1", "disable_tls": true})"}});
  EXPECT_THAT(Options(got), Contains("ram=536870912"));
  EXPECT_THAT(Options(got), Contains("chunk=128"));
  EXPECT_THAT(Options(got), Contains("s3-region=eu-central-1"));
  EXPECT_THAT(Options(got), Contains("s3-disable-tls=true"));
  EXPECT_EQ(got.presets[0].where, "env LMCACHE_CHUNK_SIZE chunk_size");
}

TEST(Lmcache, VariablesAloneAreAConfiguration) {
  const auto got = Translate({{"LMCACHE_REMOTE_STORAGE_PLUGINS", "fs.nas"},
                              {"LMCACHE_EXTRA_CONFIG", R"({"remote_storage_plugin.fs.nas.base_path": "/mnt/a"})"},
                              {"LMCACHE_LOCAL_DISK", "file:///nvme/kv"},
                              {"LMCACHE_MAX_LOCAL_DISK_SIZE", "2"},
                              {"LMCACHE_TRACK_USAGE", "false"}});
  ASSERT_TRUE(got) << got.error().what;
  EXPECT_THAT(Options(*got), ElementsAre("disk=/nvme/kv", "disk-size=2147483648", "shared=/mnt/a"));
  EXPECT_THAT(got->notes, ElementsAre("env LMCACHE_TRACK_USAGE: track_usage: nothing is told to anybody"));
}

TEST(Lmcache, AVariableThatIsNoKeyIsNotedOrRefused) {
  const auto got = Translate({{"LMCACHE_FORCE_SKIP_SAVE", "0"}, {"LMCACHE_COORDINATOR_URL", "http://h"}});
  ASSERT_TRUE(got) << got.error().what;
  EXPECT_THAT(got->notes, ElementsAre(HasSubstr("env LMCACHE_COORDINATOR_URL: coordinator_url: no controller")));
  const auto refused = Translate({{"LMCACHE_FORCE_SKIP_SAVE", "1"}});
  ASSERT_FALSE(refused);
  EXPECT_THAT(refused.error().what, HasSubstr("env LMCACHE_FORCE_SKIP_SAVE: force_skip_save: saves are not switched"));
}

// As `docker --env-file` passes them. LMCache takes the quotes off, too.
TEST(Lmcache, QuotesAroundAVariableAreNotOfIt) {
  const auto got = Translate({{"LMCACHE_REMOTE_URL", "\"s3://b.s3.example\""},
                              {"LMCACHE_MAX_LOCAL_CPU_SIZE", "'0.5'"},
                              {"LMCACHE_EXTRA_CONFIG", R"('{"s3_region": "r", "aws_secret_access_key": "\"x"}')"}});
  ASSERT_TRUE(got) << got.error().what;
  EXPECT_THAT(Options(*got),
              ElementsAre("ram=536870912", "s3-endpoint=s3://b.s3.example", "s3-region=r", "s3-secret-access-key=\"x"));
}

TEST(Lmcache, ExtraConfigMayBeTextOfJson) {
  EXPECT_THAT(Options(Good("remote_url: s3://b.h\nextra_config: '{\"s3_region\": \"r\"}'\n")), Contains("s3-region=r"));
  EXPECT_THAT(Good("extra_config: '{\"s3_regio\": 1}'\n").unknown, ElementsAre(HasSubstr(":1: s3_regio is no key")));
  EXPECT_THAT(Good("extra_config: ''\n").presets, IsEmpty());
}

// Of the cache of encoder outputs, which takes all keys again, by another prefix.
TEST(Lmcache, KeysOfTheEncoderCacheAreNoted) {
  EXPECT_THAT(
      Good("ec_chunk_size: 1\nec_controller_url: x\nec: {chunk_size: 1}\n", {{"LMCACHE_EC_LOCAL_CPU", "no"}}).notes,
      testing::SizeIs(4));
  EXPECT_THAT(Good("ec_chunk_siz: 1\n").unknown, ElementsAre(HasSubstr("ec_chunk_siz is no key")));
}

// What shells and container files leave around a value.
TEST(Lmcache, BlanksAroundAValueDoNotCount) {
  const auto got = Translate({{"LMCACHE_MAX_LOCAL_CPU_SIZE", " 0.5 "},
                              {"LMCACHE_REMOTE_URL", " S3://b.s3.example\n"},
                              {"LMCACHE_SAVE_DECODE_CACHE", " OFF "},
                              {"LMCACHE_LOCAL_DISK", " "},
                              {"LMCACHE_EXTRA_CONFIG", R"({"aws_secret_access_key": "wJalr\n", "s3_region": ""})"}});
  ASSERT_TRUE(got) << got.error().what;
  EXPECT_THAT(Options(*got), ElementsAre("save-decode-cache=OFF", "ram=536870912", "s3-endpoint=S3://b.s3.example",
                                         "s3-secret-access-key=wJalr"));
}

TEST(Lmcache, ADirectoryThatNobodyNamesIsNoted) {
  EXPECT_THAT(Good("extra_config:\n  fs_base_path: /a\n").notes, ElementsAre(HasSubstr("fs_base_path: not used: ")));
  EXPECT_THAT(Good("remote_url: FS://h\nextra_config:\n  fs_base_path: /a\n").notes, IsEmpty());
}

TEST(Lmcache, NothingIsNothing) {
  const auto got = Translate({});
  ASSERT_TRUE(got);
  EXPECT_TRUE(got->presets.empty() && got->notes.empty() && got->unknown.empty());
}

TEST(Lmcache, AKeyThatItDoesNotKnowIsNamedWithTheNearest) {
  EXPECT_THAT(
      Good("max_cpu_sizee: 1\n").unknown,  // D16.
      ElementsAre(HasSubstr(":1: max_cpu_sizee is no key of LMCache 0.5.6; did you mean \"max_local_cpu_size\"?")));
  EXPECT_THAT(Good("s3_region: x\n").unknown,
              ElementsAre(EndsWith("s3_region is no key of LMCache 0.5.6 here; it belongs under extra_config")));
  EXPECT_THAT(
      Good("extra_config: {chunk_size: 1}\n").unknown,
      ElementsAre(EndsWith("chunk_size is no key of LMCache 0.5.6 here; it does not belong under extra_config")));
  EXPECT_THAT(Good("max_local_cpu_sizee: 1\n").unknown, ElementsAre(HasSubstr("did you mean \"max_local_cpu_size\"?")));
  EXPECT_THAT(Good("extra_config:\n  s3_regio: x\n").unknown, ElementsAre(HasSubstr(":2: s3_regio is no key")));
  EXPECT_THAT(Good("", {{"LMCACHE_CHUNK_SIZ", "1"}}).unknown,
              ElementsAre("env LMCACHE_CHUNK_SIZ: LMCACHE_CHUNK_SIZ is no key of LMCache 0.5.6; did you mean "
                          "\"chunk_size\"?"));
}

TEST(Lmcache, WhatWouldHarmInSilenceIsRefused) {
  EXPECT_THAT(Bad("remote_url: redis://h:6379\n"),
              HasSubstr("F:1: remote_url: there is no redis:// storage here; use"));
  EXPECT_THAT(Bad("enable_blending: true\n"), HasSubstr("it changes answers"));
  EXPECT_THAT(Bad("enable_pd: yes\n"), HasSubstr("enable_pd"));
  EXPECT_THAT(Bad("enable_xpyd: yes\n"), HasSubstr("enable_pd: ")) << "by its old name";
  EXPECT_THAT(Bad("gds_path: /a\n"), HasSubstr("GPUDirect"));
  EXPECT_THAT(Bad("remote_storage_plugins: [redis]\n"), HasSubstr("there is no \"redis\" here"));
  EXPECT_THAT(Bad("remote_storage_plugins: [fs]\n"),
              HasSubstr("needs its directory: extra_config: remote_storage_plugin.fs.base_path"));
  EXPECT_THAT(Bad("remote_url: fs://h:1/a\nremote_storage_plugins: [fs]\nextra_config: {fs_base_path: /b}\n"),
              HasSubstr("a second shared directory"));
  EXPECT_THAT(Bad("local_disk: /a,/b\nmax_local_disk_size: 1\n"), HasSubstr("one directory, not 2"));
  EXPECT_THAT(Bad("local_disk: /a\n"), HasSubstr("needs max_local_disk_size"));
  EXPECT_THAT(Bad("max_local_cpu_size: 0\n"), HasSubstr("0 is no room"));
  EXPECT_THAT(Bad("extra_config:\n  storage_plugin.x.module_path: evil\n"), HasSubstr("foreign code is not loaded"));
  EXPECT_THAT(
      Good("enable_blending: false\nenable_pd: off\ngds_path: null\nstorage_plugins: []\nmp_host: ''\n").presets,
      IsEmpty())
      << "off is off";
}

TEST(Lmcache, ValuesAreCheckedLikeOurOwn) {
  EXPECT_EQ(Bad("local_cpu: flase\n"), "F:1: local_cpu: expected true or false");
  EXPECT_EQ(Bad("chunk_size: many\n"), "F:1: chunk_size: expected a number");
  EXPECT_EQ(Bad("chunk_size: 1.5\n"), "F:1: chunk_size: expected a whole number");
  EXPECT_EQ(Bad("max_local_cpu_size: -1\n"), "F:1: max_local_cpu_size: expected a number that is not negative");
  EXPECT_THAT(Bad("max_local_cpu_size: 1e9\n"), HasSubstr("it is in GB, and this is too much"));
  EXPECT_EQ(Bad("remote_url: [a]\n"), "F:1: remote_url: expected text");
  EXPECT_EQ(Bad("extra_config: 5\n"), "F:1: extra_config: expected a map, or JSON: {\"key\": value, ...}");
  EXPECT_EQ(Bad("extra_config: [a]\n"), "F:1: extra_config: expected a map, or JSON: {\"key\": value, ...}");
  EXPECT_THAT(Bad("extra_config: '{'\n"), HasSubstr("F:1: extra_config: not JSON: "));
  EXPECT_EQ(Bad("local_disk: !x /a\n"), "F:1: local_disk: a tag means nothing here; quote the value");
  EXPECT_EQ(Bad("chunk_size: 64\nlocal_disk: \"/a\n"), "F:2: illegal EOF in scalar");
  EXPECT_EQ(Bad("chunk_size: 1\nchunk_size: 2\n"), "F:2: chunk_size is set a second time; remove one");
  EXPECT_EQ(Bad("chunk_size: 0400\n"), "F:1: chunk_size: expected a number") << "octal there";
  EXPECT_EQ(Bad("chunk_size: 0x100\n"), "F:1: chunk_size: expected a number");
  EXPECT_EQ(Bad("max_local_cpu_size: 5GB\n"), "F:1: max_local_cpu_size: expected a number");
  EXPECT_EQ(Bad("max_local_cpu_size: .inf\n"), "F:1: max_local_cpu_size: expected a number");
  EXPECT_THAT(Bad("max_local_cpu_size: inf\n"), HasSubstr("this is too much"));
  EXPECT_EQ(Bad("chunk_size: 1\n---\nchunk_size: 2\n"), "F:2: a configuration is one YAML document; it ends here");
  EXPECT_EQ(Bad("extra_config:\n  disable_tls: True\n  disable_tls: False\n"),
            "F:3: disable_tls is set a second time; remove one");
  EXPECT_EQ(Bad("enable_xpyd: false\nenable_pd: false\n"), "F:2: enable_pd is set a second time; remove one");
  EXPECT_EQ(Bad("extra_config:\n  disable_tls: <True/False>\n"), "F:2: disable_tls: expected true or false");
  EXPECT_EQ(Bad("- a\n"), "F:1: expected `key: value` lines");
  EXPECT_THAT(Bad("a: [\n"), HasSubstr("F:2: "));
  EXPECT_THAT(Bad("", {{"LMCACHE_EXTRA_CONFIG", "{{{"}}), HasSubstr("LMCACHE_EXTRA_CONFIG: extra_config: not JSON"));
  EXPECT_EQ(Bad("", {{"LMCACHE_EXTRA_CONFIG", "5"}}),
            "env LMCACHE_EXTRA_CONFIG: extra_config: expected a map, or JSON: {\"key\": value, ...}");
  EXPECT_THAT(Options(Good("chunk_size: 256.0\n")), ElementsAre("chunk=256"));
  const auto missing = Translate({{"LMCACHE_CONFIG_FILE", "/nowhere/l.yaml"}});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().what, "LMCACHE_CONFIG_FILE: cannot read /nowhere/l.yaml: No such file or directory");
}

TEST(Lmcache, SecretsStandInPresetsAlone) {
  const std::string secret = "wJalrXUtnFEMI";
  const Translation got = Good(std::string(kGuideS3) + "  password: " + secret + "\n  resp_x: " + secret + "\n");
  for (const std::string& note : got.notes) EXPECT_THAT(note, Not(HasSubstr(secret)));
  EXPECT_THAT(Bad("extra_config:\n  aws_secret_access_key: [" + secret + "]\n"), Not(HasSubstr(secret)));
  EXPECT_THAT(Bad("chunk_size: " + secret + "\n"), Not(HasSubstr(secret)));
  for (const std::string& value : {"!" + secret, "*" + secret, "\"" + secret, secret + ": 1"}) {
    EXPECT_THAT(Bad("extra_config:\n  aws_secret_access_key: " + value + "\n"),
                testing::AllOf(Not(HasSubstr(secret)), Not("(no error)")));
  }
}

TEST(Lmcache, AKeyInAReadableFileIsNoticed) {
  const File file(kGuideS3);
  ASSERT_EQ(chmod(file.path().c_str(), 0644), 0);
  EXPECT_TRUE(Translate({{"LMCACHE_CONFIG_FILE", file.path()}})->secret_readable);
  ASSERT_EQ(chmod(file.path().c_str(), 0600), 0);
  EXPECT_FALSE(Translate({{"LMCACHE_CONFIG_FILE", file.path()}})->secret_readable);
}

// A value of the key's kind that asks for something.
std::string Sample(Kind kind) {
  switch (kind) {
    case Kind::kBool: return "true";
    case Kind::kInt:
    case Kind::kNumber: return "256";
    case Kind::kText: return "text";
    case Kind::kList: return "[a]";
    case Kind::kMap: return "{a: b}";
  }
  return "";
}

TEST(Lmcache, EveryKeyIsTakenOrNotedOrRefusedInWords) {
  for (const Key& key : Keys()) {
    const std::string name(key.name);
    EXPECT_FALSE(key.text.empty()) << name;
    if (name.ends_with('*')) continue;
    const std::string yaml = name + ": " + Sample(key.kind) + "\n";
    switch (key.fate) {
      case Fate::kNoted: EXPECT_THAT(Good(yaml).notes, ElementsAre(HasSubstr(": " + name + ": "))); break;
      case Fate::kRefused: EXPECT_THAT(Bad(yaml), HasSubstr("F:1: " + name + ": ")); break;
      case Fate::kMapped: break;
    }
    if (key.kind != Kind::kMap) {
      std::string variable = "LMCACHE_" + name;
      for (char& c : variable) c = static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
      const auto got = Translate({{variable, "256"}});
      EXPECT_TRUE(!got || got->unknown.empty()) << variable;
    }
  }
  for (const Key& key : ExtraKeys()) {
    EXPECT_FALSE(key.text.empty()) << key.name;
    if (key.name.ends_with('*') || key.fate != Fate::kNoted) continue;
    const std::string name(key.name);
    EXPECT_THAT(Good("extra_config:\n  " + name + ": " + Sample(key.kind) + "\n").notes,
                ElementsAre(HasSubstr(": " + name + ": ")));
  }
}

// docs/reference/lmcache.md below its introduction.
std::string Tables() {
  std::string page;
  const auto row = [&](const Key& key) {
    const char* fate = key.fate == Fate::kMapped ? "is" : key.fate == Fate::kNoted ? "accepted" : "refused";
    page += "`" + std::string(key.name) + "` | " + fate + " | " + std::string(key.text) + "\n";
  };
  page += "## Keys\n\nkey | here | what\n--- | --- | ---\n";
  for (const Key& key : Keys()) row(key);
  page += "\n## Under extra_config\n\nkey | here | what\n--- | --- | ---\n";
  for (const Key& key : ExtraKeys()) row(key);
  page += "\n## Variables `LMCACHE_*` that are no keys\n\nvariable | here | what\n--- | --- | ---\n";
  for (const Key& key : OtherVariables()) row(key);
  page += "\n## Old names\n\nold | now\n--- | ---\n";
  for (const Alias& alias : Aliases())
    page += "`" + std::string(alias.old_name) + "` | `" + std::string(alias.name) + "`\n";
  return page;
}

TEST(Lmcache, ItsPageIsWhatTheCodeSays) {
  const std::string path = TERRACE_SOURCE_DIR "/docs/reference/lmcache.md";
  std::ifstream in(path);
  std::string page((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const size_t begin = page.find("## Keys");
  ASSERT_NE(begin, std::string::npos) << path;
  if (std::getenv("TERRACE_WRITE_DOCS") != nullptr) {
    page.replace(begin, std::string::npos, Tables());
    std::ofstream(path) << page;
  }
  EXPECT_EQ(page.substr(begin), Tables()) << "to write it anew: TERRACE_WRITE_DOCS=1 lmcache_test";
}

}  // namespace
}  // namespace terrace::lmcache
