#include "client/pins.h"

#include <algorithm>
#include <vector>

namespace terrace {
namespace {

constexpr std::chrono::milliseconds kSweepEvery{1000};  // How late a pin may end.

}  // namespace

bool Pins::Pin(Lease lease, TimePoint until) {
  const Digest key = lease.info.key;
  const uint64_t bytes = lease.bytes.size();
  std::lock_guard lock(mutex_);
  if (const auto it = pinned_.find(key); it != pinned_.end()) {
    it->second.until = std::max(it->second.until, until);
    return true;
  }
  if (bytes > bytes_max_ - bytes_) return false;
  if (!sweeping_ && !timers_.PostAfter(kSweepEvery, [this] { Sweep(); })) return false;
  sweeping_ = true;
  pinned_.emplace(key, Pinned{std::move(lease), until});
  bytes_ += bytes;
  return true;
}

void Pins::Unpin(std::span<const Digest> keys) {
  std::lock_guard lock(mutex_);
  for (const Digest& key : keys) {
    const auto it = pinned_.find(key);
    if (it == pinned_.end()) continue;
    bytes_ -= it->second.lease.bytes.size();
    pinned_.erase(it);
  }
}

uint64_t Pins::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

void Pins::Sweep() {
  const TimePoint now = std::chrono::steady_clock::now();
  std::vector<Digest> due;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [key, pinned] : pinned_) {
      if (pinned.until <= now) due.push_back(key);
    }
  }
  Unpin(due);
  std::lock_guard lock(mutex_);
  sweeping_ = !pinned_.empty() && timers_.PostAfter(kSweepEvery, [this] { Sweep(); });
}

}  // namespace terrace
