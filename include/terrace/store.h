// The store: RAM above any number of lower tiers, and the decisions between them.
//
// An engine asks Lookup how much of a prompt is known, begins Load as early as it can (when the request is queued),
// takes chunk after chunk as Lease from it, and gives new chunks back through BeginSave / Commit. All methods may be
// called from any thread; only LoadJob::Wait blocks, until its deadline. No method does I/O on the caller's thread. No
// tier's trouble is an error here: it is a miss with a reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terrace/key.h"
#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace {

class Executor;
class Metrics;

// A verified chunk in RAM. Its bytes stay as they are while the lease lives (it pins them).
struct Lease {
  std::span<const std::byte> bytes;
  FrameInfo info;
  std::shared_ptr<const void> pin;
  std::shared_ptr<const SegmentHashes> hashes;  // Of the bytes, at kSegmentBytes.
};

struct PrefixHit {
  size_t chunks = 0;                   // Known from the first on, without a hole.
  std::vector<uint8_t> tier;           // For each of them, index into Store::tier_names().
  Reason miss_reason = Reason::kNone;  // Why the next chunk is none; kNone if all keys are known.
};

// Chunks on their way into RAM. Dropping the job cancels what has not begun.
class LoadJob {
 public:
  struct Item {
    Outcome outcome = Outcome::kMiss;
    Reason reason = Reason::kNone;
    Lease lease;       // On a hit.
    uint8_t tier = 0;  // Where the bytes came from, index into tier_names().
  };
  virtual ~LoadJob() = default;
  virtual size_t size() const = 0;
  // Item i, or a miss with kTimeout at the deadline (it may be asked again). A hit is handed out once. After a miss the
  // engine computes from there on.
  virtual Item Wait(size_t i, TimePoint deadline) = 0;
  // True: Wait(i) would not block now. False: `later` runs once, when it is worth asking again, on any thread, with no
  // lock held; quick. Not at the deadline: that is the caller's to watch. Items in order, as for Wait.
  virtual bool ReadyOr(size_t i, std::function<void()> later) = 0;
};

// The memory that all leases lie in, for those who share it with other processes.
struct RamMemory {
  int fd = -1;  // A memfd; stays the store's.
  std::span<const std::byte> bytes;
};

// Room in RAM for one chunk that the engine is about to write.
struct SaveSlot {
  std::span<std::byte> bytes;  // payload_bytes of the info.
  FrameInfo info;
  std::shared_ptr<void> reservation;  // Dropped without Commit: the room is free again.
};

class Store {
 public:
  virtual ~Store() = default;

  // "ram" first, then the lower tiers in the order asked.
  virtual const std::vector<std::string>& tier_names() const = 0;

  // Some tier may hold more than Lookup knows: a bucket that other nodes write to. Load then takes keys that are not
  // known, too, and asks for them first.
  virtual bool asks() const { return false; }
  // Asks such tiers for the rest of `keys`, so that Lookup knows it. `done` runs once, soon after `deadline` at the
  // latest, maybe at once, on any thread; quick.
  virtual void Probe(std::span<const Digest> keys, TimePoint deadline, std::function<void()> done) {
    static_cast<void>(keys);
    static_cast<void>(deadline);
    done();
  }

  // Longest known prefix of `keys`. From memory, microseconds.
  virtual PrefixHit Lookup(std::span<const Digest> keys) = 0;

  // Stages keys[i] (payload `payload_bytes` each, of `space`) into RAM, in order. Single flight: however many ask, one
  // load a key.
  virtual std::shared_ptr<LoadJob> Load(const Digest& space, std::span<const Digest> keys, uint64_t payload_bytes,
                                        TimePoint deadline) = 0;

  // An engine says once how large its chunks are: in the background room for some of them gets its pages before it is
  // needed.
  virtual void ExpectChunks(uint64_t payload_bytes) = 0;

  // Declined (kFull) if RAM has no room that is not pinned; an error of kind kInvalid if the chunk is already in RAM
  // and every lower tier is never given: then `needed` of Needs is false and the engine need not export.
  virtual Result<SaveSlot> BeginSave(const FrameInfo& info) = 0;
  virtual bool Needs(const Digest& key) = 0;  // False: RAM and all lower tiers have it, or it is on its way.
  // An engine serves this chunk from memory of its own. If RAM has it and a lower tier lost it (it was away, it was
  // emptied), it is written there anew, its ancestors first. What a load serves needs no such word.
  virtual void Offer(const Digest& key) = 0;
  // The bytes are written: hashes them in the background, makes them visible in RAM and queues them for the lower
  // tiers. `done` then says whether the chunk is visible; on any thread, quick.
  virtual void Commit(SaveSlot slot, std::function<void(bool visible)> done) = 0;
  void Commit(SaveSlot slot) {
    Commit(std::move(slot), [](bool) {});
  }

  virtual TierStats ram_stats() const = 0;
  virtual TierStats tier_stats(size_t tier) const = 0;  // By index into tier_names().
  virtual RamMemory ram_memory() const = 0;

  struct Health {
    bool degraded = false;
    std::string why;  // "shared_fs: mount /mnt/kv: ENOSPC, since 12 s".
  };
  virtual Health health() const = 0;

  // Number of saves queued or in flight below RAM. Tests and the demo wait for 0.
  virtual uint64_t pending_saves() const = 0;

  // Drains write-behind until the deadline, then closes the tiers, and waits for those of their calls that run, however
  // long that takes. Whoever has no time for it leaves it to a thread (a client) or ends (a program). Idempotent.
  virtual CloseReport Close(TimePoint deadline) = 0;
};

struct StoreOptions {
  uint64_t ram_bytes_max = 2ull << 30;             // Hard cap, staging included.
  uint64_t write_behind_bytes_max = 512ull << 20;  // Per lower tier, of pinned RAM.
  size_t save_in_flight_max = 8;                   // Per lower tier: together they share the cost of a sync.
  // Runs the store's own work: hashing, scrubbing. One task at a time, in order. Null: a thread of the store's own.
  // Given (by the simulation), it runs nothing any more when the store is destroyed.
  Executor* executor = nullptr;
};

// `tiers` from fastest to slowest; none: RAM alone. The store owns them. `metrics` (terrace/metrics.h) outlives it.
Result<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, std::vector<std::unique_ptr<Tier>> tiers,
                                         Metrics& metrics);

}  // namespace terrace
