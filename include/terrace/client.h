// KV that is kept, from an engine's side: by a store in this process, or by a node (`terrace node`) that all engines of
// the host share. One interface for both; which one it is, is an option.
//
//   auto client = Client::Open({.node = "/run/terrace/node.sock"});
//   auto hit = (*client)->Lookup(chain.keys());                             // Returns at once.
//   auto load = (*client)->Load({.space = space, .keys = keys, .payload_bytes = n, .deadline = soon, .into = buffers});
//   load->Wait(soon);
//   if (const LoadedChunk* chunk = load->Poll(0); chunk && chunk->outcome == Outcome::kHit) ...
//
// Calls return at once with a handle and do no I/O and no copying on the caller's thread. The handle is polled or
// waited for, item by item or as a whole; event_fd() becomes readable when any of them has moved, for engines with a
// loop. Only Open, Close and the Wait functions block. All methods may be called from any thread, handles too; a handle
// may outlive its client, and dropping it cancels nothing.
//
// Trouble is a miss with a reason, never an error: storage that is gone, a node that dies in the middle of a load or is
// not there at all (kUnavailable, at once). The client joins the node when it is there again, in the background.
//
// Memory. A buffer that is handed in is touched only until its item is settled, also after Cancel; `owner` is kept
// until then, so whoever stops waiting may drop all else. After anything but a hit the buffer holds bytes of no
// meaning. Leased memory stays as it is until the lease is dropped, also if the node dies meanwhile. Whatever comes
// from another process, disk or network is verified before it is a hit.
//
// Chunks are named as in terrace/key.h: KeyChain gives the keys of a token sequence in a space, ChunkKey the one after
// a given parent. Shards (tensor and pipeline rank, KV group) differ in their space.
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
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/key.h"
#include "terrace/result.h"
#include "terrace/store.h"
#include "terrace/tier.h"

namespace terrace {

// Items of a call. Beyond: all are settled at once, with kFull.
inline constexpr size_t kCallItemsMax = 4096;

struct ClientOptions {
  // Socket of a node; `@name`: one without a file. "": what the setting `node` says; if that is not set either, a store
  // in this process.
  std::string node;
  // By the names of `terrace serve`: {{"ram", "8GiB"}, {"shared", "/mnt/kv"}}. They win over the environment and its
  // files, which count as they do for programs: TERRACE_*, TERRACE_CONFIG_FILE, LMCACHE_CONFIG_FILE. With a node, those
  // of tiers are not used: they are the node's. Of its own a client has `node`, and `node-wait` (1s): how long Open
  // waits for a node that listens, so that the first calls already find it. One that is not there is not waited for.
  std::vector<std::pair<std::string, std::string>> settings;
  size_t copy_threads = 2;  // That copy to callers' buffers and verify.
  size_t calls_max = 4096;  // Not yet settled. Beyond: settled at once as declined, or as a miss, with kFull.
};

// One call under way: `size` items, each settled once.
class Call {
 public:
  explicit Call(size_t size) : size_(size) {}
  virtual ~Call() = default;
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  size_t size() const { return size_; }
  bool done() const;                    // All items are settled.
  bool Wait(TimePoint deadline) const;  // For all of them. False at the deadline.
  // What has not begun settles as kCancelled, at once; what is being copied, when the copy has ended.
  void Cancel();

 protected:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  const size_t size_;
  size_t settled_ = 0;               // Guarded by mutex_.
  bool cancelled_ = false;           // Guarded by mutex_.
  std::function<void()> on_cancel_;  // Guarded by mutex_.

 private:
  friend struct CallAccess;  // The library's side.
};

template <class Item>
class CallOf final : public Call {
 public:
  using Call::Call;
  // The item once it is settled, else null. Lives as long as the handle.
  const Item* Poll(size_t index) const {
    std::lock_guard lock(mutex_);
    return items_[index] ? &*items_[index] : nullptr;
  }
  using Call::Wait;
  const Item* Wait(size_t index, TimePoint deadline) const {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, deadline, [&] { return items_[index].has_value(); });
    return items_[index] ? &*items_[index] : nullptr;
  }

 private:
  friend struct CallAccess;
  std::vector<std::optional<Item>> items_ = std::vector<std::optional<Item>>(size_);  // Guarded by mutex_.
};

// Of a chunk that was loaded, leased, fetched ahead or pinned.
struct LoadedChunk {
  Outcome outcome = Outcome::kMiss;
  Reason reason = Reason::kNotFound;
  uint8_t tier = 0;  // On a hit: where the bytes came from, index into tier_names().
  FrameInfo info;    // On a hit.
  Lease lease;       // On a hit of Lease. Dropped: RAM may forget the chunk.
};

// Of a chunk that was to be saved.
struct SavedChunk {
  Outcome outcome = Outcome::kDeclined;  // kHit: it is in RAM, seen by lookups, and on its way to the tiers below.
  Reason reason = Reason::kNone;
  bool existed = false;  // With kHit: nothing had to be written.
};

