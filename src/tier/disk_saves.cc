#include "tier/disk_saves.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "chunk/frame.h"
#include "tier/disk_pieces.h"

namespace terrace {
namespace {

// Written and not yet durable. A commit takes some milliseconds however many it has; at 2 GB/s it is worth 16 frames of
// 2 MiB to write on meanwhile.
constexpr size_t kSavesActiveMax = 32;

// Frames evicted in one go when there is more than may be: at 1 ms each, other saves and erasures wait for 32 ms.
constexpr size_t kTrimSlice = 32;
constexpr std::chrono::milliseconds kTrimRetry{100};  // When all frames that could go are being read.

constexpr std::chrono::seconds kFullRetry{1};

SaveResult Declined(Reason reason) { return {.outcome = Outcome::kDeclined, .reason = reason}; }

}  // namespace

struct DiskSaves::Job {
  SaveItem item;
  uint64_t file_bytes = 0;
  struct Waiter {
    std::shared_ptr<SaveBatch> batch;
    size_t index = 0;
  };
  std::vector<Waiter> waiters;  // Guarded by DiskSaves::mutex_. The first one brought the bytes.

  std::string temp;
  std::shared_ptr<DiskFile> file;
  std::unique_ptr<DiskScratch> scratch;

  std::mutex mutex;
  size_t pieces_left = 0;      // Guarded by mutex, until the last one is written.
  std::optional<Error> error;  // The same.
};

DiskSaves::DiskSaves(const Deps& deps, size_t queue_items_max)
    : deps_(deps),
      queue_items_max_(queue_items_max),
      failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                        {{"tier", "disk"}, {"operation", "save"}})),
      commits_(deps.metrics.GetCounter("terrace_disk_commits_total", "Groups of saves made durable together.")),
      evictions_(deps.metrics.GetCounter("terrace_tier_evicted_total", "Frames removed to keep the cap.",
                                         {{"tier", "disk"}})) {}

void DiskSaves::Add(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  std::vector<std::pair<size_t, SaveResult>> settled;
  for (size_t i = 0; i < items.size(); ++i) {
    SaveItem& item = items[i];
    const Digest key = item.info.key;
    if (item.payload.empty() || item.payload.size() != item.info.payload_bytes ||
        item.payload.size() > kFramePayloadBytesMax) {
      settled.emplace_back(
          i, SaveResult{.error = Error{Code::kInvalid, "disk: save " + key.Hex() + ": a payload of " +
                                                           std::to_string(item.payload.size()) + " bytes said to be " +
                                                           std::to_string(item.info.payload_bytes)}});
      continue;
    }
    if (FrameBytes(item.info.payload_bytes) > deps_.index.bytes_max()) {
      settled.emplace_back(i, Declined(Reason::kFull));
      continue;
    }
    // What the device could not read makes way for what is here. If it could after all, it is the same.
    if (const auto id = deps_.index.Unreadable(key)) SetAside(key, *id, Reason::kUnavailable);
    std::lock_guard lock(mutex_);
    if (stopped_) {
      settled.emplace_back(i, Declined(Reason::kUnavailable));
    } else if (const auto it = saving_.find(key); it != saving_.end()) {
      it->second->waiters.push_back({done, i});
    } else if (deps_.index.Contains(key)) {
      settled.emplace_back(i, SaveResult{.outcome = Outcome::kHit, .existed = true});
    } else if (queue_.size() >= queue_items_max_) {
      settled.emplace_back(i, Declined(Reason::kFull));
    } else {
      auto job = std::make_shared<Job>();
      job->item = std::move(item);
      job->file_bytes = FrameBytes(job->item.info.payload_bytes);
      job->waiters.push_back({done, i});
      saving_.emplace(key, job);
      queue_.push_back(std::move(job));
    }
  }
  for (auto& [i, result] : settled) {
    if (result.existed) deps_.index.Use(items[i].info.key, static_cast<int64_t>(deps_.clock.WallNs()));
    done->Settle(i, std::move(result));
  }
  Post([this] { Pump(); });
}

