// Would catch: a caller that waits for a tier that never answers, calls that go on hitting a dead tier, a tier that
// stays out after it is back (or comes back by a restart or by traffic only), reads stopped because the disk is full,
// saves tried on a full disk again and again, a slow tier taken for a dead one, or a dead one for a living one because
// its own client gives up in time, or because it drops what waits; a frame that can't be read promised to every
// request.
#include "tier/guard_tier.h"

#include <gtest/gtest.h>

#include <iterator>

#include "tests/support/step_executor.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

// Settles at once, or keeps what it gets.
class ScriptedTier final : public Tier {
 public:
  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest>, std::span<uint8_t> present) override {
    std::fill(present.begin(), present.end(), 1);
  }
  void Load(std::vector<LoadItem> items, TimePoint, std::shared_ptr<LoadBatch> done) override {
    ++loads;
    if (hang) {
      kept.push_back(done);
      return;
    }
    LoadResult result;
    result.outcome = fail ? Outcome::kFailed : Outcome::kHit;
    result.reason = fail ? Reason::kUnavailable : Reason::kNone;
    if (fail) result.error = Error{Code::kIo, "EIO", 5};
    for (size_t i = 0; i < items.size(); ++i) done->Settle(i, result);
  }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    ++saves;
    if (declines != Reason::kNone) {
      for (size_t i = 0; i < items.size(); ++i) done->Settle(i, {.outcome = Outcome::kDeclined, .reason = declines});
      return;
    }
    SaveResult result;
    result.outcome = full || fail ? Outcome::kFailed : Outcome::kHit;
    result.reason = full ? Reason::kFull : fail ? Reason::kUnavailable : Reason::kNone;
    for (size_t i = 0; i < items.size(); ++i) done->Settle(i, result);
  }
  void Erase(std::span<const Digest>) override {}
  Result<void> ProbeSave(uint64_t payload_bytes) override {
    ++save_probes;
    probed_bytes = payload_bytes;
    if (full) return Fail(Code::kFull, "ENOSPC");
    if (fail) return Fail(Code::kIo, "EIO");
    return {};
  }
  Result<ScanPage> Scan(const std::string&, size_t) override {
    ++scans;
    if (fail) return Fail(Code::kIo, "EIO");
    return ScanPage{};
  }
  TierStats stats() const override { return {}; }
  CloseReport Close(TimePoint) override { return {}; }

  bool hang = false, fail = false, full = false;
  Reason declines = Reason::kNone;  // Saves, if it is another one.
  int loads = 0, saves = 0, scans = 0, save_probes = 0;
  uint64_t probed_bytes = 0;
  std::vector<std::shared_ptr<LoadBatch>> kept;

 private:
  TierInfo info_{.name = "scripted"};
};

class GuardTierTest : public testing::Test {
 protected:
  GuardTierTest() {
    auto tier = std::make_unique<ScriptedTier>();
    inner = tier.get();
    guard = std::make_unique<GuardTier>(std::move(tier), GuardOptions{}, executor, clock);
  }
  std::shared_ptr<LoadBatch> Load(std::chrono::milliseconds timeout = 100ms) {
    auto batch = std::make_shared<LoadBatch>(1);
    guard->Load(std::vector<LoadItem>(1), clock.Now() + timeout, batch);
    return batch;
  }
  Reason LoadNow() { return Load()->Poll(0)->reason; }
  SaveResult SaveNow() {
    auto batch = std::make_shared<SaveBatch>(1);
    std::vector<SaveItem> items(1);
    items[0].info.payload_bytes = 12345;
    guard->Save(std::move(items), batch);
    return *batch->Poll(0);
  }
  bool Believed() {
    uint8_t present = 0;
    const Digest key;
    guard->Contains(std::span(&key, 1), std::span(&present, 1));
    return present != 0;
  }
  ManualClock clock;
  StepExecutor executor{clock};
  ScriptedTier* inner;
  std::unique_ptr<GuardTier> guard;
};

