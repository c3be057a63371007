#include "tier/s3_tier.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/handover.h"
#include "base/log.h"
#include "chunk/frame.h"
#include "s3/check.h"
#include "tier/s3_frame.h"
#include "tier/s3_index.h"
#include "tier/s3_listing.h"
#include "tier/s3_names.h"
#include "tier/s3_probes.h"

namespace terrace {
namespace {

using s3::Failure;
using s3::ObjectInfo;
using s3::Trouble;

constexpr const char* kTierName = "s3";
constexpr size_t kScanPageMax = 256;  // Each name costs a read of its header.
constexpr std::chrono::seconds kScanTimeout{20};
constexpr std::chrono::seconds kUploadsEvery{6 * 3600};
constexpr int kSaveLooksMax = 3;  // Looks at what stands in a save's way.

LoadResult Miss(Reason reason) { return {.outcome = Outcome::kMiss, .reason = reason}; }
SaveResult Declined(Reason reason) { return {.outcome = Outcome::kDeclined, .reason = reason}; }

class S3Tier final : public Tier {
 public:
  S3Tier(std::unique_ptr<s3::ObjectStore> store, const S3TierOptions& options, const S3TierDeps& deps);
  ~S3Tier() override { Close(deps_.clock.Now()); }

  Result<void> Start();

  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override;
  void Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) override;
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override;
  void Erase(std::span<const Digest> keys) override;
  Result<void> ProbeSave(uint64_t payload_bytes) override;
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override;
  TierStats stats() const override;
  CloseReport Close(TimePoint deadline) override;

 private:
  struct Loading;
  struct Saving;
  struct Scanning;
  using LoadingPtr = std::shared_ptr<Loading>;
  using ScanningPtr = std::shared_ptr<Scanning>;
  using SavingPtr = std::shared_ptr<Saving>;

  std::unique_ptr<S3Collector> MakeCollector();

  // An operation that Close waits for. Any thread. False: the tier is closing.
  bool Begin();
  void End();

  // The store's thread alone, from here on.
  void StartLoad(const LoadingPtr& loading);
  void ReadFrame(const LoadingPtr& loading, size_t parts);
  void PartEnded(const LoadingPtr& loading, size_t part, const Failure& failure, const ObjectInfo& info);
  void FrameEnded(const LoadingPtr& loading);
  void SettleLoad(const LoadingPtr& loading, LoadResult result);

  // Changes of one key go one after the other.
  void Lock(const Digest& key, Task task);
  void Unlock(const Digest& key);

  void StartSave(const SavingPtr& saving);
  void Inspect(const SavingPtr& saving);
  void Write(const SavingPtr& saving, bool only_if_absent);
  void SettleSave(const SavingPtr& saving, SaveResult result);
  void FailSave(const SavingPtr& saving, const Failure& failure);

  using Erased = std::function<void(const Failure&)>;
  void EraseOne(const Digest& key, const Erased& erased = {});
  void Collect(const Digest& key, const Erased& erased);
  void SetAside(const Digest& key, Reason reason);

  void ScanNext(const ScanningPtr& scanning);
  void ScanOneLess(const ScanningPtr& scanning);

  void CollectUploads();
  // The header of an object, as far as it has one, to `done`.
  using Header = std::function<void(const Failure& failure, uint64_t total, std::span<const std::byte> header)>;
  void ReadHeader(const Digest& key, TimePoint deadline, Header done);

  TimePoint Now() const { return deps_.clock.Now(); }

  const std::unique_ptr<s3::ObjectStore> store_;
  const S3TierOptions options_;
  const S3TierDeps deps_;
  const TierInfo info_;
  const S3Names names_;
  Counter& load_failures_;
  Counter& save_failures_;
  S3Index index_;

  std::atomic<uint64_t> quarantined_{0};  // Relaxed, as all here: counts.
  std::atomic<size_t> loads_{0};
  std::atomic<size_t> saves_{0};
  std::atomic<uint64_t> abandoned_{0};

