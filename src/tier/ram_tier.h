// The ram tier: verified chunks in memory under a hard cap, and the staging room through which every chunk comes and
// goes.
//
// Besides the Tier contract it lends its memory. Reserve gives room to write a chunk into, Commit makes it visible,
// Acquire lends a visible chunk without a copy. Room reserved and chunks lent are pinned: never evicted, and their
// bytes stay as they are until the slot or lease is dropped, even after Erase, Close or the tier's end.
//
//   Result<RamSlot> slot = ram.Reserve(info);     // kFull: everything is pinned.
//   ... write slot->bytes(), hash them ...
//   std::optional<RamLease> lease = ram.Commit(std::move(*slot), hashes);
//
// Eviction is leaf first: a chunk leaves only when no child of it is here. Among leaves the least recently used goes;
// use of a chunk counts as use of all its ancestors. The cap holds for staging, pinned and visible bytes together, at
// any time, and no claim fails while enough bytes are free or evictable, whatever the mix of sizes (see ram_arena.h).
//
// All methods may be called from any thread. Contains and Acquire take one lock of many; whatever adds or removes a
// chunk takes one more, common lock, for microseconds.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "terrace/result.h"
#include "terrace/store.h"
#include "terrace/tier.h"
#include "tier/circles.h"
#include "tier/job_set.h"
#include "tier/ram_arena.h"
#include "tier/ram_limit.h"

namespace terrace {

struct RamTierOptions {
  uint64_t bytes_max = 0;         // Hard cap, staging included.
  uint64_t payload_bytes = 1;     // Of one chunk: a cap without room for one is an error.
  Executor* executor = nullptr;   // Runs the copies of Load and Save. Null: the thread that calls. Outlives the tier.
  std::shared_ptr<RamRoom> room;  // What the machine can give. Null: this machine's.
};

// Room for one chunk, invisible until committed. Dropped: the room is free again.
class RamSlot {
 public:
  RamSlot(RamSlot&&) = default;
  RamSlot& operator=(RamSlot&&) = default;
  std::span<std::byte> bytes() const { return memory_.bytes(); }  // payload_bytes of the info; old bytes until written.
  const FrameInfo& info() const { return info_; }
  // What the frame that was read into the slot says of itself (parent, position). Same key and size as reserved.
  void SetInfo(const FrameInfo& info);

 private:
  friend class RamTier;
  RamSlot(RamArena::Slot memory, const FrameInfo& info) : memory_(std::move(memory)), info_(info) {}

  RamArena::Slot memory_;
  FrameInfo info_;
};

using RamLease = Lease;

class RamTier final : public Tier {
 public:
  // A cap above what the machine can give beside its other processes is cut to that, with one log event (ram_cap_cut);
  // stats().bytes_max is what holds.
  static Result<std::unique_ptr<RamTier>> Open(const RamTierOptions& options);
  ~RamTier() override;

  // Room for info.payload_bytes. Evicts if it must. kFull: what is not pinned is not enough; kInvalid: no bytes, or a
  // chunk that is its own parent; kUnavailable: closed.
  Result<RamSlot> Reserve(const FrameInfo& info);

  // Makes the bytes visible; they must not change from here on. `hashes` are HashSegments of them. The first commit of
  // a key wins, a later one is dropped. Returns a lease on what is visible now; nothing if the tier is closed.
  std::optional<RamLease> Commit(RamSlot slot, std::shared_ptr<const SegmentHashes> hashes);

  // Nothing if it is not here. The space is the caller's to compare. Counts as a use.
  std::optional<RamLease> Acquire(const Digest& key);

  // Hashes visible chunks anew, round robin from call to call, at most once each, until `bytes_max` of them are read.
  // What is damaged is removed, counted and logged. Returns the bytes read.
  uint64_t ScrubSome(uint64_t bytes_max);

  // Gives pages, about 2 ms for 4 MiB, to free room for chunks of `payload_bytes`, until `ready_bytes` of it are ready,
  // the cap is reached or this call has done at least `step_bytes`: then Reserve need not. Call it in the background.
  // Returns the bytes made ready; changes nothing that is visible or counted in stats().
  uint64_t TouchAhead(uint64_t payload_bytes, uint64_t ready_bytes, uint64_t step_bytes);