// D22: accepts and never answers.
TEST_F(GuardTierTest, ATierThatNeverAnswersIsLeftAtTheDeadlineThenLeftAloneThenProbedAndTakenBack) {
  inner->hang = inner->fail = true;
  for (int i = 0; i < 3; ++i) {
    const auto batch = Load(100ms);
    executor.Advance(90ms);
    EXPECT_EQ(batch->Poll(0), nullptr);
    executor.Advance(40ms);
    ASSERT_NE(batch->Poll(0), nullptr);
    EXPECT_EQ(batch->Poll(0)->reason, Reason::kTimeout);
  }
  EXPECT_EQ(inner->loads, 3);
  EXPECT_FALSE(Believed());
  EXPECT_FALSE(guard->stats().available);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(LoadNow(), Reason::kUnavailable);
  EXPECT_EQ(inner->loads, 3);  // Open: no calls.
  executor.Advance(1s);
  EXPECT_EQ(inner->scans, 1);
  EXPECT_FALSE(Believed());
  inner->hang = inner->fail = false;
  executor.Advance(2s);
  EXPECT_EQ(inner->scans, 2);
  EXPECT_TRUE(Believed());
  EXPECT_TRUE(guard->stats().available);
  EXPECT_EQ(LoadNow(), Reason::kNone);
}

TEST_F(GuardTierTest, ProbesGoOnWithoutTrafficAtGrowingBoundedIntervals) {
  inner->fail = true;
  for (int i = 0; i < 3; ++i) LoadNow();
  executor.Advance(10min);
  EXPECT_GE(inner->scans, 600 / 15 - 1);
  EXPECT_LE(inner->scans, 600 / 15 + 5);
  inner->fail = false;
  executor.Advance(15s);
  EXPECT_TRUE(guard->stats().available);
}

// Such as a mount that answers from what it remembers.
TEST_F(GuardTierTest, WhenProbesSucceedAndLoadsDoNotItOpensAtTheNextFailureForLongerAndLonger) {
  inner->hang = true;
  const auto hang_once = [&] {
    const auto batch = Load(100ms);
    executor.Advance(150ms);
    return batch->Poll(0)->reason;
  };
  for (int i = 0; i < 3; ++i) EXPECT_EQ(hang_once(), Reason::kTimeout);
  for (const auto interval : {1s, 2s, 4s, 8s, 15s, 15s}) {
    EXPECT_EQ(hang_once(), Reason::kUnavailable);
    executor.Advance(interval);  // A probe, on its way.
    EXPECT_EQ(hang_once(), Reason::kTimeout);
  }
  EXPECT_EQ(inner->loads, 9);
  inner->hang = false;
  executor.Advance(15s);
  EXPECT_EQ(LoadNow(), Reason::kNone);
  inner->hang = true;
  for (int i = 0; i < 2; ++i) EXPECT_EQ(hang_once(), Reason::kTimeout);
  EXPECT_TRUE(guard->stats().available);
}

// D22 for a bucket, whose client gives up at the deadline by itself.
TEST_F(GuardTierTest, ATierThatEndsEachLoadAtItsDeadlineByItselfIsStoppedToo) {
  inner->hang = inner->fail = true;
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_TRUE(guard->stats().available);
    const auto batch = Load(100ms);
    executor.Advance(100ms);
    inner->kept.at(i)->Settle(0, {.reason = Reason::kTimeout});
    ASSERT_NE(batch->Poll(0), nullptr);
    EXPECT_EQ(batch->Poll(0)->reason, Reason::kTimeout);
  }
  EXPECT_FALSE(guard->stats().available);
  EXPECT_NE(guard->stats().why.find("no answer in time"), std::string::npos) << guard->stats().why;
}

TEST_F(GuardTierTest, WhatWaitsInADeadTierAndEndsUntriedDoesNotBringItBack) {
  constexpr Reason kUntried[] = {Reason::kTimeout, Reason::kUnavailable, Reason::kCancelled, Reason::kFull,
                                 Reason::kIndexLoading};
  inner->hang = inner->fail = true;
  for (size_t i = 0; i <= std::size(kUntried); ++i) Load(20s);
  for (int i = 0; i < 3; ++i) {
    Load(100ms);
    executor.Advance(150ms);
  }
  ASSERT_FALSE(guard->stats().available);
  for (size_t i = 0; i < std::size(kUntried); ++i) {
    inner->kept.at(i)->Settle(0, {.reason = kUntried[i]});
    EXPECT_FALSE(guard->stats().available) << ReasonName(kUntried[i]);
  }
  inner->kept.at(std::size(kUntried))->Settle(0, {.reason = Reason::kMissing});  // It looked, so it lives.
  EXPECT_TRUE(guard->stats().available);
}

