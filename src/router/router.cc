#include "router/router.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <utility>

#include "base/clock.h"
#include "base/config.h"
#include "base/log.h"
#include "base/stop_signals.h"
#include "http/server.h"
#include "router/checks.h"
#include "router/fleet.h"
#include "router/options.h"
#include "router/routes.h"
#include "terrace/metrics.h"

namespace terrace {
namespace {

constexpr int kUserMustMend = 2;

int Refuse(const std::string& why) {
  std::fprintf(stderr, "terrace router: %s\n", why.c_str());
  return kUserMustMend;
}

void LogReady(const router::Options& options, uint16_t port) {
  const std::string& host = options.http.host;
  std::string backends;
  for (const router::StaticBackend& b : options.backends) {
    const bool bare = b.host.find(':') == std::string::npos;
    backends += (backends.empty() ? "" : ",") + b.model + "@http://" + (bare ? b.host : "[" + b.host + "]") + ":" +
                std::to_string(b.port);
  }
  const bool bare = host.find(':') == std::string::npos;
  log::Info("router_ready", {{"url", "http://" + (bare ? host : "[" + host + "]") + ":" + std::to_string(port) + "/v1"},
                             {"backends", backends},
                             {"routing_logic", "roundrobin"}});
}

}  // namespace

int RunRouter(const std::vector<std::string>& args) {
  const config::Schema schema = router::Schema();
  log::LogToStderr();  // Warnings about the configuration itself.
  const auto parsed = config::Load(schema, args, config::ProcessEnvironment);
  if (!parsed) return Refuse(parsed.error().what);
  if (parsed->help) {
    std::fputs(config::Help(schema).c_str(), stdout);
    return 0;
  }
  if (parsed->print_config) {
    std::fputs(parsed->values.Dump().c_str(), stdout);
    return 0;
  }
  const Result<router::Options> options = router::ReadOptions(parsed->values);
  if (!options) return Refuse(options.error().what);
  log::LogToStderr(log::LevelNamed(parsed->values.Text("log-level")));

  StopSignals signals;
  const SystemClock clock;
  Metrics metrics;
  router::Fleet fleet(options->backends, clock, metrics);
  router::Routes routes(fleet, metrics, options->proxy);
  auto server =
      http::Server::Start(options->http, [&routes](http::Request request, std::shared_ptr<http::Responder> responder) {
        routes.Handle(std::move(request), std::move(responder));
      });
  if (!server) return Refuse(server.error().what);
  fleet.ResolveNames();
  router::Checks checks(**server, fleet, options->check_timeout);
  LogReady(*options, (*server)->port());
  do checks.Begin();
  while (!signals.WaitFor(options->check_interval));

  log::Info("router_stopping", {{"requests_deadline_ms", options->drain_timeout.count()}});
  const bool all_answered = (*server)->Drain(options->drain_timeout);
  log::Info("router_stopped", {{"requests_cut", !all_answered}});
  return 0;
}

}  // namespace terrace
