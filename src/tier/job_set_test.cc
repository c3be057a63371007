// What could go wrong: a job that neither runs nor is dropped, or both; Close returning while a job still runs; a job
// run after Close.
#include "tier/job_set.h"

#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

namespace terrace {
namespace {

TimePoint Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

TEST(JobSet, EveryJobEndsOnceWhateverTheMoment) {
  for (int round = 0; round < 50; ++round) {
    constexpr int kJobs = 64;
    std::vector<std::atomic<int>> ends(kJobs);
    std::atomic<bool> closed = false;
    ThreadPool pool("jobs", 2);
    {
      JobSet jobs(&pool);
      std::thread adder([&] {
        for (int i = 0; i < kJobs; ++i) {
          jobs.Add({.run =
                        [&, i] {
                          EXPECT_FALSE(closed);
                          ++ends[i];
                        },
                    .drop = [&, i] { ++ends[i]; }});
        }
      });
      jobs.Close(TimePoint::min());
      closed = true;
      adder.join();
    }
    for (const std::atomic<int>& n : ends) EXPECT_EQ(n, 1);
  }
}

TEST(JobSet, CloseWaitsForWhatWaitsUntilTheDeadline) {
  ThreadPool pool("jobs", 1);
  JobSet jobs(&pool);
  int ran = 0;
  for (int i = 0; i < 10; ++i) jobs.Add({.run = [&] { ++ran; }, .drop = [] { ADD_FAILURE(); }});
  EXPECT_EQ(jobs.Close(Soon()), 0u);
  EXPECT_EQ(ran, 10);
}

TEST(JobSet, WhatComesAfterCloseOrAStoppedExecutorIsDropped) {
  ThreadPool pool("jobs", 1);
  JobSet open(&pool);
  JobSet closed(&pool);
  closed.Close(TimePoint::min());
  pool.Stop();
  int dropped = 0;
  closed.Add({.run = [] { ADD_FAILURE(); }, .drop = [&] { ++dropped; }});
  open.Add({.run = [] { ADD_FAILURE(); }, .drop = [&] { ++dropped; }});
  open.Add({.run = [] { ADD_FAILURE(); }, .drop = [&] { ++dropped; }}, std::chrono::milliseconds(1));
  EXPECT_EQ(dropped, 3);
}

TEST(JobSet, WithoutAnExecutorJobsRunAtOnce) {
  JobSet jobs(nullptr);
  bool ran = false;
  jobs.Add({.run = [&] { ran = true; }, .drop = [] { ADD_FAILURE(); }});
  EXPECT_TRUE(ran);
}

}  // namespace
}  // namespace terrace
