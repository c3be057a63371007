// Time and threads in the hands of a test: tasks run when the test says so, on its own thread.
#pragma once

#include <deque>
#include <map>
#include <utility>

#include "base/clock.h"
#include "base/executor.h"

namespace terrace {

class ManualClock final : public Clock {
 public:
  TimePoint Now() const override { return now_; }
  uint64_t WallNs() const override { return static_cast<uint64_t>(now_.time_since_epoch().count()); }
  void Set(TimePoint now) { now_ = now; }

 private:
  TimePoint now_{std::chrono::hours(1)};
};

class StepExecutor final : public Executor {
 public:
  explicit StepExecutor(ManualClock& clock) : clock_(clock) {}
  bool Post(Task task) override {
    ready_.push_back(std::move(task));
    return true;
  }
  bool PostAfter(std::chrono::milliseconds delay, Task task) override {
    delayed_.emplace(clock_.Now() + delay, std::move(task));
    return true;
  }
  // Runs what is due now, and what that makes due.
  void Run() {
    for (;;) {
      while (!delayed_.empty() && delayed_.begin()->first <= clock_.Now()) {
        ready_.push_back(std::move(delayed_.begin()->second));
        delayed_.erase(delayed_.begin());
      }
      if (ready_.empty()) return;
      Task task = std::move(ready_.front());
      ready_.pop_front();
      task();
    }
  }
  // Runs all that falls due in the next `time`, each at its moment.
  void Advance(std::chrono::milliseconds time) {
    const TimePoint end = clock_.Now() + time;
    Run();
    while (!delayed_.empty() && delayed_.begin()->first <= end) {
      clock_.Set(delayed_.begin()->first);
      Run();
    }
    clock_.Set(end);
    Run();
  }

 private:
  ManualClock& clock_;
  std::deque<Task> ready_;
  std::multimap<TimePoint, Task> delayed_;
};

}  // namespace terrace
