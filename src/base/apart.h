// Work on a thread of its own, which is left behind if it has not ended when this is destroyed: a call on a mount whose
// server is gone may never return, and nobody can end its thread. So the work owns all that it touches.
#pragma once

#include <functional>
#include <future>
#include <memory>
#include <system_error>
#include <thread>
#include <utility>

#include "base/clock.h"

namespace terrace {

class Apart {
 public:
  explicit Apart(std::function<void()> work) {
    const auto task = std::make_shared<std::packaged_task<void()>>(std::move(work));
    end_ = task->get_future();
    try {
      thread_ = std::make_unique<std::thread>([task] { (*task)(); });
    } catch (const std::system_error&) {
      (*task)();  // The process may have no more threads.
    }
  }
  ~Apart() {
    if (!thread_) return;
    if (EndsBy(std::chrono::steady_clock::now())) {
      thread_->join();
    } else {
      [[maybe_unused]] const std::thread* left = thread_.release();
    }
  }
  Apart(const Apart&) = delete;
  Apart& operator=(const Apart&) = delete;

  // Whether the work has ended, after waiting until `deadline` at most. Then this thread sees what the work wrote.
  bool EndsBy(TimePoint deadline) const { return end_.wait_until(deadline) == std::future_status::ready; }

 private:
  std::future<void> end_;
  std::unique_ptr<std::thread> thread_;
};

}  // namespace terrace
