#include "http/server.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "http/conn.h"
#include "http/error.h"
#include "http/reactor.h"
#include "http/session.h"
#include "http/wire.h"

namespace terrace::http {
namespace {

constexpr std::chrono::milliseconds kLastWords{1000};  // For clients to be told that their answers were cut.

// A connection on its way to its reactor, which may have stopped meanwhile.
struct Admitted {
  Admitted(Socket s, std::shared_ptr<Counters> c) : socket(std::move(s)), counters(std::move(c)) {
    ++counters->sessions;
  }
  ~Admitted() {
    if (!taken) --counters->sessions;
  }
  Socket socket;
  const std::shared_ptr<Counters> counters;
  bool taken = false;
};

void SendBusy(Conn conn) {
  const std::string body = ErrorBody("too many connections: try again later", ErrorType(503), "too_many_connections");
  std::string head;
  AppendResponseHead(503, {{"Content-Type", "application/json"}, {"Retry-After", "1"}},
                     {.length = body.size(), .close = true}, head);
  conn.TrySend(head, body);
  conn.CloseSending();
  conn.Discard();
}

// Accepts for all reactors and deals the connections out in turn. One acceptor, not one per thread with SO_REUSEPORT:
// that would let a second program share the port in silence, and would spread few connections badly.
class Listener final : public Activity {
 public:
  Listener(Reactor& r, std::unique_ptr<Acceptor> acceptor) : Activity(r), acceptor_(std::move(acceptor)) {}

  void Abandon() override {
    Activity::Abandon();
    Close();
  }
  void Close() {
    error_code ignored;
    acceptor_->close(ignored);
    closed_ = true;
    wake.Set();
  }
  uint16_t port() const { return acceptor_->local_endpoint().port(); }

  static Async<void> Run(std::shared_ptr<Listener> self, const SessionContext& context,
                         std::vector<std::unique_ptr<Reactor>>& reactors) {
    for (size_t turn = 0; !self->closed_; turn = (turn + 1) % reactors.size()) {
      Reactor& reactor = *reactors[turn];
      auto [error, socket] = co_await Accept(*self->acceptor_, reactor.loop);
      if (self->closed_) break;
      if (error) {
        // Out of descriptors or memory, or a client that is gone already. Trying again at once would spin.
        log::Warn("http_accept_failed", {{"reason", error.message()}});
        self->Arm(std::chrono::milliseconds(100));
        co_await self->wake.Wait();
        continue;
      }
      if (self->reactor.counters->sessions >= static_cast<int64_t>(context.options.connections_max)) {
        SendBusy(Conn(std::move(socket)));
        continue;
      }
      const auto admitted = std::make_shared<Admitted>(std::move(socket), self->reactor.counters);
      reactor.Post([admitted, &reactor, &context] {
        admitted->taken = true;
        Session::Start(std::make_shared<Session>(reactor, std::move(admitted->socket), context));
      });
    }
  }

 private:
  std::unique_ptr<Acceptor> acceptor_;
  bool closed_ = false;
};

class ServerImpl final : public Server {
 public:
  ServerImpl(Options options, Handler handler) : counters_(std::make_shared<Counters>()) {
    context_.options = std::move(options);
    context_.handler = std::move(handler);
    context_.on_end = [this] {
      if (!counters_->draining) return;
      std::lock_guard lock(mutex_);
      session_ended_.notify_all();
    };
  }

  ~ServerImpl() override { Stop(); }

  Result<void> Begin() {
    for (size_t i = 0; i < std::max<size_t>(1, context_.options.threads); ++i) {
      reactors_.push_back(std::make_unique<Reactor>(counters_));
    }
    auto acceptor = Listen(reactors_[0]->loop, context_.options.host, context_.options.port);
    if (!acceptor) return Fail(acceptor.error().code, acceptor.error().what, acceptor.error().os_error);
    auto listener = std::make_shared<Listener>(*reactors_[0], std::move(*acceptor));
    port_ = listener->port();
    listener_ = listener;
    Spawn(reactors_[0]->loop, Listener::Run(std::move(listener), context_, reactors_));
    for (auto& reactor : reactors_) threads_.emplace_back([&r = *reactor] { r.Run(); });
    return {};
  }

  uint16_t port() const override { return port_; }

  ServerStats stats() const override {
    return {.connections = counters_->sessions, .watchers = counters_->watchers, .upstreams = counters_->upstreams};
  }

  bool Drain(std::chrono::milliseconds deadline) override {
    counters_->draining = true;
    reactors_[0]->Post([this] {
      if (const auto listener = listener_.lock()) listener->Close();
    });
    ToSessions(&Session::CloseIfIdle);
    const bool clean = WaitForSessions(deadline);
    if (!clean) {
      ToSessions(&Session::CutAnswer);
      WaitForSessions(kLastWords);
    }
    Stop();
    return clean;
  }

  void Stop() override {
    for (auto& reactor : reactors_) reactor->Post([&r = *reactor] { r.Stop(); });
    for (std::thread& thread : threads_) {
      TERRACE_ASSERT(thread.get_id() != std::this_thread::get_id());  // A handler must not stop its own server.
      thread.join();
    }
    threads_.clear();
  }

  void Post(std::function<void(Reactor&)> fn) override {
    reactors_[0]->Post([&r = *reactors_[0], fn = std::move(fn)] { fn(r); });
  }

 private:
  void ToSessions(void (Session::*tell)()) {
    for (auto& reactor : reactors_) {
      reactor->Post([tell, &r = *reactor] {
        for (Activity* activity : r.activities) {
          if (auto* session = dynamic_cast<Session*>(activity)) (session->*tell)();
        }
      });
    }
  }
  // False: some go on.
  bool WaitForSessions(std::chrono::milliseconds time) {
    std::unique_lock lock(mutex_);
    return session_ended_.wait_for(lock, time, [&] { return counters_->sessions == 0; });
  }

  const std::shared_ptr<Counters> counters_;
  SessionContext context_;
  uint16_t port_ = 0;
  std::weak_ptr<Listener> listener_;  // Lives on reactor 0: locked there alone.
  std::mutex mutex_;
  std::condition_variable session_ended_;           // counters_->sessions fell while draining.
  std::vector<std::unique_ptr<Reactor>> reactors_;  // After what their sessions refer to.
  std::vector<std::thread> threads_;
};

}  // namespace

Result<std::unique_ptr<Server>> Server::Start(Options options, Handler handler) {
  auto server = std::make_unique<ServerImpl>(std::move(options), std::move(handler));
  if (auto begun = server->Begin(); !begun) return tl::unexpected<Error>(begun.error());
  return server;
}

}  // namespace terrace::http
