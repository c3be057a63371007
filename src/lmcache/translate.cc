#include "lmcache/translate.h"

#include <unistd.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstring>
#include <functional>
#include <optional>
#include <string_view>
#include <utility>

#include "base/text.h"
#include "lmcache/known.h"

namespace terrace::lmcache {
namespace {

constexpr std::string_view kPrefix = "LMCACHE_";
constexpr double kGiB = 1ull << 30;
constexpr double kGiBMax = 1 << 20;  // A PiB: above it, it is a slip.

bool Matches(std::string_view pattern, std::string_view name) {
  if (!pattern.ends_with('*')) return pattern == name;
  return name.starts_with(pattern.substr(0, pattern.size() - 1));
}

const Key* Find(std::span<const Key> keys, std::string_view name) {
  const auto found = std::find_if(keys.begin(), keys.end(), [&](const Key& key) { return Matches(key.name, name); });
  return found == keys.end() ? nullptr : &*found;
}

std::string Nearest(std::span<const Key> keys, std::string_view name) {
  std::vector<std::string> names;
  for (const Key& key : keys) {
    if (!key.name.ends_with('*')) names.emplace_back(key.name);
  }
  const auto nearest = config::Nearest(name, names);
  return nearest ? "; did you mean \"" + *nearest + "\"?" : "";
}

std::optional<double> Number(std::string_view text) {
  text = Trimmed(text);
  // LMCache reads 010 as octal.
  if (text.size() > 1 && text[0] == '0' && text[1] >= '0' && text[1] <= '9') return std::nullopt;
  double value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || std::isnan(value)) return std::nullopt;
  return value;
}

struct Given {  // NOLINT(bugprone-exception-escape): nodes of yaml-cpp are copied.
  YAML::Node node;
  std::string where;  // "lmcache.yaml:3", "env LMCACHE_CHUNK_SIZE".
};

std::vector<std::string> Items(const YAML::Node& node) {
  if (node.IsScalar()) return SplitList(node.Scalar());
  std::vector<std::string> items;
  for (const YAML::Node& item : node) items.push_back(item.Scalar());
  return items;
}

// What a file of variables (docker --env-file) leaves around a value, LMCache takes off.
std::string Unquoted(std::string_view text) {
  const std::string_view inner = Trimmed(text);
  const bool quoted = inner.size() >= 2 && inner.front() == inner.back() && (inner[0] == '"' || inner[0] == '\'');
  return std::string(quoted ? inner.substr(1, inner.size() - 2) : text);
}

// What is wrong with a value, without the value: it may be a secret.
std::optional<std::string> Complaint(Kind kind, const YAML::Node& node) {
  if (node.IsNull()) return std::nullopt;
  switch (kind) {
    case Kind::kBool:
      if (!node.IsScalar() || !config::ParseBool(node.Scalar())) return "expected true or false";
      return std::nullopt;
    case Kind::kInt:
    case Kind::kNumber: {
      const auto value = node.IsScalar() ? Number(node.Scalar()) : std::nullopt;
      if (!value) return "expected a number";
      if (*value < 0) return "expected a number that is not negative";
      if (kind == Kind::kInt && *value != std::floor(*value)) return "expected a whole number";
      return std::nullopt;
    }
    case Kind::kText: return node.IsScalar() ? std::nullopt : std::optional<std::string>("expected text");
    case Kind::kList: {
      const bool texts =
          node.IsScalar() || (node.IsSequence() &&
                              std::all_of(node.begin(), node.end(), [](const auto& item) { return item.IsScalar(); }));
      return texts ? std::nullopt : std::optional<std::string>("expected a list");
    }
    case Kind::kMap:
      return node.IsMap() ? std::nullopt : std::optional<std::string>("expected a map of keys and values");
  }
  return std::nullopt;
}

bool IsOff(Kind kind, const YAML::Node& node) {
  if (node.IsNull()) return true;
  switch (kind) {
    case Kind::kBool: return !*config::ParseBool(node.Scalar());
    case Kind::kInt:
    case Kind::kNumber: return *Number(node.Scalar()) == 0;
    case Kind::kText: return node.Scalar().empty();
    case Kind::kList: return Items(node).empty();
    case Kind::kMap: return node.size() == 0;
  }
  return false;
}

class Translator {
 public:
  Result<Translation> Run(const Variables& variables) {
    try {
      if (const auto file = variables.find("LMCACHE_CONFIG_FILE"); file != variables.end() && !file->second.empty()) {
        if (const Result<void> read = ReadFile(file->second); !read) return tl::unexpected(read.error());
      }
      if (const Result<void> read = ReadVariables(variables); !read) return tl::unexpected(read.error());
      if (const Result<void> checked = CheckAll(); !checked) return tl::unexpected(checked.error());
      if (const Result<void> mapped = Map(); !mapped) return tl::unexpected(mapped.error());
    } catch (const YAML::Exception& error) {  // The edge: yaml-cpp reports by exception.
      return Fail(Code::kInvalid, "LMCACHE_EXTRA_CONFIG: not JSON: " + error.msg);
    }
    out_.secret_readable = out_.secret_readable && extra_.contains("aws_secret_access_key");
    return std::move(out_);
  }

