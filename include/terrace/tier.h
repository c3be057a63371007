// The contract that every storage level fulfils: RAM, local disk, a shared mount, a bucket.
//
// A tier keeps the opaque bytes of chunks under their keys. It is a cache, so it may forget anything at any time. All
// methods may be called from any thread. Contains, Load, Save, Erase and stats never wait for I/O: they answer from
// memory, or take the batch and settle it later from a thread of the tier's own. Only Scan, ProbeSave and Close block.
//
// Three guarantees, by name; the contract suite (tests/contract) proves them for each tier and decorator stack:
//   whole-or-nothing  A load delivers exactly the bytes that were saved under this key and space, or it is no hit.
//   last-good         A failed save leaves whatever was readable before it readable.
//   honest-close      After Close every save that settled as hit is durable, as far as TierInfo says the tier is.
//
// Buffers: an item's `owner` keeps its memory alive; the tier holds it until the item is settled, so a caller that
// stopped waiting may simply drop its own handle.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terrace/key.h"
#include "terrace/result.h"

namespace terrace {

using TimePoint = std::chrono::steady_clock::time_point;

// Why an item is no hit. The names are stable: they are metric labels, log values and `usage.terrace.miss_reason`.
enum class Reason : uint8_t {
  kNone,            // It was a hit, or there was nothing to ask.
  kNotFound,        // No tier knows the key.
  kMissing,         // The tier knew it, and it was gone when read.
  kEmpty,           // A frame of zero bytes.
  kTruncated,       // Shorter than its header says, or than a header.
  kDamaged,         // A checksum, magic or padding disagrees.
  kForeign,         // A whole frame, but of another key, space, shard or size.
  kVersion,         // A frame of a format that this release refuses by name.
  kTimeout,         // Not there by the deadline.
  kUnavailable,     // The tier failed: an I/O error, a breaker, a closed tier.
  kFull,            // No room: RAM all pinned, disk full, queue bound reached.
  kParentMissing,   // A save whose parent is not in the tier.
  kWeightsPending,  // The digest of the weights is not known yet.
  kIndexLoading,    // The tier is still reading its index after a start.
  kShortPrompt,     // Not one whole chunk before the last token.
  kNotCacheable,    // The model's KV can't be cut in chunks, or caching is off.
  kCancelled,       // The caller went away.
};
const char* ReasonName(Reason reason);  // "not_found", ...
inline constexpr int kReasonCount = static_cast<int>(Reason::kCancelled) + 1;

enum class Outcome : uint8_t {
  kHit,       // Loaded; or saved (written now, or already there).
  kMiss,      // Not there. Not an error.
  kDeclined,  // Not taken: bounds, policy. Not an error.
  kFailed,    // An error; `error` says which. Costs the hit, never the request.
};

// Where the chunk stands. Travels with the bytes.
struct FrameInfo {
  Digest space;
  Digest key;
  Digest parent;             // Key of the chunk before it, or the space id for the first.
  uint32_t first_token = 0;  // Position of its first token.
  uint32_t token_count = 0;
  uint32_t tp_rank = 0, pp_rank = 0, kv_group = 0;
  uint32_t payload_kind = 0;  // PayloadKind in src/chunk/frame.h.
  uint64_t payload_bytes = 0;
  bool operator==(const FrameInfo&) const = default;
};

// XXH3-64 of each segment of kSegmentBytes of the payload (the last one may be shorter).
using SegmentHashes = std::vector<uint64_t>;
inline constexpr size_t kSegmentBytes = 1 << 20;

struct LoadItem {
  Digest key;
  Digest space;                 // A frame of another space is kForeign.
  std::span<std::byte> into;    // Exactly payload_bytes of the frame, else kForeign.
  std::shared_ptr<void> owner;  // Keeps `into` alive.
};

struct LoadResult {
  Outcome outcome = Outcome::kMiss;
  Reason reason = Reason::kNotFound;
  FrameInfo info;                               // On a hit.
  std::shared_ptr<const SegmentHashes> hashes;  // On a hit: verified against the bytes delivered.
  std::optional<Error> error;                   // With kFailed.
};

struct SaveItem {
  FrameInfo info;
  std::span<const std::byte> payload;
  std::shared_ptr<const void> owner;            // Keeps `payload` alive and unchanged.
  std::shared_ptr<const SegmentHashes> hashes;  // Of `payload`. Null: the tier computes them.
};

struct SaveResult {
  Outcome outcome = Outcome::kFailed;
  Reason reason = Reason::kNone;
  bool existed = false;  // With kHit: somebody had written it before.
  std::optional<Error> error;
};

// The completion of one batch: each item is settled once, in any order, by the tier; waited for, item by item or as a
// whole, by the caller. Thread-safe. Held by shared_ptr from both sides.
template <class R>
class Batch {
 public:
  using Settled = std::function<void(size_t index, const R& result)>;

