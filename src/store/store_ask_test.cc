// What could go wrong with a tier that must be asked: what others saved is never found; a request waits for an answer
// that does not come; a load that goes on behind a hole; chunks that came while a request waited are computed again.
#include <gtest/gtest.h>

#include <condition_variable>
#include <mutex>
#include <set>
#include <thread>

#include "base/hash.h"
#include "terrace/metrics.h"
#include "terrace/store.h"
#include "tests/support/forwarding_tier.h"
#include "tests/support/memory_tier.h"

namespace terrace {
namespace {

constexpr uint64_t kChunkBytes = 10'000;

TimePoint Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(30); }  // A failure, not a measure.

// Holds frames of "others": Contains does not know them before Probe was answered.
class AskedTier final : public ForwardingTier {
 public:
  explicit AskedTier(std::unique_ptr<MemoryTier> inner) : ForwardingTier(std::move(inner)) {
    info_ = inner_->info();
    info_.asks = true;
  }
  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    inner_->Contains(keys, present);
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) present[i] = present[i] && known_.contains(keys[i]);
  }
  void Probe(std::vector<Digest> keys, TimePoint, Probed done) override {
    {
      std::lock_guard lock(mutex_);
      ++probes_;
      if (hold_) {
        held_ = [this, keys = std::move(keys), done = std::move(done)] { Answer(keys, done); };
        return;
      }
    }
    Answer(keys, done);
  }
  MemoryTier& inner() { return static_cast<MemoryTier&>(*inner_); }
  void Hold() {
    std::lock_guard lock(mutex_);
    hold_ = true;
  }
  void Release(std::optional<Error> trouble = std::nullopt) {
    std::function<void()> held;
    {
      std::lock_guard lock(mutex_);
      hold_ = false;
      trouble_ = std::move(trouble);
      held = std::move(held_);
    }
    if (held) held();
  }
  size_t probes() const {
    std::lock_guard lock(mutex_);
    return probes_;
  }

 private:
  void Answer(const std::vector<Digest>& keys, const Probed& done) {
    std::optional<Error> trouble;
    {
      std::lock_guard lock(mutex_);
      trouble = trouble_;
      if (!trouble) known_.insert(keys.begin(), keys.end());
    }
    done(trouble);
  }

  TierInfo info_;
  mutable std::mutex mutex_;
  bool hold_ = false;  // Guarded by mutex_, as all below.
  std::function<void()> held_;
  std::optional<Error> trouble_;
  std::set<Digest> known_;
  size_t probes_ = 0;
};

class StoreAskTest : public testing::Test {
 protected:
  StoreAskTest() {
    auto tier = std::make_unique<AskedTier>(std::make_unique<MemoryTier>());
    bucket_ = tier.get();
    std::vector<std::unique_ptr<Tier>> tiers;
    tiers.push_back(std::move(tier));
    store_ = OpenStore({.ram_bytes_max = 16 << 20}, std::move(tiers), metrics_).value();
    for (int i = 0; i < 20; ++i) keys_.push_back(Sha256Of("key " + std::to_string(i)));
  }
  FrameInfo Info(size_t i) const {
    return {.space = space_, .key = keys_[i], .parent = i == 0 ? space_ : keys_[i - 1], .payload_bytes = kChunkBytes};
  }
  void OthersSave(size_t i) { bucket_->inner().Put(Info(i), std::vector<std::byte>(kChunkBytes, std::byte{7})); }
  size_t Hits(LoadJob& job, Reason* reason = nullptr) {
    size_t hits = 0;
    for (; hits < job.size(); ++hits) {
      const LoadJob::Item item = job.Wait(hits, Soon());
      if (item.outcome == Outcome::kHit) continue;
      if (reason) *reason = item.reason;
      break;
    }
    return hits;
  }

  Metrics metrics_;
  AskedTier* bucket_ = nullptr;
  std::unique_ptr<Store> store_;
  const Digest space_ = Sha256Of("space");
  std::vector<Digest> keys_;
};

