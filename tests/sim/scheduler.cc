#include "tests/sim/scheduler.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <utility>

#include "base/assert.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#elif defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
#endif

namespace terrace::sim {
namespace {

// Room for the deepest product call in a debug build with address sanitizer. Pages that are not touched cost nothing.
constexpr size_t kStackBytes = 1 << 20;
constexpr size_t kGuardBytes = 4096;

// Not the epoch: "never" is often a default time point, and must lie well before now. Not the machine's time either,
// so that a wait that went past the simulation hangs and is found.
constexpr TimePoint kStart{std::chrono::hours(24 * 365)};
constexpr uint64_t kStartWallNs = 1'700'000'000'000'000'000;

Scheduler* active = nullptr;
Scheduler* on_fiber = nullptr;

}  // namespace

Scheduler::Scheduler(const Options& options) : options_(options), random_(options.seed), now_(kStart) {
  TERRACE_ASSERT(!active);
  active = this;
}

Scheduler::~Scheduler() {
  TERRACE_ASSERT(fibers_.empty());
  for (void* stack : stacks_) munmap(stack, kStackBytes);
  active = nullptr;
}

Scheduler* Scheduler::OnFiber() { return on_fiber; }
Scheduler* Scheduler::Active() { return active; }

void Scheduler::Abandon() { active = nullptr; }

uint64_t Scheduler::WallNs() const { return kStartWallNs + static_cast<uint64_t>((now_ - kStart).count()); }

void* Scheduler::TakeStack() {
  if (!stacks_.empty()) {
    void* stack = stacks_.back();
    stacks_.pop_back();
    return stack;
  }
  void* stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  TERRACE_ASSERT(stack != MAP_FAILED);
  TERRACE_ASSERT(mprotect(stack, kGuardBytes, PROT_NONE) == 0);
  return stack;
}

Scheduler::FiberId Scheduler::Spawn(std::string name, std::function<void()> body) {
  auto fiber = std::make_unique<Fiber>();
  fiber->id = next_id_++;
  fiber->name = std::move(name);
  fiber->body = std::move(body);
  fiber->stack = TakeStack();
  TERRACE_ASSERT(getcontext(&fiber->context) == 0);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStackBytes;
  fiber->context.uc_link = nullptr;
  makecontext(&fiber->context, &Scheduler::Enter, 0);
#if defined(__SANITIZE_THREAD__)
  fiber->sanitizer = __tsan_create_fiber(0);
#endif
  MakeReady(*fiber);
  const FiberId id = fiber->id;
  fibers_.emplace(id, std::move(fiber));
  return id;
}

void Scheduler::Enter() {
  Scheduler& self = *on_fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &self.home_stack_, &self.home_stack_bytes_);
#endif
  self.running_->body();
  self.running_->body = nullptr;  // What it captured dies on the fiber.
  self.SwitchBack(true);
}

void Scheduler::SwitchTo(Fiber& fiber) {
  running_ = &fiber;
  on_fiber = this;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&home_sanitizer_, fiber.stack, kStackBytes);
#elif defined(__SANITIZE_THREAD__)
  home_sanitizer_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.sanitizer, 0);
#endif
  TERRACE_ASSERT(swapcontext(&home_, &fiber.context) == 0);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(home_sanitizer_, nullptr, nullptr);
#endif
  on_fiber = nullptr;
  running_ = nullptr;
}

void Scheduler::SwitchBack(bool ended) {
  Fiber& fiber = *running_;
  if (ended) fiber.channel = &fiber;  // Its own: Run sees that it ended.
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(ended ? nullptr : &fiber.sanitizer, home_stack_, home_stack_bytes_);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(home_sanitizer_, 0);
#endif
  TERRACE_ASSERT(swapcontext(&fiber.context, &home_) == 0);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fiber.sanitizer, &home_stack_, &home_stack_bytes_);
#endif
}

