#include "terrace/store.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/executor.h"
#include "base/hash.h"
#include "base/log.h"
#include "store/write_behind.h"
#include "terrace/metrics.h"
#include "tier/ram_tier.h"

namespace terrace {
namespace {

constexpr uint8_t kRam = 0;  // Index of RAM in tier_names(); lower tier i has i + 1.

// RAM is re-read at this pace, so that memory gone bad is found before it is served for ever: 16 MiB a second is 0.2 %
// of a core.
constexpr uint64_t kScrubBytes = 16 << 20;
constexpr std::chrono::milliseconds kScrubEvery{1000};

// Room in RAM, at most a quarter of it, that has its pages before it is asked for: first use costs about half a
// millisecond a MiB, more than reading a frame from the page cache. A prefix of several thousand tokens finds room.
constexpr uint64_t kReadyBytesMax = 256 << 20;
constexpr uint64_t kReadyStepBytes = 16 << 20;  // Other work of the store's thread waits no longer than this takes.
// What chunks took of it is made good this much later: at once, it would take a core from the load that goes on.
constexpr std::chrono::milliseconds kReadyAfter{200};

// One chunk on its way into RAM, whoever asked first. Others wait for the same flight.
struct Flight {
  std::mutex mutex;
  std::condition_variable landed;
  std::optional<LoadJob::Item> item;           // Guarded by mutex; set once.
  std::vector<std::function<void()>> to_tell;  // Guarded by mutex; empty once it has landed.

  void Land(LoadJob::Item result) {
    std::vector<std::function<void()>> told;
    {
      std::lock_guard lock(mutex);
      item = std::move(result);
      told.swap(to_tell);
    }
    landed.notify_all();
    for (const auto& tell : told) tell();
  }
  // Nothing: it has not landed, and `tell` runs when it does.
  std::optional<Reason> LandedOr(std::function<void()> tell) {
    std::lock_guard lock(mutex);
    if (item) return item->reason;
    to_tell.push_back(std::move(tell));
    return std::nullopt;
  }
  std::optional<LoadJob::Item> Wait(TimePoint deadline) {
    std::unique_lock lock(mutex);
    landed.wait_until(lock, deadline, [&] { return item.has_value(); });
    return item;
  }
};
using FlightPtr = std::shared_ptr<Flight>;

// Who asks for a key of another space or size by mistake must neither get the bytes nor spoil the load of who is right.
struct FlightName {
  Digest key, space;
  uint64_t payload_bytes = 0;
  bool operator==(const FlightName&) const = default;
};
struct FlightNameHash {
  size_t operator()(const FlightName& name) const noexcept { return DigestHash()(name.key); }
};

LoadJob::Item MissItem(Reason reason, uint8_t tier = kRam) {
  LoadJob::Item item;
  item.outcome = Outcome::kMiss;
  item.reason = reason;
  item.tier = tier;
  return item;
}

struct Lower {
  std::unique_ptr<Tier> tier;
  std::unique_ptr<WriteBehind> write_behind;
  Histogram* load_seconds = nullptr;
};

class StoreImpl final : public Store {
 public:
  StoreImpl(const StoreOptions& options, std::unique_ptr<RamTier> ram, std::vector<std::unique_ptr<Tier>> tiers,
            Metrics& metrics);
  ~StoreImpl() override;

  const std::vector<std::string>& tier_names() const override { return names_; }
  bool asks() const override { return asks_; }
  void Probe(std::span<const Digest> keys, TimePoint deadline, std::function<void()> done) override {
    AskTiers(keys, deadline, [done = std::move(done)](Reason) { done(); });
  }
  PrefixHit Lookup(std::span<const Digest> keys) override;
  std::shared_ptr<LoadJob> Load(const Digest& space, std::span<const Digest> keys, uint64_t payload_bytes,
                                TimePoint deadline) override;
  void ExpectChunks(uint64_t payload_bytes) override;
  Result<SaveSlot> BeginSave(const FrameInfo& info) override;
  bool Needs(const Digest& key) override;
  void Offer(const Digest& key) override;  // Also of what a load served: a tier above the one it came from lacks it.
  using Store::Commit;
  void Commit(SaveSlot slot, std::function<void(bool)> done) override;
  TierStats ram_stats() const override { return ram_->stats(); }
  TierStats tier_stats(size_t tier) const override {
    return tier == kRam ? ram_->stats() : lower_[tier - 1].tier->stats();
  }
  RamMemory ram_memory() const override { return ram_->memory(); }
  Health health() const override;
  uint64_t pending_saves() const override;
  CloseReport Close(TimePoint deadline) override;

