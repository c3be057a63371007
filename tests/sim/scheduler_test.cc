// Would catch: a run that depends on more than its seed, time that passes while something could run, a lock that two
// fibers hold, a wake-up that is lost, a timer that fires early, a thread pool of one that reorders.
#include "tests/sim/scheduler.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/sim/sim_executor.h"

namespace terrace::sim {
namespace {

using namespace std::chrono_literals;

// Runs everything that was spawned.
void RunAll(Scheduler& scheduler) {
  ASSERT_TRUE(scheduler.Run([&] { return scheduler.idle(); })) << scheduler.Describe();
}

TEST(Scheduler, TheSeedDecidesTheOrder) {
  const auto order = [](uint64_t seed) {
    Scheduler scheduler({.seed = seed});
    std::string turns;
    for (char c = 'a'; c <= 'h'; ++c) {
      scheduler.Spawn("", [&scheduler, &turns, c] {
        for (int i = 0; i < 3; ++i) {
          turns += c;
          scheduler.Yield();
        }
      });
    }
    RunAll(scheduler);
    return turns;
  };
  EXPECT_EQ(order(1), order(1));
  EXPECT_NE(order(1), order(2));
}

TEST(Scheduler, TimePassesOnlyWhenNothingCanRunAndIsWhatProductCodeSees) {
  Scheduler scheduler({.seed = 1});
  const TimePoint start = scheduler.Now();
  TimePoint slept, worked, seen;
  scheduler.Spawn("sleeper", [&] {
    scheduler.Sleep(3h);
    slept = scheduler.Now();
    seen = std::chrono::steady_clock::now();
  });
  scheduler.Spawn("worker", [&] {
    for (int i = 0; i < 1000; ++i) scheduler.Yield();
    worked = scheduler.Now();
  });
  RunAll(scheduler);
  EXPECT_EQ(worked, start);
  EXPECT_EQ(slept, start + 3h);
  EXPECT_EQ(seen, slept);
}

TEST(Scheduler, AMutexIsHeldByOneFiberAcrossWaits) {
  Scheduler scheduler({.seed = 1, .preempt_one_in = 2});
  std::mutex mutex;
  int inside = 0, entered = 0;
  for (int i = 0; i < 10; ++i) {
    scheduler.Spawn("", [&] {
      for (int k = 0; k < 20; ++k) {
        std::lock_guard lock(mutex);
        EXPECT_EQ(++inside, 1);
        ++entered;
        scheduler.Sleep(1ms);
        --inside;
      }
    });
  }
  RunAll(scheduler);
  EXPECT_EQ(entered, 200);
}

TEST(Scheduler, ConditionVariablesWakeAndTimeOutInVirtualTime) {
  Scheduler scheduler({.seed = 1});
  std::mutex mutex;
  std::condition_variable changed;
  int tickets = 0, served = 0, gave_up = 0;
  const TimePoint start = scheduler.Now();
  for (int i = 0; i < 5; ++i) {
    scheduler.Spawn("taker", [&] {
      std::unique_lock lock(mutex);
      if (changed.wait_until(lock, start + 10s, [&] { return tickets > 0; })) {
        --tickets;
        ++served;
      } else {
        EXPECT_EQ(scheduler.Now(), start + 10s);
        ++gave_up;
      }
    });
  }
  scheduler.Spawn("waits for all", [&] {
    std::unique_lock lock(mutex);
    changed.wait(lock, [&] { return served == 3; });
    EXPECT_EQ(scheduler.Now(), start + 3s);
  });
  scheduler.Spawn("giver", [&] {
    for (int i = 0; i < 3; ++i) {
      scheduler.Sleep(1s);
      {
        std::lock_guard lock(mutex);
        ++tickets;
      }
      changed.notify_one();
      changed.notify_all();
      scheduler.Yield();
      changed.notify_all();
    }
  });
  // Whoever waits for all is woken with the others; the last notification may come before it is true.
  scheduler.At(start + 3s + 1ns, [&] { scheduler.Wake(&changed); });
  scheduler.Run([&] { return scheduler.Now() > start + 20s; });
  EXPECT_EQ(served, 3);
  EXPECT_EQ(gave_up, 2);
  RunAll(scheduler);
}

TEST(Scheduler, ADeadlockEndsTheRunAndIsDescribed) {
  auto* scheduler = new Scheduler({.seed = 1});  // Stays: its fibers never end.
  scheduler->Spawn("stuck", [&] { scheduler->Wait(&scheduler); });
  EXPECT_FALSE(scheduler->Run([] { return false; }));
  EXPECT_NE(scheduler->Describe().find("stuck waits"), std::string::npos) << scheduler->Describe();
  Scheduler::Abandon();
}

TEST(Scheduler, ALivelockEndsTheRun) {
  auto* scheduler = new Scheduler({.seed = 1, .steps_max = 1000});
  scheduler->Spawn("busy", [&] {
    for (;;) scheduler->Yield();
  });
  EXPECT_FALSE(scheduler->Run([] { return false; }));
  Scheduler::Abandon();
}

TEST(SchedulerDeathTest, AThreadOfAComponentsOwnIsRefused) {
  EXPECT_DEATH(
      {
        Scheduler scheduler({.seed = 1});
        scheduler.Spawn("", [] { std::thread([] {}).join(); });
        scheduler.Run([&] { return scheduler.idle(); });
      },
      "starts a thread of its own");
}

TEST(Scheduler, RandomBitsComeFromTheSeed) {
  const auto draw = [](uint64_t seed) {
    Scheduler scheduler({.seed = seed});
    unsigned drawn = 0;
    scheduler.Spawn("", [&] { drawn = std::random_device()(); });
    RunAll(scheduler);
    return drawn;
  };
  EXPECT_EQ(draw(1), draw(1));
  EXPECT_NE(draw(1), draw(2));
}

TEST(SimExecutor, OneWorkerKeepsTheOrderAndSeveralNeedNot) {
  const auto order = [](size_t workers) {
    Scheduler scheduler({.seed = 1});
    std::vector<int> begun;
    scheduler.Spawn("main", [&] {
      SimExecutor executor(scheduler, "pool", workers);
      for (int i = 0; i < 20; ++i) {
        EXPECT_TRUE(executor.Post([&, i] {
          begun.push_back(i);
          scheduler.Sleep(std::chrono::milliseconds(20 - i));
        }));
      }
      executor.Stop();
      EXPECT_FALSE(executor.Post([] {}));
    });
    RunAll(scheduler);
    EXPECT_EQ(begun.size(), 20u);
    return begun;
  };
  const auto one = order(1), four = order(4);
  EXPECT_TRUE(std::is_sorted(one.begin(), one.end()));
  EXPECT_FALSE(std::is_sorted(four.begin(), four.end()));
}

TEST(SimExecutor, DelayedTasksComeInTimeAndAreDroppedByStopAndKill) {
  Scheduler scheduler({.seed = 1});
  int ran = 0;
  scheduler.Spawn("main", [&] {
    SimExecutor executor(scheduler, "pool", 1);
    const TimePoint start = scheduler.Now();
    executor.PostAfter(5ms, [&] {
      EXPECT_EQ(scheduler.Now(), start + 5ms);
      ++ran;
    });
    executor.PostAfter(50ms, [&] { ++ran; });
    scheduler.Sleep(10ms);
    executor.Stop();
    SimExecutor killed(scheduler, "killed", 1);
    killed.Post([&] { ++ran; });
    killed.Kill();
    killed.Stop();
    scheduler.Sleep(100ms);
  });
  RunAll(scheduler);
  EXPECT_EQ(ran, 1);
}

}  // namespace
}  // namespace terrace::sim
