#include "tier/guard_tier.h"

#include <algorithm>
#include <type_traits>
#include <utility>

#include "base/log.h"

namespace terrace {
namespace {

LoadResult Late(const LoadResult*) {
  LoadResult result;
  result.outcome = Outcome::kMiss;
  result.reason = Reason::kTimeout;
  return result;
}
SaveResult Late(const SaveResult*) {
  SaveResult result;
  result.outcome = Outcome::kFailed;
  result.reason = Reason::kTimeout;
  result.error = Error{Code::kTimeout, "the tier did not answer in time", 0};
  return result;
}

// What the end of an item says of the medium. A tier may end at its deadline what it has begun, before we do; and what
// waited for its turn, or was not taken, has not been tried.
enum class Says { kWorks, kFails, kLate, kNothing };
Says SaysOf(const LoadResult& r) {
  if (r.outcome == Outcome::kFailed) return Says::kFails;
  switch (r.reason) {
    case Reason::kTimeout: return Says::kLate;
    case Reason::kUnavailable:
    case Reason::kCancelled:
    case Reason::kFull:
    case Reason::kIndexLoading: return Says::kNothing;
    default: return Says::kWorks;
  }
}
Says SaysOf(const SaveResult& r) {
  if (r.outcome == Outcome::kFailed) return Says::kFails;
  if (r.reason == Reason::kTimeout) return Says::kLate;
  return r.outcome == Outcome::kHit || r.reason == Reason::kVersion ? Says::kWorks : Says::kNothing;
}
// One answer is enough.
bool IsCertain(const LoadResult&) { return false; }
bool IsCertain(const SaveResult& r) { return r.reason == Reason::kFull; }

template <class R>
std::string WhyFailed(const R& r) {
  return r.error ? r.error->what : ReasonName(r.reason);
}

}  // namespace

struct GuardTier::Pending {
  virtual ~Pending() = default;
  virtual void Expire() = 0;
};

template <class R>
struct GuardTier::PendingBatch final : Pending {
  PendingBatch(GuardTier& g, Breaker& b, std::shared_ptr<Batch<R>> d, std::vector<Digest> k, uint64_t progress)
      : guard(g),
        begun(g.clock_.Now()),
        breaker(b),
        done(std::move(d)),
        keys(std::move(k)),
        settled(done->size()),
        progress_before(progress) {}

  // True for whoever comes first: the tier below, or the deadline.
  bool Claim(size_t i) {
    std::lock_guard lock(mutex);
    return std::exchange(settled[i], uint8_t{1}) == 0;
  }
  void Settle(size_t i, const R& result) {
    switch (SaysOf(result)) {
      case Says::kFails:
        if (&breaker == &guard.read_) guard.Doubt(keys[i]);
        guard.Failed(breaker, WhyFailed(result), IsCertain(result));
        break;
      case Says::kWorks:
        guard.Succeeded(breaker);
        if constexpr (std::is_same_v<R, SaveResult>) {
          if (result.outcome == Outcome::kHit && !result.existed) guard.Undoubt(keys[i]);
        }
        break;
      case Says::kLate: IsLate(); break;
      case Says::kNothing: break;
    }
    if (Claim(i)) done->Settle(i, result);
  }
  void IsLate() {
    bool stuck = false;
    {
      std::lock_guard lock(guard.mutex_);
      stuck = breaker.progress == progress_before;
    }
    if (stuck) guard.Failed(breaker, "no answer in time", false, guard.clock_.Now() - begun);
  }
  void Expire() override {
    bool any = false;
    for (size_t i = 0; i < done->size(); ++i) {
      if (!Claim(i)) continue;
      any = true;
      done->Settle(i, Late(static_cast<const R*>(nullptr)));
    }
    if (any) IsLate();
  }

