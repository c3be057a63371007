// What a shared_fs tier believes to be on its directory: key -> bytes of the file. In memory; a shard for each fan-out
// directory, so that a directory's listing and its shard can be compared. Any thread.
#pragma once

#include <array>
#include <atomic>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

#include "terrace/key.h"
#include "tier/shared_fs_dir.h"

namespace terrace {

class SharedFsIndex {
 public:
  bool Contains(const Digest& key) const {
    const Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    return shard.file_bytes.contains(key);
  }

  // False if it was there.
  bool Insert(const Digest& key, uint64_t file_bytes) {
    Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    if (!shard.file_bytes.emplace(key, file_bytes).second) return false;
    frames_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(file_bytes, std::memory_order_relaxed);
    return true;
  }

  // False if it was not there.
  bool Erase(const Digest& key) {
    Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    const auto it = shard.file_bytes.find(key);
    if (it == shard.file_bytes.end()) return false;
    frames_.fetch_sub(1, std::memory_order_relaxed);
    bytes_.fetch_sub(it->second, std::memory_order_relaxed);
    shard.file_bytes.erase(it);
    return true;
  }

  std::vector<Digest> Keys(size_t fan_out) const {
    const Shard& shard = shards_[fan_out];
    std::lock_guard lock(shard.mutex);
    std::vector<Digest> keys;
    keys.reserve(shard.file_bytes.size());
    for (const auto& entry : shard.file_bytes) keys.push_back(entry.first);
    return keys;
  }

  bool Empty(size_t fan_out) const {
    std::lock_guard lock(shards_[fan_out].mutex);
    return shards_[fan_out].file_bytes.empty();
  }

  void Clear() {
    for (size_t i = 0; i < kFanOut; ++i) {
      for (const Digest& key : Keys(i)) Erase(key);
    }
  }

  uint64_t frames() const { return frames_.load(std::memory_order_relaxed); }
  uint64_t bytes() const { return bytes_.load(std::memory_order_relaxed); }

  // Held while a name in the key's directory is made or taken away together with its entry here, so that the two do not
  // cross. The only lock of the tier that is held over I/O, and only one directory's.
  std::mutex& names(const Digest& key) { return Of(key).names; }

 private:
  // Not the bytes that chose the shard: those are equal within it.
  struct TailHash {
    using is_avalanching = void;
    size_t operator()(const Digest& key) const noexcept {
      size_t hash;
      std::memcpy(&hash, key.bytes.data() + 8, sizeof hash);
      return hash;
    }
  };
  struct Shard {
    mutable std::mutex mutex;
    std::mutex names;
    boost::unordered_flat_map<Digest, uint64_t, TailHash> file_bytes;  // Guarded by mutex.
  };
  const Shard& Of(const Digest& key) const { return shards_[FanOutOf(key)]; }
  Shard& Of(const Digest& key) { return shards_[FanOutOf(key)]; }

  std::array<Shard, kFanOut> shards_;
  std::atomic<uint64_t> frames_{0};  // Relaxed: statistics.
  std::atomic<uint64_t> bytes_{0};   // Relaxed: statistics.
};

}  // namespace terrace
