// Would catch: a child published before its parent, RAM pinned beyond the bound (also by a tier that was given up on),
// descendants of a dropped chunk left behind, one long prompt that keeps all others out, a queue that flaps at its
// bound, a chunk written twice, a drain that hangs or does not say what it dropped, a tier that fails and takes the
// stack along, a chunk refused because its parent was settled in that moment.
#include "store/write_behind.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <utility>

namespace terrace {
namespace {

using namespace std::chrono_literals;

// A tier that keeps saves until the test settles them.
class HeldTier final : public Tier {
 public:
  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    for (size_t i = 0; i < keys.size(); ++i) present[i] = !reads_stopped && stored.contains(keys[i]);
    if (const auto then = std::exchange(after_contains, {})) then();
  }
  void Load(std::vector<LoadItem>, TimePoint, std::shared_ptr<LoadBatch>) override { FAIL(); }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    for (size_t i = 0; i < items.size(); ++i) held.push_back({std::move(items[i]), done, i});
    if (declines_at_once) SettleNext(Outcome::kDeclined, Reason::kUnavailable);
    if (settles_at_once) SettleNext(Outcome::kHit);
  }
  void Erase(std::span<const Digest>) override {}
  Result<ScanPage> Scan(const std::string&, size_t) override { return ScanPage{}; }
  TierStats stats() const override { return {}; }
  CloseReport Close(TimePoint) override { return {}; }

  void SettleNext(Outcome outcome, Reason reason = Reason::kNone, bool existed = false) {
    ASSERT_FALSE(held.empty());
    Held next = std::move(held.front());
    held.erase(held.begin());
    if (outcome == Outcome::kHit) {
      ASSERT_TRUE(next.item.info.parent == next.item.info.space || stored.contains(next.item.info.parent));
      stored.insert(next.item.info.key);
      order.push_back(next.item.info.key);
    }
    next.done->Settle(next.index, {.outcome = outcome, .reason = reason, .existed = existed, .error = {}});
  }

  struct Held {
    SaveItem item;
    std::shared_ptr<SaveBatch> done;
    size_t index;
  };
  bool reads_stopped = false;  // As behind a guard: nothing is said to be here.
  bool settles_at_once = false;
  bool declines_at_once = false;
  std::function<void()> after_contains;  // Runs once.
  std::vector<Held> held;
  std::set<Digest> stored;
  std::vector<Digest> order;

 private:
  TierInfo info_{.name = "held"};
};

Digest Key(int chain, int position) {
  Digest d;
  d.bytes[0] = static_cast<uint8_t>(chain);
  d.bytes[1] = static_cast<uint8_t>(position + 1);
  return d;
}
const Digest kSpace = [] {
  Digest d;
  d.bytes[31] = 1;
  return d;
}();

SaveItem Item(int chain, int position, uint64_t bytes = 100) {
  SaveItem item;
  item.info.space = kSpace;
  item.info.key = Key(chain, position);
  item.info.parent = position == 0 ? kSpace : Key(chain, position - 1);
  item.info.payload_bytes = bytes;
  return item;
}

class WriteBehindTest : public testing::Test {
 protected:
  uint64_t Dropped(Reason reason) {
    return metrics.GetCounter("terrace_saves_dropped_total", "", {{"tier", "held"}, {"reason", ReasonName(reason)}})
        .value();
  }
  Metrics metrics;  // Outlives the pins, which the tier may still hold.
  HeldTier tier;
};

TEST_F(WriteBehindTest, AChildWaitsForItsParent) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 8}, metrics);
  for (int i = 0; i < 3; ++i) queue.Enqueue(Item(1, i));
  EXPECT_EQ(tier.held.size(), 1u);
  tier.SettleNext(Outcome::kHit);
  EXPECT_EQ(tier.held.size(), 1u);
  tier.SettleNext(Outcome::kHit);
  tier.SettleNext(Outcome::kHit);
  EXPECT_EQ(tier.order, (std::vector{Key(1, 0), Key(1, 1), Key(1, 2)}));
  EXPECT_EQ(queue.pending(), 0u);
  EXPECT_EQ(queue.bytes(), 0u);
}

TEST_F(WriteBehindTest, AChainIsTakenWholeWhateverTheTierSaysOfItsParents) {
  tier.reads_stopped = tier.settles_at_once = true;
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 8}, metrics);
  EXPECT_TRUE(queue.EnqueueChain({Item(1, 0), Item(1, 1), Item(1, 2)}));
  EXPECT_EQ(tier.order, (std::vector{Key(1, 0), Key(1, 1), Key(1, 2)}));
  EXPECT_EQ(Dropped(Reason::kParentMissing), 0u);
}

