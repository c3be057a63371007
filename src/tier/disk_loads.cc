#include "tier/disk_loads.h"

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>
#include <variant>

#include "base/assert.h"
#include "base/hash.h"
#include "chunk/frame.h"
#include "tier/disk_pieces.h"

namespace terrace {
namespace {

LoadResult Miss(Reason reason) { return {.outcome = Outcome::kMiss, .reason = reason}; }

}  // namespace

// Passed from thread to thread, never touched by two at once but for what the mutex guards.
struct DiskLoads::Job {
  LoadItem item;
  TimePoint deadline;
  std::shared_ptr<LoadBatch> batch;
  size_t index = 0;        // In the batch.
  size_t pieces_held = 0;  // Guarded by DiskLoads::mutex_. Its part of pieces_active_.

  DiskIndex::Reading reading;  // id 0: not acquired.
  uint64_t file_bytes = 0;     // As opened.
  std::shared_ptr<DiskFile> file;
  std::unique_ptr<DiskScratch> scratch;
  Frame frame;  // Set before header_read, then constant.

  std::mutex mutex;
  size_t pieces_left = 0;         // Guarded by mutex. Not yet read and verified.
  bool header_read = false;       // Guarded by mutex. `frame` is the frame, or `reason` says why not.
  std::vector<size_t> early;      // Guarded by mutex. Pieces that arrived before the header.
  Reason reason = Reason::kNone;  // Guarded by mutex. The first thing that went wrong.
  bool remove = false;            // Guarded by mutex. The file can serve nobody.
  std::optional<Error> error;     // Guarded by mutex.

  void Fail(Reason why, bool and_remove, std::optional<Error> because = std::nullopt) {
    std::lock_guard lock(mutex);
    if (reason != Reason::kNone) return;
    reason = why;
    remove = and_remove;
    error = std::move(because);
  }
  bool failed() {
    std::lock_guard lock(mutex);
    return reason != Reason::kNone;
  }
};

void DiskLoads::Add(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  std::vector<std::pair<size_t, Reason>> refused;
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < items.size(); ++i) {
      if (stopped_) {
        refused.emplace_back(i, Reason::kUnavailable);
      } else if (queue_.size() >= queue_items_max_) {
        refused.emplace_back(i, Reason::kFull);
      } else {
        auto job = std::make_shared<Job>();
        job->item = std::move(items[i]);
        job->deadline = deadline;
        job->batch = done;
        job->index = i;
        queue_.push_back(std::move(job));
      }
    }
  }
  for (const auto& [i, reason] : refused) done->Settle(i, Miss(reason));
  Pump();
}

// Begins what fits: at least one, then as long as few pieces are under way.
void DiskLoads::Pump() {
  for (;;) {
    JobPtr job;
    {
      std::lock_guard lock(mutex_);
      if (queue_.empty() || pieces_active_ >= kDiskPiecesMax) return;
      job = std::move(queue_.front());
      queue_.pop_front();
      ++active_;
      job->pieces_held = DiskPieceCount(job->item.into.size());
      pieces_active_ += job->pieces_held;
    }
    const auto begin = [this, job] { Begin(job); };
    deps_.jobs.Add({.run = begin, .drop = begin});
  }
}

void DiskLoads::Begin(const JobPtr& job) {
  const LoadItem& item = job->item;
  if (job->batch->cancelled()) return Settle(job, Miss(Reason::kCancelled));
  if (deps_.clock.Now() >= job->deadline) return Settle(job, Miss(Reason::kTimeout));
  const auto reading = deps_.index.Acquire(item.key, static_cast<int64_t>(deps_.clock.WallNs()));
  if (!reading) {
    bool listed;
    {
      std::lock_guard lock(mutex_);
      listed = listed_;
    }
    return Settle(job, Miss(listed ? Reason::kNotFound : Reason::kIndexLoading));
  }
  job->reading = *reading;
  const bool as_known =
      !reading->info || (reading->info->space == item.space && reading->info->payload_bytes == item.into.size());
  if (item.into.empty() || reading->file_bytes != FrameBytes(item.into.size()) || !as_known) {
    // Right by its own name, as far as is known: it stays.
    return Settle(job, Miss(Reason::kForeign));
  }
  Read(job);
}

