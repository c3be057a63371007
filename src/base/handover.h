// One value, from the thread that has it to the one that waits for it. (std::promise waits in a way of its own, which
// the simulation of tests/sim could not follow.)
#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>

namespace terrace {

template <class T>
class Handover {
 public:
  void Give(T value) {  // Once.
    {
      std::lock_guard lock(mutex_);
      value_ = std::move(value);
    }
    given_.notify_all();
  }
  T Take() {  // Once; waits for it.
    std::unique_lock lock(mutex_);
    given_.wait(lock, [this] { return value_.has_value(); });
    return *std::move(value_);
  }

 private:
  std::mutex mutex_;
  std::condition_variable given_;
  std::optional<T> value_;  // Guarded by mutex_.
};

}  // namespace terrace