void Scheduler::MakeReady(Fiber& fiber) {
  fiber.ready = true;
  fiber.channel = nullptr;
  if (fiber.has_timer) timers_.erase(fiber.timer);
  fiber.has_timer = false;
  ready_.push_back(&fiber);
}

void Scheduler::At(TimePoint when, std::function<void()> call) { timers_.emplace(when, std::move(call)); }

void Scheduler::Yield() {
  TERRACE_ASSERT(on_fiber == this);
  MakeReady(*running_);
  SwitchBack(false);
}

void Scheduler::SleepUntil(TimePoint when) {
  const int channel = 0;  // Nobody else knows this address.
  while (now_ < when) Wait(&channel, when);
}

void Scheduler::Join(FiberId id) {
  for (auto it = fibers_.find(id); it != fibers_.end(); it = fibers_.find(id)) Wait(it->second.get());
}

bool Scheduler::Wait(const void* channel, std::optional<TimePoint> deadline) {
  TERRACE_ASSERT(on_fiber == this);
  Fiber& fiber = *running_;
  fiber.timed_out = false;
  fiber.channel = channel;
  fiber.waits_since = now_;
  waiting_[channel].push_back(&fiber);
  if (deadline) {
    fiber.has_timer = true;
    fiber.timer = timers_.emplace(std::max(*deadline, now_), [this, &fiber] {
      fiber.has_timer = false;  // Run takes it off the list.
      fiber.timed_out = true;
      const auto it = waiting_.find(fiber.channel);
      it->second.erase(std::find(it->second.begin(), it->second.end(), &fiber));
      if (it->second.empty()) waiting_.erase(it);
      MakeReady(fiber);
    });
  }
  SwitchBack(false);
  return !fiber.timed_out;
}

void Scheduler::Wake(const void* channel, size_t count) {
  const auto it = waiting_.find(channel);
  if (it == waiting_.end()) return;
  for (; count > 0 && !it->second.empty(); --count) {
    MakeReady(*it->second.front());
    it->second.pop_front();
  }
  if (it->second.empty()) waiting_.erase(it);
}

bool Scheduler::Run(const std::function<bool()>& done) {
  TERRACE_ASSERT(!on_fiber);
  while (!done()) {
    if (++steps_ > options_.steps_max) return false;
    if (ready_.empty()) {
      if (timers_.empty()) return false;
      const auto next = timers_.begin();
      now_ = std::max(now_, next->first);
      const std::function<void()> call = std::move(next->second);
      timers_.erase(next);
      call();
      continue;
    }
    const size_t pick = random_.Below(ready_.size());
    Fiber& fiber = *std::exchange(ready_[pick], ready_.back());
    ready_.pop_back();
    fiber.ready = false;
    SwitchTo(fiber);
    if (fiber.channel != &fiber) continue;
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(fiber.sanitizer);
#endif
    stacks_.push_back(fiber.stack);
    const auto ended = fibers_.extract(fiber.id);
    Wake(&fiber);
  }
  return true;
}

std::string Scheduler::Describe() const {
  std::string text;
  for (const auto& [id, fiber] : fibers_) {
    const auto since = std::chrono::duration_cast<std::chrono::milliseconds>(now_ - fiber->waits_since);
    text += "  fiber " + std::to_string(id) + " " + fiber->name;
    text += fiber->ready ? " is ready" : " waits for " + std::to_string(since.count()) + " ms";
    text += fiber->has_timer || fiber->ready ? "\n" : ", without a deadline\n";
  }
  return text;
}

int Scheduler::Lock(pthread_mutex_t* mutex) {
  if (options_.preempt_one_in > 0 && atomic_ == 0 && random_.OneIn(options_.preempt_one_in)) Yield();
  for (;;) {
    const int result = pthread_mutex_trylock(mutex);
    if (result != EBUSY) return result;
    Wait(mutex);
  }
}

void Scheduler::Unlocked(pthread_mutex_t* mutex) {
  if (!waiting_.empty()) Wake(mutex, 1);
}

}  // namespace terrace::sim
