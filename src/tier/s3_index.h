// What an s3 tier believes to be in its bucket, in memory. A belief has an age: what was not seen for `positive_ttl` is
// asked for again, and that something was not there holds for `negative_ttl`. Any thread.
#pragma once

#include <array>
#include <boost/unordered/unordered_flat_map.hpp>
#include <cstdint>
#include <mutex>

#include "terrace/key.h"
#include "terrace/tier.h"

namespace terrace {

class S3Index {
 public:
  struct Options {
    std::chrono::milliseconds positive_ttl{1'200'000};
    std::chrono::milliseconds negative_ttl{2'000};
    size_t keys_max = 1 << 20;  // 100 MB. Beyond, some are forgotten, and asked for again.
  };
  explicit S3Index(const Options& options) : options_(options) {}

  enum class Belief : uint8_t { kUnknown, kAbsent, kProposed, kPresent };
  Belief Of(const Digest& key, TimePoint now) const {
    const Shard& shard = ShardOf(key);
    std::lock_guard lock(shard.mutex);
    if (const auto it = shard.present.find(key); it != shard.present.end()) {
      if (now - it->second.seen < options_.positive_ttl)
        return it->second.bytes > 0 ? Belief::kPresent : Belief::kProposed;
    }
    const auto it = shard.absent.find(key);
    return it != shard.absent.end() && now - it->second < options_.negative_ttl ? Belief::kAbsent : Belief::kUnknown;
  }
  bool Contains(const Digest& key, TimePoint now) const { return Of(key, now) >= Belief::kProposed; }

  // Seen: `bytes` of the object. False if it was known.
  bool Saw(const Digest& key, uint64_t bytes, TimePoint now) { return Put(key, {bytes, now}); }
  // Not seen, but a descendant of it was.
  void Propose(const Digest& key, TimePoint now) {
    if (Of(key, now) < Belief::kProposed) Put(key, {0, now});
  }
  void Missed(const Digest& key, TimePoint now) {
    Shard& shard = ShardOf(key);
    std::lock_guard lock(shard.mutex);
    Drop(shard, key);
    if (shard.absent.size() >= options_.keys_max / kShards) shard.absent.clear();
    shard.absent[key] = now;
  }
  // Erased, or damaged: it is not known what is there now.
  void Forget(const Digest& key) {
    Shard& shard = ShardOf(key);
    std::lock_guard lock(shard.mutex);
    Drop(shard, key);
    shard.absent.erase(key);
  }
  // A listing that began at `begun` has gone through all: what it did not show is gone.
  void ForgetOlder(TimePoint begun) {
    for (Shard& shard : shards_) {
      std::lock_guard lock(shard.mutex);
      for (auto it = shard.present.begin(); it != shard.present.end();) {
        const auto entry = it++;
        if (entry->second.seen >= begun) continue;
        Uncount(shard, entry->second);
        shard.present.erase(entry);
      }
    }
  }

  uint64_t frames() const { return Sum(&Shard::frames); }  // Seen ones.
  uint64_t bytes() const { return Sum(&Shard::bytes); }

 private:
  struct Entry {
    uint64_t bytes = 0;  // 0: proposed only.
    TimePoint seen;
  };
  struct Shard {
    mutable std::mutex mutex;
    boost::unordered_flat_map<Digest, Entry, DigestHash> present;  // Guarded by mutex, as all here.
    boost::unordered_flat_map<Digest, TimePoint, DigestHash> absent;
    uint64_t frames = 0, bytes = 0;
  };
  static constexpr size_t kShards = 16;

  bool Put(const Digest& key, const Entry& entry) {
    Shard& shard = ShardOf(key);
    std::lock_guard lock(shard.mutex);
    shard.absent.erase(key);
    if (shard.present.size() >= options_.keys_max / kShards && !shard.present.contains(key)) {
      auto some = shard.present.begin();  // Keys are hashes: the first is any.
      Uncount(shard, some->second);
      shard.present.erase(some);
    }
    const auto [it, fresh] = shard.present.try_emplace(key, entry);
    if (!fresh) {
      Uncount(shard, it->second);
      it->second = entry;
    }
    shard.frames += entry.bytes > 0 ? 1 : 0;
    shard.bytes += entry.bytes;
    return fresh;
  }
  static void Uncount(Shard& shard, const Entry& entry) {
    shard.frames -= entry.bytes > 0 ? 1 : 0;
    shard.bytes -= entry.bytes;
  }
  static void Drop(Shard& shard, const Digest& key) {
    const auto it = shard.present.find(key);
    if (it == shard.present.end()) return;
    Uncount(shard, it->second);
    shard.present.erase(it);
  }
  // Not the bytes that the hash of the map uses.
  Shard& ShardOf(const Digest& key) { return shards_[key.bytes[31] % kShards]; }
  const Shard& ShardOf(const Digest& key) const { return shards_[key.bytes[31] % kShards]; }
  uint64_t Sum(uint64_t Shard::* field) const {
    uint64_t sum = 0;
    for (const Shard& shard : shards_) {
      std::lock_guard lock(shard.mutex);
      sum += shard.*field;
    }
    return sum;
  }

  const Options options_;
  std::array<Shard, kShards> shards_;
};

}  // namespace terrace
