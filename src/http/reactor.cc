#include "http/reactor.h"

#include <algorithm>
#include <utility>

#include "http/upstream.h"

namespace terrace::http {
namespace {

constexpr std::chrono::milliseconds kSweepInterval{250};

}  // namespace

void Mailbox::Post(std::function<void()> fn) {
  std::lock_guard lock(mutex_);
  if (loop_ != nullptr) PostTo(*loop_, std::move(fn));
}

void Mailbox::Close() {
  std::lock_guard lock(mutex_);
  loop_ = nullptr;
}

Activity::Activity(Reactor& r) : reactor(r), wake(r.loop) { reactor.activities.insert(this); }
Activity::~Activity() { reactor.activities.erase(this); }

void Activity::Arm(std::chrono::milliseconds time) {
  timed_out = false;
  deadline = std::chrono::steady_clock::now() + time;
}

void Activity::Expired() {
  timed_out = true;
  if (upstream != nullptr) upstream->Close();
  wake.Set();
}

void Activity::Abandon() {
  stopped = true;
  Activity::Expired();
}

Reactor::Reactor(std::shared_ptr<Counters> c)
    : counters(std::move(c)),
      mailbox(std::make_shared<Mailbox>(loop)),
      pool(std::make_unique<UpstreamPool>()),
      sweep_timer_(loop.get_executor()) {}

Reactor::~Reactor() = default;

void Reactor::Run() {
  Spawn(loop, Sweep());
  loop.run();
}

void Reactor::Stop() {
  if (stopping_) return;
  stopping_ = true;
  mailbox->Close();
  for (Activity* activity : activities) activity->Abandon();
  pool->Clear();
  sweep_timer_.cancel();
}

Async<void> Reactor::Sweep() {
  while (!stopping_) {
    co_await SleepOn(sweep_timer_, kSweepInterval);
    const SteadyTime now = std::chrono::steady_clock::now();
    for (Activity* activity : activities) {  // Expired() only closes and wakes: the set does not change meanwhile.
      if (activity->deadline > now) continue;
      activity->Disarm();
      activity->Expired();
    }
    pool->DropIdleSince(now);
  }
}

Async<bool> WriteAll(Activity& activity, Conn& to, std::string_view a, std::string_view b,
                     std::chrono::milliseconds timeout) {
  const auto advance = [&](size_t n) {
    const size_t of_a = std::min(n, a.size());
    a.remove_prefix(of_a);
    b.remove_prefix(n - of_a);
  };
  const ssize_t sent = to.TrySend(a, b);
  if (sent < 0) co_return false;
  advance(static_cast<size_t>(sent));
  while (!a.empty() || !b.empty()) {
    activity.Arm(timeout);
    auto [error, n] = co_await to.WriteSome(a, b);
    if (error) co_return false;
    advance(n);
  }
  co_return true;
}

}  // namespace terrace::http
