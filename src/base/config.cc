#include "base/config.h"

#include <sys/stat.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <utility>

#include "base/assert.h"
#include "base/environment.h"
#include "base/log.h"
#include "base/text.h"

namespace terrace::config {
namespace {

// A file larger than this is not a configuration.
constexpr size_t kFileBytesMax = 1 << 20;

// Options that every schema has.
const std::vector<Option>& CommonOptions() {
  static const std::vector<Option> options = {
      {.name = "config", .help = "YAML file with the same names as the flags", .metavar = "FILE"},
      {.name = "print-config", .type = Type::kBool, .help = "Show every value and where it comes from, then exit"},
      {.name = "help", .type = Type::kBool, .help = "Show this, then exit"},
  };
  return options;
}

std::string Joined(const std::vector<std::string>& parts, std::string_view separator) {
  std::string out;
  for (const std::string& part : parts) {
    if (!out.empty()) out += separator;
    out += part;
  }
  return out;
}

const char* TypeName(Type type) {
  switch (type) {
    case Type::kText: return "text";
    case Type::kBool: return "true, false";
    case Type::kInt: return "number";
    case Type::kBytes: return "size";
    case Type::kDuration: return "time";
    case Type::kChoice: return "choice";
    case Type::kSecret: return "secret";
    case Type::kTextList: return "list";
  }
  return "";
}

// What is wrong with `value` for this option, or nothing. Never shows a secret.
std::optional<std::string> Complaint(const Option& option, const std::string& value) {
  switch (option.type) {
    case Type::kText:
    case Type::kSecret:
    case Type::kTextList:
      // An unset variable in a script must not switch a tier or a key off in silence.
      if (value.empty()) return "empty; give a value, or leave the option out";
      // They end up in paths, URLs and headers.
      if (std::any_of(value.begin(), value.end(), [](unsigned char c) { return std::iscntrl(c) != 0; })) {
        return "a line break or another control character is in it; remove it";
      }
      return std::nullopt;
    case Type::kBool:
      if (const auto parsed = ParseBool(value); !parsed) return parsed.error().what;
      return std::nullopt;
    case Type::kInt:
      if (const auto parsed = ParseInt(value); !parsed) return parsed.error().what;
      return std::nullopt;
    case Type::kBytes:
      if (const auto parsed = ParseBytes(value); !parsed) return parsed.error().what;
      return std::nullopt;
    case Type::kDuration:
      if (const auto parsed = ParseDurationMs(value); !parsed) return parsed.error().what;
      return std::nullopt;
    case Type::kChoice:
      if (std::find(option.choices.begin(), option.choices.end(), value) == option.choices.end()) {
        return Quoted(value) + " is none of " + Joined(option.choices, ", ");
      }
      return std::nullopt;
  }
  return std::nullopt;
}

}  // namespace

std::string EnvironmentName(std::string_view option_name) {
  if (option_name == "config") return "TERRACE_CONFIG_FILE";  // As LMCACHE_CONFIG_FILE: what it holds is no setting.
  std::string name = "TERRACE_";
  for (const char c : option_name) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

// The sources of one Load, each read into values that say where they come from; then the best one of each option wins.
struct Loader {
  struct Given {
    std::string value;
    std::string where;  // "flag --ram", "env TERRACE_RAM", "file node.yaml:3".
  };
  using GivenMap = std::map<std::string, Given, std::less<>>;

  explicit Loader(const Schema& schema) : options(schema.options) {
    options.insert(options.end(), CommonOptions().begin(), CommonOptions().end());
  }

  const Option* Find(std::string_view name) const {
    const auto found = std::find_if(options.begin(), options.end(), [&](const Option& o) { return o.name == name; });
    return found == options.end() ? nullptr : &*found;
  }

  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const Option& option : options) names.push_back(option.name);
    return names;
  }

