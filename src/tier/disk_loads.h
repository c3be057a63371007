// The loads of a disk tier: what waits, what is being read, and the proof of what was read. Pieces are read all at once
// and verified one by one as they arrive, on the executor's threads, so that hashing never keeps the disk waiting.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "base/clock.h"
#include "io/disk_io.h"
#include "terrace/metrics.h"
#include "terrace/tier.h"
#include "tier/disk_dir.h"
#include "tier/disk_index.h"
#include "tier/job_set.h"

namespace terrace {

class DiskLoads {
 public:
  struct Deps {
    DiskIo& io;
    const Clock& clock;
    const DiskDir& dir;
    DiskIndex& index;
    JobSet& jobs;
    Counter& failures;
    // A frame, by the id of its entry, that can serve nobody, or whose file is gone.
    std::function<void(const Digest& key, uint64_t id, Reason reason)> remove;
  };
  DiskLoads(const Deps& deps, size_t queue_items_max) : deps_(deps), queue_items_max_(queue_items_max) {}

  void Add(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done);

  // The names of all frames are known: what is not in the index is nowhere.
  void Listed();

  // In this order, to close: Stop refuses new items, WaitIdle waits for the others, Drop settles those not begun as
  // cancelled. From then on `abandoned` counts what ends cancelled.
  void Stop();
  bool WaitIdle(TimePoint deadline);
  void Drop();
  uint64_t abandoned() const;

 private:
  struct Job;
  using JobPtr = std::shared_ptr<Job>;

  void Pump();
  void Begin(const JobPtr& job);
  void Read(const JobPtr& job);
  void OnRead(const JobPtr& job, size_t piece, size_t bytes, const Result<size_t>& result);
  void DecodeHeader(const JobPtr& job);
  void Verify(const JobPtr& job, size_t piece);
  void PieceEnded(const JobPtr& job);
  void Finish(const JobPtr& job);
  void Settle(const JobPtr& job, LoadResult result);

  const Deps deps_;
  const size_t queue_items_max_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<JobPtr> queue_;  // Guarded by mutex_.
  size_t active_ = 0;         // Guarded by mutex_.
  size_t pieces_active_ = 0;  // Guarded by mutex_. Of loads begun, not yet read.
  bool listed_ = false;       // Guarded by mutex_.
  bool stopped_ = false;      // Guarded by mutex_.
  bool dropped_ = false;      // Guarded by mutex_.
  uint64_t abandoned_ = 0;    // Guarded by mutex_.
};

}  // namespace terrace
