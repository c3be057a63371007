// Everything of a disk tier that changes its directory: saves, erasures, eviction. All names are made and taken away by
// tasks of one executor that runs them in order, so an old file of a key is gone before a new one is begun.
//
// A save is reserved (evicting leaves if it must), written to a temporary file, and waits for the next commit. A commit
// takes all that wait: the files get their names, then files and directories are synced together; only then are they
// visible and settled. Other saves are written meanwhile and make the next commit, so a group is as large as the disk
// is slow.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "io/disk_io.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "terrace/tier.h"
#include "tier/disk_dir.h"
#include "tier/disk_index.h"
#include "tier/job_set.h"

namespace terrace {

class DiskSaves {
 public:
  struct Deps {
    DiskIo& io;
    FileIo& files;
    const Clock& clock;
    DiskDir& dir;
    DiskIndex& index;
    JobSet& jobs;
    Metrics& metrics;
  };
  DiskSaves(const Deps& deps, size_t queue_items_max);

  void Add(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done);
  void Erase(const Digest& key);
  // A frame that can serve nobody, unless it is gone already. Counted, but for kMissing.
  void SetAside(const Digest& key, uint64_t id, Reason reason);
  uint64_t set_aside() const;

  // The names of all frames are known: saves may begin.
  void Listed();
  // All headers are known: leaves are leaves, and eviction may begin.
  void IndexReady();

  // As in DiskLoads.
  void Stop();
  bool WaitIdle(TimePoint deadline);
  void Drop();
  uint64_t abandoned() const;

 private:
  struct Job;
  using JobPtr = std::shared_ptr<Job>;
  using Group = std::vector<JobPtr>;
  struct Unlink {
    Digest key;
    uint64_t file_bytes = 0;
  };

  // Tasks of the executor.
  void Pump();
  void TrimSlice();
  void Written(const JobPtr& job);
  void Committed(const Group& group);

  void Post(Task task, std::chrono::milliseconds delay = std::chrono::milliseconds(0));
  void UnlinkQueued();
  Result<void> UnlinkFrame(const Unlink& unlink);
  // Takes the frame away whose turn it is. Its bytes, 0: none may go. What can't be removed stays, and has its turn
  // after all others.
  Result<uint64_t> EvictFrame();
  bool Begin(const JobPtr& job);
  // Room under the cap. kHold: some will come. An error: what should make room can't be removed.
  enum class Room { kReserved, kHold, kNone };
  Result<Room> MakeRoom(const FrameInfo& info, uint64_t file_bytes);
  Result<std::shared_ptr<DiskFile>> CreateTemp(const Job& job);
  void Write(const JobPtr& job);
  void OnWrite(const JobPtr& job, const Result<size_t>& result);
  void StartCommit();
  // Submits a sync of each file, and `then` as a task when the last one has ended.
  void SyncAll(const std::vector<std::shared_ptr<DiskFile>>& files, std::vector<std::optional<Error>*> errors,
               Task then);
  Result<void> GiveName(const Job& job);
  void Abandon(const JobPtr& job, Error error);
  void SettleFailed(const JobPtr& job, Error error);
  void Settle(const JobPtr& job, const SaveResult& result);

  const Deps deps_;
  const size_t queue_items_max_;
  Counter& failures_;
  Counter& commits_;
  Counter& evictions_;

  mutable std::mutex mutex_;
  std::condition_variable idle_;
  std::unordered_map<Digest, JobPtr, DigestHash> saving_;  // Guarded by mutex_. Queued or active, by key.
  std::deque<JobPtr> queue_;                               // Guarded by mutex_.
  size_t active_ = 0;                                      // Guarded by mutex_. Begun, not settled.
  size_t pieces_active_ = 0;                               // Guarded by mutex_. Being written.
  Group written_;                                          // Guarded by mutex_. For the next commit.
  bool committing_ = false;                                // Guarded by mutex_.
  std::vector<Unlink> unlinks_;                            // Guarded by mutex_.
  size_t tasks_ = 0;                                       // Guarded by mutex_. Posted, not ended.
  uint64_t set_aside_ = 0;                                 // Guarded by mutex_.
  bool listed_ = false;                                    // Guarded by mutex_.
  bool ready_ = false;                                     // Guarded by mutex_.
  bool stopped_ = false;                                   // Guarded by mutex_.
  bool dropped_ = false;                                   // Guarded by mutex_. Nothing begins any more.
  uint64_t abandoned_ = 0;                                 // Guarded by mutex_.

  // The executor's own.
  uint64_t temps_ = 0;
  std::optional<TimePoint> full_until_;  // The disk was full at the last try; the next one is then.
};

}  // namespace terrace