  Result<void> ReadFlags(const std::vector<std::string>& args) {
    for (size_t i = 0; i < args.size(); ++i) {
      const std::string& arg = args[i];
      if (!arg.starts_with("--")) {
        // Any other flag would have taken it as its value.
        if (FollowsSecret(args, i)) {
          return Fail(Code::kInvalid, "unexpected argument after a secret; a value with blanks stands in quotes");
        }
        const bool follows_bool = i > 0 && args[i - 1].starts_with("--") && args[i - 1].find('=') == std::string::npos;
        const std::string hint = follows_bool ? "; did you mean " + args[i - 1] + "=" + arg + "?" : "; see --help";
        return Fail(Code::kInvalid, "unexpected argument " + Quoted(arg) + hint);
      }
      const size_t equals = arg.find('=');
      const std::string name = arg.substr(2, equals == std::string::npos ? equals : equals - 2);
      const Option* option = Find(name);
      if (option == nullptr) {
        const auto nearest = Nearest(name, Names());
        return Fail(Code::kInvalid,
                    "unknown flag --" + name + (nearest ? "; did you mean --" + *nearest + "?" : "; see --help"));
      }
      std::string value;
      if (equals != std::string::npos) {
        value = arg.substr(equals + 1);
      } else if (option->type == Type::kBool) {
        value = "true";
      } else if (i + 1 < args.size() && !args[i + 1].starts_with("--")) {
        value = args[++i];
      } else {
        return Fail(Code::kInvalid, "--" + name + " needs a value");
      }
      Given& given = flags[name];
      // Lists grow with each flag; of anything else the last flag counts, so that a caller can override what a script
      // passes.
      const bool grows = option->type == Type::kTextList && !given.where.empty();
      given = {grows ? given.value + "," + value : value, "flag --" + name};
    }
    return {};
  }

  // Is args[i] what a shell made of a secret with blanks, so that it must not be shown?
  bool FollowsSecret(const std::vector<std::string>& args, size_t i) const {
    while (i > 0 && !args[i].starts_with("--")) --i;
    const Option* option = args[i].starts_with("--") ? Find(args[i].substr(2, args[i].find('=') - 2)) : nullptr;
    return option != nullptr && option->type == Type::kSecret;
  }

  // An empty variable counts as not set: that is how shells and container files switch one off.
  void ReadEnvironment(const std::function<std::optional<std::string>(const std::string&)>& get) {
    for (const Option& option : options) {
      for (const std::string& variable : {EnvironmentName(option.name), option.environment}) {
        if (variable.empty() || environment.contains(option.name)) continue;
        const std::optional<std::string> value = get(variable);
        if (!value || value->empty() || FromKubernetes(variable, *value)) continue;
        environment[option.name] = {*value, "env " + variable};
      }
    }
  }

  // `place`: who named the file.
  Result<void> ReadYaml(const std::string& path, const std::string& place) {
    bool others_may_read = false;
    const Result<std::string> text = ReadFile(path, &others_may_read);
    if (!text) return Fail(text.error(), place);
    try {
      const YAML::Node document = YAML::Load(*text);
      (void)YAML::Load(std::string(TrimmedEnd(*text)));  // Else an open quote ends with a last line break.
      if (const auto line = SecondDocument(*text)) {
        return Fail(Code::kInvalid,
                    path + ":" + std::to_string(*line) + ": a configuration is one YAML document; it ends here");
      }
      if (document.IsNull()) return {};
      if (!document.IsMap()) return Fail(Code::kInvalid, At(path, document) + ": expected `name: value` lines");
      for (const auto& pair : document) {
        if (const Result<void> read = ReadPair(path, pair.first, pair.second); !read) return read;
      }
    } catch (const YAML::Exception& error) {  // The edge: yaml-cpp reports by exception.
      return Fail(Code::kInvalid, path + ":" + std::to_string(error.mark.line + 1) + ": " + error.msg);
    }
    for (const Option& option : options) {
      if (option.type == Type::kSecret && file.contains(option.name) && others_may_read) {
        log::Warn("config_secret_readable", {{"file", path}, {"option", option.name}, {"remedy", "chmod 600 " + path}});
      }
    }
    return {};
  }

