// Between the store and a tier: checks what the tier promises item by item, and counts what is under way.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "terrace/tier.h"
#include "tests/sim/oracle.h"
#include "tests/support/forwarding_tier.h"

namespace terrace::sim {

class ProbeTier final : public ForwardingTier {
 public:
  struct Counts {
    uint64_t loads = 0, loads_settled = 0, hits = 0;
    uint64_t saves = 0, saves_settled = 0, written = 0, existed = 0;
  };

  struct Watch {
    // What a save that is settled as hit must be.
    std::function<bool(const Digest& key, bool existed)> is_saved;
    std::function<void(const Digest& key)> erase_is_asked;  // Before the tier hears of it.
    std::function<void(const Digest& key)> failed;          // The tier may hold it against the frame. May be null.
  };
  // `who` names the node's life.
  ProbeTier(std::unique_ptr<Tier> inner, std::string who, Oracle& oracle, Watch watch)
      : ForwardingTier(std::move(inner)),
        who_(std::move(who) + "/" + inner_->info().name),
        oracle_(oracle),
        watch_(std::move(watch)) {}

  const Counts& counts() const { return counts_; }

  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override {
    counts_.loads += items.size();
    const auto asked = std::make_shared<const std::vector<LoadItem>>(items);  // Keeps the buffers for the check.
    inner_->Load(std::move(items), deadline, Watched<LoadResult>(done, [this, asked](size_t i, const LoadResult& r) {
                   ++counts_.loads_settled;
                   if (r.outcome == Outcome::kFailed && watch_.failed) watch_.failed((*asked)[i].key);
                   if (r.outcome != Outcome::kHit) {
                     if (r.reason == Reason::kNone) oracle_.Contradiction(who_ + " misses without a reason");
                     return;
                   }
                   ++counts_.hits;
                   const LoadItem& item = (*asked)[i];
                   oracle_.CheckDelivered(who_, item.key, r.info, item.into);
                   if (r.info.space != item.space) oracle_.Contradiction(who_ + " delivers another space's chunk");
                 }));
  }

  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    counts_.saves += items.size();
    std::vector<Digest> keys;
    for (const SaveItem& item : items) keys.push_back(item.info.key);
    inner_->Save(std::move(items), Watched<SaveResult>(done, [this, keys](size_t i, const SaveResult& r) {
                   ++counts_.saves_settled;
                   if (r.outcome == Outcome::kFailed && watch_.failed) watch_.failed(keys[i]);
                   if (r.outcome != Outcome::kHit) return;
                   ++(r.existed ? counts_.existed : counts_.written);
                   if (!watch_.is_saved(keys[i], r.existed)) {
                     oracle_.Contradiction(who_ + " settles a save as hit that never had its name: " + keys[i].Hex());
                   }
                 }));
  }

  void Erase(std::span<const Digest> keys) override {
    for (const Digest& key : keys) watch_.erase_is_asked(key);
    inner_->Erase(keys);
  }

 private:
  template <class R, class Check>
  static std::shared_ptr<Batch<R>> Watched(std::shared_ptr<Batch<R>> done, Check check) {
    auto settled = std::make_shared<std::vector<bool>>(done->size());
    return std::make_shared<Batch<R>>(done->size(), [done, check, settled](size_t i, const R& result) {
      TERRACE_ASSERT(!(*settled)[i]);  // Once an item.
      (*settled)[i] = true;
      check(i, result);
      done->Settle(i, result);
    });
  }

  const std::string who_;
  Oracle& oracle_;
  const Watch watch_;
  Counts counts_;
};

}  // namespace terrace::sim