  // Probe, with the reason if a tier could not be asked; else kNone.
  void AskTiers(std::span<const Digest> keys, TimePoint deadline, std::function<void(Reason)> done);
  // Whatever a load from below needs until it lands.
  struct Staging {
    Digest space, key;
    uint64_t payload_bytes = 0;
    TimePoint deadline;
    FlightPtr flight;
  };
  // The flight of a chunk: landed already, joined, or new; then `begun` says what to Start, soon and with no lock held.
  FlightPtr Fetch(const Digest& space, const Digest& key, uint64_t payload_bytes, TimePoint deadline,
                  std::optional<Staging>& begun);
  // Loads it from the fastest tier that has it. It may land at once, and all who wait for it are told on this thread.
  void Start(Staging staging);
  // Makes room for one chunk if RAM has none: eviction is leaf first, so a prefix larger than RAM can go on only by
  // giving up its own head. Drops those of `heads` that a lower tier holds, from the first on, until a chunk fits.
  // Returns how many it went over.
  size_t MakeRoom(uint64_t payload_bytes, std::span<const Digest> heads);
  uint64_t window_bytes() const { return window_bytes_; }
  void CountItem(const LoadJob::Item& item);

 private:
  std::optional<LoadJob::Item> FromRam(const Digest& space, const Digest& key, uint64_t payload_bytes);
  void FetchFrom(size_t lower, Staging staging, Reason reason_so_far);
  void Landed(size_t lower, const Staging& staging, const std::shared_ptr<RamSlot>& slot, const LoadResult& result,
              TimePoint begun);
  void Finish(const Staging& staging, LoadJob::Item item);
  void OfferBelow(Lower& lower, RamLease lease);
  Reason WhyUnknown() const;
  void Scrub();
  void TouchAhead(std::chrono::milliseconds after);  // In the background, in steps.
  void TouchStep();

  const std::unique_ptr<RamTier> ram_;
  std::vector<Lower> lower_;
  std::vector<std::string> names_;
  bool asks_ = false;
  uint64_t window_bytes_ = 0;
  uint64_t ready_bytes_ = 0;
  std::atomic<uint64_t> expected_bytes_{0};
  std::atomic<bool> touching_ahead_{false};
  std::atomic<uint64_t> offering_{0};  // Chunks on their way to write-behind queues, not yet in them.
  std::vector<Counter*> hits_;         // By tier index.
  std::vector<Counter*> hit_bytes_;    // By tier index.
  std::array<Counter*, kReasonCount> misses_{};
  Counter& save_declined_;

  mutable std::mutex mutex_;
  std::unordered_map<FlightName, FlightPtr, FlightNameHash> flights_;  // Guarded by mutex_.
  std::unordered_set<Digest, DigestHash> committing_;                  // Guarded by mutex_. Being hashed.
  std::condition_variable idle_;                                       // committing_ shrank.
  bool closed_ = false;                                                // Guarded by mutex_.

  // One thread: chunks become visible, and reach the write-behind queues, in the order committed (parents first).
  std::unique_ptr<ThreadPool> own_thread_;  // Null if an executor was given.
  Executor& background_;
};

// Longest wait for what other nodes have: a request that is not queued waits as long before it computes.
constexpr std::chrono::milliseconds kAskMax{1000};

// Chunks of one chain that are offered to a lower tier at once: a million tokens in chunks of 256. Parents come from
// headers that anybody may have written, and a longer chain is no prompt's.
constexpr size_t kOfferMax = 4096;

class JobImpl final : public LoadJob, public std::enable_shared_from_this<JobImpl> {
 public:
  JobImpl(StoreImpl& store, const Digest& space, std::span<const Digest> keys, uint64_t payload_bytes,
          TimePoint deadline)
      : store_(store),
        space_(space),
        keys_(keys.begin(), keys.end()),
        payload_bytes_(payload_bytes),
        deadline_(deadline),
        flights_(keys.size()),
        known_(keys.size()) {}

