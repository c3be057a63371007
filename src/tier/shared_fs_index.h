// What a shared_fs tier believes to be on its directory. In memory; a shard for each fan-out directory, so that a
// directory's listing and its shard can be compared. Any thread. Times are the file server's.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <optional>
#include <vector>

#include "terrace/key.h"
#include "tier/shared_fs_dir.h"

namespace terrace {

class SharedFsIndex {
 public:
  struct Entry {
    uint64_t file_bytes = 0;
    Digest parent;
    int64_t used_ns = 0;  // Last use that we know of, by any node; before that, when it was written.
    int64_t told_ns = 0;  // When somebody last said that it is there.
  };

  bool Contains(const Digest& key) const {
    const Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    return shard.entries.contains(key);
  }

  // False if it was there; then its times are brought up to date.
  bool Insert(const Digest& key, const Entry& entry) {
    Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    const auto [it, added] = shard.entries.emplace(key, Kept{.entry = entry, .noted_ns = entry.used_ns});
    if (!added) {
      Entry& there = it->second.entry;
      there.used_ns = std::max(there.used_ns, entry.used_ns);
      there.told_ns = std::max(there.told_ns, entry.told_ns);
      return false;
    }
    frames_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(entry.file_bytes, std::memory_order_relaxed);
    return true;
  }

  // False if it was not there.
  bool Erase(const Digest& key) {
    Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    const auto it = shard.entries.find(key);
    if (it == shard.entries.end()) return false;
    frames_.fetch_sub(1, std::memory_order_relaxed);
    bytes_.fetch_sub(it->second.entry.file_bytes, std::memory_order_relaxed);
    shard.entries.erase(it);
    return true;
  }

  std::optional<Entry> Find(const Digest& key) const {
    const Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    const auto it = shard.entries.find(key);
    return it == shard.entries.end() ? std::nullopt : std::optional(it->second.entry);
  }

  // Somebody used it. Nothing if it is not there.
  void Use(const Digest& key, int64_t used_ns) {
    Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    const auto it = shard.entries.find(key);
    if (it == shard.entries.end()) return;
    it->second.entry.used_ns = std::max(it->second.entry.used_ns, used_ns);
    it->second.noted_ns = std::max(it->second.noted_ns, used_ns);
  }

  // We used it. True, once for `every_ns` of a key's uses: the others should hear of it.
  bool UseAndNote(const Digest& key, int64_t now_ns, int64_t every_ns) {
    Shard& shard = Of(key);
    std::lock_guard lock(shard.mutex);
    const auto it = shard.entries.find(key);
    if (it == shard.entries.end()) return false;
    it->second.entry.used_ns = std::max(it->second.entry.used_ns, now_ns);
    if (now_ns - it->second.noted_ns < every_ns) return false;
    it->second.noted_ns = now_ns;
    return true;
  }

  // The clock was set back: nothing happened after this.
  void NotAfter(int64_t now_ns) {
    for (Shard& shard : shards_) {
      std::lock_guard lock(shard.mutex);
      for (auto& [key, kept] : shard.entries) {
        for (int64_t* time : {&kept.entry.used_ns, &kept.entry.told_ns, &kept.noted_ns})
          *time = std::min(*time, now_ns);
      }
    }
  }

  std::vector<Digest> Keys(size_t fan_out) const {
    std::vector<Digest> keys;
    ForEach(fan_out, [&](const Digest& key, const Entry&) { keys.push_back(key); });
    return keys;
  }

  // visit(key, entry), with the shard's lock held.
  template <class Visit>
  void ForEach(size_t fan_out, Visit&& visit) const {
    const Shard& shard = shards_[fan_out];
    std::lock_guard lock(shard.mutex);
    for (const auto& [key, kept] : shard.entries) visit(key, kept.entry);
  }

  bool Empty(size_t fan_out) const {
    std::lock_guard lock(shards_[fan_out].mutex);
    return shards_[fan_out].entries.empty();
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
  struct Kept {
    Entry entry;
    int64_t noted_ns = 0;  // Last use that all nodes know of.
  };
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
    boost::unordered_flat_map<Digest, Kept, TailHash> entries;  // Guarded by mutex.
  };
  const Shard& Of(const Digest& key) const { return shards_[FanOutOf(key)]; }
  Shard& Of(const Digest& key) { return shards_[FanOutOf(key)]; }

  std::array<Shard, kFanOut> shards_;
  std::atomic<uint64_t> frames_{
      0};  // Relaxed: statistics, and what the bounds are judged by, which waits for news anyway.
  std::atomic<uint64_t> bytes_{0};  // Relaxed, as above.
};

}  // namespace terrace
