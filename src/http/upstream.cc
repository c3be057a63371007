#include "http/upstream.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

namespace terrace::http {
namespace {

constexpr size_t kIdlePerBackendMax = 256;
// Longer than most servers keep an idle connection; one that was closed meanwhile is noticed when it is taken.
constexpr std::chrono::seconds kIdleTime{30};

std::vector<std::string> LookUpAddresses(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), nullptr, &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, &::freeaddrinfo);
  std::vector<std::string> addresses;
  for (const addrinfo* a = list.get(); a != nullptr; a = a->ai_next) {
    std::array<char, NI_MAXHOST> text;
    if (::getnameinfo(a->ai_addr, a->ai_addrlen, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      addresses.emplace_back(text.data());
    }
  }
  return addresses;
}

}  // namespace

// ----------------------------------------------------------------------------------------------------------- backend

Backend::Backend(std::string host, uint16_t port)
    : host_(std::move(host)),
      port_(port),
      authority_((host_.find(':') == std::string::npos ? host_ : "[" + host_ + "]") + ":" + std::to_string(port)) {
  if (ParseEndpoint(host_, port)) {
    addresses_ = {host_};
    stale_ = false;
  }
}

Backend::~Backend() {
  // A lookup can't be interrupted: this may take as long as the resolver's timeouts allow.
  if (thread_.joinable()) thread_.join();
}

std::vector<std::string> Backend::addresses() const {
  std::lock_guard lock(mutex_);
  return addresses_;
}

void Backend::Forget() {
  std::lock_guard lock(mutex_);
  stale_ = !ParseEndpoint(host_, port_);
}

bool Backend::Resolve(std::function<void()> done) {
  {
    std::lock_guard lock(mutex_);
    if (!stale_) return true;
    waiting_.push_back(std::move(done));  // As many as there are requests waiting for this backend.
    if (std::exchange(looking_up_, true)) return false;
  }
  std::lock_guard lock(thread_mutex_);
  if (thread_.joinable()) thread_.join();  // Through, but for its last lines.
  try {
    thread_ = std::thread([this] { LookUp(); });
  } catch (const std::system_error&) {  // No more threads: slow is better than not at all.
    LookUp();
  }
  return false;
}

void Backend::LookUp() {
  std::vector<std::string> addresses = LookUpAddresses(host_);
  std::vector<std::function<void()>> waiting;
  {
    std::lock_guard lock(mutex_);
    looking_up_ = false;
    if (!addresses.empty()) {  // Otherwise the old ones are the best guess there is.
      addresses_ = std::move(addresses);
      stale_ = false;
    }
    waiting = std::exchange(waiting_, {});
  }
  for (const auto& done : waiting) done();
}

// -------------------------------------------------------------------------------------------------------------- pool

Upstream::Upstream(Reactor& reactor) : conn(reactor.loop), counters_(reactor.counters) { ++counters_->upstreams; }
Upstream::~Upstream() { --counters_->upstreams; }

std::unique_ptr<Upstream> UpstreamPool::Take(const Backend& backend) {
  const auto it = idle_.find(&backend);
  if (it == idle_.end()) return nullptr;
  auto& connections = it->second.connections;
  while (!connections.empty()) {
    std::unique_ptr<Upstream> upstream = std::move(connections.back());
    connections.pop_back();
    if (upstream->conn.Silent()) return upstream;
  }
  return nullptr;
}

void UpstreamPool::Put(std::shared_ptr<Backend> backend, std::unique_ptr<Upstream> upstream) {
  Idle& idle = idle_[backend.get()];
  if (idle.connections.size() >= kIdlePerBackendMax) return;
  idle.backend = std::move(backend);
  upstream->idle_since = std::chrono::steady_clock::now();
  idle.connections.push_back(std::move(upstream));
}

void UpstreamPool::DropIdleSince(SteadyTime now) {
  for (auto& [backend, idle] : idle_) {
    auto& connections = idle.connections;  // The oldest come first.
    const auto young = std::find_if(connections.begin(), connections.end(),
                                    [&](const auto& upstream) { return upstream->idle_since + kIdleTime > now; });
    connections.erase(connections.begin(), young);
  }
}

// -------------------------------------------------------------------------------------------------------------- dial

namespace {

// Returns when the addresses are known, nobody can say better, or the activity is out of time.
Async<void> WaitForAddresses(Activity& activity, std::shared_ptr<Backend> backend) {
  const auto known = std::make_shared<bool>(false);  // As the next one, for this reactor's thread alone.
  // The lookup may end after the activity did: the event is touched only if `waits` still stands.
  const auto waits = std::make_shared<Activity*>(&activity);
  *known = backend->Resolve([known, waits, mailbox = activity.reactor.mailbox] {
    mailbox->Post([known, waits] {
      *known = true;
      if (*waits != nullptr) (*waits)->wake.Set();
    });
  });
  while (!*known && !activity.timed_out && !activity.abandoned()) co_await activity.wake.Wait();
  *waits = nullptr;
}

}  // namespace

Async<Dialled> Dial(Activity& activity, std::shared_ptr<Backend> backend, std::chrono::milliseconds timeout) {
  const SteadyTime until = std::chrono::steady_clock::now() + timeout;
  activity.Arm(timeout);
  Dialled result;
  co_await WaitForAddresses(activity, backend);
  const std::vector<std::string> addresses = backend->addresses();
  result.why = activity.timed_out ? "its name could not be looked up in time" : "its name has no address";
  for (size_t i = 0; i < addresses.size() && !activity.abandoned(); ++i) {
    const std::optional<net::ip::tcp::endpoint> endpoint = ParseEndpoint(addresses[i], backend->port());
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - std::chrono::steady_clock::now());
    if (!endpoint || left.count() <= 0) continue;
    auto upstream = std::make_unique<Upstream>(activity.reactor);
    activity.upstream = &upstream->conn;
    activity.Arm(left / static_cast<int>(addresses.size() - i));  // The first of several must not use up all the time.
    auto [error] = co_await upstream->conn.Connect(*endpoint);
    activity.upstream = nullptr;
    activity.Disarm();
    if (!error && !activity.timed_out && !activity.abandoned()) {
      upstream->conn.SetNoDelay();
      activity.upstream = &upstream->conn;
      result.upstream = std::move(upstream);
      result.why.clear();
      co_return result;
    }
    result.why = activity.timed_out ? "it did not accept a connection in time" : error.message();
  }
  activity.Disarm();
  if (!activity.abandoned()) backend->Forget();
  co_return result;
}

}  // namespace terrace::http
