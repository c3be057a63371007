// Would catch: tasks lost or run twice, order broken on one thread, delayed tasks early or never, a Stop that drops
// queued work, hangs, or lets tasks in afterwards.
#include "base/executor.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace terrace {
namespace {

using std::chrono::milliseconds;

// Enough for any machine: a deadline for tests that would hang otherwise.
constexpr std::chrono::seconds kDeadline(30);

TEST(ThreadPool, RunsEveryTaskOnce) {
  std::atomic<int> runs = 0;
  {
    ThreadPool pool("test", 4);
    for (int i = 0; i < 1000; ++i) ASSERT_TRUE(pool.Post([&] { ++runs; }));
  }
  EXPECT_EQ(runs, 1000);
}

TEST(ThreadPool, OneThreadKeepsTheOrder) {
  std::vector<int> order;
  {
    ThreadPool pool("test", 1);
    for (int i = 0; i < 100; ++i) pool.Post([&order, i] { order.push_back(i); });
  }
  for (int i = 0; i < 100; ++i) EXPECT_EQ(order.at(static_cast<size_t>(i)), i);
}

TEST(ThreadPool, DelayedTasksRunInOrderOfTheirTimeAndNotBefore) {
  ThreadPool pool("test", 1);
  const auto start = std::chrono::steady_clock::now();
  std::vector<int> order;
  std::promise<TimePoint> last;
  pool.PostAfter(milliseconds(30), [&] {
    order.push_back(2);
    last.set_value(std::chrono::steady_clock::now());
  });
  pool.PostAfter(milliseconds(10), [&] { order.push_back(1); });
  std::future<TimePoint> done = last.get_future();
  ASSERT_EQ(done.wait_for(kDeadline), std::future_status::ready);
  EXPECT_GE(done.get() - start, milliseconds(30));
  EXPECT_EQ(order, (std::vector<int>{1, 2}));
}

TEST(ThreadPool, AnIdlePoolTakesAnEarlierTaskWhileItWaitsForALaterOne) {
  ThreadPool pool("test", 1);
  std::promise<void> ran;
  pool.PostAfter(std::chrono::hours(1), [] {});
  pool.Post([&] { ran.set_value(); });
  EXPECT_EQ(ran.get_future().wait_for(kDeadline), std::future_status::ready);
}

TEST(ThreadPool, StopRunsWhatIsQueuedDropsWhatIsDelayedAndRefusesTheRest) {
  ThreadPool pool("test", 1);
  std::promise<void> go;
  std::shared_future<void> gate = go.get_future().share();
  int runs = 0;
  const auto token = std::make_shared<int>();
  pool.Post([gate] { gate.wait(); });
  for (int i = 0; i < 10; ++i) pool.Post([&] { ++runs; });
  pool.PostAfter(std::chrono::hours(1), [token] { FAIL(); });
  EXPECT_EQ(token.use_count(), 2);
  go.set_value();
  pool.Stop();
  EXPECT_EQ(runs, 10);
  EXPECT_EQ(token.use_count(), 1) << "the captures of a dropped task must die with it";
  EXPECT_FALSE(pool.Post([] { FAIL(); }));
  EXPECT_FALSE(pool.PostAfter(milliseconds(0), [] { FAIL(); }));
  pool.Stop();  // Idempotent.
}

// Under the thread sanitizer: a Post that still wakes a thread when its task has long run.
TEST(ThreadPool, MayGoOnceItsTasksHaveRun) {
  for (int i = 0; i < 200; ++i) {
    auto pool = std::make_unique<ThreadPool>("test", 1);
    std::promise<void> ran;
    std::thread poster([executor = pool.get(), &ran] { executor->Post([&] { ran.set_value(); }); });
    ran.get_future().wait();
    pool.reset();
    poster.join();
  }
}

TEST(ThreadPool, ADroppedTaskMayPostWhenItDies) {
  ThreadPool pool("test", 1);
  struct PostsWhenItDies {
    ThreadPool& pool;
    ~PostsWhenItDies() {
      pool.Post([] {});
    }
  };
  pool.PostAfter(std::chrono::hours(1), [held = std::make_shared<PostsWhenItDies>(pool)] {});
  pool.Stop();  // Would wait for its own lock.
}

TEST(ThreadPool, ATaskMayPostAnother) {
  ThreadPool pool("a name longer than fifteen", 2);
  std::promise<void> ran;
  pool.Post([&] { pool.Post([&] { pool.PostAfter(milliseconds(1), [&] { ran.set_value(); }); }); });
  EXPECT_EQ(ran.get_future().wait_for(kDeadline), std::future_status::ready);
}

}  // namespace
}  // namespace terrace
