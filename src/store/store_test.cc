// Would catch: a hole counted as a prefix, bytes of another space handed out, a second load of the same key, a caller
// that waits beyond its deadline, RAM pinned by lookups, a chunk that reaches the lower tier before its parent, a close
// that loses what was committed.
#include "terrace/store.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <thread>

#include "terrace/metrics.h"
#include "tests/support/memory_tier.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kChunkBytes = 100'000;

TimePoint Soon() { return std::chrono::steady_clock::now() + 30s; }  // A failure, not a measure.

Digest Named(uint8_t space, int position) {
  Digest d;
  d.bytes[0] = space;
  d.bytes[1] = static_cast<uint8_t>(position >> 8);
  d.bytes[2] = static_cast<uint8_t>(position);
  d.bytes[31] = 1;
  return d;
}

struct Chain {
  explicit Chain(uint8_t name, int length) {
    space = Named(name, 0xffff);
    for (int i = 0; i < length; ++i) keys.push_back(Named(name, i));
  }
  FrameInfo Info(size_t i) const {
    FrameInfo info;
    info.space = space;
    info.key = keys[i];
    info.parent = i == 0 ? space : keys[i - 1];
    info.first_token = static_cast<uint32_t>(i * 256);
    info.token_count = 256;
    info.payload_bytes = kChunkBytes;
    return info;
  }
  std::vector<std::byte> Bytes(size_t i) const {
    std::mt19937 random(space.bytes[0] * 1000u + static_cast<unsigned>(i));
    std::vector<std::byte> bytes(kChunkBytes);
    for (std::byte& b : bytes) b = static_cast<std::byte>(random());
    return bytes;
  }
  Digest space;
  std::vector<Digest> keys;
};

class StoreTest : public testing::Test {
 protected:
  void Open(uint64_t ram_bytes = 64 << 20, size_t lower_tiers = 1) {
    std::vector<std::unique_ptr<Tier>> tiers;
    for (size_t i = 0; i < lower_tiers; ++i) {
      auto tier = std::make_unique<MemoryTier>("memory" + std::to_string(i));
      lower.push_back(tier.get());
      tiers.push_back(std::move(tier));
    }
    StoreOptions options;
    options.ram_bytes_max = ram_bytes;
    store = OpenStore(options, std::move(tiers), metrics).value();
  }
  void Save(const Chain& chain, size_t i) {
    SaveSlot slot = store->BeginSave(chain.Info(i)).value();
    const auto bytes = chain.Bytes(i);
    std::memcpy(slot.bytes.data(), bytes.data(), bytes.size());
    store->Commit(std::move(slot));
  }
  void SaveAll(const Chain& chain) {
    for (size_t i = 0; i < chain.keys.size(); ++i) Save(chain, i);
    WaitForSaves();
  }
  void WaitForSaves() {
    const TimePoint deadline = Soon();
    while (store->pending_saves() > 0) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline);
      std::this_thread::yield();
    }
  }
  void PutBelow(const Chain& chain, size_t tier = 0) {
    for (size_t i = 0; i < chain.keys.size(); ++i) lower[tier]->Put(chain.Info(i), chain.Bytes(i));
  }
  void ExpectHits(const Chain& chain, uint8_t tier) {
    const auto job = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
    for (size_t i = 0; i < chain.keys.size(); ++i) {
      const LoadJob::Item item = job->Wait(i, Soon());
      ASSERT_EQ(item.outcome, Outcome::kHit) << i << " " << ReasonName(item.reason);
      EXPECT_EQ(item.tier, tier) << i;
      EXPECT_EQ(item.lease.info, chain.Info(i));
      const auto expected = chain.Bytes(i);
      ASSERT_EQ(item.lease.bytes.size(), expected.size());
      EXPECT_EQ(std::memcmp(item.lease.bytes.data(), expected.data(), expected.size()), 0) << i;
    }
  }
  Metrics metrics;  // Outlives the store.
  std::unique_ptr<Store> store;
  std::vector<MemoryTier*> lower;
};

