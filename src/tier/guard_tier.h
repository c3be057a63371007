// Deadlines and circuit breakers around a tier, so that storage trouble costs hits and no waiting.
//
// Deadlines: every item settles by its deadline, also if the tier below never settles it (what it answers later is
// dropped; the memory stays the tier's until then). Breakers, one for reads and one for saves: `failures_to_open`
// failures in a row open it, and then the tier below gets no calls. It is probed in the background, reads with a Scan
// of one frame and saves with ProbeSave, `probe_after` after opening and then at doubling intervals, whether anybody
// asks for something or not; the first probe that succeeds closes the breaker on trial: if the next call fails it opens
// again, and the intervals go on doubling. A miss is no failure, and what the tier has not tried (it was cancelled, or
// found no room, or its time was over before its turn) is no success either. A deadline that passes is a failure only
// if the tier settled nothing of the same kind meanwhile, whoever notices it, the tier or we: slow is not dead.
// Deadlines may be as short as computing is fast, and a healthy disk of a busy machine misses short ones, so deadlines
// alone open the breaker only when those of one row have waited `silence` together. A full disk (kFull) opens the
// breaker for saves alone, and at once.
//
// Verdicts: a key whose load failed is contained no more, until `doubt` has passed, a probe has closed the breaker, or
// a save has written it anew, so a frame that can't be read is not asked for by every request that would like it.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/executor.h"
#include "terrace/tier.h"
#include "tier/job_set.h"

namespace terrace {

struct GuardOptions {
  std::chrono::milliseconds load_timeout{30000};  // Above the deadline that a load brings.
  std::chrono::milliseconds save_timeout{60000};
  uint32_t failures_to_open = 3;
  std::chrono::milliseconds silence{300};  // Three deadlines of 100 ms: a healthy tier answers in one of them.
  std::chrono::milliseconds probe_after{1000};
  std::chrono::milliseconds probe_after_max{15000};
  std::chrono::milliseconds sweep_interval{20};  // How late a deadline may be noticed.
  std::chrono::milliseconds doubt{30000};
  size_t doubts_max = 4096;  // Beyond: no more are noted.
};

class GuardTier final : public Tier {
 public:
  // `executor` runs the sweep and the probes, one at a time. A probe may block one of its threads, so it has one more
  // than there are guards on it. Both outlive the tier.
  GuardTier(std::unique_ptr<Tier> inner, const GuardOptions& options, Executor& executor, const Clock& clock);
  ~GuardTier() override;

  const TierInfo& info() const override { return inner_->info(); }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override;
  void Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) override;
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override;
  void Erase(std::span<const Digest> keys) override;
  Result<void> ProbeSave(uint64_t payload_bytes) override { return inner_->ProbeSave(payload_bytes); }
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override { return inner_->Scan(cursor, limit); }
  TierStats stats() const override;
  CloseReport Close(TimePoint deadline) override;

 private:
  struct Breaker {
    const char* what = "";
    uint32_t failures = 0;          // In a row.
    TimePoint::duration silent{0};  // That those of them that were late have waited.
    uint64_t progress = 0;          // Items that worked or failed, not those that were late.
    bool open = false;
    bool probing = false;
    bool probe_armed = false;
    TimePoint opened_at;
    std::chrono::milliseconds interval{0};  // Between probes; 0 once a call succeeded.
    std::string why;                        // The last failure.
  };
  // A batch that the tier below has and that has not settled whole.
  struct Pending;
  template <class R>
  struct PendingBatch;
  template <class R, class Item>
  std::shared_ptr<Batch<R>> Watch(const std::vector<Item>& items, TimePoint deadline, std::shared_ptr<Batch<R>> done,
                                  Breaker& breaker);

  bool Admit(const Breaker& breaker) const;
  void Succeeded(Breaker& breaker, bool probed = false);
  // `late`: how long the call had waited, if its deadline is all that says so.
  void Failed(Breaker& breaker, const std::string& why, bool certain = false,
              std::optional<TimePoint::duration> late = {});
  void Doubt(const Digest& key);
  void Undoubt(const Digest& key);
  void ArmSweep();  // With mutex_ held.
  void Sweep();
  void ArmProbe(Breaker& breaker);
  void ProbeOnce(Breaker& breaker);

  std::unique_ptr<Tier> inner_;  // Destroyed first: its last calls back use the rest.
  const GuardOptions options_;
  const Clock& clock_;

  mutable std::mutex mutex_;
  Breaker read_, save_;                                         // Guarded by mutex_.
  std::unordered_map<Digest, TimePoint, DigestHash> doubts_;    // Guarded by mutex_. Until when.
  std::multimap<TimePoint, std::weak_ptr<Pending>> deadlines_;  // Guarded by mutex_.
  bool sweep_armed_ = false;                                    // Guarded by mutex_.
  bool probe_running_ = false;                                  // Guarded by mutex_. One at a time.
  uint64_t save_bytes_ = 0;                                     // Guarded by mutex_. Payload of the last save.
  bool closed_ = false;                                         // Guarded by mutex_.

  JobSet jobs_;  // Last: its jobs use the rest.
};

}  // namespace terrace
