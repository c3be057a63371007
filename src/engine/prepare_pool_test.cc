// Would catch: a queue without a bound, a place that is kept for a client that has left, jobs out of order, a stop that
// runs what waits or hangs, threads that compete with those that answer.
#include "engine/prepare_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <future>
#include <memory>
#include <thread>
#include <vector>

namespace terrace::engine {
namespace {

const auto kNotGone = [] { return false; };

// Holds the pool's only thread until released.
class Held {
 public:
  explicit Held(PreparePool& pool) {
    std::promise<void> begun;
    auto released = release_.get_future().share();
    EXPECT_TRUE(pool.Post({.run =
                               [&begun, released] {
                                 begun.set_value();
                                 released.wait();
                               },
                           .gone = kNotGone}));
    begun.get_future().wait();
  }
  void Release() { release_.set_value(); }

 private:
  std::promise<void> release_;
};

TEST(PreparePool, RefusesWhenTheQueueIsFull) {
  Metrics metrics;
  PreparePool pool("short", {.threads = 1, .queue_max = 2}, metrics);
  Held held(pool);
  std::atomic<int> ran{0};
  const auto count = [&ran] { ++ran; };
  EXPECT_TRUE(pool.Post({.run = count, .gone = kNotGone}));
  EXPECT_TRUE(pool.Post({.run = count, .gone = kNotGone}));
  EXPECT_FALSE(pool.Post({.run = count, .gone = kNotGone}));
  EXPECT_NE(metrics.Text().find("terrace_prepare_refused_total{size=\"short\"} 1\n"), std::string::npos);
  EXPECT_NE(metrics.Text().find("terrace_prepare_queue_requests{size=\"short\"} 2\n"), std::string::npos);
  std::promise<void> last;
  held.Release();
  while (!pool.Post({.run = [&last] { last.set_value(); }, .gone = kNotGone})) {
  }
  last.get_future().wait();
  EXPECT_EQ(ran, 2);
}

TEST(PreparePool, RunsJobsInTheirOrder) {
  Metrics metrics;
  PreparePool pool("short", {.threads = 1, .queue_max = 100}, metrics);
  Held held(pool);
  std::vector<int> order;
  std::promise<void> done;
  for (int i = 0; i < 20; ++i) {
    const auto run = [&, i] {
      order.push_back(i);
      if (i == 19) done.set_value();
    };
    EXPECT_TRUE(pool.Post({.run = run, .gone = kNotGone}));
  }
  held.Release();
  done.get_future().wait();
  for (int i = 0; i < 20; ++i) EXPECT_EQ(order[static_cast<size_t>(i)], i);
}

TEST(PreparePool, AClientThatLeftFreesItsPlace) {
  Metrics metrics;
  PreparePool pool("short", {.threads = 1, .queue_max = 1}, metrics);
  Held held(pool);
  auto owned = std::make_shared<int>(0);
  bool left = false;
  EXPECT_TRUE(pool.Post({.run = [owned] { ADD_FAILURE() << "nobody wants it"; }, .gone = [&left] { return left; }}));
  pool.DropGone();
  EXPECT_FALSE(pool.Post({.run = [] {}, .gone = kNotGone}));
  left = true;
  pool.DropGone();
  EXPECT_EQ(owned.use_count(), 1) << "what it held is let go at once";
  EXPECT_TRUE(pool.Post({.run = [] {}, .gone = kNotGone}));
  held.Release();
}

TEST(PreparePool, AStopDropsWhatWaits) {
  Metrics metrics;
  PreparePool pool("long", {.threads = 1, .queue_max = 10}, metrics);
  Held held(pool);
  auto owned = std::make_shared<int>(0);
  EXPECT_TRUE(pool.Post({.run = [owned] { ADD_FAILURE() << "it waited"; }, .gone = kNotGone}));
  std::thread stopper([&pool] { pool.Stop(); });
  while (metrics.Text().find("terrace_prepare_queue_requests{size=\"long\"} 0\n") == std::string::npos) {
    std::this_thread::yield();
  }
  held.Release();
  stopper.join();
  EXPECT_FALSE(pool.Post({.run = [] {}, .gone = kNotGone}));
  EXPECT_EQ(owned.use_count(), 1);
}

TEST(PreparePool, GivesWayToOtherThreads) {
  Metrics metrics;
  PreparePool pool("long", {.threads = 1, .queue_max = 1}, metrics);
  const auto nice = [] { return getpriority(PRIO_PROCESS, static_cast<id_t>(gettid())); };
  std::promise<int> of_pool;
  EXPECT_TRUE(pool.Post({.run = [&] { of_pool.set_value(nice()); }, .gone = kNotGone}));
  EXPECT_GT(of_pool.get_future().get(), nice());
}

}  // namespace
}  // namespace terrace::engine