  std::mutex mutex_;
  std::condition_variable idle_;
  bool closing_ = false;  // Guarded by mutex_.
  size_t active_ = 0;     // Guarded by mutex_. Between Begin and End.
  std::mutex close_mutex_;
  std::optional<CloseReport> close_report_;  // Guarded by close_mutex_.

  // The store's thread alone.
  std::unordered_map<Digest, std::deque<Task>, DigestHash> locked_;  // What waits for the key.
  std::unordered_map<Digest, size_t, DigestHash> erasing_;           // Erases that have not ended.
  const std::unique_ptr<S3Collector> collector_;                     // Null: there are no bounds.
  S3Listing listing_;                                                // Any thread may ask whether it is ready.
  S3Probes probes_;
};

struct S3Tier::Loading {
  LoadItem item;
  size_t index = 0;
  TimePoint deadline;
  std::shared_ptr<LoadBatch> done;
  bool believed = false;
  bool again = false;  // Read for the second time, since the first one was damaged.
  std::optional<S3Frame> frame;
  std::vector<s3::ObjectStore::CallId> calls;  // By part; 0: ended.
  size_t left = 0;
  uint64_t total = 0;  // Of the object, as the answers say.
  std::optional<std::string> etag;
  bool mixed = false;  // The parts are of different objects.
  Failure failure;     // The first that was not a consequence of another.
};

struct S3Tier::Saving {
  SaveItem item;
  size_t index = 0;
  std::shared_ptr<SaveBatch> done;
  FrameHeader header{};
  std::vector<std::byte> padding;
  TimePoint deadline;
  int looks = 0;
};

S3Tier::S3Tier(std::unique_ptr<s3::ObjectStore> store, const S3TierOptions& options, const S3TierDeps& deps)
    : store_(std::move(store)),
      options_(options),
      deps_(deps),
      info_(S3TierInfo(store_->parallel())),
      names_(store_->endpoint()),
      load_failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                             {{"tier", kTierName}, {"operation", "load"}})),
      save_failures_(deps.metrics.GetCounter("terrace_tier_failures_total", "I/O that failed, by tier and operation.",
                                             {{"tier", kTierName}, {"operation", "save"}})),
      index_({.positive_ttl = options.positive_ttl, .negative_ttl = options.negative_ttl}),
      collector_(MakeCollector()),
      listing_({.interval = options.list_interval, .pressed = options.list_pressed, .bounds = options.bounds},
               {.store = *store_,
                .clock = deps.clock,
                .names = names_,
                .index = index_,
                .is_leaving = [this](const Digest& key) { return erasing_.contains(key); },
                .collector = collector_.get()}),
      probes_({.store = *store_,
               .clock = deps.clock,
               .names = names_,
               .index = index_,
               .is_leaving = [this](const Digest& key) { return erasing_.contains(key); }}) {}

std::unique_ptr<S3Collector> S3Tier::MakeCollector() {
  if (!options_.bounds.any()) return nullptr;
  S3Collector::Hooks hooks{
      .remove = [this](const Digest& key, const Erased& done) { Collect(key, done); },
      .parent_of =
          [this](const Digest& key, const auto& done) {
            ReadHeader(key, TimePoint::max(),
                       [key, done](const Failure& failure, uint64_t total, std::span<const std::byte> header) {
                         const auto decoded = DecodeFrameHeader(header, total);
                         const Frame* frame = std::get_if<Frame>(&decoded);
                         done(failure, frame != nullptr && frame->info.key == key ? frame->info.parent : key);
                       });
          },
      .list = [this] { listing_.Soon(); }};
  return std::make_unique<S3Collector>(
      S3Collector::Options{.bounds = options_.bounds, .lease_life = options_.lease_life},
      s3::WithPrefix(store_->endpoint(), ""), *store_, deps_.clock, deps_.metrics, std::move(hooks));
}

