#include "doctor/doctor.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <utility>

#include "base/apart.h"
#include "base/log.h"
#include "base/stop_signals.h"
#include "doctor/bucket.h"
#include "doctor/directory.h"
#include "doctor/machine.h"
#include "doctor/model_size.h"
#include "doctor/node.h"
#include "doctor/payoff.h"
#include "doctor/report.h"
#include "doctor/sharing.h"
#include "settings/instance.h"

namespace terrace {
namespace {

using doctor::Bandwidth;
using doctor::DirectoryUse;
using doctor::Report;
using doctor::Severity;

constexpr int kUserMustMend = 2;
constexpr uint64_t kFrameMin = 1 << 20, kFrameMax = 256 << 20;
constexpr std::chrono::seconds kTierMax{120};  // Beside the time of the measurements.

std::atomic<bool> hangs{false};  // A thread is left behind.

int Refuse(const std::string& why) {
  std::fprintf(stderr, "terrace doctor: %s\n", why.c_str());
  return kUserMustMend;
}

struct Asked {
  settings::Tiers tiers;
  uint32_t chunk_tokens = 256;
  std::string model;  // Whose KV is counted; "": none.
  doctor::Measure measure;
  doctor::Payoff payoff;
  doctor::SharingCheck sharing;
  std::string node;  // Its socket; "": none.
  bool json = false;
  bool only_size = false;
};

Result<std::string> InstanceUrl(std::string url) {
  if (url.find('@') != std::string::npos) return Fail(Code::kInvalid, "keys do not go into URLs: set VLLM_API_KEY");
  while (url.ends_with('/')) url.pop_back();
  if (url.ends_with("/v1")) url.resize(url.size() - 3);
  const bool known = url.starts_with("http://") || url.starts_with("https://");
  if (!known) return Fail(Code::kInvalid, "an instance is http://host:port or https://host:port, not \"" + url + "\"");
  return url;
}

Result<Asked> ReadAsked(const config::Values& values) {
  Asked asked;
  Result<settings::Tiers> tiers = settings::ReadTiers(values);
  if (!tiers) return tl::unexpected(tiers.error());
  asked.tiers = *std::move(tiers);
  const auto chunk = config::Bounded(values, "chunk", 1, 4096);
  if (!chunk) return tl::unexpected(chunk.error());
  asked.chunk_tokens = *chunk;
  asked.json = values.Bool("json");
  asked.node = values.Text("node");
  asked.measure.time = std::chrono::milliseconds(std::min<int64_t>(values.DurationMs("measure"), 60'000));
  for (const char* name : {"user-tokens", "prompt-tokens"}) {
    if (const auto n = config::Bounded(values, name, 1, 10'000'000); !n) return tl::unexpected(n.error());
  }
  asked.payoff.chunk_tokens = asked.chunk_tokens;
  asked.payoff.user_tokens = static_cast<uint64_t>(values.Int("user-tokens"));
  if (values.IsSet("prefill-tps")) {
    const auto rate = config::Bounded(values, "prefill-tps", 1, 100'000'000);
    if (!rate) return tl::unexpected(rate.error());
    asked.payoff.prefill_tokens_per_s = *rate;
  }
  for (const std::string& given : values.List("instances")) {
    Result<std::string> url = InstanceUrl(given);
    if (!url) return Fail(url.error(), "--instances");
    asked.sharing.instances.push_back(*std::move(url));
  }
  if (!values.Text("router").empty()) {
    Result<std::string> url = InstanceUrl(values.Text("router"));
    if (!url) return Fail(url.error(), "--router");
    asked.sharing.router = *std::move(url);
  }
  asked.sharing.api_key = values.Text("api-key");
  asked.sharing.shared_directory = asked.tiers.shared.directory;
  asked.sharing.prompt_tokens = static_cast<uint32_t>(values.Int("prompt-tokens"));
  asked.model = values.Text("size").empty() ? values.Text("model") : values.Text("size");
  const bool has_tiers =
      !asked.tiers.disk.directory.empty() || !asked.tiers.shared.directory.empty() || asked.tiers.s3.has_value();
  asked.only_size = !values.Text("size").empty() && !has_tiers && asked.node.empty() &&
                    asked.sharing.instances.empty() && asked.sharing.router.empty();
  return asked;
}

// A call on a mount whose server is gone may never return: then the program ends without its thread. Everything that
// such a thread uses is its own, or lives for ever.
template <class Work>
std::optional<Bandwidth> WithDeadline(std::chrono::milliseconds limit, Work work) {
  const auto found = std::make_shared<Bandwidth>();
  const Apart apart([found, work = std::move(work)] { *found = work(); });
  if (apart.EndsBy(std::chrono::steady_clock::now() + limit)) return *found;
  hangs.store(true);
  return std::nullopt;
}

// "flags, TERRACE_*, node.yaml": where values that are no defaults come from.
std::string Sources(const config::Values& values) {
  std::set<std::string> sources;
  std::istringstream dump(values.Dump());
  for (std::string line; std::getline(dump, line);) {  // name = value   (file node.yaml:3)
    const size_t at = line.rfind("   (");
    if (at == std::string::npos) continue;
    const std::string origin = line.substr(at + 4);
    if (origin.starts_with("flag ")) sources.insert("flags");
    if (origin.starts_with("env ")) sources.insert("the environment");
    if (origin.starts_with("file ")) sources.insert(origin.substr(5, origin.find(':') - 5));
  }
  std::string text;
  for (const std::string& source : sources) text += (text.empty() ? "" : ", ") + source;
  return text.empty() ? "defaults only" : text;
}

void CheckConfiguration(const settings::Loaded& loaded, const Asked& asked, Report& report) {
  report.Add({"config.valid",
              Severity::kOk,
              "it can be read: " + Sources(loaded.parsed.values) + " (--print-config shows each value and its origin)",
              "",
              {}});
  for (const std::string& note : loaded.notes) report.Add({"config.lmcache", Severity::kOk, note, "", {}});
  if (loaded.secret_readable) {
    report.Add({"config.secret",
                Severity::kNote,
                loaded.lmcache_file + " holds a secret key, and others may read it",
                "chmod 600 " + loaded.lmcache_file,
                {}});
  }
  if (!asked.node.empty()) {
    report.Add({"config.node",
                Severity::kOk,
                "a vLLM server uses the RAM and the tiers of " + asked.node + ", and none that are named here",
                "",
                {}});
  } else if (asked.tiers.shared.directory.empty() && !asked.tiers.s3) {
    report.Add({"config.shared",
                Severity::kNote,
                "no shared tier is configured: instances share nothing",
                "name a directory by --shared, or a bucket by --s3-bucket",
                {}});
  }
}

// The lines about a directory, and its bandwidth for the payoff.
void CheckTierDirectory(doctor::DirectoryCheck check, Asked& asked, const std::atomic<bool>& stop, Report& report) {
  const auto limit = kTierMax + 3 * check.measure.time;
  const std::string section = doctor::SectionOf(check.use);
  const auto owned = std::make_shared<doctor::DirectoryCheck>(std::move(check));
  const auto done = WithDeadline(limit, [owned, &stop, &report] { return CheckDirectory(*owned, stop, report); });
  if (done) {
    asked.payoff.tiers.emplace_back(section, *done);
  } else {
    report.Add({section + ".hangs",
                Severity::kProblem,
                owned->path + ": a call there has not returned for " + std::to_string(limit.count() / 1000) + " s",
                "is its server up and reachable? A mount with soft,timeo=50,retrans=2 fails instead of hanging",
                {}});
  }
}

// `stop`: a signal came.
void CheckAll(const settings::Loaded& loaded, Asked& asked, const std::atomic<bool>& stop, Report& report) {
  std::optional<doctor::ModelSize> size;
  if (!asked.model.empty()) {
    const auto read = doctor::ReadModelSize(asked.model, loaded.parsed.values.Text("kv-type"));
    if (read) {
      size = *read;
      asked.measure.frame_bytes = std::clamp(size->bytes_per_token * asked.chunk_tokens, kFrameMin, kFrameMax);
    } else {
      report.Add({"size.model",
                  Severity::kProblem,
                  read.error().what,
                  "name a GGUF file, or the folder with the model's config.json",
                  {}});
    }
  }
  if (!asked.only_size) {
    const settings::Tiers& tiers = asked.tiers;
    doctor::CheckMachine({.ram_bytes = tiers.ram_bytes_max,
                          .connections = tiers.s3 ? tiers.s3->parallel_max : 0,
                          .has_disk = !tiers.disk.directory.empty()},
                         report);
    CheckConfiguration(loaded, asked, report);
    if (!asked.node.empty() && !stop) doctor::CheckNode(asked.node, report);
    if (!tiers.disk.directory.empty() && !stop) {
      CheckTierDirectory({.use = DirectoryUse::kDisk,
                          .path = tiers.disk.directory,
                          .bytes_max = tiers.disk.bytes_max,
                          .measure = asked.measure},
                         asked, stop, report);
    }
    if (!tiers.shared.directory.empty() && !stop) {
      CheckTierDirectory({.use = DirectoryUse::kShared,
                          .path = tiers.shared.directory,
                          .bytes_max = tiers.shared.bounds.bytes_max,
                          .free_bytes_min = tiers.shared.bounds.free_bytes_min,
                          .measure = asked.measure},
                         asked, stop, report);
    }
    if (tiers.s3 && !stop) asked.payoff.tiers.emplace_back("s3", CheckS3(*tiers.s3, asked.measure, stop, report));
    if ((!asked.sharing.instances.empty() || !asked.sharing.router.empty()) && !stop) {
      asked.sharing.bucket = tiers.s3 ? &*tiers.s3 : nullptr;
      const doctor::SharingResult shared = CheckSharing(asked.sharing, stop, report);
      if (asked.payoff.prefill_tokens_per_s == 0) asked.payoff.prefill_tokens_per_s = shared.prefill_tokens_per_s;
    }
  }
  if (size && !stop) TellPayoff(*size, asked.payoff, report);
}

}  // namespace

config::Schema doctor::Schema() {
  using config::Type;
  config::Schema schema{
      .program = "terrace doctor",
      .summary = "Checks the machine, the configuration and each tier of an instance, and that instances share.",
      .options = {
          {.name = "json", .type = Type::kBool, .default_value = "false", .help = "one JSON document on stdout"},
          {.name = "size",
           .type = Type::kText,
           .help = "bytes of KV of this model, and the bandwidth at which a hit pays; alone: nothing else",
           .metavar = "MODEL"},
          {.name = "prefill-tps",
           .type = Type::kInt,
           .help = "tokens a second that prefill makes, as you have measured it",
           .metavar = "N"},
          {.name = "user-tokens",
           .type = Type::kInt,
           .default_value = "4096",
           .help = "tokens of a user, of whom 1,000 are counted",
           .metavar = "N"},
          {.name = "instances",
           .type = Type::kTextList,
           .help = "running instances, to prove that they share: http://host:port,...",
           .metavar = "URLS"},
          {.name = "router", .type = Type::kText, .help = "the router in front of them", .metavar = "URL"},
          {.name = "prompt-tokens",
           .type = Type::kInt,
           .default_value = "1024",
           .help = "length of the prompt that is sent to them, about",
           .metavar = "N"},
          {.name = "measure",
           .type = Type::kDuration,
           .default_value = "2s",
           .help = "time to measure bandwidth for, each way and tier; 0: not",
           .metavar = "TIME"},
      }};
  for (config::Option& option : settings::InstanceOptions()) {
    option.required = false;
    schema.options.push_back(std::move(option));
  }
  for (config::Option& option : settings::NodeOptions()) schema.options.push_back(std::move(option));
  return schema;
}

int RunDoctor(const std::vector<std::string>& args) {
  const config::Schema schema = doctor::Schema();
  log::LogToStderr(log::Level::kError);  // What parts of ours log is here a finding.
  const Result<settings::Loaded> loaded = settings::Load(schema, args);
  if (!loaded) return Refuse(loaded.error().what);
  if (loaded->parsed.help) {
    std::fputs(config::Help(schema).c_str(), stdout);
    return 0;
  }
  if (loaded->parsed.print_config) {
    std::fputs(loaded->parsed.values.Dump().c_str(), stdout);
    return 0;
  }
  Result<Asked> asked = ReadAsked(loaded->parsed.values);
  if (!asked) return Refuse(asked.error().what);

  // The first signal ends the measurements, so that what they made is removed.
  StopSignals signals;
  std::signal(SIGPIPE, SIG_IGN);
  // Not freed: a thread that a dead mount holds may still tell something.
  auto& report =
      *std::make_unique<Report>(stdout, asked->only_size && !asked->json ? nullptr : stderr, asked->json).release();
  CheckAll(*loaded, *asked, signals.came(), report);
  if (signals.came()) {
    report.Add({"doctor.stopped", Severity::kProblem, "not everything was looked at", "run it again", {}});
  }
  std::fputs(asked->json ? report.Json().c_str() : (report.Summary() + "\n").c_str(), stdout);
  std::fflush(stdout);
  const int code = report.Has(Severity::kProblem) ? 1 : 0;
  if (hangs) _exit(code);  // Not waiting for a thread that may never end.
  return code;
}

}  // namespace terrace