  Result<void> ReadPair(const std::string& path, const YAML::Node& key_node, const YAML::Node& node) {
    if (!key_node.IsScalar()) return Fail(Code::kInvalid, At(path, key_node) + ": a name must be plain text");
    const std::string& key = key_node.Scalar();
    const std::string name = Replaced(key, '_', '-');
    const Option* option = Find(name);
    if (option == nullptr || Common(name)) {
      std::vector<std::string> names = Names();
      std::erase_if(names, [](const std::string& n) { return Common(n); });
      const auto nearest = Nearest(name, names);
      const std::string hint =
          nearest ? "; did you mean " + Quoted(Replaced(*nearest, '-', '_')) + "?" : "; see --help";
      return Fail(Code::kInvalid, At(path, key_node) + ": unknown key " + Quoted(key) + hint);
    }
    // !vault and its like ask for somebody to work on the value first, and nobody does.
    if (const std::string& tag = node.Tag(); tag.starts_with('!') && tag.size() > 1) {
      return Fail(Code::kInvalid, At(path, key_node) + ": " + key + ": a tag means nothing here; quote the value");
    }
    const std::string where = "file " + At(path, key_node);
    if (const auto earlier = file.find(name); earlier != file.end()) {
      return Fail(Code::kInvalid, At(path, key_node) + ": " + Quoted(key) + " is set a second time (first: " +
                                      earlier->second.where.substr(5) + "); remove one");
    }
    if (option->type == Type::kTextList && node.IsSequence()) {
      std::vector<std::string> items;
      for (const YAML::Node& item : node) {
        if (!item.IsScalar() || item.Scalar().find(',') != std::string::npos) {
          return Fail(Code::kInvalid, At(path, item) + ": " + key + ": an item must be text without a comma");
        }
        items.push_back(item.Scalar());
      }
      file[name] = {Joined(items, ","), where};
      return {};
    }
    if (!node.IsScalar()) {
      const char* found = node.IsMap() ? "a map" : node.IsSequence() ? "a list" : "nothing";
      return Fail(Code::kInvalid, At(path, key_node) + ": " + key + ": expected one value, found " + found);
    }
    file[name] = {node.Scalar(), where};
    return {};
  }

  Result<void> Resolve(Values* values) const {
    for (const Option& option : options) {
      if (Common(option.name)) continue;
      Values::Entry entry{option, option.default_value, Origin::kDefault, "default"};
      const std::pair<const GivenMap*, Origin> sources[] = {{&flags, Origin::kFlag},
                                                            {&environment, Origin::kEnvironment},
                                                            {&file, Origin::kFile},
                                                            {&brought, Origin::kFile}};
      for (const auto& [given, origin] : sources) {
        const auto found = given->find(option.name);
        if (found == given->end()) continue;
        // Of text, blanks may be meant. No key has blanks around it, but files and variables with one end in a line
        // break.
        std::string value = found->second.value;
        if (option.type != Type::kText && option.type != Type::kTextList) value = Trimmed(value);
        if (const auto complaint = Complaint(option, value)) {
          // "flag --ram" and "env TERRACE_RAM" name the option; a file's place does not.
          const std::string& where = found->second.where;
          const std::string place = where.substr(where.find(' ') + 1);
          return Fail(Code::kInvalid, place + ": " + (origin == Origin::kFlag ? "" : option.name + ": ") + *complaint);
        }
        if (entry.origin == Origin::kDefault) entry = {option, value, origin, found->second.where};
      }
      if (entry.origin == Origin::kDefault && !option.default_value.empty()) {
        TERRACE_ASSERT(!Complaint(option, option.default_value));
      }
      values->entries_[option.name] = std::move(entry);
    }
    return {};
  }

  Result<void> CheckRequired(const Values& values) const {
    for (const Option& option : options) {
      if (!option.required || (values.IsSet(option.name) && !values.Find(option.name).value.empty())) continue;
      return Fail(Code::kInvalid, "--" + option.name + " is needed: " + option.help);
    }
    return {};
  }

  static bool Common(std::string_view name) {
    return std::any_of(CommonOptions().begin(), CommonOptions().end(), [&](const Option& o) { return o.name == name; });
  }
  static std::string At(const std::string& path, const YAML::Node& node) {
    return path + ":" + std::to_string(node.Mark().line + 1);
  }

  std::vector<Option> options;  // The schema's, then the common ones.
  GivenMap flags, environment, file, brought;
};

