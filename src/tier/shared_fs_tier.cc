#include "tier/shared_fs_tier.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <functional>
#include <iterator>
#include <limits>
#include <map>
#include <mutex>
#include <random>
#include <set>
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
#include "tier/shared_fs_room.h"

namespace terrace {
namespace {

constexpr const char* kTierName = "shared_fs";

// Saves wait for fsync, and those that wait together share its cost: with 2 threads frames of 2 MiB are saved at 0.8 of
// the rate that they are with 8.
constexpr size_t kSaveThreads = 8;

// Of them, how many copy at a time: the engine that still fills RAM needs the cores, too.
constexpr size_t kCopiesMax = 2;

// Names proven in one step of the scan: at 1 ms each over NFS, journals wait 64 ms for the thread.
constexpr size_t kScanStepFrames = 64;

// Records that wait for a journal that can't be written, 8 MiB of them. Beyond, others learn of the frames by their own
// scans.
constexpr size_t kPendingRecordsMax = 65536;

constexpr std::chrono::minutes kCleanEvery{10};

// A save that waits, for room or for another node, looks again.
constexpr std::chrono::milliseconds kSaveRetry{20};

// Whether a frame got its name all the same is asked again.
constexpr std::chrono::seconds kLostRetry{1};

// Looking whether another node writes the same frame costs a listing, 1 ms over NFS; a frame of this size takes 80 ms
// and more. The wait is for 200 MB at 100 MB/s; then the other one is dead, or so slow that we may be faster.
constexpr size_t kShareWorkBytes = 8 << 20;
constexpr std::chrono::seconds kOthersWriteMax{2};

// Between two steps of a collection, of 64 frames each: 3,000 frames a second at most.
constexpr std::chrono::milliseconds kCollectPause{20};

// While saves wait for room, journals are read more often.
constexpr std::chrono::milliseconds kPollPressed{100};

// Room claimed beyond what is needed now: an eighth of what is free, so that others find the rest, and a claim costs an
// append of the journal only now and then.
constexpr uint64_t kSpareShare = 8;
constexpr uint64_t kSpareMax = 256ull << 20;

// More than any share has, and few enough that the sum of claims is right.
constexpr uint64_t kClaimMost = 1ull << 50;

// A claim that nobody needs any more is given back.
constexpr std::chrono::seconds kClaimIdle{1};

// The file server's clock was set back by more than it runs wrong.
constexpr int64_t kClockStepNs = 1'000'000'000;

// How long an answer to what time it is may take.
constexpr std::chrono::seconds kTimeAnswerMax{1};

// Uses wait so long for an append that is made anyway.
constexpr std::chrono::seconds kUsesWait{5};

// A record of an eviction that comes within this time of the word that its frame is there may be the older of the two.
constexpr int64_t kNewsOvertakeNs = 60'000'000'000;

// Journals are read one after the other, so the word that a frame has gone may come before the word that it is there.
constexpr std::chrono::seconds kGoneWait{60};
constexpr size_t kGoneMax = 65536;  // 4 MiB.

// One known frame is opened so often, and who removes files by hand is noticed soon, though not which.
constexpr std::chrono::seconds kLookEvery{5};
// Then a scan finds the others, so often at most.
constexpr std::chrono::seconds kRescanMin{60};

// Frames whose load failed and that are to be read before a save is told that they are there. Beyond, they stay.
constexpr size_t kUnreadableMax = 4096;

// So many frames, and no other, that can't be read each for itself: it is not each for itself.
constexpr size_t kUnreadableRow = 16;

// Files left open that are known one by one, 8 MiB of them. Beyond, each scan sees them for the first time.
constexpr size_t kLeftOpenMax = 65536;

constexpr int64_t kTimeUnknown = std::numeric_limits<int64_t>::min();

// Unique among all processes, ever: host, process and random bits, since process ids return and containers share host
// names.
std::string NodeName() {
  char host[65] = {};
  if (gethostname(host, sizeof host - 1) != 0) host[0] = '\0';
  std::random_device random;
  char tail[40];
  std::snprintf(tail, sizeof tail, "-%d-%08x", static_cast<int>(getpid()), random());
  return EncodeName(host).substr(0, 100) + tail;  // Names of files are made of it.
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
  Result<void> ProbeSave(uint64_t payload_bytes) override;
  void Erase(std::span<const Digest> keys) override;
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override;
  TierStats stats() const override;
  CloseReport Close(TimePoint deadline) override;

 private:
  LoadResult LoadOne(const LoadItem& item, TimePoint deadline, const LoadBatch& batch);
  // A save on its way: it may come back to its thread several times.
  struct PendingSave {
    SaveItem item;
    std::shared_ptr<SaveBatch> done;
    size_t index = 0;
    std::optional<TimePoint> room_until;    // It waits for room.
    uint64_t place = 0;                     // Among those who do.
    std::optional<TimePoint> others_until;  // It waits, or has waited, for another node that writes the same frame.
    std::optional<FrameProof> bad;          // What has its name can't be read, and makes way once this is written.
  };
  void PostSave(std::shared_ptr<PendingSave> save, std::chrono::milliseconds delay);
  void EndSave(PendingSave& save, SaveResult result);
  std::optional<SaveResult> SaveOne(PendingSave& save);    // Nothing: not yet.
  std::optional<SaveResult> KnownSave(PendingSave& save);  // Nothing: it is to be written.
  std::optional<SaveResult> OthersSave(PendingSave& save, bool& wait);
  bool HasRoom(PendingSave& save);
  SaveResult Write(const PendingSave& save);
  void NoteUnreadable(const Digest& key);
  bool IsUnreadable(const Digest& key);
  bool TakeUnreadable(const Digest& key);
  void LookForLost(const FrameInfo& info, uint64_t bytes,
                   std::chrono::milliseconds delay = std::chrono::milliseconds(0));
  SaveResult SaveFailed(const FrameInfo& info, Error error);
  bool Believe(const FrameInfo& info, int64_t used_ns);  // The frame is there. False if that was known.
  Result<SharedFsDir::Published> PublishOne(const std::string& temp, const FrameInfo& info, bool& left,
                                            bool& announced);
  void EraseOne(const Digest& key);
  bool Erasing(const Digest& key);
  void SetAside(const Digest& key, const FrameProof& proof);
  bool MustStop() const;
  int64_t ServerNs() const;
  int64_t NotAhead(int64_t time_ns) const;
  void NoteUse(const Digest& key);

  // On the background thread only (Start: before it begins; Close: after it ended).
  void Poll();
  Result<void> CheckDirectory();
  void EnterVolume(const std::string& id);
  bool ReadJournals();
  void NoteWhoWrote();
  void Hear(const JournalRecord& record);
  void Doubt(const Digest& key);
  void NoteGone(const Digest& key);
  bool IsGone(const Digest& key) const { return gone_.contains(key) || gone_before_.contains(key); }
  void PostScanStep();
  void ScanStep();
  bool ScanNextDirectory();
  bool ScanFrame(const Digest& key);  // False: the server did not answer.
  void ResolveDoubts(size_t fan_out, const std::vector<Digest>& keys);
  void EndScan();
  void LookAtLeftOpen(const std::string& path);
  void LookAtOne();
  void CountWhatTheDeadLeft();
  // With a bound, `claim` goes with it; without one, what is granted now.
  bool FlushJournal(std::optional<uint64_t> claim = std::nullopt);

  // Bounds.
  void LearnTime();
  void KeepBounds();
  void PostClaim();
  void ClaimRoom();
  void RenewClaim();
  void NoticeTheDead();
  bool IsAlive(std::string_view node) const;
  uint64_t OthersClaim() const;
  uint64_t Claimed() const { return OthersClaim() + claim_ + left_bytes_ + left_open_bytes_; }
  uint64_t NeededRoom() const;
  uint64_t RoomForUs();
  void PostCollect();

  void Announce(JournalRecord::Kind kind, const FrameInfo& info);

  const SharedFsOptions options_;
  const SharedFsDeps deps_;
  const TierInfo info_;
  const std::string node_;
  const SharedFsBounds bounds_;
  Counter& load_failures_;
  Counter& save_failures_;
  SharedFsDir dir_;
  SharedFsIndex index_;
  SharedFsRoom room_;

  std::atomic<int64_t> server_offset_ns_{kTimeUnknown};  // Relaxed: server time less steady time, for stamps.
  std::atomic<bool> claim_posted_{false};                // Relaxed: saves a posting.
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

  std::mutex unreadable_mutex_;
  std::unordered_set<Digest, DigestHash> unreadable_;  // Guarded by unreadable_mutex_.

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
    // Of the last one listed, not yet looked at: files that clients of the file system keep for who has them open.
    std::vector<std::string> left_open;
    std::map<std::string, TimePoint> left_open_since;  // Those looked at that are there, and when we saw them first.
    uint64_t left_open_bytes = 0;                      // Of them.
    std::set<std::string> dead;                        // Nodes that were dead when it began: it finds what they left.
  } scan_;
  // Said to be removed, and not yet looked for, by directory. As many as a poll reads records.
  std::map<size_t, std::vector<Digest>> doubted_;
  // Said to be gone while we did not know them, lately and before that.
  std::unordered_set<Digest, DigestHash> gone_, gone_before_;
  TimePoint gone_until_;
  SharedFsCollector collector_;
  bool collect_posted_ = false;
  struct Heard {
    uint64_t records = 0;  // So many of its journals were read.
    TimePoint at;          // When the last of them was new.
  };
  std::map<std::string, Heard, std::less<>> heard_;  // By node; those with a journal.
  TimePoint listened_at_;                            // When the journals were read last.
  std::set<std::string> dead_;  // Nodes that died with a claim. It holds until a scan has found what they left.
  uint64_t left_bytes_ = 0;     // Temporaries of the dead, when last looked.
  std::map<std::string, TimePoint> left_open_since_;  // By the last scan.
  uint64_t left_open_bytes_ = 0;                      // By the last scan.
  uint64_t claim_ = 0;                                // What our journal says.
  TimePoint appended_at_;                             // When the last append that succeeded began.
  TimePoint time_at_;                                 // When to ask for the server's time again.
  bool scan_posted_ = false;
  TimePoint scan_at_, clean_at_, look_at_;
  size_t looked_at_ = 0;             // Its directory.
  std::optional<Digest> seen_gone_;  // Looked at and not there; who removed it may have said so by the next look.

