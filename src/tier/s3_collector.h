// Keeps a bucket within its bounds: decides, with a lease, which frames go, and takes them away a few at a time. On the
// store's thread alone; every call to the bucket is asynchronous and nothing blocks.
//
//   lease   An object that one node at a time renews, by conditional writes and the server's clock. Where the server
//           knows no conditions two nodes may hold it for a moment; two collectors remove more than needed, and since
//           removing a frame is always safe, that is all.
//   uses    A bucket does not know when an object was read. Each node with bounds writes now and then an object with
//           the keys that it has read since (a tell); whoever holds the lease reads them when it decides.
//   order   Leaf first, unused longest first (leaf_order.h). Who is whose child stands in the frames' headers: the
//           holder reads each once, 4 KiB, unless it has saved or loaded the frame itself.
//   wants   A node whose frame finds no room writes an object among the frames whose name says how large it is, so that
//           the next listing tells the holder: it may have seen none as large, and have no reason to collect.
//
// The tier lists the bucket anyway, and hands the holder what it sees: BeginListing, Listed for each frame, EndListing.
#pragma once

#include <boost/unordered/unordered_flat_map.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/clock.h"
#include "s3/object_store.h"
#include "terrace/metrics.h"
#include "terrace/tier.h"

namespace terrace {

// Of the frames below the prefix, whoever wrote them. All nodes should be given the same: each keeps to its own, so of
// different ones the narrowest holds.
struct S3Bounds {
  uint64_t bytes_max = 0;            // 0: no bound.
  std::chrono::milliseconds ttl{0};  // Since a frame's last use; 0: for ever.

  bool any() const { return bytes_max > 0 || ttl.count() > 0; }
  // How far below the bound a collection goes: a sixteenth, 4 GiB at most; but by a frame at least. It begins when half
  // of that is left, or not enough for a frame.
  uint64_t slack() const;
};

class S3Collector {
 public:
  struct Options {
    S3Bounds bounds;
    std::chrono::milliseconds lease_life{300'000};
    // 100 bytes of RAM each, and 200 more while it decides. Of more frames than these only so many are looked at: a
    // child may stay without its parent then.
    size_t frames_max = 1 << 20;
    std::chrono::milliseconds pause{50};  // Between two steps of 16 calls: 320 a second at most.
  };
  // Of the tier.
  struct Hooks {
    // Removes the frame; `done` gets what went wrong.
    std::function<void(const Digest&, std::function<void(const s3::Failure&)> done)> remove;
    // The parent of a frame, from its header; the key itself if that is no frame.
    std::function<void(const Digest&, std::function<void(const s3::Failure&, const Digest& parent)> done)> parent_of;
    std::function<void()> list;  // Soon, please.
  };
  // All outlive it. `root`: what its own objects are named below.
  S3Collector(const Options& options, std::string root, s3::ObjectStore& store, const Clock& clock, Metrics& metrics,
              Hooks hooks);

  void Begin();  // Looks for the lease from now on.
  // Tells its uses, and lets another node collect at once. `done` runs when that has ended.
  void Close(std::function<void()> done);

  void BeginListing();
  void Listed(const Digest& key, uint64_t bytes, int64_t modified);
  void EndListing(int64_t now);  // It was whole; the server's time.
  bool holds_lease() const { return clock_.Now() < lease_until_; }
  // So full that a collection is due.
  bool near_full(uint64_t bytes) const;
  void Wanted(uint64_t bytes);              // A frame found no room here.
  void SawBeside(const std::string& name);  // By a listing: an object among the frames that is none.

  void Used(const FrameInfo& info);
  void Saved(const FrameInfo& info, uint64_t bytes);
  uint64_t Erased(const Digest& key);  // Its bytes, if they were known.

 private:
  enum Why { kSize, kTtl };
  struct Entry {
    uint64_t bytes = 0;
    int64_t used = 0;  // Unix seconds by the server's clock: when it was written or, as far as we know, last used.
    Digest parent;
    bool knows_parent = false;
    bool listed = false;  // By the listing that is under way.
  };
  struct Victim {
    Digest key;
    int64_t used = 0;
  };
  using Ended = std::function<void()>;

  // The lease.
  void LookAtLease();
  void TakeLease(const std::string& etag, TimePoint begun);
  void LeaseIs(bool held, TimePoint begun);
  void LookAgain();

  // Uses.
  std::chrono::milliseconds TellEvery() const;
  int64_t TellsKept() const;  // Seconds.
  void Tell(Ended then);
  void TellLater();
  void ReadTells();
  void ReadTell(const std::string& name, const Ended& ended);

  // A collection, step by step.
  void NoteFrameBytes(uint64_t bytes);
  uint64_t FrameRoom() const;
  uint64_t BytesOver() const;
  bool AnyUnusedSince(int64_t when) const;
  int64_t TtlBegan() const;  // What was not used since goes.
  void Decide();
  void ReadParents();
  void Plan();
  void Evict();
  void Stuck(const Digest& key, const s3::Failure& failure);
  void Finish();
  // `next(ended)` begins one call and is called again and again, some at once, with pauses between, until it says that
  // there is none left; then `then`. Neither, once the lease is lost.
  void Run(std::function<bool(const Ended& ended)> next, std::function<void()> then);
  void Failed(const char* step, const s3::Failure& failure);

  int64_t ServerNow() const;  // Unix seconds. 0: not known yet.
  void LearnTime(int64_t now);

  const Options options_;
  const std::string root_;
  s3::ObjectStore& store_;
  const Clock& clock_;
  Metrics& metrics_;
  const Hooks hooks_;
  const std::string node_;  // Unique among all processes, ever.

  TimePoint lease_until_{};
  uint64_t lease_writes_ = 0;
  int64_t time_offset_ = 0;  // Of the server's clock to the steady one; 0: not known.
  bool closing_ = false;

  std::unordered_set<Digest, DigestHash> uses_;  // Not told yet.
  uint64_t tells_ = 0;
  std::set<std::string> tells_read_;

  boost::unordered_flat_map<Digest, Entry, DigestHash> frames_;  // The holder's.
  uint64_t bytes_ = 0;                                           // Of frames_.
  uint64_t listed_bytes_ = 0;                                    // Of all that the listing under way has shown.
  uint64_t bytes_beside_ = 0;                                    // Of frames that found no room in frames_.
  bool listing_ = false;                                         // One that began with the lease.
  uint64_t frame_bytes_ = 0;                                     // Of the largest that was seen or wanted.
  uint64_t wanted_bytes_ = 0;                                    // As we told last, ...
  TimePoint wanted_until_{};                                     // ... and until when that is enough.
  std::vector<std::string> wants_;                               // Of others, by the listing under way.

  bool collecting_ = false;
  Why why_ = kSize;
  std::vector<Digest> orphans_;                        // Their parents are to be read.
  std::unordered_set<Digest, DigestHash> unreadable_;  // The server does not give their headers.
  size_t stuck_ = 0;                                   // Victims that could not be removed.
  std::vector<Victim> victims_;                        // The next one last.
  std::unordered_set<Digest, DigestHash> needed_;      // Parents of victims that stay after all.
  uint64_t evicted_frames_ = 0, evicted_bytes_ = 0;
  TimePoint begun_;
};

}  // namespace terrace