Result<Parsed> Load(const Schema& schema, const std::vector<std::string>& args,
                    const std::function<std::optional<std::string>(const std::string&)>& environment,
                    const std::vector<Preset>& presets) {
  Parsed parsed;
  // Help comes first: somebody who asks for it may have got the rest wrong.
  parsed.help =
      std::any_of(args.begin(), args.end(), [](const std::string& arg) { return arg == "--help" || arg == "-h"; });
  if (parsed.help) return parsed;

  Loader loader(schema);
  if (const Result<void> read = loader.ReadFlags(args); !read) return tl::unexpected(read.error());
  loader.ReadEnvironment(environment);
  for (const Preset& preset : presets) loader.brought[preset.name] = {preset.value, "file " + preset.where};
  for (const Loader::GivenMap* source : {&loader.flags, &loader.environment}) {
    const auto path = source->find("config");
    if (path == source->end()) continue;
    const std::string& where = path->second.where;
    if (const Result<void> read = loader.ReadYaml(path->second.value, where.substr(where.find(' ') + 1)); !read) {
      return tl::unexpected(read.error());
    }
    break;
  }
  if (const auto print = loader.flags.find("print-config"); print != loader.flags.end()) {
    const Result<bool> wanted = ParseBool(print->second.value);
    if (!wanted) return Fail(wanted.error(), "--print-config");
    parsed.print_config = *wanted;
  }
  if (const Result<void> resolved = loader.Resolve(&parsed.values); !resolved) return tl::unexpected(resolved.error());
  if (!parsed.print_config) {
    if (const Result<void> checked = loader.CheckRequired(parsed.values); !checked)
      return tl::unexpected(checked.error());
  }
  return parsed;
}

std::optional<std::string> ProcessEnvironment(const std::string& name) {
  const char* value = std::getenv(name.c_str());
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

const Values::Entry& Values::Find(std::string_view name) const {
  const auto found = entries_.find(name);
  TERRACE_ASSERT(found != entries_.end());
  return found->second;
}

const std::string& Values::Text(std::string_view name) const {
  const Entry& entry = Find(name);
  TERRACE_ASSERT(entry.option.type == Type::kText || entry.option.type == Type::kChoice ||
                 entry.option.type == Type::kSecret);
  return entry.value;
}

bool Values::Bool(std::string_view name) const {
  const Entry& entry = Find(name);
  TERRACE_ASSERT(entry.option.type == Type::kBool);
  return !entry.value.empty() && *ParseBool(entry.value);
}

int64_t Values::Int(std::string_view name) const {
  const Entry& entry = Find(name);
  TERRACE_ASSERT(entry.option.type == Type::kInt && IsSet(name));
  return *ParseInt(entry.value);
}

uint64_t Values::Bytes(std::string_view name) const {
  const Entry& entry = Find(name);
  TERRACE_ASSERT(entry.option.type == Type::kBytes && IsSet(name));
  return *ParseBytes(entry.value);
}

int64_t Values::DurationMs(std::string_view name) const {
  const Entry& entry = Find(name);
  TERRACE_ASSERT(entry.option.type == Type::kDuration && IsSet(name));
  return *ParseDurationMs(entry.value);
}

std::vector<std::string> Values::List(std::string_view name) const {
  const Entry& entry = Find(name);
  TERRACE_ASSERT(entry.option.type == Type::kTextList);
  return SplitList(entry.value);
}

bool Values::IsSet(std::string_view name) const {
  const Entry& entry = Find(name);
  return entry.origin != Origin::kDefault || !entry.value.empty();
}

bool Values::IsGiven(std::string_view name) const { return Find(name).origin != Origin::kDefault; }

std::optional<std::string> Values::Written(std::string_view name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end() || !IsSet(name)) return std::nullopt;
  return found->second.value;
}

std::string Values::Place(std::string_view name) const {
  const Entry& entry = Find(name);
  if (entry.origin == Origin::kDefault) return "--" + entry.option.name;
  const std::string place = entry.where.substr(entry.where.find(' ') + 1);
  const bool named = entry.origin != Origin::kFile || place.find(' ') != std::string::npos;
  return named ? place : place + " " + entry.option.name;
}