TEST_F(StoreTest, SavedChunksAreInRamAndReachTheLowerTier) {
  Open();
  const Chain chain(1, 5);
  SaveAll(chain);
  EXPECT_EQ(lower[0]->size(), 5u);
  ExpectHits(chain, 0);
  EXPECT_EQ(lower[0]->loads(), 0u);
}

TEST_F(StoreTest, AChunkFromBelowIsRaisedIntoRam) {
  Open();
  const Chain chain(1, 5);
  PutBelow(chain);
  ExpectHits(chain, 1);
  ExpectHits(chain, 0);
  EXPECT_EQ(lower[0]->loads(), 5u);
}

TEST_F(StoreTest, LookupCountsAPrefixAndStopsAtTheFirstHole) {
  Open();
  const Chain chain(1, 6);
  PutBelow(chain);
  Save(chain, 0);
  WaitForSaves();
  lower[0]->Erase(std::span(&chain.keys[3], 1));
  const PrefixHit hit = store->Lookup(chain.keys);
  EXPECT_EQ(hit.chunks, 3u);
  EXPECT_EQ(hit.tier, (std::vector<uint8_t>{0, 1, 1}));
  EXPECT_EQ(hit.miss_reason, Reason::kNotFound);
  EXPECT_EQ(store->Lookup(std::span(chain.keys).first(3)).miss_reason, Reason::kNone);
  EXPECT_EQ(store->Lookup({}).chunks, 0u);
}

TEST_F(StoreTest, AnUnreadIndexAndAnUnreachableTierAreNamedAsTheReason) {
  Open();
  const Chain chain(1, 1);
  lower[0]->SetStats({.index_ready = false});
  EXPECT_EQ(store->Lookup(chain.keys).miss_reason, Reason::kIndexLoading);
  EXPECT_FALSE(store->health().degraded);
  lower[0]->SetStats({.available = false, .why = "mount gone since 3 s"});
  EXPECT_EQ(store->Lookup(chain.keys).miss_reason, Reason::kUnavailable);
  EXPECT_TRUE(store->health().degraded);
  EXPECT_EQ(store->health().why, "memory0: mount gone since 3 s");
}

TEST_F(StoreTest, ATierThatTakesNoSavesIsDegradedAndTheReasonOfNoMiss) {
  Open();
  const Chain chain(1, 1);
  lower[0]->SetStats({.saving = false, .why = "saves stopped for 3 s: ENOSPC"});
  EXPECT_EQ(store->Lookup(chain.keys).miss_reason, Reason::kNotFound);
  const auto job = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
  EXPECT_EQ(job->Wait(0, Soon()).reason, Reason::kNotFound);
  EXPECT_TRUE(store->health().degraded);
  EXPECT_EQ(store->health().why, "memory0: saves stopped for 3 s: ENOSPC");
}

TEST_F(StoreTest, ManyAskersCauseOneLoadAKey) {
  Open();
  const Chain chain(1, 3);
  PutBelow(chain);
  lower[0]->Hold();
  std::vector<std::thread> askers;
  std::atomic<int> hits{0};
  for (int t = 0; t < 8; ++t) {
    askers.emplace_back([&] {
      const auto job = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
      for (size_t i = 0; i < 3; ++i) hits += job->Wait(i, Soon()).outcome == Outcome::kHit;
    });
  }
  ASSERT_TRUE(lower[0]->WaitForLoads(3, Soon()));
  lower[0]->Release();
  for (std::thread& t : askers) t.join();
  EXPECT_EQ(hits, 24);
  EXPECT_EQ(lower[0]->loads(), 3u);
}

