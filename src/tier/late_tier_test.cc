// Would catch: a program that does not start without its disk, a disk that is never joined (or only by a restart),
// calls that wait or crash before it is there, a close that misses a tier opened in the last moment.
#include "tier/late_tier.h"

#include <gtest/gtest.h>

#include "tests/support/memory_tier.h"
#include "tests/support/step_executor.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

class LateTierTest : public testing::Test {
 protected:
  Result<std::unique_ptr<Tier>> Open() {
    ++tries;
    if (!there) return Fail(Code::kUnavailable, "/mnt/disk does not exist");
    return std::make_unique<MemoryTier>();
  }
  std::unique_ptr<LateTier> Make() {
    return std::make_unique<LateTier>(
        TierInfo{.name = "memory", .durable = true}, [this] { return Open(); }, 1000ms, executor, clock);
  }
  static SaveResult Save(Tier& tier) {
    SaveItem item;
    item.info.key.bytes[0] = 1;
    auto batch = std::make_shared<SaveBatch>(1);
    tier.Save({item}, batch);
    EXPECT_TRUE(batch->WaitAll(std::chrono::steady_clock::now() + 30s));
    return *batch->Poll(0);
  }
  static bool Has(Tier& tier) {
    Digest key;
    key.bytes[0] = 1;
    uint8_t present = 1;
    tier.Contains(std::span(&key, 1), std::span(&present, 1));
    return present != 0;
  }
  bool there = false;
  int tries = 0;
  ManualClock clock;
  StepExecutor executor{clock};
};

TEST_F(LateTierTest, WhatIsThereIsOpenedAtOnce) {
  there = true;
  const auto tier = Make();
  EXPECT_TRUE(tier->stats().available);
  EXPECT_EQ(Save(*tier).outcome, Outcome::kHit);
  EXPECT_TRUE(Has(*tier));
  executor.Advance(1h);
  EXPECT_EQ(tries, 1);
}

TEST_F(LateTierTest, UntilItAppearsEverythingIsAMissAndHealthSaysWhyAndSinceWhenThenItJoins) {
  const auto tier = Make();
  executor.Advance(10s);
  EXPECT_EQ(tries, 11);
  EXPECT_FALSE(tier->stats().available);
  EXPECT_EQ(tier->stats().why, "/mnt/disk does not exist, since 10 s");
  EXPECT_FALSE(Has(*tier));
  EXPECT_EQ(Save(*tier).outcome, Outcome::kDeclined);
  EXPECT_EQ(Save(*tier).reason, Reason::kUnavailable);
  auto batch = std::make_shared<LoadBatch>(1);
  tier->Load(std::vector<LoadItem>(1), TimePoint::max(), batch);
  EXPECT_EQ(batch->Poll(0)->reason, Reason::kUnavailable);
  EXPECT_FALSE(tier->Scan("", 1));

  there = true;
  executor.Advance(1s);
  EXPECT_TRUE(tier->stats().available);
  EXPECT_EQ(Save(*tier).outcome, Outcome::kHit);
  EXPECT_TRUE(Has(*tier));
  EXPECT_TRUE(tier->Scan("", 1));
}

TEST_F(LateTierTest, OnceClosedItTriesNoMore) {
  const auto tier = Make();
  EXPECT_TRUE(tier->Close(clock.Now()).clean);
  there = true;
  executor.Advance(1min);
  EXPECT_EQ(tries, 1);
}

}  // namespace
}  // namespace terrace
