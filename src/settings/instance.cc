#include "settings/instance.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "lmcache/translate.h"
#include "s3/options.h"

namespace terrace::settings {
namespace {

using std::chrono::milliseconds;

constexpr uint64_t kRamMin = 64 << 10;            // A chunk of the smallest models, and a node's room for saves.
constexpr uint64_t kSharedSizeMin = 16ull << 20;  // Some chunks of the smallest models.
constexpr std::chrono::minutes kSharedTtlMin{1};

Result<SharedFsBounds> ReadSharedBounds(const config::Values& values, bool has_bucket) {
  SharedFsBounds bounds;
  const bool has_directory = !values.Text("shared").empty();
  for (const char* name : {"shared-size", "shared-ttl"}) {
    if (values.IsSet(name) && !has_directory && !has_bucket) {
      return Fail(Code::kInvalid, values.Place(name) + " bounds --shared and --s3-bucket, and there is neither");
    }
  }
  if (values.IsSet("shared-free-min") && !has_directory) {
    return Fail(Code::kInvalid,
                values.Place("shared-free-min") +
                    " is about the mount of --shared, and there is none; a bucket is bounded by --shared-size");
  }
  if (values.IsSet("shared-size")) bounds.bytes_max = values.Bytes("shared-size");
  if (bounds.bytes_max > 0 && bounds.bytes_max < kSharedSizeMin) {
    return Fail(Code::kInvalid, values.Place("shared-size") + " " + std::to_string(bounds.bytes_max) +
                                    " has no room for chunks: say " + std::to_string(kSharedSizeMin >> 20) +
                                    "MiB or more, or 0 for no bound");
  }
  if (values.IsSet("shared-free-min")) bounds.free_bytes_min = values.Bytes("shared-free-min");
  if (values.IsSet("shared-ttl")) bounds.ttl = milliseconds(values.DurationMs("shared-ttl"));
  if (bounds.ttl.count() > 0 && bounds.ttl < kSharedTtlMin) {
    return Fail(Code::kInvalid, values.Place("shared-ttl") + " " + std::to_string(bounds.ttl.count()) +
                                    "ms is shorter than instances take to hear of each other's uses: say 1m or more");
  }
  return bounds;
}

}  // namespace

std::vector<config::Option> InstanceOptions() {
  using config::Type;
  std::vector<config::Option> options = {
      {.name = "model",
       .type = Type::kText,
       .help = "the weights, one GGUF file",
       .metavar = "F.gguf",
       .required = true},
      {.name = "served-name",
       .type = Type::kText,
       .help = "the model's name in the API (default: the file's)",
       .metavar = "NAME"},
      {.name = "chat-template-file",
       .type = Type::kText,
       .help = "a Jinja template for chat (default: the model's own)",
       .metavar = "FILE"},
      {.name = "host",
       .type = Type::kText,
       .default_value = "127.0.0.1",
       .help = "address to listen on",
       .metavar = "ADDR"},
      {.name = "port",
       .type = Type::kInt,
       .default_value = "8000",
       .help = "port to listen on; 0: any free one",
       .metavar = "N"},
      {.name = "ram",
       .type = Type::kBytes,
       .default_value = "2GiB",
       .help = "RAM for cached KV, a hard cap",
       .metavar = "BYTES"},
      {.name = "shared", .type = Type::kText, .help = "directory on shared storage for cached KV", .metavar = "DIR"},
      {.name = "shared-size",
       .type = Type::kBytes,
       .help = "bound of --shared, and of --s3-bucket, all instances together (default: none)",
       .metavar = "BYTES"},
      {.name = "shared-free-min",
       .type = Type::kBytes,
       .help = "space kept free on the mount of --shared (default: none)",
       .metavar = "BYTES"},
      {.name = "shared-ttl",
       .type = Type::kDuration,
       .help = "what nobody used for so long leaves --shared and --s3-bucket (default: never)",
       .metavar = "TIME"},
      {.name = "disk",
       .type = Type::kText,
       .help = "directory on a local disk for cached KV, for this instance alone",
       .metavar = "DIR"},
      {.name = "disk-size", .type = Type::kBytes, .help = "cap of --disk", .metavar = "BYTES"},
      {.name = "chunk",
       .type = Type::kInt,
       .default_value = "256",
       .help = "tokens a chunk, a multiple of 64; the same on all instances",
       .metavar = "N"},
      {.name = "kv-type",
       .type = Type::kChoice,
       .default_value = "f16",
       .help = "type of KV values",
       .choices = {"f16", "q8_0"},
       .metavar = "TYPE"},
      {.name = "ctx",
       .type = Type::kInt,
       .help = "longest prompt and answer in tokens (default: the model's, at most 8192)",
       .metavar = "N"},
      {.name = "engine-kv-tokens",
       .type = Type::kInt,
       .help = "tokens of KV kept in engine memory between requests (default: as --ctx)",
       .metavar = "N"},
      {.name = "threads",
       .type = Type::kInt,
       .help = "threads that compute (default: physical cores, at most the cgroup's)",
       .metavar = "N"},
      {.name = "api-key",
       .type = Type::kSecret,
       .help = "key that clients must send as bearer token",
       .metavar = "KEY",
       .environment = "VLLM_API_KEY"},
      {.name = "strict",
       .type = Type::kBool,
       .default_value = "false",
       .help = "answers equal those without a cache bit for bit"},
      {.name = "save-decode-cache",
       .type = Type::kBool,
       .default_value = "false",
       .help = "cache the KV of generated tokens too"},
      {.name = "allow-degraded",
       .type = Type::kBool,
       .default_value = "false",
       .help = "start without --shared, --disk or --s3-bucket if it is not there, and join when it appears"},
      {.name = "fault",
       .type = Type::kText,
       .help = "make --shared and --s3-bucket fail on purpose (docs/reference/fault.md)",
       .metavar = "SPEC"},
      {.name = "queue-max",
       .type = Type::kInt,
       .default_value = "64",
       .help = "requests that may wait; above: 429",
       .metavar = "N"},
      {.name = "prepare-threads",
       .type = Type::kInt,
       .default_value = "2",
       .help = "threads that parse and tokenize requests up to 64 KiB, and as many for longer ones",
       .metavar = "N"},
      {.name = "prepare-queue-max",
       .type = Type::kInt,
       .default_value = "256",
       .help = "requests of either kind that may wait for those threads; above: 503",
       .metavar = "N"},
      {.name = "load-deadline",
       .type = Type::kDuration,
       .help = "longest wait for cached KV (default: half the time computing it would take)",
       .metavar = "TIME"},
      {.name = "lmcache-unknown",
       .type = Type::kChoice,
       .default_value = "error",
       .help = "what a key does that LMCache itself does not know (LMCACHE_CONFIG_FILE, LMCACHE_*)",
       .choices = {"error", "warn"},
       .metavar = "WHAT"},
      config::LogLevel(),
  };
  const std::vector<config::Option> s3 = s3::Options();
  const auto after_disk = std::ranges::find(options, "chunk", &config::Option::name);
  options.insert(after_disk, s3.begin(), s3.end());
  return options;
}

std::vector<config::Option> TierOptions() {
  constexpr std::array kTierOptions = {"ram",        "shared", "shared-size", "shared-free-min",
                                       "shared-ttl", "disk",   "disk-size",   "allow-degraded"};
  std::vector<config::Option> options = InstanceOptions();
  std::erase_if(options, [&](const config::Option& option) {
    return std::ranges::find(kTierOptions, option.name) == kTierOptions.end() && !option.name.starts_with("s3-");
  });
  return options;
}

std::vector<config::Option> NodeOptions() {
  using config::Type;
  return {{.name = "node", .type = Type::kText, .help = "socket of the node that keeps KV", .metavar = "PATH"},
          {.name = "node-wait",
           .type = Type::kDuration,
           .default_value = "1s",
           .help = "how long to wait for a node that listens, when a client is opened",
           .metavar = "TIME"},
          {.name = "metrics-port",
           .type = Type::kInt,
           .help = "port of /metrics and /health on 127.0.0.1 of a vLLM server's private node (default: none)",
           .metavar = "N"}};
}

Result<Loaded> Load(const config::Schema& schema, const std::vector<std::string>& args) {
  Result<lmcache::Translation> lmcache = lmcache::Translate(lmcache::VariablesOfThisProcess());
  Result<config::Parsed> parsed = config::Load(schema, args, config::ProcessEnvironment,
                                               lmcache ? lmcache->presets : std::vector<config::Preset>{});
  if (!parsed) return tl::unexpected(parsed.error());
  Loaded loaded{.parsed = *std::move(parsed)};
  if (loaded.parsed.help) return loaded;
  if (!lmcache) return tl::unexpected(lmcache.error());
  for (const config::Preset& preset : lmcache->presets) {
    if (std::ranges::find(schema.options, preset.name, &config::Option::name) == schema.options.end()) {
      return Fail(Code::kInvalid, preset.where + ": this program has no --" + preset.name);
    }
  }
  for (const std::string& unknown : lmcache->unknown) {
    if (loaded.parsed.values.Text("lmcache-unknown") == "error")
      return Fail(Code::kInvalid, unknown + "; to let it pass: TERRACE_LMCACHE_UNKNOWN=warn");
    loaded.notes.push_back(unknown + "; left out");
  }
  loaded.notes.insert(loaded.notes.end(), lmcache->notes.begin(), lmcache->notes.end());
  loaded.lmcache_file = lmcache->file;
  loaded.secret_readable = lmcache->secret_readable;
  return loaded;
}

Result<Tiers> ReadTiers(const config::Values& values) {
  Tiers tiers;
  tiers.ram_bytes_max = values.Bytes("ram");
  if (tiers.ram_bytes_max < kRamMin) {
    return Fail(Code::kInvalid, values.Place("ram") + " " + std::to_string(tiers.ram_bytes_max) +
                                    " is no room: all loads and saves go through RAM; 2GiB, say");
  }
  tiers.shared.directory = values.Text("shared");
  tiers.allow_degraded = values.Bool("allow-degraded");
  tiers.shared.open_lazily = tiers.allow_degraded;

  tiers.disk.directory = values.Text("disk");
  if (!tiers.disk.directory.empty()) {
    if (!values.IsSet("disk-size"))
      return Fail(Code::kInvalid, values.Place("disk") + " needs --disk-size, its cap: 20GiB, say");
    tiers.disk.bytes_max = values.Bytes("disk-size");
    if (tiers.disk.bytes_max == 0) {
      return Fail(Code::kInvalid, values.Place("disk-size") + " 0 is no room: give some, or leave --disk out");
    }
  } else if (values.IsSet("disk-size")) {
    return Fail(Code::kInvalid, values.Place("disk-size") + " bounds --disk, and there is none");
  }

  Result<std::optional<s3::ClientOptions>> s3 = s3::ReadOptions(values, config::ProcessEnvironment);
  if (!s3) return tl::unexpected(s3.error());
  tiers.s3 = *std::move(s3);
  const auto bounds = ReadSharedBounds(values, tiers.s3.has_value());
  if (!bounds) return tl::unexpected(bounds.error());
  tiers.shared.bounds = *bounds;
  tiers.bucket.bounds = {.bytes_max = bounds->bytes_max, .ttl = bounds->ttl};
  return tiers;
}

}  // namespace terrace::settings