 private:
  Result<void> ReadFile(const std::string& path) {
    const Result<std::string> text = config::ReadFile(path, &out_.secret_readable);
    if (!text) return Fail(text.error(), "LMCACHE_CONFIG_FILE");
    out_.file = path;
    try {
      const YAML::Node document = YAML::Load(*text);
      (void)YAML::Load(std::string(TrimmedEnd(*text)));  // Else an open quote ends with a last line break.
      if (const auto line = config::SecondDocument(*text)) {
        return Fail(Code::kInvalid,
                    path + ":" + std::to_string(*line) + ": a configuration is one YAML document; it ends here");
      }
      if (document.IsNull()) return {};
      if (!document.IsMap()) return Fail(Code::kInvalid, path + ":1: expected `key: value` lines");
      return Add(document, Keys(), top_, [&](const YAML::Node& key) { return At(path, key); });
    } catch (const YAML::Exception& error) {
      return Fail(Code::kInvalid, path + ":" + std::to_string(error.mark.line + 1) + ": " + error.msg);
    }
  }

  static std::string At(const std::string& path, const YAML::Node& node) {
    return path + ":" + std::to_string(node.Mark().line + 1);
  }

  using Where = std::function<std::string(const YAML::Node& key)>;

  // Takes the pairs of a map, by their present names.
  Result<void> Add(const YAML::Node& map, std::span<const Key> keys, std::map<std::string, Given>& into,
                   const Where& where) {
    std::map<std::string, bool> seen;
    for (const auto& pair : map) {
      if (!pair.first.IsScalar()) return Fail(Code::kInvalid, where(pair.first) + ": a key must be plain text");
      const std::string written = pair.first.Scalar();
      const std::string name = Present(written);
      if (std::exchange(seen[name], true)) {
        return Fail(Code::kInvalid, where(pair.first) + ": " + written + " is set a second time; remove one");
      }
      if (!Knows(keys, name)) {
        Unknown(where(pair.first), written, Lower(written), keys);
        continue;
      }
      if (name == "extra_config" && &into == &top_) {
        if (const Result<void> added = AddExtra(pair.second, where(pair.first), where); !added) return added;
        continue;
      }
      // Of no use to a reader that does not know it; and it may be the begin of a secret.
      if (const std::string& tag = pair.second.Tag(); tag.starts_with('!') && tag.size() > 1) {
        return Fail(Code::kInvalid, where(pair.first) + ": " + written + ": a tag means nothing here; quote the value");
      }
      into[name] = {pair.second, where(pair.first)};
    }
    return {};
  }

