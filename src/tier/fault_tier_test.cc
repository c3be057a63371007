// What could go wrong: a fault that is written but does not happen, or happens without being asked for; a run that the
// seed does not reproduce; an item that hangs for ever, or a Close that waits for it; a typing error taken for no
// fault.
#include "tier/fault_tier.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <mutex>

#include "base/hash.h"
#include "base/log.h"
#include "tests/support/memory_tier.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

TimePoint Soon() { return std::chrono::steady_clock::now() + seconds(60); }
Digest Key(uint64_t n) { return Sha256Of("key " + std::to_string(n)); }
const Digest kSpace = Sha256Of("space");

FaultSpec Spec(std::string_view text) {
  Result<FaultSpec> spec = FaultSpec::Parse(text);
  EXPECT_TRUE(spec) << spec.error().what;
  return *spec;
}

std::string ParseError(std::string_view text) {
  const Result<FaultSpec> spec = FaultSpec::Parse(text);
  EXPECT_FALSE(spec);
  EXPECT_EQ(spec.error().code, Code::kInvalid);
  return spec.error().what;
}

TEST(FaultSpec, ReadsEveryTerm) {
  const FaultSpec spec = Spec(
      "load.error=0.1,load.delay=50ms,load.corrupt=0.01,load.hang=1,save.error=0,save.enospc@17,save.hang@2,"
      "save.delay=2s,contains.lie=0.5,hang=3s,seed=7");
  EXPECT_EQ(spec.load_error.probability, 0.1);
  EXPECT_EQ(spec.load_delay, milliseconds(50));
  EXPECT_EQ(spec.load_corrupt.probability, 0.01);
  EXPECT_EQ(spec.load_hang.probability, 1);
  EXPECT_EQ(spec.save_error.probability, 0);
  EXPECT_EQ(spec.save_enospc.at, 17u);
  EXPECT_EQ(spec.save_hang.at, 2u);
  EXPECT_EQ(spec.save_delay, seconds(2));
  EXPECT_EQ(spec.contains_lie.probability, 0.5);
  EXPECT_EQ(spec.hang, seconds(3));
  EXPECT_EQ(spec.seed, 7u);
  EXPECT_EQ(Spec("").load_error.probability, 0);
}

TEST(FaultSpec, RefusesWhatItDoesNotUnderstandByName) {
  EXPECT_NE(ParseError("seed=1,load.eror=0.1").find("did you mean \"load.error\"?"), std::string::npos)
      << ParseError("seed=1,load.eror=0.1");
  for (const char* text : {"load.error", "load.error=", "load.error=1.5", "load.error=-0.1", "load.error=nan",
                           "load.error=0.1x", "save.enospc@0", "save.enospc@", "save.enospc@-1", "load.delay=fast",
                           "load.delay@3", "seed=x", "seed@1", "zzz=1", ",", "load.error=0.1,,seed=1", "=1"}) {
    EXPECT_NE(ParseError(text).find("fault \""), std::string::npos) << text;
  }
}

class FaultTierTest : public testing::Test {
 protected:
  ~FaultTierTest() override {
    if (tier_) tier_->Close(Soon());
    log::SetSink(nullptr);
  }

  void Open(std::string_view spec) {
    log::SetSink([this](log::Level, std::string_view line) {
      std::lock_guard lock(mutex_);
      lines_.emplace_back(line);
    });
    tier_ = std::make_unique<FaultTier>(std::make_unique<MemoryTier>("memory"), Spec(spec), executor_);
  }
  std::shared_ptr<SaveBatch> StartSave(uint64_t count) {
    std::vector<SaveItem> items;
    for (uint64_t n = 1; n <= count; ++n) {
      items.push_back({.info = {.space = kSpace, .key = Key(n), .parent = Key(n - 1), .payload_bytes = payload_.size()},
                       .payload = payload_});
    }
    auto done = std::make_shared<SaveBatch>(count);
    tier_->Save(std::move(items), done);
    return done;
  }
  std::shared_ptr<LoadBatch> StartLoad(uint64_t count) {
    std::vector<LoadItem> items;
    for (uint64_t n = 1; n <= count; ++n) {
      auto into = std::make_shared<std::vector<std::byte>>(payload_.size());
      items.push_back({.key = Key(n), .space = kSpace, .into = *into, .owner = into});
    }
    auto done = std::make_shared<LoadBatch>(count);
    tier_->Load(std::move(items), Soon(), done);
    return done;
  }
  static std::string Outcomes(LoadBatch& done) {
    EXPECT_TRUE(done.WaitAll(Soon()));
    std::string text;
    for (size_t i = 0; i < done.size(); ++i) {
      text += done.Poll(i)->outcome == Outcome::kHit ? '+' : done.Poll(i)->outcome == Outcome::kMiss ? '-' : '!';
    }
    return text;
  }
  size_t Logged(std::string_view text) {
    std::lock_guard lock(mutex_);
    size_t n = 0;
    for (const std::string& line : lines_) n += line.find(text) != std::string::npos;
    return n;
  }

  ThreadPool executor_{"fault", 1};
  std::mutex mutex_;
  std::vector<std::string> lines_;  // Guarded by mutex_.
  std::vector<std::byte> payload_{100, std::byte{7}};
  std::unique_ptr<FaultTier> tier_;
};