TEST_F(WriteBehindTest, WhatFollowsTheFirstOfAChainThatIsRefusedCountsNotAgain) {
  WriteBehind queue(tier, {.bytes_max = 250, .in_flight_max = 1}, metrics);
  EXPECT_FALSE(queue.EnqueueChain({Item(1, 0), Item(1, 1), Item(1, 2), Item(1, 3), Item(1, 4)}));
  EXPECT_EQ(Dropped(Reason::kFull), 1u);
  EXPECT_EQ(Dropped(Reason::kParentMissing), 0u);
  EXPECT_EQ(queue.bytes(), 200u);
}

TEST_F(WriteBehindTest, ChainsGoSideBySideUpToTheBound) {
  WriteBehind queue(tier, {.bytes_max = 10000, .in_flight_max = 3}, metrics);
  for (int chain = 1; chain <= 5; ++chain) queue.Enqueue(Item(chain, 0));
  EXPECT_EQ(tier.held.size(), 3u);
  tier.SettleNext(Outcome::kHit);
  EXPECT_EQ(tier.held.size(), 3u);
}

TEST_F(WriteBehindTest, OverTheBoundAChunkIsDroppedWithItsDescendants) {
  WriteBehind queue(tier, {.bytes_max = 250, .in_flight_max = 1}, metrics);
  for (int i = 0; i < 5; ++i) queue.Enqueue(Item(1, i));
  EXPECT_EQ(queue.bytes(), 200u);
  EXPECT_EQ(Dropped(Reason::kFull), 1u);
  EXPECT_EQ(Dropped(Reason::kParentMissing), 2u);
  tier.SettleNext(Outcome::kHit);
  tier.SettleNext(Outcome::kHit);
  queue.Enqueue(Item(1, 4));  // Its parent never came.
  EXPECT_EQ(Dropped(Reason::kParentMissing), 3u);
  queue.Enqueue(Item(1, 2));
  EXPECT_EQ(tier.held.size(), 1u);
}

TEST_F(WriteBehindTest, AFailedParentTakesItsQueuedChildrenAlong) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  for (int i = 0; i < 4; ++i) queue.Enqueue(Item(1, i));
  queue.Enqueue(Item(2, 0));
  tier.SettleNext(Outcome::kFailed);
  EXPECT_EQ(Dropped(Reason::kParentMissing), 3u);
  EXPECT_EQ(queue.pending(), 1u);
  tier.SettleNext(Outcome::kHit);
  EXPECT_EQ(tier.order, std::vector{Key(2, 0)});
  EXPECT_EQ(queue.bytes(), 0u);
}

// As a breaker does that opens while many chains wait: each would be tried from within the refusal of the one before.
TEST_F(WriteBehindTest, ATierThatBeginsToDeclineIsAskedForAllThatWaitOneAfterTheOther) {
  constexpr uint32_t kChains = 100'000;
  WriteBehind queue(tier, {.bytes_max = kChains, .in_flight_max = 1}, metrics);
  for (uint32_t i = 0; i < kChains; ++i) {
    SaveItem item = Item(1, 0, 1);
    std::memcpy(&item.info.key.bytes[2], &i, sizeof i);
    ASSERT_TRUE(queue.Enqueue(std::move(item)));
  }
  tier.declines_at_once = true;
  tier.SettleNext(Outcome::kDeclined, Reason::kUnavailable);
  EXPECT_EQ(queue.pending(), 0u);
  EXPECT_EQ(queue.bytes(), 0u);
  EXPECT_EQ(Dropped(Reason::kUnavailable), kChains);
}

// It has left the queue, and the tier was asked just before it had it.
TEST_F(WriteBehindTest, AParentThatIsSettledInThisMomentIsThere) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  queue.Enqueue(Item(1, 0));
  tier.after_contains = [&] { tier.SettleNext(Outcome::kHit); };
  EXPECT_TRUE(queue.Enqueue(Item(1, 1)));
  tier.SettleNext(Outcome::kHit);
  queue.Enqueue(Item(2, 0));
  tier.after_contains = [&] { tier.SettleNext(Outcome::kFailed); };
  EXPECT_FALSE(queue.Enqueue(Item(2, 1)));
  EXPECT_EQ(tier.order, (std::vector{Key(1, 0), Key(1, 1)}));
}

TEST_F(WriteBehindTest, NothingIsQueuedTwice) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  queue.Enqueue(Item(1, 0));
  queue.Enqueue(Item(1, 0));
  EXPECT_EQ(queue.pending(), 1u);
  tier.SettleNext(Outcome::kHit);
  queue.Enqueue(Item(1, 0));
  EXPECT_EQ(queue.pending(), 0u);
}

TEST_F(WriteBehindTest, BytesStayPinnedUntilSettledAndNoLonger) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  auto owner = std::make_shared<int>(1);
  std::weak_ptr<int> watch = owner;
  SaveItem item = Item(1, 0);
  item.owner = std::move(owner);
  queue.Enqueue(std::move(item));
  EXPECT_FALSE(watch.expired());
  tier.SettleNext(Outcome::kHit);
  EXPECT_TRUE(watch.expired());
}

