// Keeps a shared directory within its bounds: decides, with a lease, which frames go, and takes them away a few at a
// time. Used by one thread at a time, the tier's background thread.
//
// One node at a time collects: the one whose lease is on the share. Two at once do no harm (deleting a frame is always
// safe, and of two deletions of one file one finds it gone), they only evict more than needed; so the lease is a matter
// of economy and needs no fencing. What goes next is decided from the index alone: leaf first, unused longest first
// (leaf_order.h). No directory is listed.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "terrace/metrics.h"
#include "tier/shared_fs_dir.h"
#include "tier/shared_fs_index.h"

namespace terrace {

// Of a shared directory as a whole; 0: no bound. All its nodes should be given the same: each keeps to its own, so of
// different ones the narrowest holds.
struct SharedFsBounds {
  uint64_t bytes_max = 0;            // Frames, temporaries and quarantine.
  uint64_t free_bytes_min = 0;       // On the directory's file system.
  std::chrono::milliseconds ttl{0};  // Since a frame's last use.

  bool any() const { return bytes_max > 0 || free_bytes_min > 0 || ttl.count() > 0; }
  bool of_bytes() const { return bytes_max > 0 || free_bytes_min > 0; }
  // Damaged frames kept for people get a small fixed part, so that nobody needs to measure them.
  uint64_t quarantine_bytes_max() const { return bytes_max / 32; }
  // What is left for frames and temporaries.
  uint64_t frame_bytes_max() const { return bytes_max - quarantine_bytes_max(); }
};

class SharedFsCollector {
 public:
  struct Options {
    SharedFsBounds bounds;
    std::chrono::milliseconds lease_life{30'000};
  };
  SharedFsCollector(const Options& options, SharedFsDir& dir, SharedFsIndex& index, const Clock& clock,
                    Metrics& metrics);

  // Keeps or takes the lease, and begins a collection if one is due. `now_ns`: the file server's time. `claimed_bytes`:
  // what may be on the share or come to be there besides the frames of the index. True while there is something to
  // collect: call Step until it is false.
  bool Tick(int64_t now_ns, uint64_t claimed_bytes);

  // Takes up to kStepFrames frames away; evicted(key) for each. False when the collection is over, or the lease lost.
  static constexpr size_t kStepFrames = 64;
  bool Step(const std::function<void(const Digest&)>& evicted);

  // Another volume is there.
  void Reset();
  // Lets another node collect at once.
  void Close();

  // So full that a collection is due.
  bool NearFull(uint64_t claimed_bytes) const;

 private:
  enum Why { kSize, kFreeSpace, kTtl };
  struct Victim {
    Digest key;
    int64_t used_ns = 0;  // Of itself.
  };
  bool HoldsLease() const { return clock_.Now() < lease_until_; }
  void KeepLease(int64_t now_ns);
  // Frames to go until `bytes` are free, or all that were not used since `used_before_ns`.
  void Plan(Why why, uint64_t bytes, int64_t used_before_ns);
  uint64_t BytesOver(uint64_t claimed_bytes);
  int64_t NowNs() const { return tick_ns_ + std::chrono::nanoseconds(clock_.Now() - ticked_at_).count(); }
  void Stuck(const Victim& victim, const Error& error);
  Result<bool> Evict(const Victim& victim);
  void Finish();

  const Options options_;
  SharedFsDir& dir_;
  SharedFsIndex& index_;
  const Clock& clock_;
  Metrics& metrics_;
  TimePoint lease_until_, lease_look_at_, free_look_at_, ttl_look_at_;
  TimePoint ticked_at_;
  int64_t tick_ns_ = 0;                            // The file server's time then.
  std::vector<Victim> victims_;                    // The next one last.
  std::unordered_set<Digest, DigestHash> needed_;  // Parents of victims that stay after all.
  size_t stuck_ = 0;                               // Victims of this collection that could not be removed.
  Why why_ = kSize;
  uint64_t evicted_frames_ = 0, evicted_bytes_ = 0;  // In this collection.
  TimePoint begun_;
};

}  // namespace terrace
