#include "tier/shared_fs_tier.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <iterator>
#include <mutex>
#include <random>
#include <unordered_set>
#include <utility>

#include "base/hash.h"
#include "base/log.h"
#include "chunk/frame.h"
#include "chunk/name.h"
#include "tier/job_set.h"
#include "tier/shared_fs_dir.h"
#include "tier/shared_fs_index.h"
#include "tier/shared_fs_journal.h"

namespace terrace {
namespace {

constexpr const char* kTierName = "shared_fs";

// Saves wait for fsync, and more than two of them only share the same bandwidth.
constexpr size_t kSaveThreads = 2;

// Names proven in one step of the scan: at 1 ms each over NFS, journals wait 64 ms for the thread.
constexpr size_t kScanStepFrames = 64;

// Records that wait for a journal that can't be written, 8 MiB of them. Beyond, others learn of the frames by their own
// scans.
constexpr size_t kPendingRecordsMax = 65536;

constexpr std::chrono::minutes kCleanEvery{10};

// Unique among all processes, ever: host, process and random bits, since process ids return and containers share host
// names.
std::string NodeName() {
  char host[65] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  std::random_device random;
  char tail[40];
  std::snprintf(tail, sizeof tail, "-%d-%08x", static_cast<int>(getpid()), random());
  return EncodeName(host) + tail;
}

LoadResult Miss(Reason reason) { return {.outcome = Outcome::kMiss, .reason = reason}; }
SaveResult Declined(Reason reason) { return {.outcome = Outcome::kDeclined, .reason = reason}; }

class SharedFsTier final : public Tier {
 public:
  SharedFsTier(const SharedFsOptions& options, const SharedFsDeps& deps);
  ~SharedFsTier() override { Close(deps_.clock.Now()); }

  Result<void> Start();

  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override;
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override;
  void Erase(std::span<const Digest> keys) override;
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override;
  TierStats stats() const override;
  CloseReport Close(TimePoint deadline) override;

 private:
  LoadResult LoadOne(const LoadItem& item, TimePoint deadline, const LoadBatch& batch);
  SaveResult SaveOne(const SaveItem& item, const SaveBatch& batch);
  Result<SharedFsDir::Published> PublishOne(const std::string& temp, const FrameInfo& info);
  void EraseOne(const Digest& key);
  bool Erasing(const Digest& key);
  void SetAside(const Digest& key, const FrameProof& proof);
  bool MustStop() const;

  // On the background thread only (Start: before it begins; Close: after it ended).
  void Poll();
  Result<void> CheckDirectory();
  void EnterVolume(const std::string& id);
  void ReadJournals();
  void PostScanStep();
  void ScanStep();
  bool ScanNextDirectory();
  void ScanFrame(const Digest& key);
  void ResolveDoubt(const Digest& key);
  void FlushJournal();

  void Announce(JournalRecord::Kind kind, const FrameInfo& info);

  const SharedFsOptions options_;
  const SharedFsDeps deps_;
  const TierInfo info_;
  const std::string node_;
  Counter& load_failures_;
  Counter& save_failures_;
  SharedFsDir dir_;
  SharedFsIndex index_;

  std::atomic<bool> available_{false};    // Relaxed: a hint that saves doomed I/O; written by the background thread.
  std::atomic<bool> index_ready_{false};  // Relaxed: as above.
  std::atomic<bool> closing_{false};      // Relaxed: the job sets do the real closing.
  std::atomic<TimePoint::rep> stop_at_{
      TimePoint::max().time_since_epoch().count()};  // Relaxed: set by Close, asked between pieces.
  std::atomic<size_t> loads_in_flight_{0};           // Relaxed: a bound, not a hand-over.
  std::atomic<size_t> saves_queued_{0};
  std::atomic<uint64_t> abandoned_{0};  // Read after the job sets are closed.

  mutable std::mutex health_mutex_;
  std::string why_;              // Guarded by health_mutex_. Why it is not available.
  TimePoint unavailable_since_;  // Guarded by health_mutex_.

  std::mutex erasing_mutex_;
  std::unordered_set<Digest, DigestHash> erasing_;  // Guarded by erasing_mutex_. Erased, the file not yet removed.