  // A map, or the text of one in JSON.
  Result<void> AddExtra(const YAML::Node& node, const std::string& place, const Where& where) {
    if (node.IsNull() || (node.IsScalar() && Trimmed(node.Scalar()).empty())) return {};
    if (node.IsMap()) return Add(node, ExtraKeys(), extra_, where);
    YAML::Node map;
    try {
      if (node.IsScalar()) map = YAML::Load(node.Scalar());
    } catch (const YAML::Exception& error) {  // The edge: yaml-cpp reports by exception.
      return Fail(Code::kInvalid, place + ": extra_config: not JSON: " + error.msg);
    }
    if (!map.IsMap())
      return Fail(Code::kInvalid, place + ": extra_config: expected a map, or JSON: {\"key\": value, ...}");
    return Add(map, ExtraKeys(), extra_, [&](const YAML::Node&) { return place; });
  }

  // ec_chunk_size is chunk_size of the encoder's cache.
  static bool Knows(std::span<const Key> keys, std::string_view name) {
    constexpr std::string_view kEncoder = "ec_";
    if (Find(keys, name) == nullptr) return false;
    return !name.starts_with(kEncoder) || Find(keys, Present(std::string(name.substr(kEncoder.size())))) != nullptr;
  }

  static std::string Present(const std::string& written) {
    for (const Alias& alias : Aliases()) {
      if (alias.old_name == written) return std::string(alias.name);
    }
    return written;
  }

  // `name`: in lower case, without LMCACHE_.
  void Unknown(const std::string& where, const std::string& written, const std::string& name,
               std::span<const Key> keys) {
    const bool of_top = keys.data() == Keys().data();
    const bool elsewhere = Find(of_top ? ExtraKeys() : Keys(), name) != nullptr;
    const std::string place = of_top ? "; it belongs under extra_config" : "; it does not belong under extra_config";
    out_.unknown.push_back(where + ": " + written + " is no key of LMCache " + std::string(kVersion) +
                           (elsewhere ? " here" + place : Nearest(keys, name)));
  }

  Result<void> ReadVariables(const Variables& variables) {
    for (const auto& [variable, value] : variables) {
      if (value.empty()) continue;
      const std::string name = Present(Lower(variable.substr(kPrefix.size())));
      std::string where = "env " + variable;
      if (name == "extra_config") {
        const Result<void> added =
            AddExtra(YAML::Node(Unquoted(value)), where, [&](const YAML::Node&) { return where; });
        if (!added) return added;
      } else if (Knows(Keys(), name)) {
        top_[name] = {YAML::Node(Unquoted(value)), where};
      } else if (Find(OtherVariables(), name) != nullptr) {
        other_[name] = {YAML::Node(Unquoted(value)), where};
      } else {
        Unknown(where, variable, name, Keys());
      }
    }
    return {};
  }

  Result<void> CheckAll() {
    for (const auto& [given, keys] :
         {std::pair(&top_, Keys()), std::pair(&extra_, ExtraKeys()), std::pair(&other_, OtherVariables())}) {
      for (const auto& [name, value] : *given) {
        const Key& key = *Find(keys, name);
        // A pattern's keys have types of their own, which nobody reads.
        const bool typed = !key.name.ends_with('*');
        if (typed) {
          if (const auto complaint = Complaint(key.kind, value.node)) {
            return Fail(Code::kInvalid, value.where + ": " + name + ": " + *complaint);
          }
        }
        if (key.fate == Fate::kNoted) Note(name, value, key.text);
        if (key.fate == Fate::kRefused && !(typed && IsOff(key.kind, value.node))) {
          return Fail(Code::kInvalid, value.where + ": " + name + ": " + std::string(key.text));
        }
      }
    }
    return {};
  }

  void Note(const std::string& name, const Given& given, std::string_view text) {
    out_.notes.push_back(given.where + ": " + name + ": " + std::string(text));
  }

  void Preset(std::string option, const std::string& value, const std::string& name, const Given& given) {
    out_.presets.push_back({std::move(option), std::string(Trimmed(value)), given.where + " " + name});
  }

  // Null and "" are as not given.
  static const Given* Set(const std::map<std::string, Given>& in, const std::string& name) {
    const auto found = in.find(name);
    if (found == in.end() || found->second.node.IsNull()) return nullptr;
    if (found->second.node.IsScalar() && Trimmed(found->second.node.Scalar()).empty()) return nullptr;
    return &found->second;
  }