TEST_F(FaultTierTest, TheSeedReproducesTheFaults) {
  const auto run = [&](std::string_view spec) {
    Open(spec);
    EXPECT_TRUE(StartSave(200)->WaitAll(Soon()));
    return Outcomes(*StartLoad(200));
  };
  const std::string one = run("load.error=0.2,seed=1");
  EXPECT_EQ(run("load.error=0.2,seed=1"), one);
  EXPECT_NE(run("load.error=0.2,seed=2"), one);
  const auto failed = std::count(one.begin(), one.end(), '!');
  EXPECT_GT(failed, 15);  // 40 expected, deviation 6.
  EXPECT_LT(failed, 65);
}

TEST_F(FaultTierTest, TheNthItemAndNoOtherFails) {
  Open("save.enospc@2,load.error@4");
  const auto saves = StartSave(3);
  ASSERT_TRUE(saves->WaitAll(Soon()));
  EXPECT_EQ(saves->Poll(0)->outcome, Outcome::kHit);
  EXPECT_EQ(saves->Poll(1)->outcome, Outcome::kFailed);
  EXPECT_EQ(saves->Poll(1)->reason, Reason::kFull);
  EXPECT_EQ(saves->Poll(1)->error->os_error, ENOSPC);
  EXPECT_EQ(saves->Poll(2)->outcome, Outcome::kHit);
  EXPECT_EQ(Outcomes(*StartLoad(3)), "+-+");
  const auto loads = StartLoad(3);
  EXPECT_EQ(Outcomes(*loads), "!-+");
  EXPECT_EQ(loads->Poll(0)->reason, Reason::kUnavailable);
  EXPECT_EQ(loads->Poll(0)->error->os_error, EIO);
  EXPECT_EQ(Logged("event=fault_injected"), 2u);
  EXPECT_EQ(Logged("fault=save.enospc"), 1u);
  EXPECT_EQ(Logged(Key(1).Hex()), 1u);
}

TEST_F(FaultTierTest, AFailedSaveReachesNothing) {
  Open("save.error=1");
  const auto saves = StartSave(1);
  ASSERT_TRUE(saves->WaitAll(Soon()));
  EXPECT_EQ(saves->Poll(0)->outcome, Outcome::kFailed);
  EXPECT_EQ(saves->Poll(0)->reason, Reason::kUnavailable);
  EXPECT_EQ(Outcomes(*StartLoad(1)), "-");
}

TEST_F(FaultTierTest, CorruptionIsAMissAndTheFrameIsGone) {
  Open("load.corrupt@1");
  ASSERT_TRUE(StartSave(2)->WaitAll(Soon()));
  const auto loads = StartLoad(2);
  EXPECT_EQ(Outcomes(*loads), "-+");
  EXPECT_EQ(loads->Poll(0)->reason, Reason::kDamaged);
  EXPECT_EQ(tier_->stats().quarantined, 1u);
  EXPECT_EQ(Outcomes(*StartLoad(2)), "-+") << "found damaged once, it is not served later";
}

TEST_F(FaultTierTest, ALieTurnsTheAnswerRound) {
  Open("contains.lie@1");
  ASSERT_TRUE(StartSave(1)->WaitAll(Soon()));
  const Digest keys[] = {Key(1), Key(1), Key(2)};
  std::vector<uint8_t> present(3);
  tier_->Contains(keys, present);
  EXPECT_EQ(present, (std::vector<uint8_t>{0, 1, 0}));
}

TEST_F(FaultTierTest, WhatHangsIsSettledByCloseAtOnce) {
  Open("load.hang=1,save.hang@2");
  const auto saves = StartSave(2);
  const auto loads = StartLoad(1);
  ASSERT_NE(saves->Wait(0, Soon()), nullptr);
  EXPECT_EQ(saves->Poll(1), nullptr);
  EXPECT_EQ(loads->Poll(0), nullptr);
  const CloseReport report = tier_->Close(std::chrono::steady_clock::now() + std::chrono::hours(1));
  EXPECT_EQ(report.abandoned, 2u);
  EXPECT_FALSE(report.clean);
  EXPECT_EQ(loads->Poll(0)->reason, Reason::kCancelled);
  EXPECT_EQ(saves->Poll(1)->reason, Reason::kCancelled);
}

TEST_F(FaultTierTest, AHangEndsAfterItsTimeAsATimeout) {
  Open("load.hang=1,hang=1ms");
  const auto loads = StartLoad(1);
  EXPECT_EQ(Outcomes(*loads), "-");
  EXPECT_EQ(loads->Poll(0)->reason, Reason::kTimeout);
}

// Holds what is posted, and notes the delay.
class NotingExecutor final : public Executor {
 public:
  bool Post(Task) override { return false; }
  bool PostAfter(milliseconds delay, Task task) override {
    delays.push_back(delay);
    tasks.push_back(std::move(task));
    return true;
  }
  std::vector<milliseconds> delays;
  std::vector<Task> tasks;
};

TEST_F(FaultTierTest, ADelayHoldsABatchBackAndNoMore) {
  NotingExecutor executor;
  FaultTier tier(std::make_unique<MemoryTier>("memory"), Spec("load.delay=50ms"), executor);
  auto done = std::make_shared<LoadBatch>(2);
  tier.Load({{.key = Key(1)}, {.key = Key(2)}}, Soon(), done);
  EXPECT_EQ(done->Poll(0), nullptr);
  EXPECT_EQ(executor.delays, std::vector<milliseconds>{milliseconds(50)});
  executor.tasks[0]();
  EXPECT_TRUE(done->WaitAll(Soon()));
  EXPECT_EQ(done->Poll(1)->outcome, Outcome::kMiss);
}

}  // namespace
}  // namespace terrace