  // The background thread's own.
  std::string volume_;
  JournalReader reader_;
  JournalWriter writer_;
  struct {
    bool running = false;
    bool listed = false;  // `directories` is what there is left of frames/.
    TimePoint begun;
    std::vector<size_t> directories;  // Not yet listed.
    std::vector<Digest> frames;       // Of the last one listed, not yet proven.
  } scan_;
  std::vector<Digest> doubted_;  // Said to be removed, and not yet looked for. As many as a poll reads records.
  bool scan_posted_ = false;
  TimePoint scan_at_, clean_at_;

  std::mutex journal_mutex_;
  std::vector<JournalRecord> pending_;  // Guarded by journal_mutex_.
  bool flush_posted_ = false;           // Guarded by journal_mutex_.
  TimePoint flushed_at_;                // Guarded by journal_mutex_.

  std::mutex close_mutex_;
  std::optional<CloseReport> close_report_;  // Guarded by close_mutex_.

  // Last, so that they end first.
  std::unique_ptr<ThreadPool> own_load_, own_save_, own_background_;
  JobSet loads_, saves_, background_;
};

SharedFsTier::SharedFsTier(const SharedFsOptions& options, const SharedFsDeps& deps)
    : options_(options),
      deps_(deps),
      info_{.name = kTierName, .durable = true, .shared = true, .best_in_flight = options.load_threads},
      node_(NodeName()),
      load_failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                             {{"tier", kTierName}, {"operation", "load"}})),
      save_failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                             {{"tier", kTierName}, {"operation", "save"}})),
      dir_({.root = options.directory,
            .node = node_,
            .file_permissions = options.file_permissions,
            .directory_permissions = options.directory_permissions,
            .quarantine_files_max = options.quarantine_files_max,
            .quarantine_bytes_max = options.quarantine_bytes_max},
           deps.io, deps.clock, deps.metrics),
      unavailable_since_(deps.clock.Now()),
      reader_(dir_.JournalDirectory(), node_, deps.io),
      writer_({.directory = dir_.JournalDirectory(), .node = node_, .permissions = options.file_permissions}, deps.io),
      own_load_(deps.load ? nullptr : std::make_unique<ThreadPool>("terrace-fs-load", options.load_threads)),
      own_save_(deps.save ? nullptr : std::make_unique<ThreadPool>("terrace-fs-save", kSaveThreads)),
      own_background_(deps.background ? nullptr : std::make_unique<ThreadPool>("terrace-fs-index", 1)),
      loads_(deps.load ? deps.load : own_load_.get()),
      saves_(deps.save ? deps.save : own_save_.get()),
      background_(deps.background ? deps.background : own_background_.get()) {}

Result<void> SharedFsTier::Start() {
  Result<void> there = CheckDirectory();
  if (!there && !options_.open_lazily) return there;
  background_.Add({.run = [this] { Poll(); }, .drop = [] {}});
  return {};
}

bool SharedFsTier::MustStop() const {
  return deps_.clock.Now().time_since_epoch().count() >= stop_at_.load(std::memory_order_relaxed);
}

void SharedFsTier::Contains(std::span<const Digest> keys, std::span<uint8_t> present) {
  const bool available = available_.load(std::memory_order_relaxed);
  for (size_t i = 0; i < keys.size(); ++i) present[i] = available && index_.Contains(keys[i]);
}

// ---- Loads

void SharedFsTier::Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (closing_.load(std::memory_order_relaxed)) {
      done->Settle(i, Miss(Reason::kUnavailable));
    } else if (loads_in_flight_.fetch_add(1, std::memory_order_relaxed) >= options_.load_queue_items_max) {
      loads_in_flight_.fetch_sub(1, std::memory_order_relaxed);
      done->Settle(i, Miss(Reason::kFull));
    } else {
      // A job an item: a batch begins in its order and spreads over the threads.
      loads_.Add({.run =
                      [this, i, deadline, done, item = std::move(items[i])] {
                        LoadResult result = LoadOne(item, deadline, *done);
                        loads_in_flight_.fetch_sub(1, std::memory_order_relaxed);
                        done->Settle(i, std::move(result));
                      },
                  .drop =
                      [this, i, done] {
                        loads_in_flight_.fetch_sub(1, std::memory_order_relaxed);
                        abandoned_.fetch_add(1, std::memory_order_relaxed);
                        done->Settle(i, Miss(Reason::kCancelled));
                      }});
    }
  }
}