void DiskSaves::Erase(const Digest& key) {
  {
    // With the lock, so that a save that comes after this finds the file's removal queued before itself.
    std::lock_guard lock(mutex_);
    const auto file_bytes = deps_.index.Remove(key);
    if (!file_bytes) return;
    unlinks_.push_back({key, *file_bytes});
  }
  Post([this] { Pump(); });
}

void DiskSaves::SetAside(const Digest& key, uint64_t id, Reason reason) {
  {
    std::lock_guard lock(mutex_);
    const auto file_bytes = deps_.index.Remove(key, id);
    if (!file_bytes) return;  // Somebody else was faster.
    unlinks_.push_back({key, *file_bytes});
    if (reason != Reason::kMissing) ++set_aside_;
  }
  if (reason != Reason::kMissing) {
    deps_.metrics
        .GetCounter("terrace_tier_quarantined_total", "Frames that disagreed with their name or checksums.",
                    {{"tier", "disk"}, {"reason", ReasonName(reason)}})
        .Add();
    log::Warn("frame_quarantined",
              {{"tier", "disk"}, {"key", key.Hex()}, {"reason", ReasonName(reason)}, {"action", "removed"}});
  }
  Post([this] { Pump(); });
}

uint64_t DiskSaves::set_aside() const {
  std::lock_guard lock(mutex_);
  return set_aside_;
}

void DiskSaves::Listed() {
  {
    std::lock_guard lock(mutex_);
    listed_ = true;
  }
  Post([this] { Pump(); });
}

void DiskSaves::IndexReady() {
  {
    std::lock_guard lock(mutex_);
    ready_ = true;
  }
  Post([this] { TrimSlice(); });
}

// ---- Tasks of the executor

void DiskSaves::Post(Task task, std::chrono::milliseconds delay) {
  {
    std::lock_guard lock(mutex_);
    ++tasks_;
  }
  const auto run = [this, task = std::move(task)] {
    task();
    std::lock_guard lock(mutex_);  // Last: who waits for idle may destroy this.
    if (--tasks_ == 0) idle_.notify_all();
  };
  deps_.jobs.Add({.run = run, .drop = run}, delay);
}

void DiskSaves::TrimSlice() {
  size_t evicted = 0;
  while (evicted < kTrimSlice && deps_.index.OverCap()) {
    const Result<uint64_t> freed = EvictFrame();
    if (!freed || *freed == 0) break;
    ++evicted;
  }
  bool dropped;
  {
    std::lock_guard lock(mutex_);
    dropped = dropped_;
  }
  if (!dropped && deps_.index.OverCap()) {
    Post([this] { TrimSlice(); }, evicted > 0 ? std::chrono::milliseconds(0) : kTrimRetry);
  } else {
    Pump();
  }
}

void DiskSaves::Pump() {
  UnlinkQueued();
  for (;;) {
    JobPtr job;
    {
      std::lock_guard lock(mutex_);
      if (queue_.empty() || !listed_ || dropped_ || active_ >= kSavesActiveMax || pieces_active_ >= kDiskPiecesMax) {
        return;
      }
      job = std::move(queue_.front());
      queue_.pop_front();
      ++active_;
    }
    if (!Begin(job)) {
      std::lock_guard lock(mutex_);
      queue_.push_front(std::move(job));
      --active_;
      return;
    }
  }
}

void DiskSaves::UnlinkQueued() {
  std::vector<Unlink> unlinks;
  {
    std::lock_guard lock(mutex_);
    unlinks.swap(unlinks_);
  }
  for (const Unlink& unlink : unlinks) (void)UnlinkFrame(unlink);
}

Result<void> DiskSaves::UnlinkFrame(const Unlink& unlink) {
  Result<void> removed = deps_.files.Unlink(deps_.dir.FramePath(unlink.key));
  if (!removed && (removed.error().os_error == EISDIR || removed.error().os_error == EPERM)) {
    removed = deps_.dir.MoveAway(unlink.key, deps_.clock.WallNs());
  }
  if (!removed && removed.error().os_error != ENOENT) {
    // The file is there, so its bytes stay counted. The next start finds it again.
    log::Warn("disk_unlink_failed", {{"error", removed.error().what}});
    return removed;
  }
  deps_.index.Free(unlink.file_bytes);
  return {};
}