  // Begins what is known, and asks for the rest.
  void Begin() {
    std::span<const Digest> unknown;
    {
      std::unique_lock lock(mutex_);
      if (store_.asks()) known_ = store_.Lookup(keys_).chunks;
      unknown = std::span(keys_).subspan(known_);
      asking_ = !unknown.empty();
      Advance(0, lock);
      if (!asking_) return;
    }
    const TimePoint until = std::min(deadline_, std::chrono::steady_clock::now() + kAskMax);
    store_.AskTiers(unknown, until, [weak = weak_from_this()](Reason trouble) {
      if (const auto job = weak.lock()) job->Asked(trouble);
    });
  }

  size_t size() const override { return keys_.size(); }

  Item Wait(size_t i, TimePoint deadline) override {
    FlightPtr flight;
    {
      std::unique_lock lock(mutex_);
      asked_.wait_until(lock, std::min(deadline, deadline_), [&] { return i < known_ || !asking_; });
      if (i >= known_ && asking_) return Counted(MissItem(Reason::kTimeout));
      // While this waited for its turn, others may have computed it.
      if (i >= known_) LookAgain();
      if (i >= known_) return Counted(MissItem(why_unknown_));
      Advance(i, lock);
      flight = flights_[i];
    }
    if (!flight) return Counted(MissItem(Reason::kCancelled));  // Taken before.
    const TimePoint until = std::min(deadline, deadline_);
    std::optional<Item> item = flight->Wait(until);
    if (item && MayWorkNow(item->reason) && std::chrono::steady_clock::now() < until) {
      {
        std::unique_lock lock(mutex_);
        flight = FetchAgain(i, lock);
      }
      item = flight->Wait(until);
    }
    if (!item) return Counted(MissItem(Reason::kTimeout));
    {
      std::lock_guard lock(mutex_);
      flights_[i] = nullptr;  // The caller's lease is what pins it from here on.
    }
    // In order, so that parents come first.
    if (item->outcome == Outcome::kHit) store_.Offer(keys_[i]);
    return Counted(*std::move(item));
  }

  bool ReadyOr(size_t i, std::function<void()> later) override {
    std::unique_lock lock(mutex_);
    if (i >= known_ && asking_) {
      to_tell_.push_back(std::move(later));
      return false;
    }
    if (i >= known_) LookAgain();
    if (i >= known_) return true;
    Advance(i, lock);
    if (!flights_[i]) return true;
    const std::optional<Reason> landed = flights_[i]->LandedOr(later);
    if (!landed || !MayWorkNow(*landed) || std::chrono::steady_clock::now() >= deadline_) return landed.has_value();
    const FlightPtr again = FetchAgain(i, lock);  // As in Wait.
    return again->LandedOr(std::move(later)).has_value();
  }