Result<void> S3Tier::Start() {
  const s3::CheckResult check = s3::CheckBucket(*store_, Now() + options_.check_timeout);
  if (check.failure || !check.format.empty()) {
    return tl::unexpected(s3::CheckError(check, store_->endpoint()));
  }
  store_->executor().Post([this] {
    listing_.Begin();
    CollectUploads();
    if (collector_) collector_->Begin();
  });
  return {};
}

bool S3Tier::Begin() {
  std::lock_guard lock(mutex_);
  if (closing_) return false;
  ++active_;
  return true;
}

void S3Tier::End() {
  {
    std::lock_guard lock(mutex_);
    --active_;
  }
  idle_.notify_all();
}

void S3Tier::Contains(std::span<const Digest> keys, std::span<uint8_t> present) {
  const TimePoint now = Now();
  for (size_t i = 0; i < keys.size(); ++i) present[i] = index_.Contains(keys[i], now);
}

// ---- Loads

void S3Tier::Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  std::vector<LoadingPtr> batch;
  for (size_t i = 0; i < items.size(); ++i) {
    if (loads_.fetch_add(1, std::memory_order_relaxed) >= options_.load_queue_items_max) {
      loads_.fetch_sub(1, std::memory_order_relaxed);
      done->Settle(i, Miss(Reason::kFull));
      continue;
    }
    if (!Begin()) {
      loads_.fetch_sub(1, std::memory_order_relaxed);
      done->Settle(i, Miss(Reason::kUnavailable));
      continue;
    }
    auto loading = std::make_shared<Loading>();
    loading->item = std::move(items[i]);
    loading->index = i;
    loading->deadline = deadline;
    loading->done = done;
    batch.push_back(std::move(loading));
  }
  if (batch.empty()) return;
  if (store_->executor().Post([this, batch] {
        for (const LoadingPtr& loading : batch) StartLoad(loading);
      })) {
    return;
  }
  for (const LoadingPtr& loading : batch) SettleLoad(loading, Miss(Reason::kUnavailable));  // Closed meanwhile.
}

void S3Tier::StartLoad(const LoadingPtr& loading) {
  const Digest& key = loading->item.key;
  const TimePoint now = Now();
  if (loading->done->cancelled()) return SettleLoad(loading, Miss(Reason::kCancelled));
  if (now >= loading->deadline) return SettleLoad(loading, Miss(Reason::kTimeout));
  const S3Index::Belief belief = index_.Of(key, now);
  if (belief == S3Index::Belief::kAbsent || erasing_.contains(key)) {
    return SettleLoad(loading, Miss(Reason::kNotFound));
  }
  loading->believed = belief != S3Index::Belief::kUnknown;
  // Ranges make a load quicker while there are calls to spare: half of them, shared by all loads. They cost a server
  // more than whole objects, so many loads at once have none.
  const uint64_t bytes = loading->item.into.size();
  const size_t spare = std::max<size_t>(1, store_->parallel() / 2 / loads_.load(std::memory_order_relaxed));
  ReadFrame(loading, std::clamp<size_t>(bytes / options_.range_bytes_min, 1, spare));
}

void S3Tier::ReadFrame(const LoadingPtr& loading, size_t parts) {
  loading->frame.emplace(loading->item.key, loading->item.space, loading->item.into, parts);
  loading->left = loading->frame->parts();
  loading->calls.assign(loading->left, 0);
  loading->total = 0;
  loading->etag.reset();
  loading->mixed = false;
  loading->failure = {};
  for (size_t part = 0; part < loading->frame->parts(); ++part) {
    const S3Frame::Range& range = loading->frame->range(part);
    s3::GetRequest request{.key = names_.Of(loading->item.key), .deadline = loading->deadline};
    if (loading->frame->parts() > 1) {
      request.begin = range.begin;
      request.end = range.end;
    }
    request.sink = [loading, part](const ObjectInfo& info, uint64_t offset, std::span<const std::byte> piece) {
      if (loading->done->cancelled()) {
        loading->failure = {.trouble = Trouble::kCancelled};
        return false;
      }
      loading->total = info.bytes;
      return loading->frame->Take(part, info.bytes, offset, piece);
    };
    loading->calls[part] = store_->Get(
        std::move(request),
        [this, loading, part](const Failure& f, const ObjectInfo& info) { PartEnded(loading, part, f, info); });
  }
}