  GuardTier& guard;
  const TimePoint begun;
  Breaker& breaker;
  const std::shared_ptr<Batch<R>> done;
  const std::vector<Digest> keys;
  std::mutex mutex;
  std::vector<uint8_t> settled;  // Guarded by mutex.
  const uint64_t progress_before;
};

GuardTier::GuardTier(std::unique_ptr<Tier> inner, const GuardOptions& options, Executor& executor, const Clock& clock)
    : inner_(std::move(inner)), options_(options), clock_(clock), jobs_(&executor) {
  read_.what = "reads";
  save_.what = "saves";
}

GuardTier::~GuardTier() {
  Close(clock_.Now());
  inner_.reset();
}

// True if the call may go on to the tier below.
bool GuardTier::Admit(const Breaker& breaker) const {
  std::lock_guard lock(mutex_);
  return !closed_ && !breaker.open;
}

void GuardTier::Succeeded(Breaker& breaker, bool probed) {
  std::chrono::milliseconds down{0};
  {
    std::lock_guard lock(mutex_);
    ++breaker.progress;
    // A probe is no load and no save.
    breaker.failures = probed ? options_.failures_to_open - 1 : 0;
    if (!probed) {
      breaker.interval = {};
      breaker.silent = {};
    }
    breaker.probing = false;
    if (!breaker.open) return;
    breaker.open = false;
    if (&breaker == &read_) doubts_.clear();
    down = std::chrono::duration_cast<std::chrono::milliseconds>(clock_.Now() - breaker.opened_at);
  }
  log::Info("tier_recovered", {{"tier", info().name}, {"what", breaker.what}, {"down_ms", down.count()}});
}

void GuardTier::Doubt(const Digest& key) {
  std::lock_guard lock(mutex_);
  const TimePoint now = clock_.Now();
  if (doubts_.size() >= options_.doubts_max) std::erase_if(doubts_, [&](const auto& d) { return d.second <= now; });
  if (doubts_.size() < options_.doubts_max) doubts_[key] = now + options_.doubt;
}

void GuardTier::Undoubt(const Digest& key) {
  std::lock_guard lock(mutex_);
  doubts_.erase(key);
}

void GuardTier::Failed(Breaker& breaker, const std::string& why, bool certain,
                       std::optional<TimePoint::duration> late) {
  bool opened = false;
  {
    std::lock_guard lock(mutex_);
    ++breaker.progress;
    breaker.why = why;
    if (breaker.open) {
      if (!std::exchange(breaker.probing, false)) return;  // A call from before it opened.
    } else {
      ++breaker.failures;
      breaker.silent += late.value_or(TimePoint::duration{0});
      const bool enough = !late || breaker.silent >= options_.silence;
      if (!certain && (breaker.failures < options_.failures_to_open || !enough)) return;
      breaker.open = opened = true;
      breaker.opened_at = clock_.Now();
    }
    breaker.interval =
        breaker.interval.count() == 0 ? options_.probe_after : std::min(breaker.interval * 2, options_.probe_after_max);
  }
  if (!opened) return;
  log::Warn("tier_degraded", {{"tier", info().name}, {"what", breaker.what}, {"why", why}});
  ArmProbe(breaker);
}

void GuardTier::ArmProbe(Breaker& breaker) {
  std::chrono::milliseconds delay{0};
  {
    std::lock_guard lock(mutex_);
    if (closed_ || !breaker.open || std::exchange(breaker.probe_armed, true)) return;
    delay = breaker.interval;
  }
  jobs_.Add({.run = [this, &breaker] { ProbeOnce(breaker); }, .drop = [] {}}, delay);
}

void GuardTier::ProbeOnce(Breaker& breaker) {
  bool begin = false;
  uint64_t save_bytes = 0;
  {
    std::lock_guard lock(mutex_);
    breaker.probe_armed = false;
    begin = !closed_ && breaker.open && !probe_running_;
    if (begin) probe_running_ = breaker.probing = true;
    save_bytes = save_bytes_;
  }
  if (begin) {
    std::optional<Error> trouble;
    if (&breaker == &read_) {
      if (const Result<ScanPage> page = inner_->Scan("", 1); !page) trouble = page.error();
    } else if (const Result<void> taken = inner_->ProbeSave(save_bytes); !taken) {
      trouble = taken.error();
    }
    {
      std::lock_guard lock(mutex_);
      probe_running_ = false;
    }
    if (!trouble) return Succeeded(breaker, /*probed=*/true);
    Failed(breaker, trouble->what);
  }
  ArmProbe(breaker);
}

void GuardTier::ArmSweep() {
  if (std::exchange(sweep_armed_, true)) return;
  jobs_.Add({.run = [this] { Sweep(); }, .drop = [] {}}, options_.sweep_interval);
}

void GuardTier::Sweep() {
  std::vector<std::shared_ptr<Pending>> due;
  {
    std::lock_guard lock(mutex_);
    sweep_armed_ = false;
    const TimePoint now = clock_.Now();
    while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
      if (auto pending = deadlines_.begin()->second.lock()) due.push_back(std::move(pending));
      deadlines_.erase(deadlines_.begin());
    }
    if (!deadlines_.empty()) ArmSweep();
  }
  for (const auto& pending : due) pending->Expire();
}

