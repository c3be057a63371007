// Saves on their way from RAM to one lower tier: bounded, parents first, never blocking the engine.
//
// A chunk is handed on only when its parent is in the tier; children of a chunk that was dropped or failed are dropped
// with it. Over the byte bound the newest chunk is refused, and so, their parent unknown, are its descendants: the
// deepest new ones go first. All methods may be called from any thread.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/metrics.h"
#include "terrace/tier.h"

namespace terrace {

class WriteBehind {
 public:
  struct Options {
    uint64_t bytes_max = 512ull << 20;  // Payload bytes pinned in RAM for this tier, queued and in flight.
    size_t in_flight_max = 4;
  };

  // `tier` and `metrics` outlive this object.
  WriteBehind(Tier& tier, const Options& options, Metrics& metrics);

  // Takes the chunk, or drops it and counts why. `item.owner` pins its bytes until it is settled.
  void Enqueue(SaveItem item);

  bool Has(const Digest& key) const;  // Queued or in flight.
  uint64_t pending() const;           // Chunks queued and in flight.
  uint64_t bytes() const;

  // Refuses new chunks and waits for the rest until the deadline; then drops what was not begun. Returns how many were
  // dropped.
  uint64_t Drain(TimePoint deadline);

 private:
  struct Entry {
    SaveItem item;
    std::vector<Digest> children;  // Unwritten chunks that wait for this one.
    bool waits_for_parent = false;
  };
  using Entries = std::unordered_map<Digest, Entry, DigestHash>;

  void Submit();  // Hands ready entries to the tier, up to in_flight_max. Without the lock.
  void Settled(const Digest& key, const SaveResult& result);
  void DropTree(const Digest& key, Reason reason);  // With the lock.
  void CountDrop(Reason reason);

  Tier& tier_;
  const Options options_;
  Metrics& metrics_;
  Counter& saved_;
  Counter& saved_bytes_;
  Counter& existed_;
  Counter& failed_;
  Gauge& pending_bytes_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  Entries entries_;           // Guarded by mutex_. Everything queued or in flight.
  std::deque<Digest> ready_;  // Guarded by mutex_. Entries whose parent is in the tier, oldest first.
  size_t in_flight_ = 0;      // Guarded by mutex_.
  uint64_t bytes_ = 0;        // Guarded by mutex_.
  bool draining_ = false;     // Guarded by mutex_.
};

}  // namespace terrace
