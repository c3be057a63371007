// Would catch: a line that a value can break or forge, numbers or quoting that a logfmt reader misreads, a flood that
// isn't held back or isn't counted, lines below the level.
#include "base/log.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"

namespace terrace::log {
namespace {

class StillClock final : public Clock {
 public:
  TimePoint Now() const override { return now; }
  uint64_t WallNs() const override { return 1'700'000'000'123'456'789; }
  TimePoint now{};
};

class Log : public testing::Test {
 protected:
  void SetUp() override { Listen(Level::kInfo); }
  void TearDown() override { SetSink(nullptr); }
  void Listen(Level min_level) {
    SetSink([this](Level, std::string_view line) { lines_.emplace_back(line); }, min_level, &clock_);
  }
  // What one value becomes in a line.
  std::string Rendered(const Value& value) {
    lines_.clear();
    Listen(Level::kInfo);
    Info("e", {{"v", value}});
    const size_t at = lines_.at(0).find(" v=");
    return lines_[0].substr(at + 3);
  }

  StillClock clock_;
  std::vector<std::string> lines_;
};

TEST_F(Log, ALineHasTimeLevelEventAndFields) {
  Warn("tier_degraded", {{"tier", "shared_fs"}, {"for_ms", 5000}, {"shared", true}});
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_EQ(lines_[0],
            "time=2023-11-14T22:13:20.123Z level=warn event=tier_degraded tier=shared_fs for_ms=5000 shared=true");
}

TEST_F(Log, ValuesAreQuotedOnlyWhereNeededAndCannotBreakTheLine) {
  EXPECT_EQ(Rendered("plain/path-1.2:3"), "plain/path-1.2:3");
  EXPECT_EQ(Rendered(""), "\"\"");
  EXPECT_EQ(Rendered("two words"), "\"two words\"");
  EXPECT_EQ(Rendered("a=b"), "\"a=b\"");
  EXPECT_EQ(Rendered("say \"hi\" \\ there"), "\"say \\\"hi\\\" \\\\ there\"");
  EXPECT_EQ(Rendered("x\nlevel=error\tevent=forged\r"), "\"x\\nlevel=error\\tevent=forged\\u000d\"");
  EXPECT_EQ(Rendered(std::string("\x1b[31m\x7f\0", 7)), "\"\\u001b[31m\\u007f\\u0000\"");
  EXPECT_EQ(Rendered("Grüße-猫"), "Grüße-猫");
}

TEST_F(Log, NumbersPrintPlainly) {
  EXPECT_EQ(Rendered(-3), "-3");
  EXPECT_EQ(Rendered(std::numeric_limits<uint64_t>::max()), "18446744073709551615");
  EXPECT_EQ(Rendered(0.25), "0.25");
  EXPECT_EQ(Rendered(1.0 / 3), "0.333333");
  EXPECT_EQ(Rendered(1234567.0), "1.23457e+06");
}

TEST_F(Log, LinesBelowTheLevelAreLeftOut) {
  Debug("quiet");
  EXPECT_TRUE(lines_.empty());
  Listen(Level::kDebug);
  Debug("loud");
  EXPECT_EQ(lines_.size(), 1u);
}

TEST_F(Log, AFloodOfOneEventIsHeldBackAndCounted) {
  for (int i = 0; i < 51; ++i) Info("flood");
  Info("other");
  ASSERT_EQ(lines_.size(), 11u);
  EXPECT_NE(lines_[10].find("event=other"), std::string::npos);
  clock_.now += std::chrono::seconds(1);
  Info("flood", {{"n", 1}});
  Info("flood");
  ASSERT_EQ(lines_.size(), 13u);
  EXPECT_TRUE(lines_[11].ends_with("event=flood n=1 suppressed=41")) << lines_[11];
  EXPECT_TRUE(lines_[12].ends_with("event=flood")) << lines_[12];
}

TEST_F(Log, WithoutASinkNothingHappens) {
  SetSink(nullptr);
  Error("nobody_listens", {{"a", 1}});
  EXPECT_TRUE(lines_.empty());
}

TEST_F(Log, ThreadsMayLogAtOnce) {
  std::atomic<int> seen = 0;
  SetSink([&](Level, std::string_view) { ++seen; }, Level::kInfo, &clock_);
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 100; ++i) Info("same");
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(seen, 10);
}

}  // namespace
}  // namespace terrace::log