// Room for a chunk, for the caller to fill.
struct SaveSegment {
  Outcome outcome = Outcome::kDeclined;  // kHit: `bytes` is there to be filled, or `existed`.
  Reason reason = Reason::kNone;
  bool existed = false;        // With kHit: every tier has the chunk or is about to; there is nothing to do.
  std::span<std::byte> bytes;  // payload_bytes of the info.
  FrameInfo info;
  std::shared_ptr<void> lease;  // Dropped without Commit: the room is free again.
};

using Pieces = std::vector<std::span<std::byte>>;  // A chunk's bytes in order, in any number of pieces.
using ConstPieces = std::vector<std::span<const std::byte>>;

struct LoadRequest {
  Digest space;
  std::vector<Digest> keys;
  uint64_t payload_bytes = 0;  // Of each chunk.
  TimePoint deadline;          // What is not there by then is a miss with kTimeout.
  // Load only: for each key where to, payload_bytes in all.
  std::vector<Pieces> into;
  std::shared_ptr<void> owner;  // Keeps `into` alive.
  // A prefix: with the first miss the rest is one, too, for the same reason, as an engine computes from there on.
  bool stop_at_miss = true;
};

struct SaveChunk {
  FrameInfo info;
  ConstPieces from;  // info.payload_bytes in all.
};

struct ClientStats {
  bool connected = true;  // False: the node is not there, nothing else is known.
  bool in_process = true;
  std::string degraded;  // Why a tier is not available; "" if all are.
  std::vector<std::pair<std::string, TierStats>> tiers;
  uint64_t pending_saves = 0;  // Below RAM.
  uint64_t leased_bytes = 0;   // Lent to clients for reading, and for writing.
  uint64_t pinned_bytes = 0;   // By Pin.
  uint64_t sessions = 0;       // Of a node.
};

// Where log lines go (docs/reference/events.md), from kInfo on; called from any thread, several at once. Without it,
// warnings go to stderr. Before the first client is opened.
enum class LogLevel { kDebug, kInfo, kWarn, kError };
void LogTo(std::function<void(LogLevel level, std::string_view line)> sink);

class Client {
 public:
  // Settings that can't be, or tiers that can't be opened, are errors (see `allow-degraded`). A node that is not there
  // is none.
  static Result<std::unique_ptr<Client>> Open(const ClientOptions& options);
  virtual ~Client() = default;  // Close, now.

  // "ram" first. Of a node that was not met yet: empty.
  virtual std::vector<std::string> tier_names() const = 0;
  virtual bool connected() const = 0;  // In process: always.
  // Value of a setting as a user would write it, wherever it came from; nothing for one that is not set or not known.
  virtual std::optional<std::string> Setting(std::string_view name) const = 0;

  // Readable if an item of any call was settled since the last ClearEvent, and now and then for nothing. Clear first,
  // then poll. Never read from it, never close it.
  virtual int event_fd() const = 0;
  virtual void ClearEvent() = 0;

  // Longest known prefix of `keys`, and the fastest tier of each. One item.
  virtual std::shared_ptr<CallOf<PrefixHit>> Lookup(std::vector<Digest> keys) = 0;
  // Asks tiers that others write to (a bucket) first, until `deadline` at the latest. One item.
  virtual std::shared_ptr<CallOf<PrefixHit>> Probe(std::vector<Digest> keys, TimePoint deadline) = 0;

  // Each key is an item. Load copies to `into`; Lease lends the bytes where they are; Prefetch leaves them in RAM.
  virtual std::shared_ptr<CallOf<LoadedChunk>> Load(LoadRequest request) = 0;
  virtual std::shared_ptr<CallOf<LoadedChunk>> Lease(LoadRequest request) = 0;
  virtual std::shared_ptr<CallOf<LoadedChunk>> Prefetch(LoadRequest request) = 0;

  // Each chunk is an item. Parents first, in a call and from call to call. `owner` keeps the memory alive and
  // unchanged.
  virtual std::shared_ptr<CallOf<SavedChunk>> Save(std::vector<SaveChunk> chunks,
                                                   std::shared_ptr<const void> owner) = 0;
  // The same without a copy on this side: asks for room, to be filled and committed. Room that is not committed counts
  // against a bound.
  virtual std::shared_ptr<CallOf<SaveSegment>> BeginSave(std::vector<FrameInfo> chunks) = 0;
  virtual std::shared_ptr<CallOf<SavedChunk>> Commit(std::vector<SaveSegment> segments) = 0;

  // Loads chunks into RAM and keeps them there for `lifetime`, also after this client is gone. Pinned again: the later
  // end counts. Beyond the bound on pinned bytes: a miss with kFull.
  virtual std::shared_ptr<CallOf<LoadedChunk>> Pin(LoadRequest request, std::chrono::milliseconds lifetime) = 0;
  virtual void Unpin(std::vector<Digest> keys) = 0;

  virtual std::shared_ptr<CallOf<ClientStats>> Stats() = 0;  // One item.

  // Refuses new calls and settles all others. In process: writes what is queued for the tiers below, then closes them.
  // Returns by the deadline, or 2 s from now if that is later, also if storage holds a call for ever: a thread that
  // owns all it touches is left behind then, and the report is not clean. The destructor does, too. Idempotent.
  virtual CloseReport Close(TimePoint deadline) = 0;
};

}  // namespace terrace