  std::mutex journal_mutex_;
  std::vector<JournalRecord> pending_;  // Guarded by journal_mutex_.
  std::vector<JournalRecord> uses_;     // Guarded by journal_mutex_. They go with the next append.
  TimePoint uses_since_;                // Guarded by journal_mutex_. Of the oldest of them.
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
      bounds_(options.bounds),
      load_failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                             {{"tier", kTierName}, {"operation", "load"}})),
      save_failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                             {{"tier", kTierName}, {"operation", "save"}})),
      dir_({.root = options.directory,
            .node = node_,
            .file_permissions = options.file_permissions,
            .directory_permissions = options.directory_permissions,
            .quarantine_files_max = options.quarantine_files_max,
            .quarantine_bytes_max = options.bounds.bytes_max == 0
                                        ? options.quarantine_bytes_max
                                        : std::min(options.quarantine_bytes_max, options.bounds.quarantine_bytes_max()),
            .copies_max = deps.save ? std::numeric_limits<size_t>::max() : kCopiesMax},
           deps.io, deps.clock, deps.metrics),
      room_(options.bounds.bytes_max > 0 ? options.bounds.frame_bytes_max() : std::numeric_limits<uint64_t>::max()),
      unavailable_since_(deps.clock.Now()),
      reader_(dir_.JournalDirectory(), node_, deps.io),
      writer_({.directory = dir_.JournalDirectory(), .node = node_, .permissions = options.file_permissions}, deps.io),
      collector_({.bounds = options.bounds, .lease_life = options.claim_life / 2}, dir_, index_, deps.clock,
                 deps.metrics),
      own_load_(deps.load ? nullptr : std::make_unique<ThreadPool>("terrace-fs-load", options.load_threads)),
      own_save_(deps.save ? nullptr : std::make_unique<ThreadPool>("terrace-fs-save", kSaveThreads)),
      own_background_(deps.background ? nullptr : std::make_unique<ThreadPool>("terrace-fs-index", 1)),
      loads_(deps.load ? deps.load : own_load_.get()),
      saves_(deps.save ? deps.save : own_save_.get()),
      background_(deps.background ? deps.background : own_background_.get()) {}