void S3Tier::PartEnded(const LoadingPtr& loading, size_t part, const Failure& failure, const ObjectInfo& info) {
  loading->calls[part] = 0;
  if (!failure && loading->etag.value_or(info.etag) != info.etag) loading->mixed = true;
  if (!failure) loading->etag = info.etag;
  // What the frame itself refused, and a range behind the end of a shorter object, tell nothing of the bucket.
  const bool consequence = failure.trouble == Trouble::kStopped || failure.trouble == Trouble::kNoRange;
  if (failure && !consequence && !loading->failure) loading->failure = failure;
  const bool over = loading->failure || loading->frame->reason() != Reason::kNone;
  if (over) {
    for (const s3::ObjectStore::CallId call : loading->calls) {
      if (call != 0) store_->Cancel(call);
    }
  }
  if (--loading->left == 0) FrameEnded(loading);
}

void S3Tier::FrameEnded(const LoadingPtr& loading) {
  const Digest& key = loading->item.key;
  const Failure& failure = loading->failure;
  if (failure && loading->frame->reason() == Reason::kNone) {
    switch (failure.trouble) {
      case Trouble::kNotFound:
        index_.Missed(key, Now());
        return SettleLoad(loading, Miss(loading->believed ? Reason::kMissing : Reason::kNotFound));
      case Trouble::kTimeout:
        // The server was slow, or the deadline near: which of the two, the guard above finds out.
        if (Now() >= loading->deadline) return SettleLoad(loading, Miss(Reason::kTimeout));
        break;
      case Trouble::kCancelled: return SettleLoad(loading, Miss(Reason::kCancelled));
      default: break;
    }
    load_failures_.Add();
    return SettleLoad(loading, {.outcome = Outcome::kFailed,
                                .reason = Reason::kUnavailable,
                                .error = s3::ToError(failure, "s3: get " + names_.Of(key))});
  }
  const Reason reason = loading->mixed ? Reason::kDamaged : loading->frame->Finish(loading->total);
  if (reason == Reason::kNone) {
    index_.Saw(key, loading->frame->object_bytes(), Now());
    if (collector_) collector_->Used(loading->frame->frame().info);
    const bool usual = loading->frame->frame().segment_bytes == kSegmentBytes;
    SegmentHashes hashes = usual ? loading->frame->hashes() : HashSegments(loading->item.into);
    return SettleLoad(loading, {.outcome = Outcome::kHit,
                                .reason = Reason::kNone,
                                .info = loading->frame->frame().info,
                                .hashes = std::make_shared<const SegmentHashes>(std::move(hashes))});
  }
  if (reason == Reason::kVersion) index_.Forget(key);
  if (!loading->mixed && !loading->frame->is_rubbish()) return SettleLoad(loading, Miss(reason));
  // The network may have done it, or a writer in between: once more, in one piece, before it is removed.
  if (!std::exchange(loading->again, true)) return ReadFrame(loading, 1);
  SetAside(key, reason);
  SettleLoad(loading, Miss(reason));
}

void S3Tier::SettleLoad(const LoadingPtr& loading, LoadResult result) {
  if (result.reason == Reason::kCancelled) abandoned_.fetch_add(1, std::memory_order_relaxed);
  loading->frame.reset();
  loading->item.owner.reset();
  loads_.fetch_sub(1, std::memory_order_relaxed);
  loading->done->Settle(loading->index, std::move(result));
  End();
}

