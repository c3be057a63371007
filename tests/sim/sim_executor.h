// The collaborators that a scheduler stands for: clock and executors.
#pragma once

#include <chrono>
#include <cstddef>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/executor.h"
#include "tests/sim/scheduler.h"

namespace terrace::sim {

class SimClock final : public Clock {
 public:
  explicit SimClock(const Scheduler& scheduler) : scheduler_(scheduler) {}
  TimePoint Now() const override { return scheduler_.Now(); }
  uint64_t WallNs() const override { return scheduler_.WallNs(); }

 private:
  const Scheduler& scheduler_;
};

// A ThreadPool on fibers: tasks begin in the order posted, one a worker. One worker is one thread: strictly in order.
// Several overlap wherever they block or are preempted.
class SimExecutor final : public Executor {
 public:
  SimExecutor(Scheduler& scheduler, const std::string& name, size_t workers) : scheduler_(scheduler) {
    for (size_t i = 0; i < workers; ++i) {
      workers_.push_back(scheduler_.Spawn(name + "-" + std::to_string(i), [this] { Work(); }));
    }
  }
  // Stopped and its workers joined before: on a fiber, by Stop.
  SimExecutor(const SimExecutor&) = delete;  // Its workers know where it is.
  SimExecutor& operator=(const SimExecutor&) = delete;

  bool Post(Task task) override {
    if (stopping_) return false;
    queue_.push_back(std::move(task));
    scheduler_.Wake(this, 1);
    return true;
  }

  bool PostAfter(std::chrono::milliseconds delay, Task task) override {
    if (stopping_) return false;
    const uint64_t id = next_delayed_++;
    delayed_.emplace(id, std::move(task));
    scheduler_.At(scheduler_.Now() + delay, [state = alive_, id] {
      if (!*state) return;
      const auto node = (*state)->delayed_.extract(id);
      if (node) (*state)->Post(node.mapped());
    });
    return true;
  }

  // As ThreadPool: drops what is delayed, runs what is queued, joins.
  void Stop() {
    stopping_ = true;
    Drop(delayed_);
    scheduler_.Wake(this);
    for (const Scheduler::FiberId worker : workers_) scheduler_.Join(worker);
    *alive_ = nullptr;
  }

  // The process died: what has not begun never does. Workers end with what they do now; join them by Stop.
  void Kill() {
    stopping_ = true;
    Drop(delayed_);
    Drop(queue_);
    scheduler_.Wake(this);
  }

 private:
  // What tasks hold may post, or lock, when it dies.
  template <class Tasks>
  static void Drop(Tasks& tasks) {
    Tasks dropped;
    dropped.swap(tasks);
  }

  void Work() {
    for (;;) {
      if (!queue_.empty()) {
        Task task = std::move(queue_.front());
        queue_.pop_front();
        // Of several threads the one that took its task first need not be the first to begin it.
        if (workers_.size() > 1) scheduler_.Yield();
        task();
      } else if (stopping_) {
        return;
      } else {
        scheduler_.Wait(this);
      }
    }
  }

  Scheduler& scheduler_;
  std::vector<Scheduler::FiberId> workers_;
  std::deque<Task> queue_;
  std::map<uint64_t, Task> delayed_;
  uint64_t next_delayed_ = 0;
  bool stopping_ = false;
  const std::shared_ptr<SimExecutor*> alive_ = std::make_shared<SimExecutor*>(this);
};

}  // namespace terrace::sim
