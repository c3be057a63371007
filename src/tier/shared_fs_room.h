// Room on a bounded share, for the saves of this node. No I/O: the tier writes the journal and reads those of others.
//
// Nodes share no memory and no lock, and still keep to one bound. Each says in its journal how many bytes it may have
// under way (its claim), waits until that is durable, and only then reads what the others say. It writes no more than
// it claimed, and nothing unless all frames and all claims fit under the bound. Of two that claim at once the later one
// sees the other's claim, so both can't believe that the same room is theirs.
//
//   granted   What we may have under way. Never above the claim that our journal shows.
//   in flight Promised to saves (Take) and not yet given back, or published and not yet told of: until others know of a
//             frame they count it by our claim.
//
// A claim that was not renewed for long is void for others, since its node may be dead; so a grant ends earlier.
// Any thread.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <mutex>
#include <utility>

#include "terrace/tier.h"

namespace terrace {

class SharedFsRoom {
 public:
  // `bytes_max`: of the share.
  explicit SharedFsRoom(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  // --- By saves

  // Promises room. False: there is none now, or only for those who wait longer (`place`: what Want gave, or none).
  bool Take(uint64_t bytes, TimePoint now, uint64_t place = std::numeric_limits<uint64_t>::max()) {
    std::lock_guard lock(mutex_);
    uint64_t before = 0;
    for (auto it = waiting_.begin(); it != waiting_.end() && it->first < place; ++it) before += it->second;
    if (now >= until_ || in_flight_ + before + bytes > granted_) return false;
    in_flight_ += bytes;
    writing_ += bytes;
    return true;
  }
  // Nothing is written, or it is removed again.
  void GiveBack(uint64_t bytes) {
    std::lock_guard lock(mutex_);
    in_flight_ -= bytes;
    writing_ -= bytes;
  }
  // It has its name, and its record waits to be written.
  void Published(uint64_t bytes) {
    std::lock_guard lock(mutex_);
    untold_ += bytes;
    writing_ -= bytes;
  }
  // A save that waits for room counts in the next claim, until Unwant. Its place among those who wait.
  uint64_t Want(uint64_t bytes) {
    std::lock_guard lock(mutex_);
    wanted_ += bytes;
    largest_ = std::max(largest_, bytes);
    waiting_.emplace(next_place_, bytes);
    return next_place_++;
  }
  void Unwant(uint64_t place) {
    std::lock_guard lock(mutex_);
    const auto it = waiting_.find(place);
    wanted_ -= it->second;
    waiting_.erase(it);
  }

  // --- By the background thread

  bool wanted() const {
    std::lock_guard lock(mutex_);
    return wanted_ > 0;
  }
  // The least claim that is of use where so many nodes claim, we among them. Saves that wait claim a 16th of the share
  // together, or a part of its half if that is less, or one of them what it needs. If each node claimed for all that
  // wait, no claim would fit, and what is there would go to make room for none.
  uint64_t Needed(uint64_t nodes) const {
    std::lock_guard lock(mutex_);
    const uint64_t part = bytes_max_ / std::max<uint64_t>(16, 2 * nodes);
    return in_flight_ + std::min(wanted_, std::max(largest_, part));
  }
  // Of temporaries, at most.
  uint64_t writing() const {
    std::lock_guard lock(mutex_);
    return writing_;
  }
  uint64_t granted() const {
    std::lock_guard lock(mutex_);
    return granted_;
  }

  // Before an append: the published bytes whose records go with it. They stay in flight until Told.
  uint64_t TakeUntold() {
    std::lock_guard lock(mutex_);
    return std::exchange(untold_, 0);
  }
  // The append that began at `begun` succeeded: everyone counts these bytes as frames now.
  void Told(uint64_t bytes, TimePoint begun, std::chrono::steady_clock::duration lasts) {
    std::lock_guard lock(mutex_);
    in_flight_ -= bytes;
    granted_ -= std::min(granted_, bytes);
    if (begun < until_) until_ = begun + lasts;  // What ended is not renewed but claimed anew.
  }
  // It failed.
  void NotTold(uint64_t bytes) {
    std::lock_guard lock(mutex_);
    untold_ += bytes;
  }

  // So much of our claim, which is in our journal since `begun`, fits under the bound. What is in flight has been
  // granted before.
  void Grant(uint64_t bytes, TimePoint begun, std::chrono::steady_clock::duration lasts) {
    std::lock_guard lock(mutex_);
    granted_ = std::max(bytes, in_flight_);
    until_ = begun + lasts;
  }
  // Keeps no more than `claim` and what is in flight, so that a lower claim may be written: the one returned.
  uint64_t Limit(uint64_t claim) {
    std::lock_guard lock(mutex_);
    granted_ = std::min(granted_, std::max(claim, in_flight_));
    return std::max(claim, granted_);
  }

 private:
  const uint64_t bytes_max_;
  mutable std::mutex mutex_;
  uint64_t granted_ = 0;  // All guarded by mutex_.
  uint64_t in_flight_ = 0;
  uint64_t writing_ = 0;  // Part of in_flight_, as the next.
  uint64_t untold_ = 0;
  uint64_t wanted_ = 0;
  std::map<uint64_t, uint64_t> waiting_;  // Bytes by place.
  uint64_t next_place_ = 0;
  uint64_t largest_ = 0;  // That a save ever waited for.
  TimePoint until_{};     // The grant's end.
};

}  // namespace terrace