 private:
  // Each answer is one hit, or one miss with its reason: not each flight, which several jobs may share.
  Item Counted(Item item) {
    store_.CountItem(item);
    return item;
  }
  void Asked(Reason trouble) {
    std::vector<std::function<void()>> told;
    {
      std::unique_lock lock(mutex_);
      asking_ = false;
      trouble_ = trouble;
      LookAgain();
      Advance(next_ == 0 ? 0 : next_ - 1, lock);
      told.swap(to_tell_);
    }
    asked_.notify_all();
    for (const auto& tell : told) tell();
  }
  void LookAgain() {
    const PrefixHit more = store_.Lookup(std::span(keys_).subspan(known_));
    known_ += more.chunks;
    why_unknown_ = trouble_ == Reason::kNone ? more.miss_reason : trouble_;
  }
  // Begins what fits into the window beyond item `done`. A prefix larger than RAM is staged while its head is consumed.
  // As FetchBehind, lets go of the lock where others may be told of what lands.
  void Advance(size_t done, std::unique_lock<std::mutex>& lock) {
    while (next_ < known_ && (next_ <= done || (next_ - done) * payload_bytes_ < store_.window_bytes())) {
      FetchBehind(done, next_++, lock);
    }
  }
  // Begins item i, at the cost of those before item `done` if RAM has no room else.
  FlightPtr FetchBehind(size_t done, size_t i, std::unique_lock<std::mutex>& lock) {
    const size_t heads = done - std::min(done, heads_dropped_);
    heads_dropped_ += store_.MakeRoom(payload_bytes_, std::span(keys_).subspan(heads_dropped_, heads));
    std::optional<StoreImpl::Staging> begun;
    FlightPtr flight = flights_[i] = store_.Fetch(space_, keys_[i], payload_bytes_, deadline_, begun);
    if (begun) {
      lock.unlock();
      store_.Start(*std::move(begun));
      lock.lock();
    }
    return flight;
  }
  // The load was begun by somebody with less time than we have, or while RAM was full of what others waited for.
  static bool MayWorkNow(Reason reason) { return reason == Reason::kTimeout || reason == Reason::kFull; }
  FlightPtr FetchAgain(size_t i, std::unique_lock<std::mutex>& lock) { return FetchBehind(i, i, lock); }

