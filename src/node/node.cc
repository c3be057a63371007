#include "node/node.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>
#include <utility>

#include "base/log.h"
#include "base/stop_signals.h"
#include "client/host.h"
#include "http/server.h"
#include "node/server.h"
#include "settings/instance.h"
#include "tier/ram_limit.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;

constexpr int kUserMustMend = 2;
constexpr std::chrono::seconds kStopGrace{3};  // Beyond the deadline. Then the process ends, whatever hangs.

int Refuse(const std::string& why) {
  std::fprintf(stderr, "terrace node: %s\n", why.c_str());
  return kUserMustMend;
}

// Of systemd's socket unit; it owns the file and its permissions.
std::optional<Fd> ListenerFromSystemd() {
  const char* pid = std::getenv("LISTEN_PID");
  const char* fds = std::getenv("LISTEN_FDS");
  if (pid == nullptr || fds == nullptr || pid != std::to_string(getpid()) || std::string_view(fds) != "1") {
    return std::nullopt;
  }
  constexpr int kFirst = 3;
  unsetenv("LISTEN_PID");
  unsetenv("LISTEN_FDS");
  return Fd(kFirst);
}

bool IsPacketListener(int fd) {
  int type = 0;
  int listening = 0;
  socklen_t length = sizeof type;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &length) != 0) return false;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &length) != 0) return false;
  return type == SOCK_SEQPACKET && listening == 1;
}

// "READY=1" to whoever started us, if it listens.
void Notify(const std::string& state) {
  const char* path = std::getenv("NOTIFY_SOCKET");
  if (path == nullptr || *path == 0) return;
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t length = std::string_view(path).copy(address.sun_path, sizeof address.sun_path - 1);
  if (address.sun_path[0] == '@') address.sun_path[0] = 0;
  const Fd fd(socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  const auto size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + length);
  sendto(fd.get(), state.data(), state.size(), MSG_NOSIGNAL, reinterpret_cast<const sockaddr*>(&address), size);
}

void Respond(const Host& host, const http::Request& request, http::Responder& responder) {
  if (request.path == "/metrics") {
    return responder.Send(200, {{"Content-Type", "text/plain; version=0.0.4"}}, host.metrics.Text());
  }
  if (request.path == "/health") {
    const Store::Health health = host.store->health();
    return responder.Send(200, {{"Content-Type", "text/plain"}}, health.degraded ? "degraded: " + health.why : "ok");
  }
  responder.Send(404, {{"Content-Type", "text/plain"}}, "there are /metrics and /health");
}