// A chain of 9 and one of 2 behind one that is written; 11 chunks wait.
TEST_F(WriteBehindTest, AtTheBoundEachChainGivesUpAQuarterOfItsDescendantsTheDeepestFirst) {
  WriteBehind queue(tier, {.bytes_max = 1250, .in_flight_max = 1}, metrics);
  queue.Enqueue(Item(1, 0));
  for (int i = 0; i < 9; ++i) queue.Enqueue(Item(2, i));
  for (int i = 0; i < 2; ++i) queue.Enqueue(Item(3, i));
  EXPECT_EQ(queue.bytes(), 1200u);
  EXPECT_FALSE(queue.Enqueue(Item(4, 0)));
  EXPECT_EQ(Dropped(Reason::kFull), 3u);  // A quarter of 8 descendants, and the newcomer.
  EXPECT_FALSE(queue.Has(Key(2, 8)));
  EXPECT_FALSE(queue.Has(Key(2, 7)));
  EXPECT_TRUE(queue.Has(Key(2, 6)));
  EXPECT_TRUE(queue.Has(Key(3, 1)));
  EXPECT_EQ(queue.bytes(), 1000u);
  while (!tier.held.empty()) tier.SettleNext(Outcome::kHit);
  EXPECT_EQ(tier.order.size(), 10u);
}

TEST_F(WriteBehindTest, AfterTheBoundWasReachedNothingIsTakenUntilHalfOfItIsFree) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  int chain = 0;
  while (queue.Enqueue(Item(++chain, 0))) {
  }
  EXPECT_EQ(queue.bytes(), 1000u);
  for (int left = 9; left >= 6; --left) {
    tier.SettleNext(Outcome::kHit);
    EXPECT_EQ(queue.bytes(), 100u * static_cast<unsigned>(left));
    EXPECT_FALSE(queue.Enqueue(Item(++chain, 0)));
  }
  EXPECT_EQ(Dropped(Reason::kFull), 5u);
  tier.SettleNext(Outcome::kHit);
  for (int i = 0; i < 5; ++i) EXPECT_TRUE(queue.Enqueue(Item(++chain, 0)));
  EXPECT_EQ(queue.bytes(), 1000u);
  EXPECT_EQ(Dropped(Reason::kFull), 5u);
}

// Such as one behind a deadline, that settled its items and can't let go of them.
TEST_F(WriteBehindTest, WhatTheTierStillHoldsCountsAgainstTheBound) {
  WriteBehind queue(tier, {.bytes_max = 250, .in_flight_max = 1}, metrics);
  std::vector<SaveItem> stuck;
  for (int chain = 1; chain <= 2; ++chain) {
    EXPECT_TRUE(queue.Enqueue(Item(chain, 0)));
    stuck.push_back(tier.held.front().item);
    tier.SettleNext(Outcome::kFailed);
  }
  EXPECT_EQ(queue.pending(), 0u);
  EXPECT_EQ(queue.bytes(), 200u);
  EXPECT_FALSE(queue.Enqueue(Item(3, 0)));
  stuck.pop_back();
  EXPECT_TRUE(queue.Enqueue(Item(3, 0)));
}

TEST_F(WriteBehindTest, DrainAtItsDeadlineDropsWhatWasNotBegunAndSaysSo) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  queue.Enqueue(Item(1, 0));
  queue.Enqueue(Item(1, 1));
  queue.Enqueue(Item(2, 0));
  queue.Enqueue(Item(2, 1));
  queue.Drain(std::chrono::steady_clock::now());
  EXPECT_EQ(queue.drained().dropped, 2u);
  EXPECT_EQ(queue.pending(), 2u);
  EXPECT_FALSE(queue.Enqueue(Item(3, 0)));
  EXPECT_EQ(Dropped(Reason::kCancelled), 3u);
  tier.SettleNext(Outcome::kHit);
  tier.SettleNext(Outcome::kDeclined, Reason::kCancelled);  // The tier closes.
  queue.Drain(std::chrono::steady_clock::now() + 1min);
  EXPECT_EQ(queue.drained().written, 1u);
  EXPECT_EQ(queue.drained().dropped, 3u);
  EXPECT_EQ(queue.drained().abandoned, 3u);
}

TEST_F(WriteBehindTest, WhatATierDeclinesWhileItDrainsIsDroppedAndNotAbandoned) {
  WriteBehind queue(tier, {.bytes_max = 1000, .in_flight_max = 1}, metrics);
  queue.Enqueue(Item(1, 0));
  queue.Enqueue(Item(1, 1));
  queue.Drain(std::chrono::steady_clock::now());
  tier.SettleNext(Outcome::kDeclined, Reason::kFull);
  EXPECT_EQ(queue.drained().dropped, 2u);
  EXPECT_EQ(queue.drained().abandoned, 0u);
}

}  // namespace
}  // namespace terrace