Result<void> SharedFsTier::Start() {
  if (options_.open_lazily) {
    // Not here: a mount whose server is gone may answer when it is back, and nobody waits for it.
    std::lock_guard lock(health_mutex_);
    why_ = "shared directory " + options_.directory + ": no answer yet";
  } else if (Result<void> there = CheckDirectory(); !there) {
    return there;
  }
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
      NoteUse(item.key);
      SegmentHashes hashes =
          proof.frame.segment_bytes == kSegmentBytes ? std::move(proof.frame.segments) : HashSegments(item.into);
      return {.outcome = Outcome::kHit,
              .reason = Reason::kNone,
              .info = proof.frame.info,
              .hashes = std::make_shared<const SegmentHashes>(std::move(hashes))};
    }
    case Reason::kUnavailable:
      load_failures_.Add();
      if (proof.unreadable) NoteUnreadable(item.key);
      return {.outcome = Outcome::kFailed,
              .reason = Reason::kUnavailable,
              .error = Fail(*proof.error, "shared_fs: load " + item.key.Hex()).value()};
    case Reason::kCancelled: abandoned_.fetch_add(1, std::memory_order_relaxed); break;
    case Reason::kMissing:
      // Removed by hand, or by somebody whose word is on its way. Others may have it in RAM and write it anew.
      if (index_.Erase(item.key)) Announce(JournalRecord::Kind::kRemoved, {.key = item.key});
      break;
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
      auto save = std::make_shared<PendingSave>();
      *save = {.item = std::move(items[i]), .done = done, .index = i};
      PostSave(std::move(save), std::chrono::milliseconds(0));
    }
  }
}

void SharedFsTier::PostSave(std::shared_ptr<PendingSave> save, std::chrono::milliseconds delay) {
  saves_.Add({.run =
                  [this, save] {
                    saves_queued_.fetch_sub(1, std::memory_order_relaxed);
                    if (std::optional<SaveResult> result = SaveOne(*save)) return EndSave(*save, *std::move(result));
                    saves_queued_.fetch_add(1, std::memory_order_relaxed);
                    PostSave(save, kSaveRetry);
                  },
              .drop =
                  [this, save] {
                    saves_queued_.fetch_sub(1, std::memory_order_relaxed);
                    abandoned_.fetch_add(1, std::memory_order_relaxed);
                    EndSave(*save, Declined(Reason::kCancelled));
                  }},
             delay);
}

void SharedFsTier::EndSave(PendingSave& save, SaveResult result) {
  if (save.room_until) room_.Unwant(save.place);
  save.done->Settle(save.index, std::move(result));
}