TEST_F(GuardTierTest, SavesThatAreDeclinedBetweenFailuresAreNoSuccess) {
  inner->fail = true;
  for (int i = 0; i < 2; ++i) EXPECT_EQ(SaveNow().outcome, Outcome::kFailed);
  inner->declines = Reason::kUnavailable;
  EXPECT_EQ(SaveNow().outcome, Outcome::kDeclined);
  inner->declines = Reason::kNone;
  EXPECT_EQ(SaveNow().outcome, Outcome::kFailed);
  EXPECT_FALSE(guard->stats().saving);
}

TEST_F(GuardTierTest, SlowIsNotDead) {
  inner->hang = true;
  for (int i = 0; i < 20; ++i) {
    const auto late = Load(50ms);
    const auto other = std::exchange(inner->kept, {});
    executor.Advance(30ms);
    LoadResult hit;
    hit.outcome = Outcome::kHit;
    const auto in_time = Load(50ms);
    inner->kept.at(0)->Settle(0, hit);
    inner->kept.clear();
    executor.Advance(100ms);
    EXPECT_EQ(late->Poll(0)->reason, Reason::kTimeout);
    EXPECT_EQ(in_time->Poll(0)->outcome, Outcome::kHit);
  }
  EXPECT_TRUE(guard->stats().available);
}

// Where computing takes a tenth of a second, a load has 20 ms, and a healthy disk of a busy machine may miss that.
TEST_F(GuardTierTest, ShortDeadlinesThatPassDoNotStopAHealthyTier) {
  inner->hang = true;
  int late = 0;
  while (guard->stats().available && late < 100) {
    Load(20ms);
    executor.Advance(20ms);
    ++late;
    if (late == 5) {
      LoadResult hit;
      hit.outcome = Outcome::kHit;
      inner->kept.back()->Settle(0, hit);  // Too late for its request.
    }
  }
  EXPECT_EQ(late, 5 + 15) << "300 ms without any answer is enough";
}

TEST_F(GuardTierTest, ReadsThatHangAreSeenThoughSavesGoOn) {
  inner->hang = true;
  for (int i = 0; i < 3; ++i) {
    const auto batch = Load(100ms);
    EXPECT_EQ(SaveNow().outcome, Outcome::kHit);
    executor.Advance(150ms);
  }
  EXPECT_FALSE(guard->stats().available);
  EXPECT_TRUE(guard->stats().saving);
  EXPECT_EQ(SaveNow().outcome, Outcome::kHit);
}

TEST_F(GuardTierTest, AnAnswerAfterTheDeadlineIsDropped) {
  inner->hang = true;
  const auto batch = Load(10ms);
  executor.Advance(50ms);
  LoadResult hit;
  hit.outcome = Outcome::kHit;
  inner->kept.at(0)->Settle(0, hit);
  EXPECT_EQ(batch->Poll(0)->reason, Reason::kTimeout);
}

TEST_F(GuardTierTest, MissesAndOneSuccessInBetweenKeepItClosed) {
  for (int i = 0; i < 50; ++i) {
    inner->fail = i % 3 != 2;
    LoadNow();
  }
  EXPECT_TRUE(guard->stats().available);
}

TEST_F(GuardTierTest, AFullDiskStopsSavesAtOnceAndReadsGoOn) {
  inner->full = true;
  EXPECT_EQ(SaveNow().reason, Reason::kFull);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(SaveNow().outcome, Outcome::kDeclined);
  EXPECT_EQ(inner->saves, 1);
  EXPECT_TRUE(Believed());
  EXPECT_EQ(LoadNow(), Reason::kNone);
  EXPECT_NE(guard->stats().why.find("saves stopped for 0 s: full"), std::string::npos) << guard->stats().why;
  EXPECT_TRUE(guard->stats().available);  // What is there can be had: a miss now has another reason.
  EXPECT_FALSE(guard->stats().saving);
}

TEST_F(GuardTierTest, ItFindsOutByItselfThatThereIsRoomAgain) {
  inner->full = true;
  EXPECT_EQ(SaveNow().reason, Reason::kFull);
  executor.Advance(10min);
  EXPECT_EQ(inner->saves, 1);
  EXPECT_EQ(inner->probed_bytes, 12345u);
  EXPECT_GE(inner->save_probes, 600 / 15 - 1);
  EXPECT_LE(inner->save_probes, 600 / 15 + 5);
  EXPECT_FALSE(guard->stats().saving);
  inner->full = false;
  executor.Advance(15s);
  EXPECT_TRUE(guard->stats().saving);
  EXPECT_EQ(guard->stats().why, "");
  const int probes = inner->save_probes;
  executor.Advance(1h);
  EXPECT_EQ(inner->save_probes, probes);  // A healthy tier is left alone.
  EXPECT_EQ(SaveNow().outcome, Outcome::kHit);
}

