// One schema per program: each option once, with its type, default and one line of help. From it come the flags, the
// environment variables, the keys of the YAML file, --help, --print-config and the nearest-name hints.
//
// Precedence: flag > environment > file > default. Unknown names are errors that name the nearest known one. A name
// `engine-kv-tokens` is flag --engine-kv-tokens, environment TERRACE_ENGINE_KV_TOKENS and file key engine_kv_tokens (or
// engine-kv-tokens).
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "terrace/result.h"

namespace terrace::config {

enum class Type { kText, kBool, kInt, kBytes, kDuration, kChoice, kSecret, kTextList };

struct Option {
  std::string name;  // "engine-kv-tokens".
  Type type = Type::kText;
  std::string default_value;         // As a user would write it; "" means not set.
  std::string help;                  // One line.
  std::vector<std::string> choices;  // For kChoice.
  std::string metavar;               // Shown in help: "N", "DIR".
  std::string environment;           // Extra variable besides TERRACE_*: "VLLM_API_KEY".
  bool required = false;
};

struct Schema {
  std::string program;  // "terrace serve".
  std::string summary;  // One line for --help.
  std::vector<Option> options;
};

enum class Origin { kDefault, kFile, kEnvironment, kFlag };

class Values {
 public:
  // Of the option's type; asking for another type or name is a bug of ours.
  const std::string& Text(std::string_view name) const;
  bool Bool(std::string_view name) const;
  int64_t Int(std::string_view name) const;
  uint64_t Bytes(std::string_view name) const;
  int64_t DurationMs(std::string_view name) const;
  std::vector<std::string> List(std::string_view name) const;  // By commas, by repeated flags, or a YAML list.
  bool IsSet(std::string_view name) const;                     // Not from the default, or the default is not "".
  bool IsGiven(std::string_view name) const;                   // Not from the default.
  // As a user would write it, of any option, secrets included; nothing if it is not set, or not known.
  std::optional<std::string> Written(std::string_view name) const;
  // How an error names the option, so that it is found where it was set: "--chunk", "TERRACE_CHUNK", "node.yaml:3
  // chunk".
  std::string Place(std::string_view name) const;
  // `name = value   (flag --name | env VAR | file F:3 | default)`, one a line; secrets, and what stands before the @ of
  // a URL, as ***.
  std::string Dump() const;

 private:
  friend struct Loader;
  struct Entry {
    Option option;
    std::string value;
    Origin origin = Origin::kDefault;
    std::string where;
  };
  const Entry& Find(std::string_view name) const;
  std::map<std::string, Entry, std::less<>> entries_;
};

// A value that comes from another program's configuration: it counts as the file's, but our own file wins over it.
struct Preset {
  std::string name;   // Of an option of the schema; of another one: it is left out.
  std::string value;  // As a user would write it.
  std::string where;  // For errors and Dump: "lmcache.yaml:2 max_local_cpu_size".
};

struct Parsed {
  Values values;
  bool help = false;          // --help was given: print Help(schema), exit 0.
  bool print_config = false;  // --print-config was given: print values.Dump(), exit 0.
};

// `args` without the program name. Every schema has --help, --config FILE and --print-config besides its own options. A
// flag is `--name value` or `--name=value`; a bool flag may stand alone (true), or take a value with `=`. Errors are
// one line that says where, what and what to do: `node.yaml:14: unknown key "ram_sise"; did you mean "ram"?`.
Result<Parsed> Load(const Schema& schema, const std::vector<std::string>& args,
                    const std::function<std::optional<std::string>(const std::string&)>& environment,
                    const std::vector<Preset>& presets = {});
// A variable of this process: what programs give Load.
std::optional<std::string> ProcessEnvironment(const std::string& name);
// "TERRACE_ENGINE_KV_TOKENS" of "engine-kv-tokens".
std::string EnvironmentName(std::string_view option_name);
std::string Help(const Schema& schema);
// The table of docs/reference/config.md: of each option its flag, variable, key, type, default and meaning.
std::string Reference(const Schema& schema);

// --log-level, as each program has it (log::LevelNamed).
Option LogLevel();

// An integer option within bounds, 0 to 2^32 - 1 at most.
Result<uint32_t> Bounded(const Values& values, const char* name, int64_t low, int64_t high);

// D15. "5GiB" 5368709120, "5GB" 5000000000, "512MiB", "123" bytes; fractions allowed ("1.5GiB"), of a byte not. Not
// negative, no leading zero.
Result<uint64_t> ParseBytes(std::string_view text);
// Digits, and a minus; no leading zero.
Result<int64_t> ParseInt(std::string_view text);
// D14. true 1 yes on / false 0 no off, any case, surrounding blanks allowed.
Result<bool> ParseBool(std::string_view text);
// "250ms", "5s", "2m", "1h"; a bare number is milliseconds. At most 100 years: it can be added to any clock.
Result<int64_t> ParseDurationMs(std::string_view text);

// A file of at most 1 MiB, as a whole. `others_may_read`: group or world may.
Result<std::string> ReadFile(const std::string& path, bool* others_may_read);

// Number of the line where a second YAML document begins, or the first one ends, if one does.
std::optional<size_t> SecondDocument(std::string_view yaml);

// The closest of `known` to `name`, if close enough to be a slip of the fingers.
std::optional<std::string> Nearest(std::string_view name, const std::vector<std::string>& known);

}  // namespace terrace::config