std::optional<SaveResult> SharedFsTier::SaveOne(PendingSave& save) {
  if (save.done->cancelled()) return Declined(Reason::kCancelled);
  if (!available_.load(std::memory_order_relaxed)) return Declined(Reason::kUnavailable);
  const SaveItem& item = save.item;
  const FrameInfo& info = item.info;
  if (!save.bad && (index_.Contains(info.key) || IsUnreadable(info.key))) {
    if (std::optional<SaveResult> result = KnownSave(save)) return result;
  }
  if (item.payload.size() != info.payload_bytes || item.payload.empty() ||
      item.payload.size() > kFramePayloadBytesMax) {
    return SaveFailed(info, {Code::kInvalid, "a payload of " + std::to_string(item.payload.size()) +
                                                 " bytes said to be " + std::to_string(info.payload_bytes)});
  }
  if (bounds_.any()) index_.Use(info.parent, ServerNs());  // So that no collector takes it now.
  bool wait = false;
  if (std::optional<SaveResult> result = OthersSave(save, wait); result || wait) return result;
  if (HasRoom(save)) return Write(save);
  const bool ready = index_ready_.load(std::memory_order_relaxed);
  const bool too_large = bounds_.bytes_max > 0 && FrameBytes(info.payload_bytes) > bounds_.frame_bytes_max();
  if (too_large) {
    log::Warn("shared_fs_bound_too_small",
              {{"frame_bytes", FrameBytes(info.payload_bytes)}, {"bytes_max", bounds_.bytes_max}});
  }
  if (too_large || deps_.clock.Now() >= *save.room_until) {
    return Declined(ready ? Reason::kFull : Reason::kIndexLoading);
  }
  if (!closing_.load(std::memory_order_relaxed)) return std::nullopt;
  abandoned_.fetch_add(1, std::memory_order_relaxed);
  return Declined(Reason::kCancelled);
}

// Its name is taken, as far as is known. What could not be read is read again, as a load would: right, it stays; else
// it makes way. Twice, since one error says little, and others may read it.
std::optional<SaveResult> SharedFsTier::KnownSave(PendingSave& save) {
  const SaveItem& item = save.item;
  const Digest& key = item.info.key;
  if (TakeUnreadable(key)) {
    std::vector<std::byte> into(item.payload.size());
    const FrameProof proof = dir_.Read(key, item.info.space, into, [this] { return MustStop(); }, {});
    switch (proof.reason) {
      case Reason::kNone: Believe(proof.frame.info, proof.stat.mtime_ns); break;
      case Reason::kForeign: break;
      case Reason::kCancelled: return Declined(Reason::kCancelled);
      case Reason::kMissing:
      case Reason::kVersion: index_.Erase(key); return std::nullopt;
      case Reason::kUnavailable:
        if (!proof.unreadable) return SaveFailed(item.info, *proof.error);
        save.bad = proof;
        return std::nullopt;
      default:
        SetAside(key, proof);
        if (!index_.Contains(key)) return std::nullopt;
    }
  }
  NoteUse(key);
  return SaveResult{.outcome = Outcome::kHit, .existed = true};
}

void SharedFsTier::NoteUnreadable(const Digest& key) {
  std::lock_guard lock(unreadable_mutex_);
  if (unreadable_.size() < kUnreadableMax) unreadable_.insert(key);
}

bool SharedFsTier::IsUnreadable(const Digest& key) {
  std::lock_guard lock(unreadable_mutex_);
  return unreadable_.contains(key);
}

bool SharedFsTier::TakeUnreadable(const Digest& key) {
  std::lock_guard lock(unreadable_mutex_);
  return unreadable_.erase(key) > 0;
}

// If another node is at the same frame, waits for it instead of writing all of it once more. What it does not finish,
// because it died, we write.
std::optional<SaveResult> SharedFsTier::OthersSave(PendingSave& save, bool& wait) {
  const FrameInfo& info = save.item.info;
  const TimePoint now = deps_.clock.Now();
  if (info.payload_bytes < kShareWorkBytes || save.room_until) return std::nullopt;
  if (save.others_until && now >= *save.others_until) return std::nullopt;
  if (!closing_.load(std::memory_order_relaxed) && dir_.OthersWrite(info.key)) {
    if (!save.others_until) save.others_until = now + kOthersWriteMax;
    wait = true;
    return std::nullopt;
  }
  if (!save.others_until) return std::nullopt;
  save.others_until = now;  // Gone: this look is the last.
  const FrameProof proof = dir_.Prove(info.key);
  if (proof.reason != Reason::kNone) return std::nullopt;
  Believe(info, proof.stat.mtime_ns);
  return SaveResult{.outcome = Outcome::kHit, .existed = true};
}

bool SharedFsTier::HasRoom(PendingSave& save) {
  if (!bounds_.of_bytes()) return true;
  const uint64_t bytes = FrameBytes(save.item.info.payload_bytes);
  const TimePoint now = deps_.clock.Now();
  if (save.room_until ? room_.Take(bytes, now, save.place) : room_.Take(bytes, now)) {
    if (std::exchange(save.room_until, std::nullopt)) room_.Unwant(save.place);
    return true;
  }
  if (!save.room_until) {
    save.room_until = now + options_.room_wait;
    save.place = room_.Want(bytes);
    if (!claim_posted_.exchange(true, std::memory_order_relaxed)) PostClaim();
  }
  return false;
}

