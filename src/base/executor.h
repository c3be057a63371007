// Where work runs. A component posts tasks; a ThreadPool runs them in a program, a StepExecutor one by one in a test.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace terrace {

using Task = std::function<void()>;

class Executor {
 public:
  virtual ~Executor() = default;
  // Runs `task` later, on some thread of the executor. False once stopped: the task is dropped.
  virtual bool Post(Task task) = 0;
  virtual bool PostAfter(std::chrono::milliseconds delay, Task task) = 0;
};

// Fixed number of threads, FIFO. Tasks must not throw. The queue is not bounded here: its users bound what they post.
class ThreadPool final : public Executor {
 public:
  ThreadPool(std::string name, size_t threads);  // Name shows in `top -H`, 15 characters at most.
  ~ThreadPool() override;                        // Stop().
  bool Post(Task task) override;
  bool PostAfter(std::chrono::milliseconds delay, Task task) override;
  // Drops delayed tasks, runs those queued, joins. Not from a task of its own.
  void Stop();

 private:
  void Run();

  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Task> queue_;                  // Guarded by mutex_.
  std::multimap<TimePoint, Task> delayed_;  // Guarded by mutex_.
  bool stopping_ = false;                   // Guarded by mutex_.
  std::vector<std::thread> threads_;        // Set in the constructor, joined in Stop.
};

}  // namespace terrace
