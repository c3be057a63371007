// What a bucket holds, as far as this node knows: listed in the background, at the start and now and then, and counted
// on from there by what the node itself writes and removes. On the store's thread alone, but for ready().
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>

#include "base/clock.h"
#include "s3/object_store.h"
#include "terrace/tier.h"
#include "tier/s3_collector.h"
#include "tier/s3_index.h"
#include "tier/s3_names.h"

namespace terrace {

class S3Listing {
 public:
  struct Options {
    std::chrono::milliseconds interval{600'000};  // Zero: never.
    std::chrono::milliseconds pressed{60'000};    // While the bucket is nearly full.
    S3Bounds bounds;
  };
  struct Deps {
    s3::ObjectStore& store;
    const Clock& clock;
    const S3Names& names;
    S3Index& index;
    std::function<bool(const Digest&)> is_leaving;  // It is being erased: not there, whatever a listing shows.
    S3Collector* collector;                         // Gets what is seen. Null: there are no bounds.
  };
  S3Listing(const Options& options, Deps deps) : options_(options), deps_(std::move(deps)) {}

  void Begin();
  void Soon();  // For the collector: as soon as the one that is under way has ended.

  void Wrote(uint64_t bytes);
  void Removed(uint64_t bytes) { changed_bytes_ -= static_cast<int64_t>(bytes); }
  // As far as we know: what others wrote since the last listing is not in it.
  bool HasRoom(uint64_t bytes);

  bool ready() const { return ready_.load(std::memory_order_relaxed); }  // The first one has ended. Any thread.

 private:
  void ListAll();
  void TakePage(const s3::ListPage& page);
  void Listed(const s3::Failure& failure, int64_t now);
  std::chrono::milliseconds After() const;
  uint64_t bytes() const;
  void LookIfPressed();

  const Options options_;
  const Deps deps_;
  std::atomic<bool> ready_{false};  // Relaxed: a hint.

  bool running_ = false;
  bool again_ = false;   // Another one is wanted as soon as this one has ended.
  uint64_t number_ = 0;  // Of the timer that begins the next one.
  TimePoint begun_;
  int64_t seen_bytes_ = 0, changed_before_ = 0;  // Of the one that is under way.
  // What the last one saw, and what we wrote less what we removed since it began.
  int64_t listed_bytes_ = 0, changed_bytes_ = 0;
};

}  // namespace terrace