// With room for it.
SaveResult SharedFsTier::Write(const PendingSave& save) {
  const SaveItem& item = save.item;
  const FrameInfo& info = item.info;
  const uint64_t bytes = bounds_.of_bytes() ? FrameBytes(info.payload_bytes) : 0;
  bool left = false;  // Then RemoveLeft gives the room back.
  const auto temp = dir_.WriteTemp(info, item.payload, item.hashes.get(), [this] { return MustStop(); }, left);
  if (!temp) {
    if (!left) room_.GiveBack(bytes);
    if (temp.error().code != Code::kCancelled) return SaveFailed(info, temp.error());
    abandoned_.fetch_add(1, std::memory_order_relaxed);
    return Declined(Reason::kCancelled);
  }
  if (save.bad) SetAside(info.key, *save.bad);
  bool announced = false;
  const auto published = PublishOne(*temp, info, left, announced);
  if (!published) {
    if (dir_.Prove(info.key).unreadable) NoteUnreadable(info.key);  // For the next save.
    LookForLost(info, left ? 0 : bytes);
    return SaveFailed(info, published.error());
  }
  // After its record was queued. One that existed may be our own, given its name by a call whose answer was lost.
  if (*published == SharedFsDir::Published::kNew || (announced && !left)) {
    room_.Published(bytes);
  } else if (!left) {
    room_.GiveBack(bytes);
  }
  if (*published == SharedFsDir::Published::kOtherVersion) return Declined(Reason::kVersion);
  return {.outcome = Outcome::kHit, .existed = *published == SharedFsDir::Published::kExisted};
}

// It may have got its name all the same: then it is as any other that was published. Its room is kept until that is
// known.
void SharedFsTier::LookForLost(const FrameInfo& info, uint64_t bytes, std::chrono::milliseconds delay) {
  background_.Add({.run =
                       [this, info, bytes] {
                         if (!CheckDirectory() || !ScanFrame(info.key)) return LookForLost(info, bytes, kLostRetry);
                         if (!index_.Contains(info.key)) return room_.GiveBack(bytes);
                         Announce(JournalRecord::Kind::kPublished, info);
                         room_.Published(bytes);
                       },
                   .drop = [] {}},
                  delay);
}

SaveResult SharedFsTier::SaveFailed(const FrameInfo& info, Error error) {
  save_failures_.Add();
  const Reason reason = error.code == Code::kFull ? Reason::kFull : Reason::kUnavailable;
  return {.outcome = Outcome::kFailed,
          .reason = reason,
          .error = Fail(std::move(error), "shared_fs: save " + info.key.Hex()).value()};
}

Result<SharedFsDir::Published> SharedFsTier::PublishOne(const std::string& temp, const FrameInfo& info, bool& left,
                                                        bool& announced) {
  std::lock_guard lock(index_.names(info.key));
  EraseOne(info.key);  // If it was erased before this save, and the file not yet removed.
  Result<SharedFsDir::Published> published = dir_.Publish(temp, info, left);
  if (!published || *published == SharedFsDir::Published::kOtherVersion) return published;
  // Announced even if it existed: its writer may have died before it could. And even if it was known: others may know
  // that it was gone for a while.
  announced = Believe(info, ServerNs()) || *published == SharedFsDir::Published::kNew;
  if (announced) Announce(JournalRecord::Kind::kPublished, info);
  return published;
}

bool SharedFsTier::Believe(const FrameInfo& info, int64_t used_ns) {
  used_ns = NotAhead(used_ns);
  if (bounds_.any()) index_.Use(info.parent, used_ns);
  return index_.Insert(
      info.key,
      {.file_bytes = FrameBytes(info.payload_bytes), .parent = info.parent, .used_ns = used_ns, .told_ns = ServerNs()});
}

// No file and no journal tells of a time to come. A clock that was ahead did, and what was used then would stay for
// ever.
int64_t SharedFsTier::NotAhead(int64_t time_ns) const {
  const int64_t now_ns = ServerNs();
  return now_ns == 0 ? time_ns : std::min(time_ns, now_ns);
}

// The file server's time, 0 while it is not known.
int64_t SharedFsTier::ServerNs() const {
  const int64_t offset = server_offset_ns_.load(std::memory_order_relaxed);
  if (offset == kTimeUnknown) return 0;
  return std::chrono::nanoseconds(deps_.clock.Now().time_since_epoch()).count() + offset;
}

// Others hear of it with a later append.
void SharedFsTier::NoteUse(const Digest& key) {
  if (!bounds_.any()) return;
  const int64_t now_ns = ServerNs();
  // In time for what goes by age.
  const std::chrono::nanoseconds every =
      bounds_.ttl.count() > 0 ? std::min(options_.use_interval, bounds_.ttl / 4) : options_.use_interval;
  if (!index_.UseAndNote(key, now_ns, every.count())) return;
  std::lock_guard lock(journal_mutex_);
  if (uses_.size() >= kPendingRecordsMax) return;
  if (uses_.empty()) uses_since_ = deps_.clock.Now();
  uses_.push_back({.kind = JournalRecord::Kind::kUsed, .key = key, .time_ns = now_ns});
}