LoadResult SharedFsTier::LoadOne(const LoadItem& item, TimePoint deadline, const LoadBatch& batch) {
  if (batch.cancelled()) return Miss(Reason::kCancelled);
  if (deps_.clock.Now() >= deadline) return Miss(Reason::kTimeout);
  if (!available_.load(std::memory_order_relaxed)) return Miss(Reason::kUnavailable);
  if (!index_.Contains(item.key)) {
    return Miss(index_ready_.load(std::memory_order_relaxed) ? Reason::kNotFound : Reason::kIndexLoading);
  }
  FrameProof proof = dir_.Read(
      item.key, item.space, item.into, [this] { return MustStop(); },
      [this](size_t parts, const std::function<void()>& work) {
        // Threads that have nothing else to do. If another load comes first, they find nothing left.
        const size_t busy = loads_in_flight_.load(std::memory_order_relaxed);
        const size_t idle = options_.load_threads - std::min(options_.load_threads, busy);
        for (size_t i = 0; i < std::min(idle, parts - 1); ++i) loads_.Add({.run = work, .drop = [] {}});
      });
  if (proof.set_aside) SetAside(item.key, proof);
  switch (proof.reason) {
    case Reason::kNone: {
      SegmentHashes hashes =
          proof.frame.segment_bytes == kSegmentBytes ? std::move(proof.frame.segments) : HashSegments(item.into);
      return {.outcome = Outcome::kHit,
              .reason = Reason::kNone,
              .info = proof.frame.info,
              .hashes = std::make_shared<const SegmentHashes>(std::move(hashes))};
    }
    case Reason::kUnavailable:
      load_failures_.Add();
      return {.outcome = Outcome::kFailed,
              .reason = Reason::kUnavailable,
              .error = Fail(*proof.error, "shared_fs: load " + item.key.Hex()).value()};
    case Reason::kCancelled: abandoned_.fetch_add(1, std::memory_order_relaxed); break;
    case Reason::kMissing:
    case Reason::kVersion: index_.Erase(item.key); break;
    default: break;
  }
  return Miss(proof.reason);
}

void SharedFsTier::SetAside(const Digest& key, const FrameProof& proof) {
  std::lock_guard lock(index_.names(key));
  if (!dir_.SetAside(key, proof.reason, proof.stat)) return;
  index_.Erase(key);
  Announce(JournalRecord::Kind::kRemoved, {.key = key});
}

// ---- Saves

void SharedFsTier::Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  for (size_t i = 0; i < items.size(); ++i) {
    if (closing_.load(std::memory_order_relaxed)) {
      done->Settle(i, Declined(Reason::kUnavailable));
    } else if (saves_queued_.fetch_add(1, std::memory_order_relaxed) >= options_.save_queue_items_max) {
      saves_queued_.fetch_sub(1, std::memory_order_relaxed);
      done->Settle(i, Declined(Reason::kFull));
    } else {
      saves_.Add({.run =
                      [this, i, done, item = std::move(items[i])] {
                        saves_queued_.fetch_sub(1, std::memory_order_relaxed);
                        done->Settle(i, SaveOne(item, *done));
                      },
                  .drop =
                      [this, i, done] {
                        saves_queued_.fetch_sub(1, std::memory_order_relaxed);
                        abandoned_.fetch_add(1, std::memory_order_relaxed);
                        done->Settle(i, Declined(Reason::kCancelled));
                      }});
    }
  }
}

SaveResult SharedFsTier::SaveOne(const SaveItem& item, const SaveBatch& batch) {
  if (batch.cancelled()) return Declined(Reason::kCancelled);
  if (!available_.load(std::memory_order_relaxed)) return Declined(Reason::kUnavailable);
  const FrameInfo& info = item.info;
  if (index_.Contains(info.key)) return {.outcome = Outcome::kHit, .existed = true};
  const auto failed = [&](Error error) -> SaveResult {
    save_failures_.Add();
    const Reason reason = error.code == Code::kFull ? Reason::kFull : Reason::kUnavailable;
    return {.outcome = Outcome::kFailed,
            .reason = reason,
            .error = Fail(std::move(error), "shared_fs: save " + info.key.Hex()).value()};
  };
  if (item.payload.size() != info.payload_bytes || item.payload.empty() ||
      item.payload.size() > kFramePayloadBytesMax) {
    return failed({Code::kInvalid, "a payload of " + std::to_string(item.payload.size()) + " bytes said to be " +
                                       std::to_string(info.payload_bytes)});
  }
  const auto temp = dir_.WriteTemp(info, item.payload, item.hashes.get(), [this] { return MustStop(); });
  if (!temp && temp.error().code == Code::kCancelled) {
    abandoned_.fetch_add(1, std::memory_order_relaxed);
    return Declined(Reason::kCancelled);
  }
  if (!temp) return failed(temp.error());
  const auto published = PublishOne(*temp, info);
  if (!published) return failed(published.error());
  if (*published == SharedFsDir::Published::kOtherVersion) return Declined(Reason::kVersion);
  return {.outcome = Outcome::kHit, .existed = *published == SharedFsDir::Published::kExisted};
}