int Serve(const config::Values& values) {
  const Result<settings::Tiers> tiers = settings::ReadTiers(values);
  if (!tiers) return Refuse(tiers.error().what);
  const auto sessions = config::Bounded(values, "sessions-max", 1, 10'000);
  if (!sessions) return Refuse(sessions.error().what);
  const auto port = config::Bounded(values, "metrics-port", 0, 65535);
  if (!port) return Refuse(port.error().what);
  if (values.IsSet("segments") && values.Bytes("segments") >= tiers->ram_bytes_max) {
    return Refuse("--segments is part of --ram, and leaves nothing of it");
  }
  const milliseconds drain(values.DurationMs("drain-timeout"));

  StopSignals signals;
  std::optional<Fd> given = ListenerFromSystemd();
  const bool activated = given.has_value();
  if (activated && !IsPacketListener(given->get())) {
    return Refuse("the socket of systemd is not of the kind needed: ListenSequentialPacket=");
  }
  const std::string& path = values.Text("socket");
  Result<Listener> listener = activated ? Listener{.fd = *std::move(given), .file = {}} : ListenAt(path);
  if (!listener) return Refuse("--socket: " + listener.error().what);
  // The tiers come last: a start that is refused has put nothing into their directories.
  std::unique_ptr<Host> host;
  std::atomic<const Host*> ready = nullptr;
  std::unique_ptr<http::Server> http;
  if (*port != 0) {
    auto started =
        http::Server::Start({.port = static_cast<uint16_t>(*port)},
                            [&](const http::Request& request, const std::shared_ptr<http::Responder>& responder) {
                              if (const Host* is = ready.load()) return Respond(*is, request, *responder);
                              responder->Send(503, {{"Content-Type", "text/plain"}}, "starting");
                            });
    if (!started) return Refuse("--metrics-port: " + started.error().what);
    http = *std::move(started);
  }
  // What clients write to before it is committed is RAM, too, and cut like the rest.
  const std::shared_ptr<RamRoom> room = RoomOfThisMachine();
  const uint64_t wanted = std::min(tiers->ram_bytes_max, AvailableMemoryBytes()) / 8;
  const uint64_t segments =
      room->Reserve({.asked_bytes = values.IsSet("segments") ? values.Bytes("segments") : wanted});
  Result<std::unique_ptr<Host>> opened = OpenHost(*tiers, {.ram_bytes_max = tiers->ram_bytes_max - segments});
  if (!opened) return Refuse(opened.error().what);
  host = *std::move(opened);
  auto server = NodeServer::Start({.sessions_max = *sessions, .segments_bytes_max = segments}, std::move(listener->fd),
                                  *host->store, host->metrics);
  if (!server) return Refuse(server.error().what);
  ready = host.get();
  log::Info("node_ready", {{"socket", activated ? "systemd" : path},
                           {"ram", host->store->ram_stats().bytes_max + segments},
                           {"segments", segments},
                           {"disk", tiers->disk.directory},
                           {"shared", tiers->shared.directory},
                           {"s3", tiers->s3 ? tiers->s3->endpoint.Describe() : ""}});
  Notify("READY=1");

  signals.Wait();
  Notify("STOPPING=1");
  listener->file.Remove();  // Nobody finds this node any more, and another may come.
  EndAtTheLatestAfter(std::chrono::ceil<std::chrono::seconds>(drain + kStopGrace),
                      "terrace node: a call to the storage does not return; ended without it\n");
  const TimePoint deadline = std::chrono::steady_clock::now() + drain;
  log::Info("node_stopping", {{"deadline_ms", drain.count()}});
  const NodeServer::Report report = (*server)->Stop(std::min(deadline, std::chrono::steady_clock::now() + drain / 2));
  if (http) http->Stop();
  const CloseReport closed = host->store->Close(deadline);
  log::Info("node_stopped", {{"sessions", report.sessions},
                             {"calls_cut", report.calls_cut},
                             {"saves_finished", closed.clean},
                             {"saves_abandoned", closed.abandoned}});
  return 0;
}

}  // namespace

config::Schema node::Schema() {
  using config::Type;
  config::Schema schema = {.program = "terrace node",
                           .summary = "Keeps KV for all engines of this host, in shared RAM and the tiers below it.",
                           .options = {{.name = "socket",
                                        .type = Type::kText,
                                        .default_value = "/run/terrace/node.sock",
                                        .help = "where clients connect; for owner and group; @NAME: without a file",
                                        .metavar = "PATH"}}};
  const std::vector<config::Option> tiers = settings::TierOptions();
  schema.options.insert(schema.options.end(), tiers.begin(), tiers.end());
  const config::Option own[] = {
      {.name = "segments",
       .type = Type::kBytes,
       .help = "of --ram: room for chunks that clients are about to save (default: an eighth)",
       .metavar = "BYTES"},
      {.name = "sessions-max",
       .type = Type::kInt,
       .default_value = "256",
       .help = "clients at once; more are refused",
       .metavar = "N"},
      {.name = "metrics-port",
       .type = Type::kInt,
       .default_value = "0",
       .help = "port of /metrics and /health on 127.0.0.1; 0: none",
       .metavar = "N"},
      {.name = "drain-timeout",
       .type = Type::kDuration,
       .default_value = "25s",
       .help = "how long calls and saves under way may take after a stop signal",
       .metavar = "TIME"},
      config::LogLevel()};
  schema.options.insert(schema.options.end(), std::begin(own), std::end(own));
  return schema;
}

int RunNode(const std::vector<std::string>& args) {
  const config::Schema schema = node::Schema();
  log::LogToStderr();  // Warnings about the configuration itself.
  // LMCache's file is an engine's: what it says of chunks is nothing to a node.
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
  log::LogToStderr(log::LevelNamed(parsed->values.Text("log-level")));
  return Serve(parsed->values);
}

}  // namespace terrace
