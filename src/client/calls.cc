#include "client/calls.h"

#include <sys/eventfd.h>
#include <unistd.h>

#include "base/assert.h"

namespace terrace {

bool Call::done() const {
  std::lock_guard lock(mutex_);
  return settled_ == size_;
}

bool Call::Wait(TimePoint deadline) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, deadline, [&] { return settled_ == size_; });
}

void Call::Cancel() {
  std::function<void()> on_cancel;
  {
    std::lock_guard lock(mutex_);
    if (settled_ == size_) return;
    cancelled_ = true;
    on_cancel.swap(on_cancel_);
  }
  if (on_cancel) on_cancel();
}

void CallAccess::OnCancel(Call& call, std::function<void()> on_cancel) {
  {
    std::lock_guard lock(call.mutex_);
    if (call.settled_ == call.size_) return;
    if (!call.cancelled_) {
      call.on_cancel_ = std::move(on_cancel);
      return;
    }
  }
  on_cancel();
}

bool CallAccess::Cancelled(const Call& call) {
  std::lock_guard lock(call.mutex_);
  return call.cancelled_;
}

Calls::Calls(size_t max) : max_(max), fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  TERRACE_ASSERT(fd_ >= 0);  // Out of descriptors at the start of a process.
}

Calls::~Calls() { close(fd_); }

void Calls::Signal() {
  if (signalled_.exchange(true)) return;
  const uint64_t one = 1;
  [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
}

void Calls::ClearEvent() {
  uint64_t count = 0;
  [[maybe_unused]] const ssize_t got = read(fd_, &count, sizeof count);
  signalled_.store(false);
}

}  // namespace terrace