void S3Tier::SetAside(const Digest& key, Reason reason) {
  index_.Forget(key);
  quarantined_.fetch_add(1, std::memory_order_relaxed);
  deps_.metrics
      .GetCounter("terrace_tier_quarantined_total", "Frames found damaged since the start, by reason.",
                  {{"tier", kTierName}, {"reason", ReasonName(reason)}})
      .Add();
  log::Warn("frame_quarantined",
            {{"tier", kTierName}, {"key", key.Hex()}, {"reason", ReasonName(reason)}, {"action", "removed"}});
  if (!Begin()) return;
  ++erasing_[key];
  Lock(key, [this, key] { EraseOne(key); });
}

// ---- Saves

void S3Tier::Lock(const Digest& key, Task task) {
  const auto [it, free] = locked_.try_emplace(key);
  if (!free) return it->second.push_back(std::move(task));
  task();
}

void S3Tier::Unlock(const Digest& key) {
  const auto it = locked_.find(key);
  if (it->second.empty()) {
    locked_.erase(it);
    return;
  }
  const Task next = std::move(it->second.front());
  it->second.pop_front();
  next();
}

void S3Tier::Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  std::vector<SavingPtr> batch;
  for (size_t i = 0; i < items.size(); ++i) {
    if (saves_.fetch_add(1, std::memory_order_relaxed) >= options_.save_queue_items_max) {
      saves_.fetch_sub(1, std::memory_order_relaxed);
      done->Settle(i, Declined(Reason::kFull));
      continue;
    }
    if (!Begin()) {
      saves_.fetch_sub(1, std::memory_order_relaxed);
      done->Settle(i, Declined(Reason::kUnavailable));
      continue;
    }
    auto saving = std::make_shared<Saving>();
    saving->item = std::move(items[i]);
    saving->index = i;
    saving->done = done;
    batch.push_back(std::move(saving));
  }
  if (batch.empty()) return;
  if (store_->executor().Post([this, batch] {
        for (const SavingPtr& saving : batch) Lock(saving->item.info.key, [this, saving] { StartSave(saving); });
      })) {
    return;
  }
  for (const SavingPtr& saving : batch) {
    saving->done->Settle(saving->index, Declined(Reason::kUnavailable));  // Closed meanwhile.
    End();
  }
}

void S3Tier::StartSave(const SavingPtr& saving) {
  const SaveItem& item = saving->item;
  const FrameInfo& info = item.info;
  if (saving->done->cancelled()) return SettleSave(saving, Declined(Reason::kCancelled));
  saving->deadline = Now() + options_.save_timeout;
  if (item.payload.empty() || item.payload.size() != info.payload_bytes ||
      item.payload.size() > kFramePayloadBytesMax) {
    return SettleSave(
        saving, {.outcome = Outcome::kFailed,
                 .error = Error{Code::kInvalid,
                                "s3: save " + info.key.Hex() + ": a payload of " + std::to_string(item.payload.size()) +
                                    " bytes said to be " + std::to_string(info.payload_bytes),
                                0}});
  }
  switch (index_.Of(info.key, Now())) {
    case S3Index::Belief::kPresent: return SettleSave(saving, {.outcome = Outcome::kHit, .existed = true});
    case S3Index::Belief::kAbsent: return Write(saving, /*only_if_absent=*/true);
    default: return Inspect(saving);
  }
}

// What another node may have written: a look at its header is cheaper than sending a frame in vain.
void S3Tier::Inspect(const SavingPtr& saving) {
  ++saving->looks;
  const Digest key = saving->item.info.key;
  ReadHeader(key, saving->deadline,
             [this, saving, key](const Failure& failure, uint64_t total, std::span<const std::byte> header) {
               if (failure.trouble == Trouble::kNotFound) return Write(saving, /*only_if_absent=*/true);
               if (failure) return FailSave(saving, failure);
               const auto decoded = DecodeFrameHeader(header, total);
               if (const Frame* frame = std::get_if<Frame>(&decoded); frame != nullptr && frame->info.key == key) {
                 index_.Saw(key, total, Now());
                 return SettleSave(saving, {.outcome = Outcome::kHit, .existed = true});
               }
               const Reason* reason = std::get_if<Reason>(&decoded);
               if (reason != nullptr && *reason == Reason::kVersion)
                 return SettleSave(saving, Declined(Reason::kVersion));
               Write(saving, /*only_if_absent=*/false);  // Over what is no frame.
             });
}

