// Which parts of a segment are taken. First fit; neighbours that are free become one.
#pragma once

#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

namespace terrace {

class Room {
 public:
  explicit Room(uint64_t bytes) : bytes_(bytes) { free_.emplace(0, bytes); }

  uint64_t bytes() const { return bytes_; }
  std::optional<uint64_t> Take(uint64_t bytes) {
    const uint64_t rounded = Rounded(bytes);
    std::lock_guard lock(mutex_);
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      const auto [offset, size] = *it;
      if (size < rounded) continue;
      free_.erase(it);
      if (size > rounded) free_.emplace(offset + rounded, size - rounded);
      return offset;
    }
    return std::nullopt;
  }
  void Give(uint64_t offset, uint64_t bytes) {
    std::lock_guard lock(mutex_);
    auto it = free_.emplace(offset, Rounded(bytes)).first;
    if (const auto next = std::next(it); next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it == free_.begin()) return;
    const auto before = std::prev(it);
    if (before->first + before->second != it->first) return;
    before->second += it->second;
    free_.erase(it);
  }

 private:
  static uint64_t Rounded(uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; }

  const uint64_t bytes_;
  std::mutex mutex_;
  std::map<uint64_t, uint64_t> free_;  // Guarded by mutex_. Offset to size.
};

}  // namespace terrace
