#include "tier/disk_tier.h"

#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "base/log.h"
#include "chunk/frame.h"
#include "tier/disk_dir.h"
#include "tier/disk_index.h"
#include "tier/disk_loads.h"
#include "tier/disk_pieces.h"
#include "tier/disk_saves.h"
#include "tier/job_set.h"

namespace terrace {
namespace {

constexpr const char* kTierName = "disk";

// Headers read at once at the start: they keep the device busy, and are 128 KiB ahead of a load that comes.
constexpr size_t kScanStepFrames = 32;

class DiskTier final : public Tier {
 public:
  DiskTier(const DiskTierOptions& options, const DiskTierDeps& deps, std::unique_ptr<DiskIo> own_io);
  ~DiskTier() override { Close(deps_.clock.Now()); }

  Result<void> Start();

  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override { index_.Contains(keys, present); }
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override {
    loads_.Add(std::move(items), deadline, std::move(done));
  }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    saves_.Add(std::move(items), std::move(done));
  }
  void Erase(std::span<const Digest> keys) override {
    for (const Digest& key : keys) saves_.Erase(key);
  }
  Result<void> ProbeSave(uint64_t payload_bytes) override {
    // What is ours yields to a save.
    return dir_.ProbeSave(FrameBytes(payload_bytes), index_.bytes());
  }
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override;
  TierStats stats() const override;
  CloseReport Close(TimePoint deadline) override;

 private:
  // A header that is being read.
  struct Header {
    Digest key;
    uint64_t id = 0;
    uint64_t file_bytes = 0;
    std::shared_ptr<DiskFile> file;
    DiskScratch scratch;
    std::optional<Error> error;
  };

  // The recovery, on the background executor: first the names, a directory a task, then the headers.
  void Step(Task task);
  void ListStep(size_t fan_out);
  void HeaderStep();
  void HeadersRead(const std::vector<std::unique_ptr<Header>>& headers);
  void Recovered();
  void EndScan();

  const DiskTierDeps deps_;
  const TierInfo info_;
  const std::unique_ptr<DiskIo> own_io_;
  DiskIo& io_;
  DiskDir dir_;
  DiskIndex index_;

  std::atomic<bool> stopping_{false};     // Relaxed: a hint to the recovery.
  std::atomic<bool> index_ready_{false};  // Relaxed: for statistics.

  // The recovery's own.
  TimePoint opened_at_;
  std::vector<Digest> unread_;  // Frames whose header is not read.
  size_t foreign_ = 0;
  std::string a_foreign_;

  std::mutex scan_mutex_;
  std::condition_variable scan_ended_;
  bool scanning_ = false;  // Guarded by scan_mutex_. A task or header reads are under way.

  std::mutex close_mutex_;
  std::optional<CloseReport> close_report_;  // Guarded by close_mutex_.

  std::unique_ptr<ThreadPool> own_load_, own_save_, own_background_;
  JobSet load_jobs_, save_jobs_, background_jobs_;
  DiskSaves saves_;
  DiskLoads loads_;
};

DiskTier::DiskTier(const DiskTierOptions& options, const DiskTierDeps& deps, std::unique_ptr<DiskIo> own_io)
    : deps_(deps),
      info_(DiskTierInfo()),
      own_io_(std::move(own_io)),
      io_(deps.io ? *deps.io : *own_io_),
      dir_({.root = options.directory,
            .file_permissions = options.file_permissions,
            .directory_permissions = options.directory_permissions},
           deps.files, io_),
      index_(options.bytes_max),
      opened_at_(deps.clock.Now()),
      own_load_(deps.load ? nullptr : std::make_unique<ThreadPool>("terrace-dk-load", options.load_threads)),
      own_save_(deps.save ? nullptr : std::make_unique<ThreadPool>("terrace-dk-save", 1)),
      own_background_(deps.background ? nullptr : std::make_unique<ThreadPool>("terrace-dk-scan", 1)),
      load_jobs_(deps.load ? deps.load : own_load_.get()),
      save_jobs_(deps.save ? deps.save : own_save_.get()),
      background_jobs_(deps.background ? deps.background : own_background_.get()),
      saves_({.io = io_,
              .files = deps.files,
              .clock = deps.clock,
              .dir = dir_,
              .index = index_,
              .jobs = save_jobs_,
              .metrics = deps.metrics},
             options.save_queue_items_max),
      loads_(
          {.io = io_,
           .clock = deps.clock,
           .dir = dir_,
           .index = index_,
           .jobs = load_jobs_,
           .failures = deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                               {{"tier", kTierName}, {"operation", "load"}}),
           .remove = [this](const Digest& key, uint64_t id, Reason reason) { saves_.SetAside(key, id, reason); }},
          options.load_queue_items_max) {}

