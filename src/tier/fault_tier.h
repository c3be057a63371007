// Faults on demand: a tier that holds a tier and makes some of its items fail, for tests, demonstrations and `--fault`.
//
// The specification is a list of terms separated by commas; docs/reference/fault.md describes each:
//
//   load.error load.corrupt load.hang        FAULT=P   each item with probability P, 0 to 1
//   save.error save.enospc save.hang         FAULT@N   the Nth item of its verb and no other, from 1
//   contains.lie
//   load.delay save.delay                    =DURATION every batch waits that long first
//   hang=DURATION                            how long what hangs hangs; 1h
//   seed=N                                   1
//
// The same specification and the same order of items give the same faults. Each one is logged (fault_injected).
//
// What comes out is what a real tier would report, so whole-or-nothing holds: a tier verifies its own bytes, so
// `load.corrupt` does not hand out wrong bytes (nobody above could notice) but turns a hit into the miss that a tier
// which found the damage reports, and removes the frame.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/executor.h"
#include "terrace/result.h"
#include "terrace/tier.h"
#include "tier/job_set.h"

namespace terrace {

struct FaultSpec {
  struct Trigger {
    double probability = 0;
    uint64_t at = 0;  // The Nth item, from 1; 0: by probability.
  };
  Trigger load_error, load_corrupt, load_hang, save_error, save_enospc, save_hang, contains_lie;
  std::chrono::milliseconds load_delay{0}, save_delay{0};
  std::chrono::milliseconds hang = std::chrono::hours(1);
  uint64_t seed = 1;

  // "" is a specification without faults. Errors name the term and, if there is one, the nearest known name.
  static Result<FaultSpec> Parse(std::string_view text);
};

class FaultTier final : public Tier {
 public:
  // Delays and hangs wait in `executor`, which outlives the tier.
  FaultTier(std::unique_ptr<Tier> inner, const FaultSpec& spec, Executor& executor);
  ~FaultTier() override;

  const TierInfo& info() const override { return inner_->info(); }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override;
  void Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) override {
    inner_->Probe(std::move(keys), deadline, std::move(done));
  }
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override;
  Result<void> ProbeSave(uint64_t payload_bytes) override;
  void Erase(std::span<const Digest> keys) override { inner_->Erase(keys); }
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override { return inner_->Scan(cursor, limit); }
  TierStats stats() const override;
  // What hangs is settled at once, what is delayed is given until the deadline.
  CloseReport Close(TimePoint deadline) override;

 private:
  // Whether `trigger` fires for the nth item. Logs it if so.
  bool Fires(const FaultSpec::Trigger& trigger, const char* name, uint64_t n, const Digest& key) const;

  const FaultSpec spec_;
  std::atomic<uint64_t> contained_{0};  // Relaxed, as are the next four: counts.
  std::atomic<uint64_t> loads_{0};
  std::atomic<uint64_t> saves_{0};
  std::atomic<uint64_t> save_probes_{0};
  std::atomic<uint64_t> corrupted_{0};
  const std::unique_ptr<Tier> inner_;
  JobSet delayed_;
  JobSet hung_;
};

}  // namespace terrace