  static Result<std::string> Bytes(const std::string& name, const Given& given) {
    const double gib = *Number(given.node.Scalar());
    if (gib > kGiBMax) return Fail(Code::kInvalid, given.where + ": " + name + ": it is in GB, and this is too much");
    return std::to_string(static_cast<uint64_t>(std::llround(gib * kGiB)));
  }

  Result<void> Map() {
    if (const Given* chunk = Set(top_, "chunk_size")) {
      const double tokens = std::min(*Number(chunk->node.Scalar()), 1e9);  // "256.0" is 256.
      Preset("chunk", std::to_string(std::llround(tokens)), "chunk_size", *chunk);
    }
    if (const Given* save = Set(top_, "save_decode_cache")) {
      Preset("save-decode-cache", save->node.Scalar(), "save_decode_cache", *save);
    }
    if (const Given* ram = Set(top_, "max_local_cpu_size")) {
      const Result<std::string> bytes = Bytes("max_local_cpu_size", *ram);
      if (!bytes) return tl::unexpected(bytes.error());
      if (*bytes == "0") {
        return Fail(Code::kInvalid,
                    ram->where + ": max_local_cpu_size: 0 is no room; all loads and saves go through RAM");
      }
      Preset("ram", *bytes, "max_local_cpu_size", *ram);
    }
    if (const Result<void> disk = MapDisk(); !disk) return disk;
    if (const Result<void> plugins = MapPlugins(); !plugins) return plugins;
    return MapRemoteUrl();
  }

  Result<void> MapDisk() {
    const Given* directory = Set(top_, "local_disk");
    const Given* size = Set(top_, "max_local_disk_size");
    if (directory == nullptr) {
      if (size != nullptr) Note("max_local_disk_size", *size, "caps nothing: there is no local_disk");
      return {};
    }
    const Result<std::string> path = OneDirectory("local_disk", *directory);
    if (!path) return tl::unexpected(path.error());
    if (size == nullptr || *Number(size->node.Scalar()) == 0) {
      return Fail(Code::kInvalid, directory->where + ": local_disk needs max_local_disk_size, its cap in GB");
    }
    const Result<std::string> bytes = Bytes("max_local_disk_size", *size);
    if (!bytes) return tl::unexpected(bytes.error());
    Preset("disk", *path, "local_disk", *directory);
    Preset("disk-size", *bytes, "max_local_disk_size", *size);
    return {};
  }

  // "/a", "file:///a"; a list of them is more than we take.
  static Result<std::string> OneDirectory(const std::string& name, const Given& given) {
    const std::vector<std::string> items = Items(given.node);
    if (items.size() != 1) {
      return Fail(Code::kInvalid, given.where + ": " + name + ": one directory, not " + std::to_string(items.size()) +
                                      "; join disks below the file system (RAID 0, LVM)");
    }
    const std::string_view path = items[0];
    constexpr std::string_view kScheme = "file://";
    return std::string(path.starts_with(kScheme) ? path.substr(kScheme.size()) : path);
  }

  Result<void> MapPlugins() {
    std::vector<std::string> names;
    const Given* plugins = Set(top_, "remote_storage_plugins");
    if (plugins != nullptr) names = Items(plugins->node);
    for (const std::string& name : names) {
      if (name != "fs" && !name.starts_with("fs.")) {
        return Fail(Code::kInvalid, plugins->where + ": remote_storage_plugins: there is no \"" + name +
                                        "\" here; use fs, or remote_url with s3://");
      }
      const std::string key = "remote_storage_plugin." + name + ".base_path";
      const Given* path = Set(extra_, key);
      const std::string found = path != nullptr ? key : "fs_base_path";
      if (path == nullptr) path = Set(extra_, "fs_base_path");
      if (path == nullptr) {
        return Fail(Code::kInvalid, plugins->where + ": remote_storage_plugins: \"" + name +
                                        "\" needs its directory: extra_config: " + key);
      }
      if (const Result<void> shared = MapShared(found, *path); !shared) return shared;
    }
    const Given* url = Set(top_, "remote_url");
    const bool by_url = url != nullptr && Lower(url->node.Scalar()).starts_with("fs://");
    if (const Given* path = Set(extra_, "fs_base_path"); path != nullptr && names.empty() && !by_url) {
      Note("fs_base_path", *path, "not used: neither remote_storage_plugins nor remote_url says fs");
    }
    for (const auto& [key, given] : extra_) {
      constexpr std::string_view kBegin = "remote_storage_plugin.", kEnd = ".base_path";
      if (!key.starts_with(kBegin)) continue;
      if (!key.ends_with(kEnd)) {
        return Fail(Code::kInvalid,
                    given.where + ": " + key + ": foreign code is not loaded, and fs has only base_path here");
      }
      const std::string name = key.substr(kBegin.size(), key.size() - kBegin.size() - kEnd.size());
      if (std::find(names.begin(), names.end(), name) == names.end()) {
        Note(key, given, "not used: remote_storage_plugins does not name it");
      }
    }
    return {};
  }

