// One thread's loop, and what lives on it: activities with a deadline, swept by one timer.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_set>

#include "http/conn.h"

namespace terrace::http {

class Reactor;
class UpstreamPool;

using SteadyTime = std::chrono::steady_clock::time_point;

// The way into a loop for other threads. Outlives the loop: what is posted after Close is dropped.
class Mailbox {
 public:
  explicit Mailbox(Loop& loop) : loop_(&loop) {}
  void Post(std::function<void()> fn);
  void Close();

 private:
  std::mutex mutex_;
  Loop* loop_;  // Guarded by mutex_; null once closed.
};

// What runs on a reactor and waits: a client's session, a call to a backend. Touched by the reactor's thread alone.
class Activity {
 public:
  explicit Activity(Reactor& reactor);
  virtual ~Activity();
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  // Whoever waits for a socket or event arms first. At the deadline Expired() runs, within the sweep's 250 ms.
  void Arm(std::chrono::milliseconds time);
  void Disarm() { deadline = SteadyTime::max(); }

  // Wakes the waiter: closes what it waits for. By default the upstream connection.
  virtual void Expired();
  // The reactor stops: as Expired, for everything and for good.
  virtual void Abandon();
  // Nobody wants the result any more.
  virtual bool abandoned() const { return stopped; }

  Reactor& reactor;
  Event wake;
  Conn* upstream = nullptr;  // While connected or connecting; owned by the coroutine that set it.
  SteadyTime deadline = SteadyTime::max();
  bool timed_out = false;  // Set by Expired, cleared by Arm.
  bool stopped = false;
};

// Shared by the reactors of a server and those who ask how it does. Relaxed atomics: each stands alone.
struct Counters {
  std::atomic<int64_t> sessions{0};  // Open client connections.
  std::atomic<int64_t> watchers{0};
  std::atomic<int64_t> upstreams{0};  // Connections to backends, idle ones included.
  std::atomic<size_t> body_bytes{0};  // Of requests that arrive or are being answered.
  std::atomic<bool> draining{false};  // Set once, before the reactors are told by message.
};

class Reactor {
 public:
  explicit Reactor(std::shared_ptr<Counters> counters);
  ~Reactor();

  // From any thread.
  void Post(std::function<void()> fn) { mailbox->Post(std::move(fn)); }

  // On this thread only.
  void Run();   // Until stopped and everything on it ended.
  void Stop();  // Abandons all activities.
  bool stopping() const { return stopping_; }

  Loop loop{1};  // First, so that it is destroyed last.
  const std::shared_ptr<Counters> counters;
  const std::shared_ptr<Mailbox> mailbox;
  std::unordered_set<Activity*> activities;
  const std::unique_ptr<UpstreamPool> pool;

 private:
  Async<void> Sweep();

  Timer sweep_timer_;
  bool stopping_ = false;
};

// Sends a and then b whole; the activity's deadline is armed anew whenever the socket took some. Reading on only after
// this returned is what holds a fast sender back.
Async<bool> WriteAll(Activity& activity, Conn& to, std::string_view a, std::string_view b,
                     std::chrono::milliseconds timeout);

}  // namespace terrace::http