  StoreImpl& store_;
  const Digest space_;
  const std::vector<Digest> keys_;
  const uint64_t payload_bytes_;
  const TimePoint deadline_;
  std::mutex mutex_;
  std::vector<FlightPtr> flights_;              // Guarded by mutex_. Null before it is begun and after it was taken.
  size_t next_ = 0;                             // Guarded by mutex_. First not begun.
  size_t heads_dropped_ = 0;                    // Guarded by mutex_. Consumed chunks that were looked at to make room.
  std::condition_variable asked_;               // asking_ became false.
  size_t known_;                                // Guarded by mutex_. Keys that may be begun.
  bool asking_ = false;                         // Guarded by mutex_. More may become known.
  std::vector<std::function<void()>> to_tell_;  // Guarded by mutex_. When asking_ has become false.
  Reason trouble_ = Reason::kNone;              // Guarded by mutex_. Why a tier could not be asked.
  Reason why_unknown_ = Reason::kNotFound;      // Guarded by mutex_. Of the first that is not known.
};

StoreImpl::StoreImpl(const StoreOptions& options, std::unique_ptr<RamTier> ram,
                     std::vector<std::unique_ptr<Tier>> tiers, Metrics& metrics)
    : ram_(std::move(ram)),
      window_bytes_(ram_->stats().bytes_max / 2),
      ready_bytes_(std::min(window_bytes_ / 2, kReadyBytesMax)),
      save_declined_(
          metrics.GetCounter("terrace_saves_declined_total", "Chunks that found no room in RAM to be saved from.")),
      own_thread_(options.executor ? nullptr : std::make_unique<ThreadPool>("terrace-store", 1)),
      background_(options.executor ? *options.executor : *own_thread_) {
  names_.emplace_back("ram");
  for (auto& tier : tiers) {
    Lower lower;
    names_.push_back(tier->info().name);
    asks_ = asks_ || tier->info().asks;
    lower.load_seconds = &metrics.GetHistogram(
        "terrace_load_seconds", "Time of one chunk's load from a tier below RAM.", {{"tier", tier->info().name}});
    lower.write_behind = std::make_unique<WriteBehind>(
        *tier,
        WriteBehind::Options{.bytes_max = options.write_behind_bytes_max, .in_flight_max = options.save_in_flight_max},
        metrics);
    lower.tier = std::move(tier);
    lower_.push_back(std::move(lower));
  }
  for (const std::string& name : names_) {
    hits_.push_back(&metrics.GetCounter("terrace_chunk_hits_total", "Chunks loaded, by the tier the bytes came from.",
                                        {{"tier", name}}));
    hit_bytes_.push_back(
        &metrics.GetCounter("terrace_loaded_bytes_total", "Payload bytes loaded, by tier.", {{"tier", name}}));
  }
  for (int i = 1; i < kReasonCount; ++i) {
    misses_[i] = &metrics.GetCounter("terrace_chunk_misses_total", "Chunks asked for and not loaded, by reason.",
                                     {{"reason", ReasonName(static_cast<Reason>(i))}});
  }
  const auto gauge = [&](const char* name, const char* help, size_t index, uint64_t TierStats::* field) {
    metrics.AddGaugeCallback(name, help, {{"tier", names_[index]}}, [this, index, field] {
      const TierStats stats = index == kRam ? ram_->stats() : lower_[index - 1].tier->stats();
      return static_cast<double>(stats.*field);
    });
  };
  for (size_t i = 0; i < names_.size(); ++i) {
    gauge("terrace_tier_bytes", "Bytes a tier holds.", i, &TierStats::bytes);
    gauge("terrace_tier_frames", "Frames a tier holds.", i, &TierStats::frames);
    gauge("terrace_tier_bytes_max", "Cap of a tier; 0: none.", i, &TierStats::bytes_max);
    gauge("terrace_tier_quarantined", "Frames found damaged since the start.", i, &TierStats::quarantined);
  }
  gauge("terrace_tier_pinned_bytes", "Bytes that may not be evicted now.", kRam, &TierStats::pinned_bytes);
  metrics.AddGaugeCallback("terrace_ram_resident_bytes", "Memory that the RAM tier has taken from the system.", {},
                           [this] { return static_cast<double>(ram_->resident_bytes()); });
  background_.PostAfter(kScrubEvery, [this] { Scrub(); });
}

StoreImpl::~StoreImpl() {
  Close(std::chrono::steady_clock::now());
  for (Lower& lower : lower_) lower.tier.reset();  // Their last calls back still find everything.
}

void StoreImpl::ExpectChunks(uint64_t payload_bytes) {
  expected_bytes_ = payload_bytes;
  TouchAhead(std::chrono::milliseconds{0});
}

void StoreImpl::TouchAhead(std::chrono::milliseconds after) {
  if (!touching_ahead_.exchange(true)) background_.PostAfter(after, [this] { TouchStep(); });
}

void StoreImpl::TouchStep() {
  if (ram_->TouchAhead(expected_bytes_, ready_bytes_, kReadyStepBytes) == 0) {
    touching_ahead_ = false;
  } else {
    background_.Post([this] { TouchStep(); });
  }
}

void StoreImpl::Scrub() {
  ram_->FitTheMachine();
  ram_->ScrubSome(kScrubBytes);
  background_.PostAfter(kScrubEvery, [this] { Scrub(); });
}

Reason StoreImpl::WhyUnknown() const {
  for (const Lower& lower : lower_) {
    const TierStats stats = lower.tier->stats();
    if (!stats.available) return Reason::kUnavailable;
    if (!stats.index_ready) return Reason::kIndexLoading;
  }
  return Reason::kNotFound;
}

PrefixHit StoreImpl::Lookup(std::span<const Digest> keys) {
  PrefixHit hit;
  std::vector<uint8_t> known(keys.size(), 0);
  std::vector<uint8_t> present(keys.size());
  hit.tier.assign(keys.size(), 0);
  for (size_t t = 0; t < names_.size(); ++t) {
    Tier& tier = t == kRam ? static_cast<Tier&>(*ram_) : *lower_[t - 1].tier;
    std::fill(present.begin(), present.end(), 0);
    tier.Contains(keys, present);
    for (size_t i = 0; i < keys.size(); ++i) {
      if (present[i] && !known[i]) {
        known[i] = 1;
        hit.tier[i] = static_cast<uint8_t>(t);
      }
    }
  }
  while (hit.chunks < keys.size() && known[hit.chunks]) ++hit.chunks;
  hit.tier.resize(hit.chunks);
  if (hit.chunks < keys.size()) hit.miss_reason = WhyUnknown();
  return hit;
}

std::shared_ptr<LoadJob> StoreImpl::Load(const Digest& space, std::span<const Digest> keys, uint64_t payload_bytes,
                                         TimePoint deadline) {
  auto job = std::make_shared<JobImpl>(*this, space, keys, payload_bytes, deadline);
  job->Begin();
  return job;
}

void StoreImpl::AskTiers(std::span<const Digest> keys, TimePoint deadline, std::function<void(Reason)> done) {
  struct Asking {
    std::atomic<size_t> left{1};  // Acquire-release: the last one sees the trouble of all.
    std::atomic<Reason> trouble{Reason::kNone};
    std::function<void(Reason)> done;
    void OneLess() {
      if (left.fetch_sub(1, std::memory_order_acq_rel) == 1) done(trouble.load());
    }
  };
  auto asking = std::make_shared<Asking>();
  asking->done = std::move(done);
  const std::span<const Digest> rest = keys.subspan(Lookup(keys).chunks);
  for (const Lower& lower : lower_) {
    if (rest.empty() || !lower.tier->info().asks) continue;
    ++asking->left;
    lower.tier->Probe({rest.begin(), rest.end()}, deadline, [asking](const std::optional<Error>& trouble) {
      if (trouble) asking->trouble = trouble->code == Code::kTimeout ? Reason::kTimeout : Reason::kUnavailable;
      asking->OneLess();
    });
  }
  asking->OneLess();
}

size_t StoreImpl::MakeRoom(uint64_t payload_bytes, std::span<const Digest> heads) {
  FrameInfo probe;
  probe.key = heads.empty() ? Digest{} : heads[0];
  probe.payload_bytes = payload_bytes;
  size_t gone_over = 0;
  while (gone_over < heads.size() && !ram_->Reserve(probe)) {
    const std::span<const Digest> head = heads.subspan(gone_over++, 1);
    for (const Lower& lower : lower_) {
      uint8_t present = 0;
      lower.tier->Contains(head, std::span(&present, 1));
      if (!present) continue;
      ram_->Erase(head);
      break;
    }
  }
  return gone_over;
}

std::optional<LoadJob::Item> StoreImpl::FromRam(const Digest& space, const Digest& key, uint64_t payload_bytes) {
  const std::optional<RamLease> lease = ram_->Acquire(key);
  if (!lease) return std::nullopt;
  if (lease->info.space != space || lease->info.payload_bytes != payload_bytes) return MissItem(Reason::kForeign);
  LoadJob::Item item;
  item.outcome = Outcome::kHit;
  item.lease = *lease;
  return item;
}

FlightPtr StoreImpl::Fetch(const Digest& space, const Digest& key, uint64_t payload_bytes, TimePoint deadline,
                           std::optional<Staging>& begun) {
  auto flight = std::make_shared<Flight>();
  if (std::optional<LoadJob::Item> item = FromRam(space, key, payload_bytes)) {
    flight->Land(*std::move(item));
    return flight;
  }
  {
    std::lock_guard lock(mutex_);
    if (closed_) {
      flight->Land(MissItem(Reason::kUnavailable));
      return flight;
    }
    const auto [it, added] = flights_.try_emplace({key, space, payload_bytes}, flight);
    if (!added) return it->second;
  }
  begun = {space, key, payload_bytes, deadline, flight};
  return flight;
}

void StoreImpl::Start(Staging staging) {
  // An earlier flight may have landed since Fetch looked: it was in RAM before it left flights_.
  if (std::optional<LoadJob::Item> item = FromRam(staging.space, staging.key, staging.payload_bytes)) {
    Finish(staging, *std::move(item));
  } else {
    FetchFrom(0, std::move(staging), Reason::kNone);
  }
}

// From the first tier at or below `lower` that believes it has the chunk. `reason_so_far`: why the tiers above it
// failed.
void StoreImpl::FetchFrom(size_t lower, Staging staging, Reason reason_so_far) {
  uint8_t present = 0;
  for (; lower < lower_.size(); ++lower) {
    lower_[lower].tier->Contains(std::span(&staging.key, 1), std::span(&present, 1));
    if (present) break;
  }
  if (!present) {
    return Finish(staging, MissItem(reason_so_far == Reason::kNone ? WhyUnknown() : reason_so_far));
  }
  FrameInfo info;
  info.space = staging.space;
  info.key = staging.key;
  info.payload_bytes = staging.payload_bytes;
  Result<RamSlot> reserved = ram_->Reserve(info);
  if (!reserved) return Finish(staging, MissItem(Reason::kFull, static_cast<uint8_t>(lower + 1)));
  auto slot = std::make_shared<RamSlot>(*std::move(reserved));
  std::vector<LoadItem> items;
  items.push_back({.key = staging.key, .space = staging.space, .into = slot->bytes(), .owner = slot});
  const TimePoint begun = std::chrono::steady_clock::now();
  const TimePoint deadline = staging.deadline;
  auto batch = std::make_shared<LoadBatch>(
      1, [this, lower, staging = std::move(staging), slot, begun](size_t, const LoadResult& result) {
        Landed(lower, staging, slot, result, begun);
      });
  lower_[lower].tier->Load(std::move(items), deadline, std::move(batch));
}

void StoreImpl::Landed(size_t lower, const Staging& staging, const std::shared_ptr<RamSlot>& slot,
                       const LoadResult& result, TimePoint begun) {
  if (result.outcome != Outcome::kHit) {
    if (result.error) {
      log::Warn("load_failed", {{"tier", names_[lower + 1]}, {"key", staging.key.Hex()}, {"why", result.error->what}});
    }
    return FetchFrom(lower + 1, staging, result.reason);
  }
  lower_[lower].load_seconds->Observe(std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count());
  slot->SetInfo(result.info);
  const std::optional<RamLease> lease = ram_->Commit(std::move(*slot), result.hashes);
  TouchAhead(kReadyAfter);
  if (!lease) return Finish(staging, MissItem(Reason::kCancelled));  // The store closes.
  LoadJob::Item item;
  item.outcome = Outcome::kHit;
  item.tier = static_cast<uint8_t>(lower + 1);
  item.lease = *lease;
  Finish(staging, std::move(item));
}

void StoreImpl::Finish(const Staging& staging, LoadJob::Item item) {
  {
    std::lock_guard lock(mutex_);
    flights_.erase({staging.key, staging.space, staging.payload_bytes});
  }
  staging.flight->Land(std::move(item));
}

void StoreImpl::CountItem(const LoadJob::Item& item) {
  if (item.outcome == Outcome::kHit) {
    hits_[item.tier]->Add();
    hit_bytes_[item.tier]->Add(item.lease.info.payload_bytes);
  } else if (item.reason != Reason::kNone) {
    misses_[static_cast<int>(item.reason)]->Add();
  }
}

bool StoreImpl::Needs(const Digest& key) {
  {
    std::lock_guard lock(mutex_);
    if (committing_.contains(key)) return false;
  }
  uint8_t present = 0;
  ram_->Contains(std::span(&key, 1), std::span(&present, 1));
  if (!present) return true;
  for (const Lower& lower : lower_) {
    lower.tier->Contains(std::span(&key, 1), std::span(&present, 1));
    if (!present && !lower.write_behind->Has(key)) return true;
  }
  return false;
}

Result<SaveSlot> StoreImpl::BeginSave(const FrameInfo& info) {
  Result<RamSlot> reserved = ram_->Reserve(info);
  if (!reserved) {
    save_declined_.Add();
    return Fail(reserved.error(), "save chunk " + info.key.Hex());
  }
  SaveSlot slot;
  auto ram_slot = std::make_shared<RamSlot>(*std::move(reserved));
  slot.bytes = ram_slot->bytes();
  slot.info = info;
  slot.reservation = std::move(ram_slot);
  return slot;
}

void StoreImpl::Commit(SaveSlot slot, std::function<void(bool)> done) {
  const Digest key = slot.info.key;
  bool closed = false;
  {
    std::lock_guard lock(mutex_);
    closed = closed_;
    if (!closed) committing_.insert(key);
  }
  if (closed) return done(false);
  const bool posted = background_.Post([this, key, done, slot = std::move(slot)] {
    auto hashes = std::make_shared<const SegmentHashes>(HashSegments(slot.bytes));
    RamSlot& ram_slot = *static_cast<RamSlot*>(slot.reservation.get());
    const std::optional<RamLease> lease = ram_->Commit(std::move(ram_slot), std::move(hashes));
    if (lease) {
      for (Lower& lower : lower_) OfferBelow(lower, *lease);
    }
    done(lease.has_value());
    TouchAhead(kReadyAfter);
    {
      std::lock_guard lock(mutex_);
      committing_.erase(key);
    }
    idle_.notify_all();
  });
  if (!posted) done(false);
}

// A tier that was away, or emptied, lacks ancestors of what comes now: those that RAM has go first.
void StoreImpl::OfferBelow(Lower& lower, RamLease lease) {
  const auto item = [](RamLease from) {
    return SaveItem{.info = from.info, .payload = from.bytes, .owner = from.pin, .hashes = from.hashes};
  };
  std::vector<SaveItem> chain = {item(std::move(lease))};
  std::unordered_set<Digest, DigestHash> parents;  // A header from outside may call its own chunk its ancestor.
  for (;;) {
    const FrameInfo& last = chain.back().info;
    if (last.parent == last.space || chain.size() >= kOfferMax || lower.write_behind->Has(last.parent)) break;
    uint8_t present = 0;
    lower.tier->Contains(std::span(&last.parent, 1), std::span(&present, 1));
    if (present) break;
    if (!parents.insert(last.parent).second) break;
    std::optional<RamLease> parent = ram_->Acquire(last.parent);
    if (!parent) break;
    chain.push_back(item(*std::move(parent)));
  }
  std::reverse(chain.begin(), chain.end());
  lower.write_behind->EnqueueChain(std::move(chain));
}

void StoreImpl::Offer(const Digest& key) {
  bool lost = false;
  for (const Lower& lower : lower_) {
    uint8_t present = 0;
    lower.tier->Contains(std::span(&key, 1), std::span(&present, 1));
    lost = lost || (!present && !lower.write_behind->Has(key));
  }
  if (!lost) return;
  ++offering_;
  const bool posted = background_.Post([this, key] {
    if (std::optional<RamLease> lease = ram_->Acquire(key)) {
      for (Lower& lower : lower_) OfferBelow(lower, *lease);
    }
    --offering_;
  });
  if (!posted) --offering_;
}

Store::Health StoreImpl::health() const {
  Health health;
  for (const Lower& lower : lower_) {
    const TierStats stats = lower.tier->stats();
    if (stats.available && stats.saving) continue;
    health.degraded = true;
    health.why += (health.why.empty() ? "" : "; ") + lower.tier->info().name + ": " + stats.why;
  }
  return health;
}

uint64_t StoreImpl::pending_saves() const {
  uint64_t pending = offering_;
  {
    std::lock_guard lock(mutex_);
    pending += committing_.size();
  }
  for (const Lower& lower : lower_) pending += lower.write_behind->pending();
  return pending;
}

CloseReport StoreImpl::Close(TimePoint deadline) {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closed_, true)) return {};
  }
  {
    std::unique_lock lock(mutex_);  // Hashing only, no I/O: soon done.
    idle_.wait_until(lock, deadline, [&] { return committing_.empty(); });
  }
  if (own_thread_) own_thread_->Stop();
  CloseReport report;
  for (Lower& lower : lower_) {
    lower.write_behind->Drain(deadline);
    const CloseReport tier = lower.tier->Close(deadline);
    const WriteBehind::Drained saves = lower.write_behind->drained();
    report.abandoned += saves.abandoned;
    report.clean = report.clean && tier.clean;
    if (saves.written + saves.dropped > 0) {
      log::Info("saves_drained",
                {{"tier", lower.tier->info().name}, {"written", saves.written}, {"dropped", saves.dropped}});
    }
  }
  report.clean = report.clean && report.abandoned == 0;
  ram_->Close(deadline);
  return report;
}

}  // namespace

Result<std::unique_ptr<Store>> OpenStore(const StoreOptions& options, std::vector<std::unique_ptr<Tier>> tiers,
                                         Metrics& metrics) {
  Result<std::unique_ptr<RamTier>> ram = RamTier::Open({.bytes_max = options.ram_bytes_max});
  if (!ram) return Fail(ram.error(), "open store");
  return std::make_unique<StoreImpl>(options, *std::move(ram), std::move(tiers), metrics);
}

}  // namespace terrace