template <class R, class Item>
std::shared_ptr<Batch<R>> GuardTier::Watch(const std::vector<Item>& items, TimePoint deadline,
                                           std::shared_ptr<Batch<R>> done, Breaker& breaker) {
  std::vector<Digest> keys;
  for (const Item& item : items) {
    if constexpr (std::is_same_v<Item, LoadItem>) {
      keys.push_back(item.key);
    } else {
      keys.push_back(item.info.key);
    }
  }
  std::lock_guard lock(mutex_);
  auto pending = std::make_shared<PendingBatch<R>>(*this, breaker, std::move(done), std::move(keys), breaker.progress);
  deadlines_.emplace(deadline, pending);
  ArmSweep();
  return std::make_shared<Batch<R>>(items.size(), [pending](size_t i, const R& result) { pending->Settle(i, result); });
}

void GuardTier::Contains(std::span<const Digest> keys, std::span<uint8_t> present) {
  {
    std::lock_guard lock(mutex_);
    if (read_.open) {
      std::fill(present.begin(), present.end(), 0);
      return;
    }
  }
  inner_->Contains(keys, present);
  std::lock_guard lock(mutex_);
  if (doubts_.empty()) return;
  for (size_t i = 0; i < keys.size(); ++i) {
    const auto it = doubts_.find(keys[i]);
    if (it != doubts_.end() && clock_.Now() < it->second) present[i] = 0;
  }
}

void GuardTier::Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) {
  if (!Admit(read_)) return done(Error{Code::kUnavailable, "reads are stopped", 0});
  const TimePoint latest = std::min(deadline, clock_.Now() + options_.load_timeout);
  inner_->Probe(std::move(keys), latest, [this, done = std::move(done)](const std::optional<Error>& trouble) {
    if (!trouble) {
      Succeeded(read_);
    } else if (trouble->code != Code::kCancelled) {
      Failed(read_, trouble->what);
    }
    done(trouble);
  });
}

void GuardTier::Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  if (!Admit(read_)) {
    LoadResult refused;
    refused.reason = Reason::kUnavailable;
    for (size_t i = 0; i < items.size(); ++i) done->Settle(i, refused);
    return;
  }
  const TimePoint latest = std::min(deadline, clock_.Now() + options_.load_timeout);
  auto watched = Watch<LoadResult>(items, latest, std::move(done), read_);
  inner_->Load(std::move(items), latest, std::move(watched));
}

void GuardTier::Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  if (!Admit(save_)) {
    SaveResult refused;
    refused.outcome = Outcome::kDeclined;
    refused.reason = Reason::kUnavailable;
    for (size_t i = 0; i < items.size(); ++i) done->Settle(i, refused);
    return;
  }
  if (!items.empty()) {
    std::lock_guard lock(mutex_);
    save_bytes_ = items.back().info.payload_bytes;
  }
  auto watched = Watch<SaveResult>(items, clock_.Now() + options_.save_timeout, std::move(done), save_);
  inner_->Save(std::move(items), std::move(watched));
}

void GuardTier::Erase(std::span<const Digest> keys) { inner_->Erase(keys); }

TierStats GuardTier::stats() const {
  TierStats stats = inner_->stats();
  std::lock_guard lock(mutex_);
  for (const Breaker* breaker : {&read_, &save_}) {
    if (!breaker->open) continue;
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(clock_.Now() - breaker->opened_at).count();
    stats.why += (stats.why.empty() ? "" : "; ") + std::string(breaker->what) + " stopped for " +
                 std::to_string(seconds) + " s: " + breaker->why;
    (breaker == &read_ ? stats.available : stats.saving) = false;
  }
  return stats;
}

CloseReport GuardTier::Close(TimePoint deadline) {
  {
    std::lock_guard lock(mutex_);
    closed_ = true;
  }
  CloseReport report = inner_->Close(deadline);  // Deadlines hold until it is done.
  jobs_.Close(TimePoint::min());
  std::vector<std::shared_ptr<Pending>> left;
  {
    std::lock_guard lock(mutex_);
    for (auto& [at, pending] : deadlines_) {
      if (auto alive = pending.lock()) left.push_back(std::move(alive));
    }
    deadlines_.clear();
  }
  for (const auto& pending : left) pending->Expire();
  return report;
}

}  // namespace terrace