Result<void> SharedFsTier::ProbeSave(uint64_t payload_bytes) {
  if (!available_.load(std::memory_order_relaxed)) return Fail(Code::kUnavailable, stats().why);
  return dir_.ProbeSave(FrameBytes(payload_bytes));
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
    LearnTime();
    ReadJournals();
    FlushJournal();  // What an earlier flush could not write.
    const uint64_t removed = dir_.RemoveLeft();
    if (bounds_.of_bytes()) room_.GiveBack(removed);
    KeepBounds();
    const TimePoint now = deps_.clock.Now();
    const bool ready = index_ready_.load(std::memory_order_relaxed);
    if (!scan_.running && ready && now >= clean_at_) {
      clean_at_ = now + kCleanEvery;
      const Result<void> cleaned = dir_.RemoveStale(options_.stale_age);
      if (!cleaned) log::Warn("shared_fs_clean_failed", {{"error", cleaned.error().what}});
      CountWhatTheDeadLeft();
    }
    if (!scan_.running && ready && now >= look_at_) {
      look_at_ = now + kLookEvery;
      LookAtOne();
    }
    if (!scan_.running && (!ready || now >= scan_at_)) {
      // Only now, with the journals read: what is published from here on comes through them.
      scan_ = {.running = true, .begun = now, .dead = dead_};
      scan_at_ = now + options_.scan_interval;
      PostScanStep();
    }
  }
  const bool pressed = bounds_.of_bytes() && (room_.wanted() || collector_.NearFull(Claimed()));
  background_.Add({.run = [this] { Poll(); }, .drop = [] {}},
                  pressed ? std::min(options_.poll_interval, kPollPressed) : options_.poll_interval);
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
  gone_.clear();
  gone_before_.clear();
  collector_.Reset();
  server_offset_ns_.store(kTimeUnknown, std::memory_order_relaxed);
  time_at_ = {};
  heard_.clear();
  dead_.clear();
  left_bytes_ = left_open_bytes_ = 0;
  left_open_since_.clear();
  claim_ = 0;
  room_.Grant(0, TimePoint{}, {});
  std::lock_guard lock(journal_mutex_);
  pending_.clear();
  uses_.clear();
}

// False if something that others wrote may not have been heard.
bool SharedFsTier::ReadJournals() {
  const Result<void> read = reader_.Poll([this](const JournalRecord& record) { Hear(record); });
  if (!read) log::Warn("shared_fs_poll_failed", {{"error", read.error().what}});
  if (!doubted_.empty()) PostScanStep();
  if (read) NoteWhoWrote();
  return read && reader_.heard_all();
}

void SharedFsTier::NoteWhoWrote() {
  listened_at_ = deps_.clock.Now();
  std::erase_if(heard_, [this](const auto& heard) { return !reader_.peers().contains(heard.first); });
  for (const auto& [node, peer] : reader_.peers()) {
    const auto [heard, is_new] = heard_.try_emplace(node);
    if (!is_new && heard->second.records == peer.records) continue;
    heard->second = {peer.records, listened_at_};
    // So that a claim left behind need not hold once more for each node that starts. If it was not, the next record
    // says so.
    if (is_new && ServerNs() != 0 && LeftBehind(peer.written_ns, ServerNs())) heard->second.at -= options_.claim_life;
  }
}

void SharedFsTier::Hear(const JournalRecord& record) {
  switch (record.kind) {
    case JournalRecord::Kind::kPublished:
      if (record.payload_bytes == 0 || record.payload_bytes > kFramePayloadBytesMax) return;
      Believe({.key = record.key, .parent = record.parent, .payload_bytes = record.payload_bytes},
              record.time_ns != 0 ? record.time_ns : ServerNs());
      if (IsGone(record.key)) Doubt(record.key);
      return;
    case JournalRecord::Kind::kUsed: return index_.Use(record.key, NotAhead(record.time_ns));
    case JournalRecord::Kind::kEvicted: {
      // Believed, but if it may have been overtaken by the word of a frame written anew. A listing for each frame that
      // goes would be dear, and what the first scan finds it finds anyway.
      const auto entry = index_.Find(record.key);
      if (!entry) return NoteGone(record.key);
      if (!index_ready_.load(std::memory_order_relaxed) || ServerNs() - entry->told_ns > kNewsOvertakeNs) {
        index_.Erase(record.key);
        return;
      }
      break;
    }
    default: break;
  }
  // Not believed at once: it may be late, and somebody has written the frame anew meanwhile.
  if (index_.Contains(record.key)) return Doubt(record.key);
  NoteGone(record.key);
}

void SharedFsTier::Doubt(const Digest& key) { doubted_[FanOutOf(key)].push_back(key); }

void SharedFsTier::NoteGone(const Digest& key) {
  if (const TimePoint now = deps_.clock.Now(); now >= gone_until_ || gone_.size() >= kGoneMax) {
    gone_before_ = std::exchange(gone_, {});
    gone_until_ = now + kGoneWait;
  }
  gone_.insert(key);
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
    const auto directory = doubted_.extract(doubted_.begin());
    ResolveDoubts(directory.key(), directory.mapped());
  }
  if (!doubted_.empty()) return PostScanStep();
  if (!scan_.running) return;
  for (size_t i = 0; i < kScanStepFrames && !scan_.left_open.empty(); ++i) {
    LookAtLeftOpen(scan_.left_open.back());
    scan_.left_open.pop_back();
  }
  if (!scan_.left_open.empty()) return PostScanStep();
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
    EndScan();
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
  auto listed = dir_.ListFrames(fan_out, &scan_.left_open);
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
void SharedFsTier::ResolveDoubts(size_t fan_out, const std::vector<Digest>& keys) {
  std::lock_guard lock(index_.names(keys.front()));  // All of one directory.
  const auto listed = dir_.ListFrames(fan_out);
  if (!listed && (listed.error().os_error != ENOENT || !CheckDirectory())) return;  // Unmounted, everything is gone.
  for (const Digest& key : keys) {
    if (!listed || !std::binary_search(listed->begin(), listed->end(), key)) index_.Erase(key);
  }
}

