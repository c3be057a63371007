#include "tier/late_tier.h"

#include <algorithm>
#include <utility>

#include "base/log.h"

namespace terrace {

LateTier::LateTier(TierInfo info, Opener open, std::chrono::milliseconds retry_interval, Executor& executor,
                   const Clock& clock)
    : info_(std::move(info)),
      open_(std::move(open)),
      retry_interval_(retry_interval),
      clock_(clock),
      since_(clock.Now()),
      jobs_(&executor) {
  Try();
  if (!inner()) log::Warn("tier_unavailable", {{"tier", info_.name}, {"why", why_}});
}

LateTier::~LateTier() { Close(clock_.Now()); }

void LateTier::Try() {
  Result<std::unique_ptr<Tier>> opened = open_();
  if (opened) {
    owned_ = *std::move(opened);
    inner_.store(owned_.get(), std::memory_order_release);
    return;
  }
  {
    std::lock_guard lock(mutex_);
    why_ = opened.error().what;
  }
  jobs_.Add({.run = [this] { Try(); }, .drop = [] {}}, retry_interval_);
}

void LateTier::Contains(std::span<const Digest> keys, std::span<uint8_t> present) {
  if (Tier* tier = inner()) return tier->Contains(keys, present);
  std::fill(present.begin(), present.end(), 0);
}

void LateTier::Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) {
  if (Tier* tier = inner()) return tier->Probe(std::move(keys), deadline, std::move(done));
  done(Error{Code::kUnavailable, info_.name + ": not open yet", 0});
}

void LateTier::Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  if (Tier* tier = inner()) return tier->Load(std::move(items), deadline, std::move(done));
  LoadResult refused;
  refused.reason = Reason::kUnavailable;
  for (size_t i = 0; i < items.size(); ++i) done->Settle(i, refused);
}

void LateTier::Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  if (Tier* tier = inner()) return tier->Save(std::move(items), std::move(done));
  SaveResult refused;
  refused.outcome = Outcome::kDeclined;
  refused.reason = Reason::kUnavailable;
  for (size_t i = 0; i < items.size(); ++i) done->Settle(i, refused);
}

Result<void> LateTier::ProbeSave(uint64_t payload_bytes) {
  if (Tier* tier = inner()) return tier->ProbeSave(payload_bytes);
  return Fail(Code::kUnavailable, info_.name + ": not open yet");
}

void LateTier::Erase(std::span<const Digest> keys) {
  if (Tier* tier = inner()) tier->Erase(keys);
}

Result<ScanPage> LateTier::Scan(const std::string& cursor, size_t limit) {
  if (Tier* tier = inner()) return tier->Scan(cursor, limit);
  return Fail(Code::kUnavailable, info_.name + ": not open yet");
}

TierStats LateTier::stats() const {
  if (Tier* tier = inner()) return tier->stats();
  const auto since = std::chrono::duration_cast<std::chrono::seconds>(clock_.Now() - since_);
  std::lock_guard lock(mutex_);
  return {.index_ready = false, .available = false, .why = why_ + ", since " + std::to_string(since.count()) + " s"};
}

// No try begins any more; one under way ends, and what it opened is closed.
CloseReport LateTier::Close(TimePoint deadline) {
  jobs_.Close(TimePoint::min());
  Tier* tier = inner();
  return tier ? tier->Close(deadline) : CloseReport{};
}

}  // namespace terrace
