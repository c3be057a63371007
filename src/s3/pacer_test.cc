// What could go wrong: a server that asks for less is pressed on; waits that do not grow, or that all clients share.
#include "s3/pacer.h"

#include <gtest/gtest.h>

#include <set>

namespace terrace::s3 {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;

TEST(Pacer, HalvesOnceForCallsOfOneTimeAndGrowsBackByOneARound) {
  Pacer pacer({.parallel_max = 32}, 1);
  TimePoint now{};
  now += milliseconds(100);
  for (int i = 0; i < 10; ++i) pacer.AskedForLess(now - milliseconds(50), now);
  EXPECT_EQ(pacer.limit(), 16u) << "ten refusals of one moment";
  now += milliseconds(100);
  pacer.AskedForLess(now - milliseconds(1), now);
  EXPECT_EQ(pacer.limit(), 8u);
  for (int i = 0; i < 9; ++i) pacer.Succeeded();
  EXPECT_EQ(pacer.limit(), 9u);
  for (int i = 0; i < 100; ++i) {
    now += milliseconds(100);
    pacer.AskedForLess(now, now);
  }
  EXPECT_EQ(pacer.limit(), 1u) << "never none";
  for (int i = 0; i < 2000; ++i) pacer.Succeeded();
  EXPECT_EQ(pacer.limit(), 32u) << "never more";
}

// D20.
TEST(Pacer, WaitsGrowAreBoundedAndDiffer) {
  Pacer pacer({.backoff = milliseconds(64), .backoff_max = milliseconds(400)}, 7);
  std::set<int64_t> firsts;
  for (int i = 0; i < 200; ++i) {
    const auto first = pacer.Backoff(1);
    EXPECT_GE(first, milliseconds(32));
    EXPECT_LE(first, milliseconds(64));
    EXPECT_GE(pacer.Backoff(2), milliseconds(64));
    EXPECT_GE(pacer.Backoff(3), milliseconds(128));
    EXPECT_LE(pacer.Backoff(60), milliseconds(400));
    firsts.insert(first.count());
  }
  EXPECT_GT(firsts.size(), 10u);
}

TEST(Pacer, AReadIsLateWhenFewWereThatLate) {
  Pacer pacer({.hedge_min = milliseconds(5)}, 1);
  EXPECT_EQ(pacer.hedge_after().count(), 0) << "nothing learnt yet";
  for (int i = 0; i < 128; ++i) pacer.ObserveFirstByte(microseconds(i < 120 ? 10'000 : 500'000));
  EXPECT_EQ(pacer.hedge_after(), milliseconds(750));
  for (int i = 0; i < 128; ++i) pacer.ObserveFirstByte(microseconds(i < 125 ? 10'000 : 500'000));
  EXPECT_EQ(pacer.hedge_after(), milliseconds(15));
  for (int i = 0; i < 128; ++i) pacer.ObserveFirstByte(microseconds(100));
  EXPECT_EQ(pacer.hedge_after(), milliseconds(5));
}

}  // namespace
}  // namespace terrace::s3