Result<void> DiskTier::Start() {
  Result<void> joined = dir_.Join();
  if (!joined) return joined;
  const bool direct = dir_.DirectIo();
  if (!direct) log::Warn("disk_buffered", {{"dir", dir_.root()}, {"why", "its file system has no O_DIRECT"}});
  log::Info("disk_open", {{"dir", dir_.root()}, {"io", io_.name()}, {"direct", direct}});
  scanning_ = true;
  Step([this] { ListStep(0); });
  return {};
}

Result<ScanPage> DiskTier::Scan(const std::string& cursor, size_t limit) {
  std::optional<Digest> after;
  if (!cursor.empty()) {
    after = Digest::FromHex(cursor);
    if (!after) return Fail(Code::kInvalid, "disk: scan: \"" + cursor + "\" is no cursor of this tier");
  }
  if (limit == 0) return Fail(Code::kInvalid, "disk: scan with limit 0");
  // The answer is in memory, but whoever scans also wants to know whether the disk is there.
  if (Result<void> answers = dir_.Probe(); !answers) return Fail(answers.error(), "disk: scan");
  ScanPage page{.frames = index_.After(after, limit)};
  if (page.frames.size() == limit) page.next = page.frames.back().key.Hex();
  return page;
}

TierStats DiskTier::stats() const {
  return {.frames = index_.frames(),
          .bytes = index_.bytes(),
          .bytes_max = index_.bytes_max(),
          .quarantined = saves_.set_aside(),
          .index_ready = index_ready_.load(std::memory_order_relaxed)};
}

CloseReport DiskTier::Close(TimePoint deadline) {
  std::lock_guard lock(close_mutex_);
  if (close_report_) return *close_report_;
  loads_.Stop();
  saves_.Stop();
  (void)loads_.WaitIdle(deadline);
  (void)saves_.WaitIdle(deadline);
  // The time is over. What has not gone to the device does not go any more, and what waits for a thread of an executor
  // runs here.
  stopping_.store(true, std::memory_order_relaxed);
  loads_.Drop();
  saves_.Drop();
  io_.CancelQueued();
  for (JobSet* jobs : {&load_jobs_, &save_jobs_, &background_jobs_}) jobs->Close(deps_.clock.Now());
  (void)loads_.WaitIdle(TimePoint::max());
  (void)saves_.WaitIdle(TimePoint::max());
  {
    std::unique_lock scan_lock(scan_mutex_);
    scan_ended_.wait(scan_lock, [this] { return !scanning_; });
  }
  close_report_.emplace();
  close_report_->abandoned = loads_.abandoned() + saves_.abandoned();
  close_report_->clean = close_report_->abandoned == 0;
  return *close_report_;
}

// ---- Recovery

void DiskTier::Step(Task task) {
  background_jobs_.Add({.run =
                            [this, task = std::move(task)] {
                              if (!stopping_.load(std::memory_order_relaxed)) return task();
                              EndScan();
                            },
                        // Also of an executor that has gone: going on here would go through all of it on one stack.
                        .drop = [this] { EndScan(); }});
}

void DiskTier::EndScan() {
  std::lock_guard lock(scan_mutex_);
  scanning_ = false;
  scan_ended_.notify_all();
}

void DiskTier::ListStep(size_t fan_out) {
  const auto foreign = [this](std::vector<std::string> names) {
    if (foreign_ == 0 && !names.empty()) a_foreign_ = std::move(names.front());
    foreign_ += names.size();
  };
  if (fan_out == 0) {
    if (const auto removed = dir_.RemoveTemps(); !removed) {
      log::Warn("disk_temps_left", {{"error", removed.error().what}});
    }
    foreign(dir_.ListForeign());
  }
  auto listing = dir_.ListFrames(fan_out);
  if (!listing) {
    // Its frames are not known, and are written anew in their places.
    log::Warn("disk_list_failed", {{"error", listing.error().what}});
  } else {
    foreign(std::move(listing->foreign));
    for (const auto& [key, stat] : listing->frames) {
      index_.AddListed(key, stat.bytes, stat.mtime_ns);
      if (stat.bytes < FrameBytes(1) || stat.bytes % 4096 != 0) {
        saves_.SetAside(key, 0, stat.bytes == 0 ? Reason::kEmpty : Reason::kTruncated);
      } else {
        unread_.push_back(key);
      }
    }
  }
  if (fan_out + 1 < kDiskFanOut) return Step([this, fan_out] { ListStep(fan_out + 1); });
  if (foreign_ > 0) log::Warn("disk_foreign_files", {{"count", foreign_}, {"one", a_foreign_}});
  loads_.Listed();
  saves_.Listed();
  Step([this] { HeaderStep(); });
}

