// Saves on their way from RAM to one lower tier: bounded, parents first, never blocking the engine.
//
// A chunk is handed on only when its parent is in the tier; children of a chunk that was dropped or failed are dropped
// with it. The bound is on the bytes that stay in RAM because of this tier, also of those that it was given up on and
// still holds. When a chunk does not fit, the backlog is cut: each chain that waits gives up a quarter of its
// descendants, the deepest first, so that a long prompt gives way to short ones and fronts of chains, which serve most
// requests, are written. Then nothing is taken until the backlog has fallen to half the bound: a tier that is too slow
// gets some chains whole, and not a bit of each.
//
// All methods may be called from any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "terrace/metrics.h"
#include "terrace/tier.h"

namespace terrace {

class WriteBehind {
 public:
  struct Options {
    uint64_t bytes_max = 512ull << 20;  // Payload bytes pinned in RAM for this tier, queued and in flight.
    size_t in_flight_max = 4;
  };
  struct Drained {
    uint64_t written = 0;    // Or found to be there.
    uint64_t dropped = 0;    // For any reason.
    uint64_t abandoned = 0;  // Of those: because there was no more time.
  };

  // `metrics` outlives this object and what `tier` still holds of it. No method is called once `tier` is gone.
  WriteBehind(Tier& tier, const Options& options, Metrics& metrics);

  // `chain`: chunks from the first on, each the parent of the next. They are taken together, so a child finds its
  // parent here even if the tier has settled it since, and does not say that it has it (its reads are stopped). True:
  // all are in the tier, or on their way. False: one was dropped, and counted with the reason; those behind it were not
  // taken. An item's `owner` pins its bytes until the tier lets go of them.
  bool EnqueueChain(std::vector<SaveItem> chain);
  bool Enqueue(SaveItem item);  // A chain of one.

  bool Has(const Digest& key) const;  // Queued or in flight.
  uint64_t pending() const;           // Chunks queued and in flight.
  uint64_t bytes() const { return pinned_->bytes.load(); }

  // Refuses new chunks and waits for the rest until the deadline; then drops what was not begun.
  void Drain(TimePoint deadline);
  // What became of the chunks that were here when Drain began. Whole once the tier is closed.
  Drained drained() const;

 private:
  struct Entry {
    SaveItem item;
    std::vector<Digest> children;  // Unwritten chunks that wait for this one.
    bool waits_for_parent = false;
  };
  using Entries = std::unordered_map<Digest, Entry, DigestHash>;
  // Bytes that stay in RAM for this tier. The pins, which count it down, may outlive the queue.
  struct Pinned {
    std::atomic<uint64_t> bytes{0};  // Stands alone: only its value is used.
    Gauge* gauge = nullptr;
  };
  struct Pin;

  // Hands ready entries to the tier, up to in_flight_max. Without the lock. By one thread at a time, and not from
  // within itself: a tier that declines at once would else be asked on one stack for all that is ready.
  void Submit();
  void Settled(const Digest& key, const SaveResult& result);
  // With the lock. What leaves the queue is moved to `gone`, to be unpinned without it.
  Reason WhyRefused(const FrameInfo& info, bool parent_is_there);
  void Insert(SaveItem item);
  void DropTree(const Digest& key, Reason reason, std::vector<Entry>& gone);
  void CutBacklog(std::vector<Entry>& gone);
  void Take(Entries::iterator it, std::vector<Entry>& gone);
  void CountDrop(Reason reason);

  Tier& tier_;
  const Options options_;
  Metrics& metrics_;
  Counter& saved_;
  Counter& saved_bytes_;
  Counter& existed_;
  Counter& failed_;
  const std::shared_ptr<Pinned> pinned_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  Entries entries_;           // Guarded by mutex_. Everything queued or in flight.
  std::deque<Digest> ready_;  // Guarded by mutex_. Entries whose parent is in the tier, oldest first.
  size_t in_flight_ = 0;      // Guarded by mutex_.
  bool submitting_ = false;   // Guarded by mutex_. Some thread is in Submit, and looks again before it leaves.
  bool shedding_ = false;     // Guarded by mutex_. The bound was reached, and not yet half of it again.
  bool draining_ = false;     // Guarded by mutex_.
  Drained drained_;           // Guarded by mutex_. Counts while draining.
};

}  // namespace terrace