Result<SharedFsDir::Published> SharedFsTier::PublishOne(const std::string& temp, const FrameInfo& info) {
  std::lock_guard lock(index_.names(info.key));
  EraseOne(info.key);  // If it was erased before this save, and the file not yet removed.
  Result<SharedFsDir::Published> published = dir_.Publish(temp, info.key);
  if (!published || *published == SharedFsDir::Published::kOtherVersion) return published;
  // Announced even if it existed: its writer may have died before it could.
  if (index_.Insert(info.key, FrameBytes(info.payload_bytes))) Announce(JournalRecord::Kind::kPublished, info);
  return published;
}

void SharedFsTier::Erase(std::span<const Digest> keys) {
  if (closing_.load(std::memory_order_relaxed)) return;
  {
    std::lock_guard lock(erasing_mutex_);
    erasing_.insert(keys.begin(), keys.end());
  }
  for (const Digest& key : keys) index_.Erase(key);
  saves_.Add({.run =
                  [this, erased = std::vector<Digest>(keys.begin(), keys.end())] {
                    for (const Digest& key : erased) {
                      std::lock_guard lock(index_.names(key));
                      EraseOne(key);
                    }
                  },
              .drop = [] {}});
}

bool SharedFsTier::Erasing(const Digest& key) {
  std::lock_guard lock(erasing_mutex_);
  return erasing_.contains(key);
}

// With the key's names lock held.
void SharedFsTier::EraseOne(const Digest& key) {
  {
    std::lock_guard lock(erasing_mutex_);
    if (erasing_.erase(key) == 0) return;
  }
  const Result<void> removed = dir_.Remove(key);
  if (!removed) log::Warn("shared_fs_erase_failed", {{"error", removed.error().what}});
  index_.Erase(key);  // The scan may have found it once more.
  Announce(JournalRecord::Kind::kRemoved, {.key = key});
}

// ---- Background: health, journals, scan

void SharedFsTier::Poll() {
  if (CheckDirectory()) {
    ReadJournals();
    FlushJournal();  // What an earlier flush could not write.
    const TimePoint now = deps_.clock.Now();
    const bool ready = index_ready_.load(std::memory_order_relaxed);
    if (!scan_.running && ready && now >= clean_at_) {
      clean_at_ = now + kCleanEvery;
      const Result<void> cleaned = dir_.RemoveStale(options_.stale_age);
      if (!cleaned) log::Warn("shared_fs_clean_failed", {{"error", cleaned.error().what}});
    }
    if (!scan_.running && (!ready || now >= scan_at_)) {
      // Only now, with the journals read: what is published from here on comes through them.
      scan_ = {.running = true, .begun = now};
      scan_at_ = now + options_.scan_interval;
      PostScanStep();
    }
  }
  background_.Add({.run = [this] { Poll(); }, .drop = [] {}}, options_.poll_interval);
}

Result<void> SharedFsTier::CheckDirectory() {
  const Result<std::string> id = dir_.Revisit();
  const bool was = available_.load(std::memory_order_relaxed);
  if (id) {
    if (*id != volume_) EnterVolume(*id);
    if (!was) log::Info("tier_available", {{"tier", kTierName}, {"directory", options_.directory}});
    available_.store(true, std::memory_order_relaxed);
    return {};
  }
  {
    std::lock_guard lock(health_mutex_);
    why_ = id.error().what;
    if (was) unavailable_since_ = deps_.clock.Now();
  }
  if (was) log::Warn("tier_unavailable", {{"tier", kTierName}, {"why", id.error().what}});
  available_.store(false, std::memory_order_relaxed);
  return tl::unexpected(id.error());
}

// First, or another one in the place of the one we knew: nothing known of that holds.
void SharedFsTier::EnterVolume(const std::string& id) {
  volume_ = id;
  index_ready_.store(false, std::memory_order_relaxed);
  index_.Clear();
  reader_.Reset();
  writer_.Rotate();
  scan_ = {};
  doubted_.clear();
  std::lock_guard lock(journal_mutex_);
  pending_.clear();
}