TEST_F(StoreTest, WhatIsNotThereByTheDeadlineIsATimeoutAndMayLandLater) {
  Open();
  const Chain chain(1, 1);
  PutBelow(chain);
  lower[0]->Hold();
  auto job = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
  const LoadJob::Item item = job->Wait(0, std::chrono::steady_clock::now() + 20ms);
  EXPECT_EQ(item.outcome, Outcome::kMiss);
  EXPECT_EQ(item.reason, Reason::kTimeout);
  job.reset();
  lower[0]->Release();
  const TimePoint deadline = Soon();
  while (store->Lookup(chain.keys).tier.at(0) != 0 && std::chrono::steady_clock::now() < deadline)
    std::this_thread::yield();
  ExpectHits(chain, 0);
}

TEST_F(StoreTest, AFailingTierIsPassedOverForTheNext) {
  Open(64 << 20, 2);
  const Chain chain(1, 3);
  PutBelow(chain, 0);
  PutBelow(chain, 1);
  lower[0]->FailLoads(Reason::kUnavailable);
  ExpectHits(chain, 2);
}

TEST_F(StoreTest, AChunkFromTheSlowestTierIsKeptInTheFasterOneToo) {
  Open(64 << 20, 2);
  const Chain chain(1, 4);
  PutBelow(chain, 1);
  ExpectHits(chain, 2);
  const TimePoint deadline = Soon();
  while (lower[0]->size() < 4 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(lower[0]->size(), 4u);
}

TEST_F(StoreTest, AFailureBelowIsAMissWithItsReason) {
  Open();
  const Chain chain(1, 1);
  PutBelow(chain);
  for (const Reason reason :
       {Reason::kDamaged, Reason::kEmpty, Reason::kMissing, Reason::kForeign, Reason::kUnavailable}) {
    lower[0]->FailLoads(reason);
    const LoadJob::Item item = store->Load(chain.space, chain.keys, kChunkBytes, Soon())->Wait(0, Soon());
    EXPECT_EQ(item.outcome, Outcome::kMiss);
    EXPECT_EQ(item.reason, reason);
    EXPECT_EQ(metrics.GetCounter("terrace_chunk_misses_total", "", {{"reason", ReasonName(reason)}}).value(), 1u);
  }
  lower[0]->FailLoads(Reason::kNone);
  ExpectHits(chain, 1);
}

TEST_F(StoreTest, EachAnswerIsOneHitOrOneMissHoweverManyShareALoad) {
  Open();
  const Chain chain(1, 3);
  PutBelow(chain);
  lower[0]->Hold();
  const auto first = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
  const auto second = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
  EXPECT_EQ(first->Wait(0, TimePoint::min()).reason, Reason::kTimeout);
  lower[0]->Release();
  EXPECT_EQ(first->Wait(0, Soon()).outcome, Outcome::kHit);
  EXPECT_EQ(first->Wait(0, Soon()).reason, Reason::kCancelled);  // Taken before.
  EXPECT_EQ(second->Wait(0, Soon()).outcome, Outcome::kHit);
  const auto hits = [&](const char* tier) {
    return metrics.GetCounter("terrace_chunk_hits_total", "", {{"tier", tier}}).value();
  };
  const auto misses = [&](Reason reason) {
    return metrics.GetCounter("terrace_chunk_misses_total", "", {{"reason", ReasonName(reason)}}).value();
  };
  EXPECT_EQ(hits("memory0"), 2u);  // The other two chunks were staged, and nobody was given them.
  EXPECT_EQ(hits("ram"), 0u);
  EXPECT_EQ(misses(Reason::kTimeout), 1u);
  EXPECT_EQ(misses(Reason::kCancelled), 1u);
}

TEST_F(StoreTest, AnotherSpaceNeverGetsTheBytes) {
  Open();
  const Chain chain(1, 1);
  SaveAll(chain);
  const Digest other = Named(9, 0xffff);
  EXPECT_EQ(store->Load(other, chain.keys, kChunkBytes, Soon())->Wait(0, Soon()).reason, Reason::kForeign);
  EXPECT_EQ(store->Load(chain.space, chain.keys, kChunkBytes - 1, Soon())->Wait(0, Soon()).reason, Reason::kForeign);
}

TEST_F(StoreTest, AnotherSpaceSharesNoLoadUnderWay) {
  Open();
  const Chain chain(1, 1);
  PutBelow(chain);
  const Digest other = Named(9, 0xffff);
  lower[0]->Hold();
  const auto wrong_first = store->Load(other, chain.keys, kChunkBytes, Soon());
  const auto right = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
  const auto wrong = store->Load(other, chain.keys, kChunkBytes, Soon());
  const auto shorter = store->Load(chain.space, chain.keys, kChunkBytes - 1, Soon());
  lower[0]->Release();
  EXPECT_EQ(right->Wait(0, Soon()).outcome, Outcome::kHit);
  for (const auto& job : {wrong_first, wrong, shorter}) EXPECT_EQ(job->Wait(0, Soon()).reason, Reason::kForeign);
}

TEST_F(StoreTest, APrefixLargerThanRamIsStagedWhileItsHeadIsConsumed) {
  Open(1 << 20);  // Ten chunks or less.
  const Chain chain(1, 40);
  PutBelow(chain);
  ExpectHits(chain, 1);
  EXPECT_LE(store->ram_stats().bytes, 1u << 20);
}

// D12.
TEST_F(StoreTest, FullRamStillLoadsFromBelowAndLookupsPinNothing) {
  Open(1 << 20);
  const Chain filler(1, 9);
  SaveAll(filler);
  const Chain chain(2, 3);
  PutBelow(chain);
  ExpectHits(chain, 1);
  // What loaded a chunk lets it go a moment after it said so, and the store holds what it checks.
  const auto is_let_go = [&] {
    for (const TimePoint deadline = Soon(); std::chrono::steady_clock::now() < deadline; std::this_thread::yield()) {
      if (store->ram_stats().pinned_bytes == 0) return true;
    }
    return false;
  };
  ASSERT_TRUE(is_let_go());
  for (int i = 0; i < 1000; ++i) store->Lookup(chain.keys);
  EXPECT_TRUE(is_let_go());
}

TEST_F(StoreTest, RamAllPinnedDeclinesASaveAndMissesALoadWithFull) {
  Open(1 << 20);
  const Chain chain(1, 12);
  std::vector<SaveSlot> slots;
  for (size_t i = 0; i < 12; ++i) {
    Result<SaveSlot> slot = store->BeginSave(chain.Info(i));
    if (!slot) {
      EXPECT_EQ(slot.error().code, Code::kFull);
      break;
    }
    slots.push_back(*std::move(slot));
  }
  EXPECT_LT(slots.size(), 12u);
  const Chain below(2, 1);
  PutBelow(below);
  EXPECT_EQ(store->Load(below.space, below.keys, kChunkBytes, Soon())->Wait(0, Soon()).reason, Reason::kFull);
  slots.clear();
  ExpectHits(below, 1);
}

// A request that waits its turn finds RAM full of what those before it wait for. They go.
TEST_F(StoreTest, WhatFoundNoRoomWhenTheLoadBeganIsTriedAgainWhenItIsWaitedFor) {
  Open(1 << 20);
  std::vector<SaveSlot> slots;
  const Chain others(1, 20);
  for (size_t i = 0; i < 20; ++i) {
    Result<SaveSlot> slot = store->BeginSave(others.Info(i));
    if (!slot) break;
    slots.push_back(*std::move(slot));
  }
  const Chain chain(2, 3);
  PutBelow(chain);
  const auto job = store->Load(chain.space, chain.keys, kChunkBytes, Soon());
  EXPECT_EQ(lower[0]->loads(), 0u);
  slots.clear();
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(job->Wait(i, Soon()).outcome, Outcome::kHit) << i;
}

TEST_F(StoreTest, NeedsIsFalseOnlyWhenEveryTierHasIt) {
  Open();
  const Chain chain(1, 1);
  EXPECT_TRUE(store->Needs(chain.keys[0]));
  lower[0]->Hold();
  Save(chain, 0);
  EXPECT_FALSE(store->Needs(chain.keys[0]));  // On its way.
  lower[0]->Release();
  WaitForSaves();
  EXPECT_FALSE(store->Needs(chain.keys[0]));
  lower[0]->Erase(chain.keys);
  EXPECT_TRUE(store->Needs(chain.keys[0]));
}

TEST_F(StoreTest, ALowerTierThatWasEmptiedIsFilledAgainFromRamParentsFirst) {
  Open();
  const Chain chain(1, 4);
  for (size_t i = 0; i < 3; ++i) Save(chain, i);
  WaitForSaves();
  lower[0]->Erase(chain.keys);
  Save(chain, 3);  // Its parent is in RAM only.
  WaitForSaves();
  EXPECT_EQ(lower[0]->size(), 4u);

  lower[0]->Erase(chain.keys);
  ExpectHits(chain, 0);  // Nothing new is computed: serving from RAM is enough.
  const TimePoint deadline = Soon();
  while (lower[0]->size() < 4 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(lower[0]->size(), 4u);
}

// Such a header can come from outside only, and must not keep the store's thread for ever.
TEST_F(StoreTest, AChunkThatCallsItselfItsParentIsServedAndNotOfferedToATierThatLacksIt) {
  Open(64 << 20, 2);
  const Chain chain(1, 1);
  FrameInfo info = chain.Info(0);
  info.parent = info.key;
  lower[1]->Put(info, std::vector<std::byte>(kChunkBytes, std::byte{1}));
  EXPECT_EQ(store->Load(chain.space, chain.keys, kChunkBytes, Soon())->Wait(0, Soon()).outcome, Outcome::kHit);
  const Chain next(2, 1);
  Save(next, 0);  // By the same thread.
  WaitForSaves();
  EXPECT_EQ(lower[0]->size(), 1u);
}

// Nor may any number of them keep RAM.
TEST_F(StoreTest, ChunksThatAreEachOthersParentsPinNoRam) {
  Open(8 << 20, 2);
  const Chain circles(1, 300);  // Several times what RAM holds.
  for (size_t i = 0; i < circles.keys.size(); ++i) {
    FrameInfo info = circles.Info(i);
    info.parent = circles.keys[i ^ 1];
    lower[1]->Put(info, circles.Bytes(i));
  }
  for (size_t i = 0; i < circles.keys.size(); ++i) {
    const auto job = store->Load(circles.space, std::span(circles.keys).subspan(i, 1), kChunkBytes, Soon());
    const LoadJob::Item item = job->Wait(0, Soon());
    ASSERT_EQ(item.outcome, Outcome::kHit) << i << " " << ReasonName(item.reason);
  }
  const Chain next(2, 40);
  SaveAll(next);
  EXPECT_EQ(lower[0]->size(), 40u);
  ExpectHits(next, 0);
}

TEST_F(StoreTest, CloseWritesWhatWasCommitted) {
  Open();
  const Chain chain(1, 20);
  for (size_t i = 0; i < 20; ++i) Save(chain, i);
  const CloseReport report = store->Close(Soon());
  EXPECT_TRUE(report.clean);
  EXPECT_EQ(lower[0]->size(), 20u);
  EXPECT_EQ(store->Load(chain.space, std::span(chain.keys).first(1), kChunkBytes, Soon())->size(), 1u);
}

TEST_F(StoreTest, AReservationThatIsDroppedLeavesNothing) {
  Open();
  const Chain chain(1, 1);
  {
    const SaveSlot slot = store->BeginSave(chain.Info(0)).value();
  }
  EXPECT_EQ(store->ram_stats().bytes, 0u);
  EXPECT_EQ(store->Lookup(chain.keys).chunks, 0u);
}

}  // namespace
}  // namespace terrace
