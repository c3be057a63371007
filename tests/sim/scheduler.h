// Threads and time of a simulation: all fibers on one operating-system thread, one seed, virtual time.
//
// A fiber runs until it blocks: in Yield, Sleep or Wait here, or where product code waits for a mutex or condition
// variable (platform.cc routes those calls to its fiber's scheduler). Then a fiber that is ready is picked at random;
// when none is, the clock jumps to the next timer. So the code under test is the real code with its real locks and
// waits, every interleaving comes from the seed, and a minute costs nothing.
//
// With preempt_one_in = n, one in n locks taken lets others run first: interleavings between the locks of a function.
//
//   Scheduler scheduler({.seed = 7});
//   scheduler.Spawn("client", [&] { scheduler.Sleep(1s); ... });
//   scheduler.Run([&] { return finished; });
#pragma once

#include <pthread.h>
#include <ucontext.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "terrace/tier.h"
#include "tests/sim/random.h"

namespace terrace::sim {

class Scheduler {
 public:
  struct Options {
    uint64_t seed = 1;
    uint32_t preempt_one_in = 0;      // 0: never.
    uint64_t steps_max = 20'000'000;  // More is a livelock: Run gives up.
  };
  using Duration = std::chrono::nanoseconds;
  using FiberId = uint64_t;

  explicit Scheduler(const Options& options);
  ~Scheduler();
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;

  // The scheduler whose fiber calls, or null. At most one scheduler runs at a time.
  static Scheduler* OnFiber();
  // The scheduler that exists, or null.
  static Scheduler* Active();

  TimePoint Now() const { return now_; }
  uint64_t WallNs() const;
  uint64_t steps() const { return steps_; }
  Random& random() { return random_; }

  // Anywhere. `name` is for people. The body must not throw.
  FiberId Spawn(std::string name, std::function<void()> body);
  // Runs `call` at `when`, between two fibers; it must not block.
  void At(TimePoint when, std::function<void()> call);

  // On a fiber only. All of them let others run.
  void Yield();
  void SleepUntil(TimePoint when);
  void Sleep(Duration duration) { SleepUntil(now_ + duration); }
  void Join(FiberId fiber);  // Returns when it has ended.
  // Until Wake(channel), which is any address; false at the deadline. May wake for nothing: test the condition again.
  bool Wait(const void* channel, std::optional<TimePoint> deadline = std::nullopt);

  // Anywhere. Wakes up to `count` of those that wait, in the order they came.
  void Wake(const void* channel, size_t count = SIZE_MAX);

  // While it lives, locks do not preempt: what runs on this fiber without waiting is one step.
  class Atomic {
   public:
    explicit Atomic(Scheduler& scheduler) : scheduler_(scheduler) { ++scheduler_.atomic_; }
    ~Atomic() { --scheduler_.atomic_; }
    Atomic(const Atomic&) = delete;
    Atomic& operator=(const Atomic&) = delete;

   private:
    Scheduler& scheduler_;
  };

  // Not on a fiber. Steps until `done` (asked between steps). False if it gave up: nothing can run any more, or
  // steps_max.
  bool Run(const std::function<bool()>& done);

  bool idle() const { return fibers_.empty(); }
  // The active scheduler stays for ever as it is, fibers and all, and another one may begin. After a failure.
  static void Abandon();

  // What every live fiber waits for, one a line.
  std::string Describe() const;

  // For platform.cc, on a fiber.
  int Lock(pthread_mutex_t* mutex);
  void Unlocked(pthread_mutex_t* mutex);

 private:
  struct Fiber {
    FiberId id = 0;
    std::string name;
    std::function<void()> body;
    ucontext_t context{};
    void* stack = nullptr;
    bool ready = false;
    const void* channel = nullptr;  // What it waits for.
    std::multimap<TimePoint, std::function<void()>>::iterator timer;
    bool has_timer = false;
    bool timed_out = false;
    TimePoint waits_since;
    void* sanitizer = nullptr;  // Its fake stack (asan) or its shadow (tsan).
  };
  static void Enter();
  void SwitchTo(Fiber& fiber);
  void SwitchBack(bool ended);
  void MakeReady(Fiber& fiber);
  void* TakeStack();

  const Options options_;
  Random random_;
  TimePoint now_;
  uint64_t steps_ = 0;
  int atomic_ = 0;
  FiberId next_id_ = 1;
  std::map<FiberId, std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_;
  std::unordered_map<const void*, std::deque<Fiber*>> waiting_;
  std::multimap<TimePoint, std::function<void()>> timers_;
  Fiber* running_ = nullptr;
  std::vector<void*> stacks_;  // Free ones.
  ucontext_t home_{};
  void* home_sanitizer_ = nullptr;
  const void* home_stack_ = nullptr;
  size_t home_stack_bytes_ = 0;
};

}  // namespace terrace::sim