void DiskLoads::Read(const JobPtr& job) {
  const LoadItem& item = job->item;
  auto file = deps_.io.Open(deps_.dir.FramePath(item.key), {.direct = DiskAligned(item.into.data())});
  auto stat = file ? (*file)->Stat() : Result<FileStat>(tl::unexpected(file.error()));
  if (!stat) {
    const int os_error = stat.error().os_error;
    const bool missing = os_error == ENOENT;
    const bool no_file = os_error == ENXIO || os_error == ENODEV || os_error == ELOOP;  // A socket, a device, a link.
    job->Fail(missing   ? Reason::kMissing
              : no_file ? Reason::kDamaged
                        : Reason::kUnavailable,
              missing || no_file, stat.error());
    return Finish(job);
  }
  if (!stat->is_file) {
    job->Fail(Reason::kDamaged, true);  // A pipe would be waited for.
    return Finish(job);
  }
  job->file = *std::move(file);
  job->file_bytes = stat->bytes;
  job->scratch = std::make_unique<DiskScratch>();
  std::vector<DiskOp> ops;
  const auto add = [&](DiskOp op, size_t i) {
    op.done = [this, job, i, bytes = DiskOpBytes(op)](const Result<size_t>& result) { OnRead(job, i, bytes, result); };
    ops.push_back(std::move(op));
  };
  if (job->file_bytes == job->reading.file_bytes) {
    for (size_t i = 0; i < DiskPieceCount(item.into.size()); ++i) {
      add(DiskPiece(DiskOp::Kind::kRead, job->file, i, item.into, *job->scratch, {}), i);
    }
  } else {
    // Cut, or grown: its header says which.
    DiskOp header{.kind = DiskOp::Kind::kRead, .file = job->file};
    header.parts[0] = job->scratch->header;
    add(std::move(header), 0);
  }
  job->pieces_left = ops.size();
  deps_.io.Submit(std::move(ops));
}

// On a thread of the DiskIo: hands over and returns.
void DiskLoads::OnRead(const JobPtr& job, size_t piece, size_t bytes, const Result<size_t>& result) {
  {
    std::lock_guard lock(mutex_);
    --job->pieces_held;
    --pieces_active_;
  }
  Pump();  // The next load begins before this one is verified, so that the disk always has work.
  if (!result) {
    job->Fail(result.error().code == Code::kCancelled ? Reason::kCancelled : Reason::kUnavailable, false,
              result.error());
  } else if (*result < bytes && job->file_bytes == job->reading.file_bytes) {
    job->Fail(Reason::kTruncated, true);  // Cut after it was opened.
  }
  Task next;
  if (piece == 0) {
    next = [this, job] { DecodeHeader(job); };
  } else {
    std::lock_guard lock(job->mutex);
    if (!job->header_read) {
      job->early.push_back(piece);
      return;
    }
    next = [this, job, piece] { Verify(job, piece); };
  }
  deps_.jobs.Add({.run = next, .drop = next});
}

void DiskLoads::DecodeHeader(const JobPtr& job) {
  if (!job->failed()) {
    auto decoded = DecodeFrameHeader(job->scratch->header, job->file_bytes);
    if (const Reason* reason = std::get_if<Reason>(&decoded)) {
      job->Fail(*reason, true);
    } else {
      job->frame = std::get<Frame>(std::move(decoded));
      const FrameInfo& info = job->frame.info;
      if (info.key != job->item.key || job->file_bytes != job->reading.file_bytes) {
        job->Fail(Reason::kForeign, true);  // Another frame was put in its place.
      } else {
        deps_.index.SetInfo(info.key, info);
        if (info.space != job->item.space || info.payload_bytes != job->item.into.size()) {
          job->Fail(Reason::kForeign, false);
        }
      }
    }
  }
  std::vector<size_t> early;
  {
    std::lock_guard lock(job->mutex);
    job->header_read = true;
    early.swap(job->early);
  }
  // All but the last on other threads, if there are any. Piece 0 is not ended before, so the job lives.
  for (const size_t piece : early) {
    const auto verify = [this, job, piece] { Verify(job, piece); };
    deps_.jobs.Add({.run = verify, .drop = verify});
  }
  Verify(job, 0);
}

