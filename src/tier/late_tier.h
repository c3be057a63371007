// A tier that may not be there yet: opened when it can be, so that a program starts without its disk and joins it when
// it appears.
//
// Until then nothing is contained, loads are misses and saves are declined with kUnavailable, and the statistics say
// why and since when. It is tried at once, by the constructor, and then at intervals.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "base/clock.h"
#include "base/executor.h"
#include "terrace/result.h"
#include "terrace/tier.h"
#include "tier/job_set.h"

namespace terrace {

class LateTier final : public Tier {
 public:
  using Opener = std::function<Result<std::unique_ptr<Tier>>()>;

  // `info` is that of the tier to come. `executor` runs the tries, which may block; it and `clock` outlive the tier.
  LateTier(TierInfo info, Opener open, std::chrono::milliseconds retry_interval, Executor& executor,
           const Clock& clock);
  ~LateTier() override;

  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override;
  void Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) override;
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override;
  Result<void> ProbeSave(uint64_t payload_bytes) override;
  void Erase(std::span<const Digest> keys) override;
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override;
  TierStats stats() const override;
  CloseReport Close(TimePoint deadline) override;

 private:
  void Try();
  Tier* inner() const { return inner_.load(std::memory_order_acquire); }

  const TierInfo info_;
  const Opener open_;
  const std::chrono::milliseconds retry_interval_;
  const Clock& clock_;
  const TimePoint since_;

  std::unique_ptr<Tier> owned_;        // Set once, by Try.
  std::atomic<Tier*> inner_{nullptr};  // owned_, released by Try: whoever acquires it sees a tier that is whole.
  mutable std::mutex mutex_;
  std::string why_;  // Guarded by mutex_.

  JobSet jobs_;  // Last: its jobs use the rest.
};

}  // namespace terrace