  Result<void> MapShared(const std::string& name, const Given& given) {
    const Result<std::string> path = OneDirectory(name, given);
    if (!path) return tl::unexpected(path.error());
    if (std::any_of(out_.presets.begin(), out_.presets.end(),
                    [](const config::Preset& p) { return p.name == "shared"; }))
      return Fail(Code::kInvalid,
                  given.where + ": " + name + ": a second shared directory; only one is used: remove one");
    Preset("shared", *path, name, given);
    return {};
  }

  Result<void> MapRemoteUrl() {
    const Given* given = Set(top_, "remote_url");
    const std::string url(given != nullptr ? Trimmed(given->node.Scalar()) : "");
    const size_t end = url.find("://");
    const std::string scheme = end == std::string::npos ? "" : Lower(url.substr(0, end));
    if (scheme == "s3") {
      Preset("s3-endpoint", url, "remote_url", *given);
      for (const auto& [key, option] :
           {std::pair("s3_region", "s3-region"), std::pair("disable_tls", "s3-disable-tls"),
            std::pair("s3_prefer_http2", "s3-http2"), std::pair("aws_access_key_id", "s3-access-key-id"),
            std::pair("aws_secret_access_key", "s3-secret-access-key")}) {
        if (const Given* value = Set(extra_, key)) Preset(option, value->node.Scalar(), key, *value);
      }
      return {};
    }
    for (const char* key :
         {"s3_region", "disable_tls", "s3_prefer_http2", "aws_access_key_id", "aws_secret_access_key"}) {
      if (const Given* value = Set(extra_, key)) Note(key, *value, "not used: remote_url is no s3:// address");
    }
    if (url.empty()) return {};
    if (scheme == "fs") {  // fs://host:port/dir: LMCache ignores host and port, too.
      const size_t slash = url.find('/', 5);
      if (slash != std::string::npos && slash + 1 < url.size()) {
        return MapShared("remote_url", {YAML::Node(url.substr(slash)), given->where});
      }
      if (const Given* path = Set(extra_, "fs_base_path")) return MapShared("fs_base_path", *path);
      return Fail(Code::kInvalid, given->where + ": remote_url: fs:// needs a directory: fs://localhost/mnt/kvcache");
    }
    return Fail(Code::kInvalid,
                given->where + ": remote_url: " +
                    (scheme.empty() ? "expected s3:// or fs://" : "there is no " + scheme + ":// storage here") +
                    "; use a bucket (s3://bucket.host) or a directory (remote_storage_plugins: [\"fs\"])");
  }

  Translation out_;
  std::map<std::string, Given> top_, extra_, other_;
};

}  // namespace

Variables VariablesOfThisProcess() {
  Variables variables;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text = *entry;
    const size_t equals = text.find('=');
    if (text.starts_with(kPrefix) && equals != std::string_view::npos) {
      variables.emplace(text.substr(0, equals), text.substr(equals + 1));
    }
  }
  return variables;
}

Result<Translation> Translate(const Variables& variables) { return Translator().Run(variables); }

}  // namespace terrace::lmcache
