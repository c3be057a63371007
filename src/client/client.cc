#include "terrace/client.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <string>
#include <utility>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "client/host.h"
#include "client/local_client.h"
#include "client/node_client.h"
#include "settings/instance.h"

namespace terrace {
namespace {

// What a client is told, in the engine's process. Not only tiers: what LMCache's configuration can say has its place.
config::Schema ClientSchema() {
  constexpr std::array kForEngines = {"chunk", "save-decode-cache", "load-deadline", "lmcache-unknown"};
  config::Schema schema{.program = "client", .options = settings::TierOptions()};
  for (const config::Option& option : settings::InstanceOptions()) {
    if (std::ranges::find(kForEngines, option.name) != kForEngines.end()) schema.options.push_back(option);
  }
  for (config::Option& option : settings::NodeOptions()) schema.options.push_back(std::move(option));
  return schema;
}

std::vector<std::string> AsFlags(const ClientOptions& options) {
  std::vector<std::string> flags;
  for (auto [name, value] : options.settings) {
    std::ranges::replace(name, '_', '-');
    flags.push_back("--" + name + "=" + value);
  }
  if (!options.node.empty()) flags.push_back("--node=" + options.node);
  return flags;
}

// A line each, and the last one has the rest: the log lets through so many lines of one event in a second.
void TellNotes(const std::vector<std::string>& notes) {
  constexpr size_t kLinesMax = 10;
  std::string rest;
  for (size_t i = 0; i < notes.size(); ++i) {
    if (i + 1 < kLinesMax) {
      log::Warn("client_note", {{"note", notes[i]}});
    } else {
      rest += (rest.empty() ? "" : "; ") + notes[i];
    }
  }
  if (!rest.empty()) log::Warn("client_note", {{"note", rest}});
}

std::atomic<bool> log_chosen{false};  // Who sets it first decides; set before our threads start.

}  // namespace

void LogTo(std::function<void(LogLevel level, std::string_view line)> sink) {
  log_chosen.store(true);
  log::SetSink(
      [sink = std::move(sink)](log::Level level, std::string_view line) { sink(static_cast<LogLevel>(level), line); });
}

Result<std::unique_ptr<Host>> OpenHost(const settings::Tiers& tiers, const StoreOptions& options) {
  auto host = std::make_unique<Host>();
  auto opened = settings::OpenTiers(tiers, std::nullopt,
                                    {.io = *host->io, .clock = host->clock, .metrics = host->metrics}, host->timers);
  if (!opened) return tl::unexpected(opened.error());
  Result<std::unique_ptr<Store>> store = OpenStore(options, *std::move(opened), host->metrics);
  if (!store) return tl::unexpected(store.error());
  host->store = *std::move(store);
  return host;
}

Result<std::unique_ptr<Client>> Client::Open(const ClientOptions& options) {
  if (!log_chosen.exchange(true)) log::LogToStderr(log::Level::kWarn);
  const Result<settings::Loaded> loaded = settings::Load(ClientSchema(), AsFlags(options));
  if (!loaded) return Fail(loaded.error(), "client");
  if (loaded->secret_readable) {
    log::Warn("config_secret_readable", {{"file", loaded->lmcache_file},
                                         {"option", "aws_secret_access_key"},
                                         {"remedy", "chmod 600 " + loaded->lmcache_file}});
  }
  TellNotes(loaded->notes);
  const config::Values& values = loaded->parsed.values;
  const LocalOptions local{.copy_threads = options.copy_threads,
                           .calls_max = options.calls_max,
                           .node_wait = std::chrono::milliseconds(values.DurationMs("node-wait")),
                           .setting = [values](std::string_view name) { return values.Written(name); }};
  if (values.IsSet("node")) return NewNodeClient(local, values.Text("node"));
  Result<settings::Tiers> tiers = settings::ReadTiers(values);
  if (!tiers) return Fail(tiers.error(), "client");
  Result<std::unique_ptr<Host>> opened = OpenHost(*tiers, {.ram_bytes_max = tiers->ram_bytes_max});
  if (!opened) return Fail(opened.error(), "client");
  const std::shared_ptr<Host> host = *std::move(opened);
  return NewLocalClient(local, *host->store, host);
}

}  // namespace terrace