void DiskTier::HeaderStep() {
  auto headers = std::make_shared<std::vector<std::unique_ptr<Header>>>();
  while (!unread_.empty() && headers->size() < kScanStepFrames) {
    const Digest key = unread_.back();
    unread_.pop_back();
    const auto reading = index_.Acquire(key, 0);
    if (!reading) continue;
    auto header = std::make_unique<Header>();
    header->key = key;
    header->id = reading->id;
    if (!reading->info) {
      auto file = io_.Open(dir_.FramePath(key), {.direct = true});
      const auto stat = file ? (*file)->Stat() : Result<FileStat>(tl::unexpected(file.error()));
      if (stat && stat->is_file) {
        header->file = *std::move(file);
        header->file_bytes = stat->bytes;
        headers->push_back(std::move(header));
        continue;
      }
      // That it can't be opened now says nothing about the frame: a load may find out.
      if (!stat && stat.error().os_error == ENOENT) saves_.SetAside(key, header->id, Reason::kMissing);
    }
    index_.Release(key, header->id);
  }
  if (headers->empty()) return Recovered();
  auto left = std::make_shared<std::atomic<size_t>>(headers->size());
  std::vector<DiskOp> ops;
  for (const auto& header : *headers) {
    DiskOp op{.kind = DiskOp::Kind::kRead, .file = header->file};
    op.parts[0] = header->scratch.header;
    op.done = [this, headers, left, header = header.get()](const Result<size_t>& result) {
      if (!result) header->error = result.error();
      // Acquire and release: the last one's task sees what the others read.
      if (left->fetch_sub(1, std::memory_order_acq_rel) > 1) return;
      const auto run = [this, headers] { HeadersRead(*headers); };
      background_jobs_.Add({.run = run, .drop = run});
    };
    ops.push_back(std::move(op));
  }
  io_.Submit(std::move(ops));
}

void DiskTier::HeadersRead(const std::vector<std::unique_ptr<Header>>& headers) {
  for (const auto& header : headers) {
    const auto decoded = header->error ? std::variant<Frame, Reason>(Reason::kDamaged)
                                       : DecodeFrameHeader(header->scratch.header, header->file_bytes);
    const Frame* frame = std::get_if<Frame>(&decoded);
    if (frame && frame->info.key == header->key) {
      index_.SetInfo(header->key, frame->info);
    } else if (!header->error || header->error->code != Code::kCancelled) {
      saves_.SetAside(header->key, header->id, frame ? Reason::kForeign : std::get<Reason>(decoded));
    }
    header->file = nullptr;
    index_.Release(header->key, header->id);
  }
  Step([this] { HeaderStep(); });
}

void DiskTier::Recovered() {
  saves_.IndexReady();
  index_ready_.store(true, std::memory_order_relaxed);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(deps_.clock.Now() - opened_at_);
  log::Info("disk_index_ready", {{"frames", index_.frames()},
                                 {"bytes", index_.bytes()},
                                 {"removed", saves_.set_aside()},
                                 {"took_ms", took.count()}});
  EndScan();
}

}  // namespace

TierInfo DiskTierInfo() {
  return {.name = kTierName, .durable = true, .shared = false, .best_in_flight = kDiskPiecesMax};
}

Result<std::unique_ptr<Tier>> OpenDiskTier(const DiskTierOptions& options, const DiskTierDeps& deps) {
  if (options.bytes_max == 0) return Fail(Code::kInvalid, "disk: a cap of 0 bytes: say how much may be kept");
  std::unique_ptr<DiskIo> own_io;
  if (!deps.io) {
    auto opened = OpenDiskIo(options.io);
    if (!opened) return Fail(opened.error(), "disk");
    own_io = *std::move(opened);
  }
  auto tier = std::make_unique<DiskTier>(options, deps, std::move(own_io));
  if (Result<void> started = tier->Start(); !started) return tl::unexpected(started.error());
  return tier;
}

}  // namespace terrace