void S3Tier::Write(const SavingPtr& saving, bool only_if_absent) {
  const SaveItem& item = saving->item;
  const uint64_t bytes = item.payload.size();
  if (!listing_.HasRoom(FrameBytes(bytes))) return SettleSave(saving, Declined(Reason::kFull));
  saving->header = EncodeFrameHeader(item.info, deps_.clock.WallNs(), item.payload, item.hashes.get());
  saving->padding.assign(PaddedBytes(bytes) - bytes, std::byte{0});
  s3::PutRequest request{
      .key = names_.Of(item.info.key), .owner = saving, .only_if_absent = only_if_absent, .deadline = saving->deadline};
  request.body = {saving->header, item.payload};
  if (!saving->padding.empty()) request.body.emplace_back(saving->padding);
  store_->Put(std::move(request), [this, saving](const Failure& failure, const ObjectInfo&) {
    if (failure.trouble == Trouble::kExists && saving->looks < kSaveLooksMax) return Inspect(saving);
    if (failure) return FailSave(saving, failure);
    const uint64_t written = FrameBytes(saving->item.payload.size());
    index_.Saw(saving->item.info.key, written, Now());
    if (collector_) collector_->Saved(saving->item.info, written);
    listing_.Wrote(written);
    SettleSave(saving, {.outcome = Outcome::kHit});
  });
}

void S3Tier::FailSave(const SavingPtr& saving, const Failure& failure) {
  if (failure.trouble == Trouble::kCancelled) return SettleSave(saving, Declined(Reason::kCancelled));
  save_failures_.Add();
  SettleSave(saving, {.outcome = Outcome::kFailed,
                      .reason = failure.trouble == Trouble::kFull ? Reason::kFull : Reason::kUnavailable,
                      .error = s3::ToError(failure, "s3: put " + names_.Of(saving->item.info.key))});
}

void S3Tier::SettleSave(const SavingPtr& saving, SaveResult result) {
  if (result.reason == Reason::kCancelled) abandoned_.fetch_add(1, std::memory_order_relaxed);
  const Digest key = saving->item.info.key;
  saving->item.owner.reset();
  saves_.fetch_sub(1, std::memory_order_relaxed);
  saving->done->Settle(saving->index, std::move(result));
  Unlock(key);
  End();
}

// ---- Erase

void S3Tier::Erase(std::span<const Digest> keys) {
  for (const Digest& key : keys) {
    if (!Begin()) return;
    index_.Forget(key);
    const bool posted = store_->executor().Post([this, key] {
      ++erasing_[key];
      Lock(key, [this, key] { EraseOne(key); });
    });
    if (!posted) End();
  }
}

// With the key locked, counted in erasing_.
void S3Tier::EraseOne(const Digest& key, const Erased& erased) {
  store_->Delete(names_.Of(key), TimePoint::max(), [this, key, erased](const Failure& failure, const ObjectInfo&) {
    index_.Forget(key);  // A save that was on its way.
    if (!failure && collector_) listing_.Removed(collector_->Erased(key));
    if (failure && failure.trouble != Trouble::kCancelled) {
      log::Warn("s3_erase_failed", {{"key", names_.Of(key)}, {"why", failure.Describe()}});
    }
    if (--erasing_[key] == 0) erasing_.erase(key);
    if (erased) erased(failure);
    Unlock(key);
    End();
  });
}