  // `on_settled`, if given, runs on the settling thread, before waiters wake, with no lock held. It must be quick.
  explicit Batch(size_t size, Settled on_settled = {}) : results_(size), on_settled_(std::move(on_settled)) {}

  size_t size() const { return results_.size(); }

  // By the tier, once per item.
  void Settle(size_t index, R result) {
    if (on_settled_) on_settled_(index, result);
    {
      std::lock_guard lock(mutex_);
      results_[index] = std::move(result);
      ++settled_;
    }
    changed_.notify_all();
  }

  // The result of an item, or nothing at the deadline. The reference lives as long as the batch.
  const R* Wait(size_t index, TimePoint deadline) {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return results_[index].has_value(); });
    return results_[index] ? &*results_[index] : nullptr;
  }
  const R* Poll(size_t index) {
    std::lock_guard lock(mutex_);
    return results_[index] ? &*results_[index] : nullptr;
  }
  bool WaitAll(TimePoint deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return settled_ == results_.size(); });
  }

  // A hint: the tier may settle what it has not begun as kCancelled.
  void Cancel() {
    std::lock_guard lock(mutex_);
    cancelled_ = true;
  }
  bool cancelled() const {
    std::lock_guard lock(mutex_);
    return cancelled_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::optional<R>> results_;  // Guarded by mutex_; an element never changes once set.
  size_t settled_ = 0;                     // Guarded by mutex_.
  bool cancelled_ = false;                 // Guarded by mutex_.
  const Settled on_settled_;
};
using LoadBatch = Batch<LoadResult>;
using SaveBatch = Batch<SaveResult>;

struct TierInfo {
  std::string name;           // "ram", "disk", "shared_fs", "s3": metric label and cached_by_tier key.
  bool durable = false;       // Survives the process.
  bool shared = false;        // Other nodes write and read it too.
  bool asks = false;          // Contains knows what others saved only after Probe has asked.
  size_t best_in_flight = 1;  // Items at once beyond which more do not help.
};

struct TierStats {
  uint64_t frames = 0;
  uint64_t bytes = 0;         // On the medium, headers and temporaries included.
  uint64_t bytes_max = 0;     // 0: no bound.
  uint64_t pinned_bytes = 0;  // RAM only.
  uint64_t quarantined = 0;   // Frames set aside or removed as damaged since the start.
  bool index_ready = true;    // False while the first scan runs.
  bool available = true;      // False: it can't be reached now; everything is a miss with kUnavailable.
  bool saving = true;         // False: no save is taken now. Says nothing of loads.
  std::string why;            // With !available or !saving: what is wrong and since when, for people.
};

struct CloseReport {
  bool clean = true;       // Everything accepted was settled before the deadline.
  uint64_t abandoned = 0;  // Items settled as cancelled or unavailable because of the close.
};

struct ScanPage {
  std::vector<FrameInfo> frames;
  std::string next;  // Cursor of the next page; empty at the end.
};

class Tier {
 public:
  virtual ~Tier() = default;

  virtual const TierInfo& info() const = 0;

  // present[i] = 1 if keys[i] is believed to be here. No I/O. A belief: only a load decides.
  virtual void Contains(std::span<const Digest> keys, std::span<uint8_t> present) = 0;

  // Asks the medium for the longest prefix of `keys` (a chain, parents first) that is here, so that Contains knows it
  // afterwards. `done` runs once, soon after `deadline` at the latest, maybe at once, on any thread, with what went
  // wrong if something did. Only for tiers whose TierInfo says `asks`; the others know already.
  using Probed = std::function<void(const std::optional<Error>& trouble)>;
  virtual void Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) {
    static_cast<void>(keys);
    static_cast<void>(deadline);
    done(std::nullopt);
  }

  // Settles each item of `items` in `done` (same size and order). Items not begun by `deadline` settle as a miss with
  // kTimeout; a slow one may settle later. Anything that disagrees with its name is a miss with its reason, quarantined
  // once and counted.
  virtual void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) = 0;

  // Writes frames that are not there yet. A frame that exists is kept, and is a hit with `existed`.
  virtual void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) = 0;

  // Would a save of a frame of that size be taken now, as far as a little I/O can tell? Writes to the medium and leaves
  // nothing there. For whoever waits for the end of an outage. Blocks on I/O.
  virtual Result<void> ProbeSave(uint64_t payload_bytes) {
    static_cast<void>(payload_bytes);
    return {};
  }

  virtual void Erase(std::span<const Digest> keys) = 0;

  // Up to `limit` frames after `cursor` ("" to begin). Blocks on I/O. Frames that come or go meanwhile may be left out.
  virtual Result<ScanPage> Scan(const std::string& cursor, size_t limit) = 0;

  virtual TierStats stats() const = 0;

  // Stops taking work, settles what it has, until the deadline; then settles the rest as cancelled. Idempotent. Blocks.
  virtual CloseReport Close(TimePoint deadline) = 0;
};

}  // namespace terrace