std::string Values::Dump() const {
  std::string out;
  for (const auto& [name, entry] : entries_) {
    std::string shown = WithoutUserInfo(entry.value);
    if (entry.option.type == Type::kSecret && !entry.value.empty()) shown = "***";
    if (entry.option.type == Type::kBool && !entry.value.empty()) shown = Bool(name) ? "true" : "false";
    std::string line = name + " = " + shown;
    line.resize(std::max<size_t>(line.size() + 3, 40), ' ');
    out += line + "(" + entry.where + ")\n";
  }
  return out;
}

std::string Help(const Schema& schema) {
  std::vector<std::pair<std::string, std::string>> rows;
  const auto add = [&](const Option& option) {
    std::string flag = "--" + option.name;
    if (!option.metavar.empty()) flag += " " + option.metavar;
    std::vector<std::string> notes;
    if (option.required) notes.emplace_back("needed");
    if (!option.choices.empty()) notes.push_back("one of " + Joined(option.choices, ", "));
    if (!option.default_value.empty()) notes.push_back("default " + option.default_value);
    if (!option.environment.empty()) notes.push_back("also from " + option.environment);
    rows.emplace_back(flag, option.help + (notes.empty() ? "" : " (" + Joined(notes, "; ") + ")"));
  };
  for (const Option& option : schema.options) add(option);
  for (const Option& option : CommonOptions()) add(option);
  size_t width = 0;
  for (const auto& row : rows) width = std::max(width, row.first.size());

  std::string out = schema.program + ": " + schema.summary + "\n\nUsage: " + schema.program + " [flags]\n\n";
  for (const auto& [flag, text] : rows) out += "  " + flag + std::string(width + 2 - flag.size(), ' ') + text + "\n";
  out += "\nA flag --some-name is also TERRACE_SOME_NAME in the environment and some_name in the file.\n";
  out += "Precedence: flag, environment, file, default.\n";
  return out;
}

std::string Reference(const Schema& schema) {
  std::string page = "flag | variable | file | type | default | what\n--- | --- | --- | --- | --- | ---\n";
  std::vector<Option> options = schema.options;
  options.insert(options.end(), CommonOptions().begin(), CommonOptions().end());
  for (const Option& option : options) {
    const bool in_file = !Loader::Common(option.name);
    std::string variables = "`" + EnvironmentName(option.name) + "`";
    if (!option.environment.empty()) variables += ", `" + option.environment + "`";
    if (!in_file && option.name != "config") variables = "";
    const std::string key = in_file ? "`" + Replaced(option.name, '-', '_') + "`" : "";
    const std::string type = option.choices.empty() ? TypeName(option.type) : Joined(option.choices, ", ");
    const std::string absent = option.required ? "needed" : option.default_value;
    std::string row = "`--" + option.name + "`";
    for (const std::string& cell : {variables, key, type, absent, option.help}) row += " | " + cell;
    page += row + "\n";
  }
  return page;
}

Result<std::string> ReadFile(const std::string& path, bool* others_may_read) {
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  const auto failed = [&] {
    const int error = errno;
    return Fail(Code::kIo, "cannot read " + path + ": " + std::strerror(error), error);
  };
  if (file == nullptr) return failed();
  struct stat status{};
  if (fstat(fileno(file.get()), &status) != 0) return failed();
  *others_may_read = (status.st_mode & (S_IRGRP | S_IROTH)) != 0;
  std::string text(kFileBytesMax + 1, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), file.get()));
  if (std::ferror(file.get()) != 0) return failed();
  if (text.size() > kFileBytesMax)
    return Fail(Code::kInvalid, path + ": larger than 1 MiB; is this a configuration file?");
  return text;
}

Option LogLevel() {
  return {.name = "log-level",
          .type = Type::kChoice,
          .default_value = "info",
          .help = "lines from this level on go to stderr",
          .choices = {"debug", "info", "warn", "error"},
          .metavar = "LEVEL"};
}

Result<uint32_t> Bounded(const Values& values, const char* name, int64_t low, int64_t high) {
  const int64_t value = values.Int(name);
  if (value >= low && value <= high) return static_cast<uint32_t>(value);
  return Fail(Code::kInvalid, values.Place(name) + " " + std::to_string(value) + " is not between " +
                                  std::to_string(low) + " and " + std::to_string(high));
}

}  // namespace terrace::config
