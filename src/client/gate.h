// What callbacks that may come late go through: once it is closed, none is in and none gets in.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <utility>

namespace terrace {

class Gate {
 public:
  class Pass {
   public:
    explicit Pass(std::shared_ptr<Gate> gate) : gate_(std::move(gate)) {
      std::lock_guard lock(gate_->mutex_);
      if (gate_->closed_) return;
      ++gate_->inside_;
      entered_ = true;
    }
    ~Pass() {
      if (!entered_) return;
      std::lock_guard lock(gate_->mutex_);
      if (--gate_->inside_ == 0) gate_->empty_.notify_all();
    }
    Pass(const Pass&) = delete;
    Pass& operator=(const Pass&) = delete;
    explicit operator bool() const { return entered_; }

   private:
    const std::shared_ptr<Gate> gate_;
    bool entered_ = false;
  };

  // Returns when nobody is inside. Not from inside.
  void Close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    empty_.wait(lock, [&] { return inside_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable empty_;
  size_t inside_ = 0;    // Guarded by mutex_.
  bool closed_ = false;  // Guarded by mutex_.
};

}  // namespace terrace