  // To be called about once a second, by one thread. Lowers the cap when the system runs short of memory, and evicts
  // what is above it; raises it, to what was asked at most, when others have gone: that is looked at every tenth time.
  void FitTheMachine();

  // What the system holds for this tier, freed and not yet reused pages included; never above stats().bytes_max.
  uint64_t resident_bytes() const { return arena_->resident_bytes(); }
  RamMemory memory() const { return {arena_->fd(), arena_->mapped()}; }

  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override;
  // Copies, and verifies what was copied.
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override;
  void Erase(std::span<const Digest> keys) override;
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override;
  // Walks the index: for gauges, not for decisions. bytes: live slots, reserved ones included.
  TierStats stats() const override;
  // Forgets everything. Leases live on.
  CloseReport Close(TimePoint deadline) override;

 private:
  // A visible chunk. Shared by the index and its leases: whoever is last frees the memory. use_count() > 1 is what pins
  // it; copies are made only under the shard's lock or from a lease.
  struct Entry {
    RamArena::Slot memory;
    FrameInfo info;
    std::shared_ptr<const SegmentHashes> hashes;
    std::atomic<uint64_t> last_use{0};  // Relaxed: an approximate order; publishes nothing.
    uint64_t queued_as = 0;             // Guarded by order_mutex_. Its stamp in leaves_; 0: not in it.
    Digest parent;                      // Guarded by order_mutex_. Whose child it counts as; itself: nobody's.
    uint64_t walk = 0;                  // Guarded by order_mutex_. For Circles.
  };
  struct alignas(64) Shard {
    mutable std::mutex mutex;
    std::unordered_map<Digest, std::shared_ptr<Entry>, DigestHash> entries;  // Guarded by mutex.
  };

  RamTier(const RamTierOptions& options, std::shared_ptr<RamArena> arena, std::shared_ptr<RamRoom> room);
  Shard& ShardOf(const Digest& key) const;
  std::shared_ptr<Entry> Find(const Digest& key) const;
  static RamLease LeaseOn(const std::shared_ptr<Entry>& entry);
  // visit(shared_ptr<Entry>) for up to `limit` entries after `cursor` in index order (by shard, then by key), under the
  // lock of their shard.
  template <class Visit>
  void VisitAfter(const std::optional<Digest>& cursor, size_t limit, const Visit& visit) const;

  LoadResult LoadOne(const LoadItem& item);
  SaveResult SaveOne(const SaveItem& item);
  void RemoveDamaged(const std::shared_ptr<Entry>& entry);

  uint64_t NextStamp() { return clock_.fetch_add(1, std::memory_order_relaxed) + 1; }
  void Touch(Entry& entry) { entry.last_use.store(NextStamp(), std::memory_order_relaxed); }

  // With order_mutex_ held:
  bool EvictOne();
  void QueueLeaf(Entry& entry, uint64_t stamp);
  void UnqueueLeaf(Entry& entry);
  void Unlink(Entry& entry);  // It has left the index.
  void ChildLeft(const Digest& parent, uint64_t last_use);
  void BreakCircles();

  const std::shared_ptr<RamRoom> room_;
  const std::shared_ptr<RamArena> arena_;
  const uint64_t asked_bytes_;
  uint64_t said_cap_;  // In the last event about the cap. With fits_, touched by FitTheMachine alone.
  uint64_t fits_ = 0;
  const TierInfo info_;
  const size_t shard_count_;  // A power of two.
  const std::unique_ptr<Shard[]> shards_;
  std::atomic<uint64_t> clock_{0};        // Counts uses. Alone: nothing is published by it.
  std::atomic<uint64_t> quarantined_{0};  // Relaxed: a count.

  // Held by whatever adds or removes entries, so that links and index change together. Taken before a shard's mutex.
  std::mutex order_mutex_;
  std::set<std::pair<uint64_t, Entry*>> leaves_;                   // Guarded by order_mutex_. Unused longest first.
  std::unordered_map<Digest, uint32_t, DigestHash> child_counts_;  // Guarded by order_mutex_. By parent, here or not.
  Circles circles_;                                                // Guarded by order_mutex_.
  bool closed_ = false;                                            // Guarded by order_mutex_.

  std::mutex scrub_mutex_;
  std::optional<Digest> scrubbed_;  // Guarded by scrub_mutex_. The last one; none: begin at the start.

  JobSet jobs_;  // Last: its jobs use the rest.
};

}  // namespace terrace