Result<uint64_t> DiskSaves::EvictFrame() {
  const auto victim = deps_.index.EvictOne();
  if (!victim) return 0;
  // A disk that was mounted read-only by its own kernel can still be read.
  if (Result<void> gone = UnlinkFrame({victim->info.key, victim->file_bytes}); !gone) {
    deps_.index.PutBack(*victim, static_cast<int64_t>(deps_.clock.WallNs()));
    return tl::unexpected(gone.error());
  }
  evictions_.Add();
  return victim->file_bytes;
}

Result<DiskSaves::Room> DiskSaves::MakeRoom(const FrameInfo& info, uint64_t file_bytes) {
  while (!deps_.index.Reserve(info, file_bytes)) {
    {
      std::lock_guard lock(mutex_);
      if (!ready_) return Room::kHold;
    }
    if (deps_.index.OverCap()) return Room::kHold;  // TrimSlice is at work.
    const Result<uint64_t> freed = EvictFrame();
    if (!freed) return tl::unexpected(freed.error());  // Not one frame after the other.
    if (*freed == 0) {
      std::lock_guard lock(mutex_);
      return active_ > 1 ? Room::kHold : Room::kNone;  // Another save will be a leaf soon.
    }
  }
  return Room::kReserved;
}

// False: it must wait, and nothing is done.
bool DiskSaves::Begin(const JobPtr& job) {
  const FrameInfo& info = job->item.info;
  bool wanted;
  {
    std::lock_guard lock(mutex_);
    wanted = std::any_of(job->waiters.begin(), job->waiters.end(), [](const auto& w) { return !w.batch->cancelled(); });
  }
  if (!wanted) {
    Settle(job, Declined(Reason::kCancelled));
    return true;
  }
  if (deps_.index.Contains(info.key)) {  // Its name was found meanwhile.
    Settle(job, {.outcome = Outcome::kHit, .existed = true});
    return true;
  }
  if (full_until_ && deps_.clock.Now() < *full_until_) {
    failures_.Add();
    Settle(job, {.reason = Reason::kFull, .error = Error{Code::kFull, "disk: save " + info.key.Hex() + ": disk full"}});
    return true;
  }
  const Result<Room> room = MakeRoom(info, job->file_bytes);
  if (!room) {
    SettleFailed(job, room.error());
    return true;
  }
  if (*room == Room::kHold) return false;
  if (*room == Room::kNone) {
    Settle(job, Declined(Reason::kFull));
    return true;
  }
  job->temp = deps_.dir.TempPath(temps_++);
  auto file = CreateTemp(*job);
  if (!file) {
    job->temp.clear();
    Abandon(job, file.error());
    return true;
  }
  job->file = *std::move(file);
  Write(job);
  return true;
}

Result<std::shared_ptr<DiskFile>> DiskSaves::CreateTemp(const Job& job) {
  const auto create = [&] {
    return deps_.io.Open(job.temp, {.mode = DiskIo::OpenOptions::Mode::kCreateNew,
                                    .direct = DiskAligned(job.item.payload.data()),
                                    .permissions = deps_.dir.file_permissions(),
                                    .preallocate_bytes = job.file_bytes});
  };
  auto file = create();
  if (!file && file.error().os_error == ENOENT) {
    // Somebody emptied the directory.
    Result<void> made = deps_.dir.MakeLayout();
    if (!made) return tl::unexpected(made.error());
    file = create();
  }
  if (!file && file.error().code == Code::kFull) {
    // Others fill the disk: what is ours yields.
    uint64_t freed = 0;
    while (freed < job.file_bytes) {
      const Result<uint64_t> more = EvictFrame();
      if (!more || *more == 0) break;
      freed += *more;
    }
    if (freed > 0) file = create();
  }
  const bool full = !file && file.error().code == Code::kFull;
  if (full && !full_until_) log::Warn("disk_full", {{"error", file.error().what}});
  if (file && full_until_) log::Info("disk_has_room");
  full_until_.reset();
  if (full) full_until_ = deps_.clock.Now() + kFullRetry;
  return file;
}