TEST_F(StoreAskTest, ALoadFindsWhatOthersSavedAndSaysWhyItEnds) {
  for (size_t i = 0; i < 7; ++i) OthersSave(i);
  ASSERT_TRUE(store_->asks());
  EXPECT_EQ(store_->Lookup(keys_).chunks, 0u) << "not asked yet";
  const auto job = store_->Load(space_, keys_, kChunkBytes, Soon());
  Reason reason = Reason::kNone;
  EXPECT_EQ(Hits(*job, &reason), 7u);
  EXPECT_EQ(reason, Reason::kNotFound);
}

TEST_F(StoreAskTest, AProbeTellsLookupMore) {
  for (size_t i = 0; i < 3; ++i) OthersSave(i);
  bool done = false;
  store_->Probe(keys_, Soon(), [&] { done = true; });
  EXPECT_TRUE(done);
  EXPECT_EQ(store_->Lookup(keys_).chunks, 3u);
}

TEST_F(StoreAskTest, NothingIsAskedWhenAllIsKnown) {
  OthersSave(0);
  store_->Probe(std::span(keys_).first(1), Soon(), [] {});
  const auto job = store_->Load(space_, std::span(keys_).first(1), kChunkBytes, Soon());
  EXPECT_EQ(Hits(*job), 1u);
  EXPECT_EQ(bucket_->probes(), 1u);
}

TEST_F(StoreAskTest, WhatIsKnownIsServedWhileTheRestIsAskedFor) {
  OthersSave(0);
  OthersSave(1);
  store_->Probe(std::span(keys_).first(1), Soon(), [] {});
  bucket_->Hold();
  const auto job = store_->Load(space_, keys_, kChunkBytes, Soon());
  EXPECT_EQ(job->Wait(0, Soon()).outcome, Outcome::kHit);
  EXPECT_EQ(job->Wait(1, TimePoint::min()).reason, Reason::kTimeout) << "no answer by the caller's deadline";
  bucket_->Release();
  EXPECT_EQ(job->Wait(1, Soon()).outcome, Outcome::kHit);
}

TEST_F(StoreAskTest, ATierThatCanNotBeAskedIsAReasonAndNoWait) {
  OthersSave(0);
  bucket_->Hold();
  const auto job = store_->Load(space_, keys_, kChunkBytes, Soon());
  bucket_->Release(Error{Code::kUnavailable, "down", 0});
  Reason reason = Reason::kNone;
  EXPECT_EQ(Hits(*job, &reason), 0u);
  EXPECT_EQ(reason, Reason::kUnavailable);
}

TEST_F(StoreAskTest, AHoleEndsThePrefix) {
  for (const size_t i : {0, 1, 3, 4}) OthersSave(i);
  const auto job = store_->Load(space_, keys_, kChunkBytes, Soon());
  EXPECT_EQ(Hits(*job), 2u);
  EXPECT_EQ(job->Wait(3, Soon()).outcome, Outcome::kMiss) << "behind the hole";
}

TEST_F(StoreAskTest, WhatWasComputedWhileARequestWaitedIsFound) {
  const auto job = store_->Load(space_, keys_, kChunkBytes, Soon());  // Asked: there is nothing.
  SaveSlot slot = store_->BeginSave(Info(0)).value();
  std::fill(slot.bytes.begin(), slot.bytes.end(), std::byte{7});
  store_->Commit(std::move(slot));
  const TimePoint deadline = Soon();
  while (store_->pending_saves() > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(Hits(*job), 1u);
}

TEST_F(StoreAskTest, AnAnswerMayComeAfterTheJobIsDropped) {
  OthersSave(0);
  bucket_->Hold();
  store_->Load(space_, keys_, kChunkBytes, Soon()).reset();
  bucket_->Release();
  EXPECT_EQ(store_->Lookup(keys_).chunks, 1u);
}

}  // namespace
}  // namespace terrace