void SharedFsTier::ReadJournals() {
  const Result<void> read = reader_.Poll([this](const JournalRecord& record) {
    if (record.kind == JournalRecord::Kind::kRemoved) {
      // Not believed at once: it may be late, and somebody has written the frame anew meanwhile.
      if (index_.Contains(record.key)) doubted_.push_back(record.key);
    } else if (record.payload_bytes > 0 && record.payload_bytes <= kFramePayloadBytesMax) {
      index_.Insert(record.key, FrameBytes(record.payload_bytes));
    }
  });
  if (!read) log::Warn("shared_fs_poll_failed", {{"error", read.error().what}});
  if (!doubted_.empty()) PostScanStep();
}

void SharedFsTier::PostScanStep() {
  if (std::exchange(scan_posted_, true)) return;
  background_.Add({.run =
                       [this] {
                         scan_posted_ = false;
                         ScanStep();
                       },
                   .drop = [] {}});
}

// A bounded piece of the scan, so that journals are read meanwhile.
void SharedFsTier::ScanStep() {
  for (size_t i = 0; i < kScanStepFrames && !doubted_.empty(); ++i) {
    ResolveDoubt(doubted_.back());
    doubted_.pop_back();
  }
  if (!doubted_.empty()) return PostScanStep();
  if (!scan_.running) return;
  if (scan_.frames.empty() && !ScanNextDirectory()) return;
  for (size_t i = 0; i < kScanStepFrames && !scan_.frames.empty(); ++i) {
    ScanFrame(scan_.frames.back());
    scan_.frames.pop_back();
  }
  PostScanStep();
}

// False if the scan is over, or given up until the next poll begins it again.
bool SharedFsTier::ScanNextDirectory() {
  if (!std::exchange(scan_.listed, true)) {
    auto directories = dir_.ListFanOut();
    if (!directories) {
      scan_ = {};
      return false;
    }
    scan_.directories = *std::move(directories);
    // A journal may tell of a frame whose directory is gone.
    for (size_t i = 0; i < kFanOut; ++i) {
      if (!index_.Empty(i)) scan_.directories.push_back(i);
    }
    std::sort(scan_.directories.begin(), scan_.directories.end(), std::greater<>());
    scan_.directories.erase(std::unique(scan_.directories.begin(), scan_.directories.end()), scan_.directories.end());
  }
  if (scan_.directories.empty()) {
    const auto took = deps_.clock.Now() - scan_.begun;
    scan_ = {};
    if (index_ready_.exchange(true, std::memory_order_relaxed)) return false;
    log::Info("tier_index_ready", {{"tier", kTierName},
                                   {"frames", index_.frames()},
                                   {"bytes", index_.bytes()},
                                   {"took_ms", std::chrono::duration_cast<std::chrono::milliseconds>(took).count()}});
    return false;
  }
  const size_t fan_out = scan_.directories.back();
  scan_.directories.pop_back();
  // What is known is taken before the listing, so a frame that comes between the two is not held to be gone.
  std::vector<Digest> known = index_.Keys(fan_out);
  std::sort(known.begin(), known.end());
  auto listed = dir_.ListFrames(fan_out);
  if (!listed && !CheckDirectory()) {
    scan_ = {};
    return false;
  }
  if (!listed && listed.error().os_error == ENOENT) listed = std::vector<Digest>{};
  if (!listed) {
    log::Warn("shared_fs_directory_skipped", {{"error", listed.error().what}});
    return true;
  }
  // To prove: what is new, and what a journal told of and the listing does not have.
  std::set_symmetric_difference(known.begin(), known.end(), listed->begin(), listed->end(),
                                std::back_inserter(scan_.frames));
  return true;
}

// A listing says what is there; a look at the name alone might be answered from what an NFS client remembers.
void SharedFsTier::ResolveDoubt(const Digest& key) {
  std::lock_guard lock(index_.names(key));
  const auto listed = dir_.ListFrames(FanOutOf(key));
  const bool gone =
      listed ? !std::binary_search(listed->begin(), listed->end(), key) : listed.error().os_error == ENOENT;
  if (gone) index_.Erase(key);
}

void SharedFsTier::ScanFrame(const Digest& key) {
  const FrameProof proof = dir_.Prove(key);
  if (proof.reason == Reason::kNone) {
    index_.Insert(key, FrameBytes(proof.frame.info.payload_bytes));
  } else if (proof.reason == Reason::kMissing) {
    ResolveDoubt(key);
  } else if (proof.set_aside) {
    SetAside(key, proof);
  }  // Else it could not be read: a later scan sees.
}

