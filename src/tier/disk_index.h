// What a disk tier has: its frames by key, who may be evicted next, and every byte counted against the cap. In memory,
// no I/O; all methods may be called from any thread.
//
// Bytes are counted from the moment they are promised (Reserve) until the file is gone (Free), so the sum is never less
// than what is on the disk.
//
// Who is evicted is said by leaf_order.h; a frame is held while it is read, and while a child of it is on its way. One
// that was found by its name only (AddListed) is neither evicted nor listed until its header was read (SetInfo), but it
// is contained and can be loaded. Times are of the wall clock, and of two uses the later one has the later time also if
// that clock was set back in between.
#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <shared_mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "terrace/key.h"
#include "terrace/tier.h"
#include "tier/leaf_order.h"

namespace terrace {

// Directories, and shards of the index: by the first byte of the key.
inline constexpr size_t kDiskFanOut = 256;

class DiskIndex {
 public:
  explicit DiskIndex(uint64_t bytes_max) : bytes_max_(bytes_max) {}

  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) const;
  bool Contains(const Digest& key) const;

  // A file of this name was found. False if the key is known already.
  bool AddListed(const Digest& key, uint64_t file_bytes, int64_t used_ns);
  // What the header says. Nothing if the frame has gone, or was told before.
  void SetInfo(const Digest& key, const FrameInfo& info);
  bool HasInfo(const Digest& key) const;
  // A load of this frame failed with an error of the device. Nothing if it has gone.
  void NoteUnreadable(const Digest& key, uint64_t id);
  // Its id, if that was said of it.
  std::optional<uint64_t> Unreadable(const Digest& key) const;

  // A frame that is being read: it is not evicted before Release.
  struct Reading {
    uint64_t id = 0;  // Tells this frame from a later one of the same key.
    uint64_t file_bytes = 0;
    std::optional<FrameInfo> info;  // If it is known.
    bool stamp_file = false;        // Its file should be told of the use: it was not for kStampEvery.
  };
  static constexpr std::chrono::hours kStampEvery{1};
  std::optional<Reading> Acquire(const Digest& key, int64_t now_ns);  // 0: it is no use.
  void Release(const Digest& key, uint64_t id);
  void Use(const Digest& key, int64_t now_ns);

  // Takes a frame out of the index; `id` 0: whichever it is. Its bytes stay counted until Free. Nothing if it is gone.
  std::optional<uint64_t> Remove(const Digest& key, uint64_t id = 0);
  struct Evicted {
    FrameInfo info;
    uint64_t file_bytes = 0;
    int64_t stamped_ns = 0;
  };
  std::optional<Evicted> EvictOne();
  // Its file could not be removed: it is here as before, and the last to be evicted.
  void PutBack(const Evicted& evicted, int64_t now_ns);
  void Free(uint64_t file_bytes);

  // Promises room for a frame that is not here, and holds its parent. False: it does not fit under the cap now.
  bool Reserve(const FrameInfo& info, uint64_t file_bytes);
  // It is here, where no frame of this key was.
  void Commit(const FrameInfo& info, uint64_t file_bytes, int64_t now_ns);
  // It is not, and its file is gone.
  void Abort(const FrameInfo& info, uint64_t file_bytes);

  // Frames after `cursor` in the order of their keys.
  std::vector<FrameInfo> After(const std::optional<Digest>& cursor, size_t limit) const;

  uint64_t frames() const;
  uint64_t bytes() const;
  uint64_t bytes_max() const { return bytes_max_; }
  bool OverCap() const { return bytes() > bytes_max_; }

 private:
  struct Entry {
    uint64_t id = 0;
    uint64_t file_bytes = 0;
    int64_t used_ns = 0;     // Until its header is known; then order_ has it.
    int64_t stamped_ns = 0;  // Time of the last use that its file knows of.
    uint32_t readers = 0;    // So many holds in order_ are theirs.
    bool unreadable = false;
    std::optional<FrameInfo> info;
  };
  using Shard = std::unordered_map<Digest, Entry, DigestHash>;

  // All with mutex_ held.
  Shard& ShardOf(const Digest& key) { return shards_[key.bytes[0]]; }
  const Shard& ShardOf(const Digest& key) const { return shards_[key.bytes[0]]; }
  Entry* Find(const Digest& key);
  const Entry* Find(const Digest& key) const;
  int64_t Later(int64_t now_ns) { return latest_ns_ = std::max(now_ns, latest_ns_ + 1); }
  void SetUsed(const Digest& key, Entry& entry, int64_t used_ns);
  uint64_t Erase(const Digest& key, Entry& entry);

  const uint64_t bytes_max_;
  mutable std::shared_mutex mutex_;        // Exclusive for whatever changes something.
  std::array<Shard, kDiskFanOut> shards_;  // Guarded by mutex_.
  LeafOrder order_;                        // Guarded by mutex_. Frames whose header is known.
  uint64_t frames_ = 0;                    // Guarded by mutex_.
  uint64_t bytes_ = 0;                     // Guarded by mutex_.
  uint64_t last_id_ = 0;                   // Guarded by mutex_.
  int64_t latest_ns_ = 0;                  // Guarded by mutex_. Of all uses.
};

}  // namespace terrace