// For the collector.
void S3Tier::Collect(const Digest& key, const Erased& erased) {
  if (!Begin()) {
    store_->executor().Post([erased] { erased({.trouble = Trouble::kCancelled}); });
    return;
  }
  index_.Forget(key);
  ++erasing_[key];
  Lock(key, [this, key, erased] { EraseOne(key, erased); });
}

// ---- What others have

void S3Tier::Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) {
  if (!Begin()) return done(Error{Code::kUnavailable, "s3: the tier is closed", 0});
  const Probed ended = [this, done = std::move(done)](const std::optional<Error>& trouble) {
    done(trouble);
    End();
  };
  auto asked = std::make_shared<std::vector<Digest>>(std::move(keys));
  if (store_->executor().Post([this, asked, deadline, ended] { probes_.Begin(std::move(*asked), deadline, ended); }))
    return;
  ended(Error{Code::kUnavailable, "s3: the tier is closed", 0});
}

void S3Tier::CollectUploads() {
  store_->AbortOldUploads(names_.root(), options_.upload_age, [](const Failure& failure, size_t aborted) {
    if (!failure && aborted > 0) log::Info("s3_uploads_aborted", {{"count", aborted}});
  });
  store_->executor().PostAfter(kUploadsEvery, [this] { CollectUploads(); });
}

void S3Tier::ReadHeader(const Digest& key, TimePoint deadline, Header done) {
  auto header = std::make_shared<std::vector<std::byte>>();
  s3::GetRequest request{.key = names_.Of(key), .begin = 0, .end = kFrameHeaderBytes, .deadline = deadline};
  request.sink = [header](const ObjectInfo&, uint64_t offset, std::span<const std::byte> piece) {
    header->resize(offset);
    header->insert(header->end(), piece.begin(), piece.end());
    return true;
  };
  store_->Get(std::move(request), [header, done = std::move(done)](const Failure& failure, const ObjectInfo& info) {
    if (failure.trouble == Trouble::kNoRange) return done({}, 0, {});  // Empty.
    done(failure, info.bytes, *header);
  });
}

// ---- For people

// Whether it may be written is what the check at the start asks. A save beyond the bounds is declined, which is no
// failure: nobody waits for its end here.
Result<void> S3Tier::ProbeSave(uint64_t) {
  if (!Begin()) return Fail(Code::kUnavailable, "s3: the tier is closed");
  const s3::CheckResult check = s3::CheckBucket(*store_, Now() + options_.check_timeout);
  End();
  if (check.failure || !check.format.empty()) return tl::unexpected(s3::CheckError(check, store_->endpoint()));
  return {};
}

struct S3Tier::Scanning {
  Handover<Result<ScanPage>> end;
  s3::ObjectStore::ListRequest request;
  std::optional<Digest> after;
  std::vector<std::optional<FrameInfo>> found;
  std::string next;
  size_t left = 1;
  Failure failure;
  Failure refused;  // Of one object's header.
};

Result<ScanPage> S3Tier::Scan(const std::string& cursor, size_t limit) {
  auto scanning = std::make_shared<Scanning>();
  scanning->after = Digest::FromHex(cursor);
  if (!cursor.empty() && !scanning->after) return Fail(Code::kInvalid, "\"" + cursor + "\" is no cursor");
  if (!Begin()) return Fail(Code::kUnavailable, "s3: the tier is closed");
  scanning->request = {
      .prefix = names_.root(), .limit = std::min(limit, kScanPageMax), .deadline = Now() + kScanTimeout};
  if (scanning->after) scanning->request.start_after = names_.Of(*scanning->after);
  if (!store_->executor().Post([this, scanning] { ScanNext(scanning); })) ScanOneLess(scanning);
  return scanning->end.Take();
}