// Any thread.
void SharedFsTier::Announce(JournalRecord::Kind kind, const FrameInfo& info) {
  std::chrono::milliseconds delay{0};
  {
    std::lock_guard lock(journal_mutex_);
    if (pending_.size() >= kPendingRecordsMax) return;
    pending_.push_back({.kind = kind,
                        .space = info.space,
                        .key = info.key,
                        .parent = info.parent,
                        .payload_bytes = info.payload_bytes,
                        .first_token = info.first_token,
                        .token_count = info.token_count});
    if (std::exchange(flush_posted_, true)) return;
    const auto wait = flushed_at_ + options_.flush_interval - deps_.clock.Now();
    delay = std::max(delay, std::chrono::ceil<std::chrono::milliseconds>(wait));
  }
  background_.Add({.run = [this] { FlushJournal(); }, .drop = [] {}}, delay);
}

void SharedFsTier::FlushJournal() {
  std::vector<JournalRecord> records;
  {
    std::lock_guard lock(journal_mutex_);
    records.swap(pending_);
    flush_posted_ = false;
    if (records.empty()) return;
    flushed_at_ = deps_.clock.Now();
  }
  const Result<void> written = writer_.Append(records);
  if (written) return;
  log::Warn("shared_fs_journal_failed", {{"error", written.error().what}, {"records", records.size()}});
  std::lock_guard lock(journal_mutex_);  // The next flush or poll tries again, in the same order.
  pending_.insert(pending_.begin(), records.begin(), records.end());
}

// ---- For people

Result<ScanPage> SharedFsTier::Scan(const std::string& cursor, size_t limit) {
  std::optional<Digest> after;
  if (!cursor.empty()) {
    after = Digest::FromHex(cursor);
    if (!after) return Fail(Code::kInvalid, "shared_fs: no cursor: " + cursor);
  }
  const auto directories = dir_.ListFanOut();
  if (!directories) return Fail(directories.error(), "shared_fs: scan");
  ScanPage page;
  for (const size_t fan_out : *directories) {
    if (after && fan_out < FanOutOf(*after)) continue;
    const auto keys = dir_.ListFrames(fan_out);
    if (!keys && keys.error().os_error == ENOENT) continue;
    if (!keys) return Fail(keys.error(), "shared_fs: scan");
    for (const Digest& key : *keys) {
      if ((after && key <= *after) || Erasing(key)) continue;
      FrameProof proof = dir_.Prove(key);
      if (proof.reason != Reason::kNone) continue;
      page.frames.push_back(proof.frame.info);
      if (page.frames.size() >= limit) {
        page.next = key.Hex();
        return page;
      }
    }
  }
  return page;
}

TierStats SharedFsTier::stats() const {
  TierStats stats{.frames = index_.frames(),
                  .bytes = index_.bytes(),
                  .quarantined = dir_.quarantined(),
                  .index_ready = index_ready_.load(std::memory_order_relaxed),
                  .available = available_.load(std::memory_order_relaxed)};
  if (!stats.available) {
    std::lock_guard lock(health_mutex_);
    const auto since = deps_.clock.Now() - unavailable_since_;
    stats.why =
        why_ + ", since " + std::to_string(std::chrono::duration_cast<std::chrono::seconds>(since).count()) + " s";
  }
  return stats;
}

CloseReport SharedFsTier::Close(TimePoint deadline) {
  std::lock_guard lock(close_mutex_);
  if (close_report_) return *close_report_;
  closing_.store(true, std::memory_order_relaxed);
  stop_at_.store(deadline.time_since_epoch().count(), std::memory_order_relaxed);
  saves_.Close(deadline);
  loads_.Close(deadline);
  background_.Close(TimePoint{});
  FlushJournal();
  const uint64_t abandoned = abandoned_.load(std::memory_order_relaxed);
  close_report_ = {.clean = abandoned == 0, .abandoned = abandoned};
  return *close_report_;
}

}  // namespace

Result<std::unique_ptr<Tier>> OpenSharedFsTier(const SharedFsOptions& options, const SharedFsDeps& deps) {
  auto tier = std::make_unique<SharedFsTier>(options, deps);
  if (auto started = tier->Start(); !started) return tl::unexpected(started.error());
  return tier;
}

}  // namespace terrace