void DiskLoads::Verify(const JobPtr& job, size_t piece) {
  if (!job->failed()) {
    const std::span<std::byte> into = job->item.into;
    const size_t at = piece * kDiskPieceBytes;
    const size_t bytes = std::min(kDiskPieceBytes, into.size() - at);
    const size_t tail = bytes % kDirectAlignment;
    bool right = true;
    if (tail > 0) {
      const auto& scratch = job->scratch->tail;
      std::memcpy(into.data() + at + bytes - tail, scratch.data(), tail);
      right = std::all_of(scratch.begin() + static_cast<ptrdiff_t>(tail), scratch.end(),
                          [](std::byte b) { return b == std::byte{0}; });
    }
    // A segment of a very large frame is many pieces: Finish looks at it.
    if (job->frame.segment_bytes == kDiskPieceBytes) {
      right = right && SegmentMatches(job->frame, piece, into.subspan(at, bytes));
    }
    if (!right) job->Fail(Reason::kDamaged, true);
  }
  PieceEnded(job);
}

void DiskLoads::PieceEnded(const JobPtr& job) {
  {
    std::lock_guard lock(job->mutex);
    if (--job->pieces_left > 0) return;
  }
  Finish(job);
}

void DiskLoads::Finish(const JobPtr& job) {
  // Nobody else has the job now.
  SegmentHashes hashes;
  if (job->reason == Reason::kNone) {
    hashes = std::move(job->frame.segments);
    if (job->frame.segment_bytes != kSegmentBytes) {
      job->frame.segments = std::move(hashes);
      for (size_t i = 0; i < job->frame.segments.size(); ++i) {
        const uint64_t at = i * job->frame.segment_bytes;
        const auto rest = job->item.into.subspan(at);
        if (!SegmentMatches(job->frame, i, rest.first(std::min<uint64_t>(job->frame.segment_bytes, rest.size())))) {
          job->Fail(Reason::kDamaged, true);
        }
      }
      hashes = HashSegments(job->item.into);
    }
  }
  if (job->reason == Reason::kNone) {
    if (job->reading.stamp_file) job->file->Touch();
    return Settle(job, {.outcome = Outcome::kHit,
                        .reason = Reason::kNone,
                        .info = job->frame.info,
                        .hashes = std::make_shared<const SegmentHashes>(std::move(hashes))});
  }
  if (job->remove) deps_.remove(job->item.key, job->reading.id, job->reason);
  if (job->reason == Reason::kUnavailable) {
    deps_.index.NoteUnreadable(job->item.key, job->reading.id);
    deps_.failures.Add();
    return Settle(job, {.outcome = Outcome::kFailed,
                        .reason = Reason::kUnavailable,
                        .error = Fail(*job->error, "disk: load " + job->item.key.Hex()).value()});
  }
  Settle(job, Miss(job->reason));
}

void DiskLoads::Settle(const JobPtr& job, LoadResult result) {
  job->file = nullptr;  // Before the frame may be evicted, so that its bytes are gone when its name is.
  if (job->reading.id != 0) deps_.index.Release(job->item.key, job->reading.id);
  const bool cancelled = result.reason == Reason::kCancelled;
  job->batch->Settle(job->index, std::move(result));
  {
    std::lock_guard lock(mutex_);
    pieces_active_ -= std::exchange(job->pieces_held, 0);
    if (dropped_ && cancelled) ++abandoned_;
  }
  Pump();
  // Last: who waits for idle may destroy this.
  std::lock_guard lock(mutex_);
  if (--active_ == 0 && queue_.empty()) idle_.notify_all();
}

void DiskLoads::Listed() {
  std::lock_guard lock(mutex_);
  listed_ = true;
}

void DiskLoads::Stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
}

bool DiskLoads::WaitIdle(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  const auto idle = [this] { return active_ == 0 && queue_.empty(); };
  if (deadline == TimePoint::max()) {
    idle_.wait(lock, idle);
    return true;
  }
  return idle_.wait_until(lock, deadline, idle);
}

void DiskLoads::Drop() {
  std::deque<JobPtr> queued;
  {
    std::lock_guard lock(mutex_);
    dropped_ = true;
    queued.swap(queue_);
    abandoned_ += queued.size();
  }
  for (const JobPtr& job : queued) job->batch->Settle(job->index, Miss(Reason::kCancelled));
}

uint64_t DiskLoads::abandoned() const {
  std::lock_guard lock(mutex_);
  return abandoned_;
}

}  // namespace terrace