// Such as a quota, of which the free space tells nothing.
TEST_F(GuardTierTest, WhenProbesSucceedAndSavesDoNotTheIntervalsGrow) {
  inner->fail = true;
  for (int i = 0; i < 3; ++i) SaveNow();
  inner->fail = false;
  for (const auto interval : {1s, 2s, 4s, 8s, 15s, 15s}) {
    executor.Advance(interval - 1ms);
    EXPECT_EQ(SaveNow().outcome, Outcome::kDeclined);
    executor.Advance(1ms);
    EXPECT_TRUE(guard->stats().saving);
    inner->fail = true;
    EXPECT_EQ(SaveNow().outcome, Outcome::kFailed);
    inner->fail = false;
    EXPECT_FALSE(guard->stats().saving);
  }
  executor.Advance(15s);
  EXPECT_EQ(SaveNow().outcome, Outcome::kHit);
}

TEST_F(GuardTierTest, ReadsAndSavesAreProbedEachForItself) {
  inner->fail = true;
  for (int i = 0; i < 3; ++i) LoadNow();
  executor.Advance(500ms);
  for (int i = 0; i < 3; ++i) SaveNow();
  executor.Advance(30s);
  EXPECT_GE(inner->scans, 4);
  EXPECT_GE(inner->save_probes, 4);
  inner->fail = false;
  executor.Advance(15s);
  EXPECT_TRUE(guard->stats().available);
  EXPECT_TRUE(guard->stats().saving);
}

TEST_F(GuardTierTest, SavesThatFailOtherwiseStopAfterThree) {
  inner->fail = true;
  for (int i = 0; i < 3; ++i) EXPECT_EQ(SaveNow().outcome, Outcome::kFailed);
  for (int i = 0; i < 100; ++i) EXPECT_EQ(SaveNow().outcome, Outcome::kDeclined);
  EXPECT_EQ(inner->saves, 3);
}

TEST_F(GuardTierTest, AKeyWhoseLoadFailedIsNotClaimedForAWhile) {
  inner->fail = true;
  EXPECT_EQ(LoadNow(), Reason::kUnavailable);
  inner->fail = false;
  EXPECT_FALSE(Believed());
  Digest other;
  other.bytes[0] = 1;
  uint8_t present = 0;
  guard->Contains(std::span(&other, 1), std::span(&present, 1));
  EXPECT_TRUE(present);
  executor.Advance(30s - 1ms);
  EXPECT_FALSE(Believed());
  executor.Advance(1ms);
  EXPECT_TRUE(Believed());
}

TEST_F(GuardTierTest, AKeyThatWasWrittenAnewIsClaimedAtOnce) {
  inner->fail = true;
  LoadNow();
  inner->fail = false;
  EXPECT_FALSE(Believed());
  EXPECT_EQ(SaveNow().outcome, Outcome::kHit);
  EXPECT_TRUE(Believed());
}

TEST_F(GuardTierTest, KeysThatFailedInAnOutageAreClaimedAsSoonAsItIsOver) {
  inner->fail = true;
  for (int i = 0; i < 3; ++i) LoadNow();
  inner->fail = false;
  executor.Advance(1s);
  EXPECT_TRUE(Believed());
}

TEST_F(GuardTierTest, CloseDoesNotWaitForTheNextProbe) {
  inner->fail = true;
  for (int i = 0; i < 3; ++i) LoadNow();
  for (int i = 0; i < 3; ++i) SaveNow();
  guard->Close(TimePoint::max());
  executor.Advance(1h);
  EXPECT_EQ(inner->scans, 0);
  EXPECT_EQ(inner->save_probes, 0);
}

TEST_F(GuardTierTest, CloseSettlesWhatHangs) {
  inner->hang = true;
  const auto batch = Load(1h);
  guard->Close(clock.Now());
  ASSERT_NE(batch->Poll(0), nullptr);
  EXPECT_EQ(LoadNow(), Reason::kUnavailable);
}

}  // namespace
}  // namespace terrace