// Pages without a frame are passed over: others may have put anything there. The deadline ends that.
void S3Tier::ScanNext(const ScanningPtr& scanning) {
  store_->List(scanning->request, [this, scanning](const Failure& failure, const s3::ListPage& page) {
    scanning->failure = failure;
    std::vector<Digest> keys;
    for (size_t i = 0; i < page.objects.size() && keys.size() < kScanPageMax; ++i) {
      const std::optional<Digest> key = names_.KeyOf(page.objects[i].key);
      if (key && (!scanning->after || *scanning->after < *key)) keys.push_back(*key);
    }
    if (keys.empty() && !page.next.empty()) {
      scanning->request.token = page.next;
      return ScanNext(scanning);
    }
    if (!keys.empty() && (!page.next.empty() || keys.size() == kScanPageMax)) scanning->next = keys.back().Hex();
    scanning->found.resize(keys.size());
    scanning->left += keys.size();
    for (size_t i = 0; i < keys.size(); ++i) {
      ReadHeader(
          keys[i], scanning->request.deadline,
          [this, scanning, i, key = keys[i]](const Failure& f, uint64_t total, std::span<const std::byte> header) {
            const auto decoded = DecodeFrameHeader(header, total);
            const Frame* frame = std::get_if<Frame>(&decoded);
            if (s3::MayBeTheObjectsOwn(f.trouble)) {
              scanning->refused = f;
            } else if (f && f.trouble != Trouble::kNotFound && !scanning->failure) {
              scanning->failure = f;
            }
            if (!f && frame != nullptr && frame->info.key == key) scanning->found[i] = frame->info;
            ScanOneLess(scanning);
          });
    }
    ScanOneLess(scanning);
  });
}

void S3Tier::ScanOneLess(const ScanningPtr& scanning) {
  if (--scanning->left > 0) return;
  ScanPage page{.next = scanning->next};
  for (const auto& info : scanning->found) {
    if (info) page.frames.push_back(*info);
  }
  // One object that the server will not give is passed over; if it gives none, whoever scans has to hear of it.
  if (page.frames.empty() && !scanning->failure) scanning->failure = scanning->refused;
  Result<ScanPage> result = std::move(page);
  if (scanning->failure) result = tl::unexpected(s3::ToError(scanning->failure, "s3: list " + names_.root()));
  scanning->end.Give(std::move(result));
  End();
}

TierStats S3Tier::stats() const {
  TierStats stats;
  stats.frames = index_.frames();
  stats.bytes = index_.bytes();
  stats.bytes_max = options_.bounds.bytes_max;
  stats.quarantined = quarantined_.load(std::memory_order_relaxed);
  stats.index_ready = listing_.ready();
  return stats;
}

CloseReport S3Tier::Close(TimePoint deadline) {
  std::lock_guard closing(close_mutex_);
  if (close_report_) return {};
  if (collector_ && Begin() && !store_->executor().Post([this] { collector_->Close([this] { End(); }); })) End();
  {
    std::unique_lock lock(mutex_);
    closing_ = true;
    idle_.wait_until(lock, deadline, [&] { return active_ == 0; });
  }
  abandoned_.store(0, std::memory_order_relaxed);
  store_->Stop();  // Settles what is left, as cancelled.
  CloseReport report{.abandoned = abandoned_.load(std::memory_order_relaxed)};
  report.clean = report.abandoned == 0;
  close_report_ = report;
  return report;
}

}  // namespace

TierInfo S3TierInfo(size_t parallel) {
  return {.name = kTierName, .durable = true, .shared = true, .asks = true, .best_in_flight = parallel};
}

Result<std::unique_ptr<Tier>> OpenS3Tier(std::unique_ptr<s3::ObjectStore> store, const S3TierOptions& options,
                                         const S3TierDeps& deps) {
  auto tier = std::make_unique<S3Tier>(std::move(store), options, deps);
  if (const Result<void> started = tier->Start(); !started) return tl::unexpected(started.error());
  return tier;
}

Result<std::unique_ptr<Tier>> OpenS3Tier(const s3::ClientOptions& client, const S3TierOptions& options,
                                         const S3TierDeps& deps) {
  return OpenS3Tier(s3::OpenClient(client, deps.clock, deps.metrics), options, deps);
}

}  // namespace terrace
