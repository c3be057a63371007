// A tier that hands everything to another one: what tests derive from to change a little of it.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "terrace/tier.h"

namespace terrace {

class ForwardingTier : public Tier {
 public:
  explicit ForwardingTier(std::unique_ptr<Tier> inner) : inner_(std::move(inner)) {}
  const TierInfo& info() const override { return inner_->info(); }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override { inner_->Contains(keys, present); }
  void Probe(std::vector<Digest> keys, TimePoint deadline, Probed done) override {
    inner_->Probe(std::move(keys), deadline, std::move(done));
  }
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override {
    inner_->Load(std::move(items), deadline, std::move(done));
  }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    inner_->Save(std::move(items), std::move(done));
  }
  Result<void> ProbeSave(uint64_t payload_bytes) override { return inner_->ProbeSave(payload_bytes); }
  void Erase(std::span<const Digest> keys) override { inner_->Erase(keys); }
  Result<ScanPage> Scan(const std::string& cursor, size_t limit) override { return inner_->Scan(cursor, limit); }
  TierStats stats() const override { return inner_->stats(); }
  CloseReport Close(TimePoint deadline) override { return inner_->Close(deadline); }

 protected:
  const std::unique_ptr<Tier> inner_;
};

}  // namespace terrace