bool SharedFsTier::ScanFrame(const Digest& key) {
  const FrameProof proof = dir_.Prove(key);
  if (proof.reason == Reason::kNone) {
    Believe(proof.frame.info, proof.stat.mtime_ns);
  } else if (proof.reason == Reason::kMissing) {
    ResolveDoubts(FanOutOf(key), {key});
  } else if (proof.set_aside) {
    SetAside(key, proof);
  }  // Else it could not be read: a later scan sees.
  return proof.reason != Reason::kUnavailable || proof.unreadable;
}

// It may be read still, for as long as a load takes. What was there for long belongs to a client that died with it.
void SharedFsTier::LookAtLeftOpen(const std::string& path) {
  const TimePoint now = deps_.clock.Now();
  const auto before = left_open_since_.find(path);
  const TimePoint since = before == left_open_since_.end() ? now : before->second;
  const Result<uint64_t> bytes = dir_.LeftOpenBytes(path, now - since >= options_.stale_age);
  if (!bytes || *bytes == 0) return;
  scan_.left_open_bytes += *bytes;
  if (scan_.left_open_since.size() < kLeftOpenMax) scan_.left_open_since.emplace(path, since);
}

// A known frame, of another directory each time. If it is gone, and by the next look nobody has said so, others may be
// gone too.
void SharedFsTier::LookAtOne() {
  if (const std::optional<Digest> gone = std::exchange(seen_gone_, std::nullopt)) {
    if (!index_.Contains(*gone)) return;
    ScanFrame(*gone);
    const TimePoint began = scan_at_ - options_.scan_interval;  // The last scan.
    if (!index_.Contains(*gone)) scan_at_ = std::min(scan_at_, began + kRescanMin);
    return;
  }
  for (size_t i = 0; i < kFanOut; ++i) {
    looked_at_ = (looked_at_ + 1) % kFanOut;
    if (index_.Empty(looked_at_)) continue;
    const Digest key = index_.Keys(looked_at_).front();
    if (dir_.IsGone(key)) seen_gone_ = key;
    return;
  }
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

bool SharedFsTier::FlushJournal(std::optional<uint64_t> claim) {
  std::vector<JournalRecord> records;
  size_t news = 0;
  uint64_t told = 0;
  const TimePoint begun = deps_.clock.Now();
  {
    std::lock_guard lock(journal_mutex_);
    flush_posted_ = false;
    const bool uses_due = !uses_.empty() && begun >= uses_since_ + kUsesWait;
    if (!claim && pending_.empty() && !uses_due) return true;
    flushed_at_ = begun;
    told = room_.TakeUntold();
    records.swap(pending_);
    news = records.size();
    records.insert(records.end(), uses_.begin(), uses_.end());
    uses_.clear();
  }
  const uint64_t claims = claim ? room_.Limit(*claim) : room_.granted();
  if (bounds_.any()) {
    // First, since it gives the others their time. So what goes out with it counts in it once more.
    records.insert(records.begin(),
                   {.kind = JournalRecord::Kind::kNode, .payload_bytes = claims, .time_ns = ServerNs()});
  }
  const Result<void> written = writer_.Append(records);
  if (written) {
    claim_ = claims;
    appended_at_ = begun;
    room_.Told(told, begun, options_.claim_life / 2);
    return true;
  }
  log::Warn("shared_fs_journal_failed", {{"error", written.error().what}, {"records", records.size()}});
  room_.NotTold(told);
  claim_ = std::max(claim_, claims);     // Part of it may be there.
  std::lock_guard lock(journal_mutex_);  // The next flush or poll tries again, in the same order.
  const auto first = records.begin() + (bounds_.any() ? 1 : 0);
  pending_.insert(pending_.begin(), first, first + static_cast<ptrdiff_t>(news));
  return false;
}

// ---- Bounds

void SharedFsTier::LearnTime() {
  const TimePoint begun = deps_.clock.Now();
  if (!bounds_.any() || begun < time_at_) return;
  const Result<int64_t> server = dir_.ServerNow();
  const TimePoint now = deps_.clock.Now();
  // The file got its time somewhere between the two. After a slow answer nobody knows where: for who adds a minute of
  // waiting to the server's time, others are dead and frames are old that are not. The next poll asks again.
  if (!server || now - begun > kTimeAnswerMax) return;
  time_at_ = now + kCleanEvery;
  const int64_t offset = *server - std::chrono::nanoseconds(now.time_since_epoch()).count();
  const int64_t before = server_offset_ns_.exchange(offset, std::memory_order_relaxed);
  if (before != kTimeUnknown && before - offset > kClockStepNs) index_.NotAfter(*server);
}

void SharedFsTier::KeepBounds() {
  const bool knows_time = server_offset_ns_.load(std::memory_order_relaxed) != kTimeUnknown;
  if (!bounds_.any() || !knows_time || !index_ready_.load(std::memory_order_relaxed)) return;
  NoticeTheDead();
  RenewClaim();
  if (collector_.Tick(ServerNs(), Claimed())) PostCollect();
  if (room_.wanted()) ClaimRoom();
}

void SharedFsTier::PostClaim() {
  background_.Add({.run =
                       [this] {
                         claim_posted_.store(false, std::memory_order_relaxed);
                         if (available_.load(std::memory_order_relaxed)) KeepBounds();
                       },
                   .drop = [] {}});
}

bool SharedFsTier::IsAlive(std::string_view node) const {
  if (node == node_) return true;
  const auto heard = heard_.find(node);
  return heard != heard_.end() && listened_at_ - heard->second.at < options_.claim_life;
}

// A claim of the dead holds until a scan has found what they published and could not tell of.
void SharedFsTier::NoticeTheDead() {
  for (const auto& [node, peer] : reader_.peers()) {
    if (peer.claimed_bytes == 0 || IsAlive(node) || !dead_.insert(node).second) continue;
    log::Info("shared_fs_node_gone", {{"node", node}, {"claimed_bytes", peer.claimed_bytes}});
    scan_at_ = deps_.clock.Now();
  }
}

void SharedFsTier::EndScan() {
  // Not by what was read before the scan, which may have hung for long.
  const bool heard = scan_.dead.empty() || ReadJournals();
  for (const std::string& node : scan_.dead) {
    if (heard && !IsAlive(node)) reader_.Forget(node);
    dead_.erase(node);
  }
  left_open_since_ = std::move(scan_.left_open_since);
  left_open_bytes_ = scan_.left_open_bytes;
  scan_ = {};
  CountWhatTheDeadLeft();
}

void SharedFsTier::CountWhatTheDeadLeft() {
  if (!bounds_.of_bytes()) return;
  const auto bytes = dir_.TempBytes([this](std::string_view node) { return !IsAlive(node); });
  if (bytes) left_bytes_ = *bytes;
}

uint64_t SharedFsTier::OthersClaim() const {
  uint64_t bytes = 0;
  for (const auto& [node, peer] : reader_.peers()) bytes += std::min(peer.claimed_bytes, kClaimMost);
  return bytes;
}

uint64_t SharedFsTier::NeededRoom() const {
  const auto claims = [](const auto& peer) { return peer.second.claimed_bytes > 0; };
  return room_.Needed(1 + static_cast<uint64_t>(std::ranges::count_if(reader_.peers(), claims)));
}

// What we may have under way, by all bounds, as far as we know.
uint64_t SharedFsTier::RoomForUs() {
  const auto less = [](uint64_t all, uint64_t taken) { return all - std::min(all, taken); };
  const uint64_t others = OthersClaim() + left_bytes_ + left_open_bytes_;
  uint64_t room = std::numeric_limits<uint64_t>::max();
  if (bounds_.bytes_max > 0) room = less(bounds_.frame_bytes_max(), index_.bytes() + others);
  if (bounds_.free_bytes_min > 0) {
    const auto space = dir_.FreeSpace();
    room = std::min(room, space ? less(space->free_bytes, bounds_.free_bytes_min + others) : 0);
  }
  return room;
}

// See shared_fs_room.h: claim, then look.
void SharedFsTier::ClaimRoom() {
  const auto lasts = options_.claim_life / 2;
  const uint64_t needed = NeededRoom();
  const uint64_t room = RoomForUs();
  const uint64_t spare = room > needed ? std::min((room - needed) / kSpareShare, kSpareMax) : 0;
  const bool fresh = deps_.clock.Now() < appended_at_ + lasts / 2;
  if (!fresh || claim_ < needed || claim_ > std::max(room, needed)) {
    if (!FlushJournal(needed + spare)) return;
  }
  if (!ReadJournals()) return;
  if (claim_ > needed && claim_ > RoomForUs() && !FlushJournal(needed)) return;
  room_.Grant(std::min(claim_, RoomForUs()), appended_at_, lasts);
}

// While saves are in flight; a claim that is not needed is given back.
void SharedFsTier::RenewClaim() {
  if (claim_ == 0) return;
  const auto age = deps_.clock.Now() - appended_at_;
  if (NeededRoom() == 0 && age >= kClaimIdle) {
    FlushJournal(0);
  } else if (age >= options_.claim_life / 4) {
    FlushJournal(room_.granted());
  }
}

// A few frames at a time, so that journals are read and loads find the server meanwhile.
void SharedFsTier::PostCollect() {
  if (std::exchange(collect_posted_, true)) return;
  background_.Add({.run =
                       [this] {
                         collect_posted_ = false;
                         const bool more = collector_.Step([this](const Digest& key) {
                           NoteGone(key);  // A scan may have found it before its writer could tell of it.
                           Announce(JournalRecord::Kind::kEvicted, {.key = key});
                         });
                         FlushJournal();  // Others may wait for it.
                         if (more) return PostCollect();
                         KeepBounds();
                       },
                   .drop = [] {}},
                  kCollectPause);
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
  size_t unreadable = 0;
  for (const size_t fan_out : *directories) {
    if (after && fan_out < FanOutOf(*after)) continue;
    const auto keys = dir_.ListFrames(fan_out);
    if (!keys && keys.error().os_error == ENOENT) continue;
    if (!keys) return Fail(keys.error(), "shared_fs: scan");
    for (const Digest& key : *keys) {
      if ((after && key <= *after) || Erasing(key)) continue;
      FrameProof proof = dir_.Prove(key);
      // The server, and not this frame; or all of them: whoever probes has to hear of it.
      const bool failed = proof.reason == Reason::kUnavailable;
      if (failed && (!proof.unreadable || (++unreadable >= kUnreadableRow && page.frames.empty() && !after))) {
        return Fail(*proof.error, "shared_fs: scan");
      }
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
                  .bytes = index_.bytes() + room_.writing(),
                  .bytes_max = bounds_.bytes_max,
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
  if (claim_ > 0) FlushJournal(0);
  if (available_.load(std::memory_order_relaxed)) collector_.Close();
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