void DiskSaves::Write(const JobPtr& job) {
  const SaveItem& item = job->item;
  job->scratch = std::make_unique<DiskScratch>();

  const bool given = item.hashes && item.hashes->size() == DiskPieceCount(item.payload.size());
  job->scratch->header =
      EncodeFrameHeader(item.info, deps_.clock.WallNs(), item.payload, given ? item.hashes.get() : nullptr);
  const size_t tail = DiskTailBytes(item.payload.size());
  if (tail > 0) std::memcpy(job->scratch->tail.data(), item.payload.data() + item.payload.size() - tail, tail);

  // An operation only reads what it writes from.
  const std::span<std::byte> payload(const_cast<std::byte*>(item.payload.data()), item.payload.size());
  std::vector<DiskOp> ops;
  for (size_t i = 0; i < DiskPieceCount(payload.size()); ++i) {
    ops.push_back(DiskPiece(DiskOp::Kind::kWrite, job->file, i, payload, *job->scratch,
                            [this, job](const Result<size_t>& result) { OnWrite(job, result); }));
  }
  job->pieces_left = ops.size();
  {
    std::lock_guard lock(mutex_);
    pieces_active_ += ops.size();
  }
  deps_.io.Submit(std::move(ops));
}

// On a thread of the DiskIo.
void DiskSaves::OnWrite(const JobPtr& job, const Result<size_t>& result) {
  bool pump = false;
  {
    std::lock_guard lock(mutex_);
    pump = --pieces_active_ < kDiskPiecesMax && !queue_.empty();
  }
  // The next save begins before this one ends, so that the disk always has work.
  if (pump) Post([this] { Pump(); });
  {
    std::lock_guard lock(job->mutex);
    if (!result && !job->error) job->error = result.error();
    if (--job->pieces_left > 0) return;
  }
  Post([this, job] { Written(job); });
}

void DiskSaves::Written(const JobPtr& job) {
  bool commit = false;
  {
    std::lock_guard lock(mutex_);
    if (!job->error) {
      written_.push_back(job);
      commit = !std::exchange(committing_, true);
    }
  }
  if (job->error) Abandon(job, *job->error);
  if (commit) StartCommit();
  Pump();
}

// Names first, then one round of syncs for files and directories, so that a journaling file system commits once. In a
// power failure a name may so outlive its bytes: a frame that its checksums refuse, of a save that nobody was told of.
void DiskSaves::StartCommit() {
  auto group = std::make_shared<Group>();
  {
    std::lock_guard lock(mutex_);
    group->swap(written_);
  }
  std::vector<std::shared_ptr<DiskFile>> files;
  std::vector<std::optional<Error>*> errors;
  auto directories = std::make_shared<std::map<uint8_t, std::optional<Error>>>();  // Each once, and what came of it.
  for (const JobPtr& job : *group) {
    const Result<void> named = GiveName(*job);
    if (!named) {
      job->error = named.error();
      continue;
    }
    directories->try_emplace(job->item.info.key.bytes[0]);
    files.push_back(std::exchange(job->file, nullptr));
    errors.push_back(&job->error);
  }
  for (auto& [fan_out, error] : *directories) {
    auto file = deps_.io.Open(deps_.dir.FanOutPath(fan_out), {.mode = DiskIo::OpenOptions::Mode::kDirectory});
    if (!file) {
      error = file.error();
      continue;
    }
    files.push_back(*std::move(file));
    errors.push_back(&error);
  }
  commits_.Add();
  SyncAll(files, std::move(errors), [this, group, directories] {
    for (const JobPtr& job : *group) {
      if (!job->error) job->error = directories->at(job->item.info.key.bytes[0]);
    }
    Committed(*group);
  });
}

void DiskSaves::SyncAll(const std::vector<std::shared_ptr<DiskFile>>& files, std::vector<std::optional<Error>*> errors,
                        Task then) {
  struct Pending {
    std::atomic<size_t> left;  // Acquire and release: the last one sees what the others wrote to `errors`.
    std::vector<std::optional<Error>*> errors;
    Task then;
  };
  auto pending = std::make_shared<Pending>();
  pending->left = files.size();
  pending->errors = std::move(errors);
  pending->then = std::move(then);
  std::vector<DiskOp> ops;
  for (size_t i = 0; i < files.size(); ++i) {
    ops.push_back({.kind = DiskOp::Kind::kSync, .file = files[i], .done = [this, pending, i](const Result<size_t>& r) {
                     if (!r && !*pending->errors[i]) *pending->errors[i] = r.error();
                     if (pending->left.fetch_sub(1, std::memory_order_acq_rel) == 1) Post(std::move(pending->then));
                   }});
  }
  if (ops.empty()) return Post(std::move(pending->then));
  deps_.io.Submit(std::move(ops));
}

