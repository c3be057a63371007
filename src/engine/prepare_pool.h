// Threads beside the reactors, for what a request's parsing, template and tokens take: seconds, for the longest. They
// give way to the reactors and to the threads that compute.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "terrace/metrics.h"

namespace terrace::engine {

struct PrepareOptions {
  size_t threads = 2;
  size_t queue_max = 256;  // Jobs that wait for a thread.
};

class PreparePool {
 public:
  struct Job {
    std::function<void()> run;   // Must not throw.
    std::function<bool()> gone;  // Nobody wants it any more. Called with the pool's lock held.
  };

  // `size` names the pool in metrics and in `top -H`: "short", "long". `metrics` outlives it.
  PreparePool(const std::string& size, PrepareOptions options, Metrics& metrics);
  ~PreparePool();  // Stop().

  // Runs `job` later, in the order of the calls. False: the queue is full, or the pool has stopped. Any thread.
  bool Post(Job job);
  // Drops jobs that wait and are gone. Any thread.
  void DropGone();
  // Drops what waits, and waits for what runs. Idempotent. Not from a job.
  void Stop();

 private:
  void Run();

  const PrepareOptions options_;
  Counter& refused_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> queue_;             // Guarded by mutex_.
  bool stopping_ = false;             // Guarded by mutex_.
  std::vector<std::thread> threads_;  // Set in the constructor, joined in Stop.
};

}  // namespace terrace::engine