Result<void> DiskSaves::GiveName(const Job& job) {
  const std::string name = deps_.dir.FramePath(job.item.info.key);
  Result<void> named = deps_.files.Rename(job.temp, name);
  if (!named && named.error().os_error == EISDIR) {
    named = deps_.dir.MoveAway(job.item.info.key, deps_.clock.WallNs());
    if (named) named = deps_.files.Rename(job.temp, name);
  }
  if (named || named.error().os_error != ENOENT) return named;
  Result<void> made = deps_.dir.MakeLayout();  // Somebody removed the directory.
  if (!made) return made;
  return deps_.files.Rename(job.temp, name);
}

void DiskSaves::Committed(const Group& group) {
  for (const JobPtr& job : group) {
    if (job->error) {
      Abandon(job, *job->error);
      continue;
    }
    deps_.index.Commit(job->item.info, job->file_bytes, static_cast<int64_t>(deps_.clock.WallNs()));
    Settle(job, {.outcome = Outcome::kHit});
  }
  bool more;
  {
    std::lock_guard lock(mutex_);
    more = !written_.empty();
    committing_ = more;
  }
  if (more) StartCommit();
  Pump();
}

// Nothing of the save is left.
void DiskSaves::Abandon(const JobPtr& job, Error error) {
  job->file = nullptr;
  if (!job->temp.empty()) {
    // Under one name or the other: a name whose directory could not be synced is taken back.
    (void)deps_.files.Unlink(job->temp);
    (void)deps_.files.Unlink(deps_.dir.FramePath(job->item.info.key));
  }
  deps_.index.Abort(job->item.info, job->file_bytes);
  SettleFailed(job, std::move(error));
}

void DiskSaves::SettleFailed(const JobPtr& job, Error error) {
  if (error.code == Code::kCancelled) return Settle(job, Declined(Reason::kCancelled));
  failures_.Add();
  const Reason reason = error.code == Code::kFull ? Reason::kFull : Reason::kUnavailable;
  Settle(job, {.reason = reason, .error = Fail(std::move(error), "disk: save " + job->item.info.key.Hex()).value()});
}

void DiskSaves::Settle(const JobPtr& job, const SaveResult& result) {
  std::vector<Job::Waiter> waiters;
  {
    std::lock_guard lock(mutex_);
    saving_.erase(job->item.info.key);
    waiters.swap(job->waiters);
    --active_;
    if (dropped_ && result.reason == Reason::kCancelled) abandoned_ += waiters.size();
  }
  for (size_t i = 0; i < waiters.size(); ++i) {
    SaveResult copy = result;
    if (i > 0 && result.outcome == Outcome::kHit) copy.existed = true;
    waiters[i].batch->Settle(waiters[i].index, std::move(copy));
  }
}

// ---- Closing

void DiskSaves::Stop() {
  std::lock_guard lock(mutex_);
  stopped_ = true;
}

bool DiskSaves::WaitIdle(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  const auto idle = [this] { return active_ == 0 && queue_.empty() && tasks_ == 0; };
  if (deadline == TimePoint::max()) {
    idle_.wait(lock, idle);
    return true;
  }
  return idle_.wait_until(lock, deadline, idle);
}

void DiskSaves::Drop() {
  std::deque<JobPtr> queued;
  {
    std::lock_guard lock(mutex_);
    dropped_ = true;
    queued.swap(queue_);
    active_ += queued.size();  // As Settle expects.
  }
  for (const JobPtr& job : queued) Settle(job, Declined(Reason::kCancelled));
}

uint64_t DiskSaves::abandoned() const {
  std::lock_guard lock(mutex_);
  return abandoned_;
}

}  // namespace terrace
