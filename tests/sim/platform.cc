// What product code asks of the platform besides the collaborators that it is given: locks, condition variables, time
// and random bits. The linker's --wrap (CMakeLists.txt has the list) sends these calls here. On a fiber of a simulation
// they become steps of its scheduler; elsewhere they are what they always are. So the code under test is unchanged.
//
// A thread of a component's own would run outside of the simulation: starting one on a fiber is a failure that says so.
#include <pthread.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <random>
#include <thread>

#include "base/assert.h"
#include "tests/sim/scheduler.h"

using terrace::TimePoint;
using terrace::sim::Scheduler;

extern "C" {

int __real_pthread_mutex_lock(pthread_mutex_t* mutex);
int __real_pthread_mutex_unlock(pthread_mutex_t* mutex);
int __real_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const timespec* deadline);
void __real__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(std::condition_variable* self,
                                                                      std::unique_lock<std::mutex>& lock);
void __real__ZNSt18condition_variable10notify_oneEv(std::condition_variable* self);
void __real__ZNSt18condition_variable10notify_allEv(std::condition_variable* self);
int64_t __real__ZNSt6chrono3_V212steady_clock3nowEv();
int64_t __real__ZNSt6chrono3_V212system_clock3nowEv();
unsigned __real__ZNSt13random_device9_M_getvalEv(std::random_device* self);
pid_t __real_getpid();
void __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(std::thread* self,
                                                                                                  void* state,
                                                                                                  void (*depend)());

int __wrap_pthread_mutex_lock(pthread_mutex_t* mutex) {
  if (Scheduler* s = Scheduler::OnFiber()) return s->Lock(mutex);
  if (!Scheduler::Active()) return __real_pthread_mutex_lock(mutex);
  // Between two fibers: one of them may hold it, and can't run before we return.
  const int result = pthread_mutex_trylock(mutex);
  TERRACE_ASSERT(result != EBUSY);
  return result;
}

int __wrap_pthread_mutex_unlock(pthread_mutex_t* mutex) {
  const int result = __real_pthread_mutex_unlock(mutex);
  if (Scheduler* s = Scheduler::Active()) s->Unlocked(mutex);
  return result;
}

// The address of a condition variable's pthread_cond_t is its own: it is the only member.
int __wrap_pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex, clockid_t clock,
                                  const timespec* deadline) {
  Scheduler* s = Scheduler::OnFiber();
  if (!s) return __real_pthread_cond_clockwait(condition, mutex, clock, deadline);
  TERRACE_ASSERT(clock == CLOCK_MONOTONIC);
  const auto at = std::chrono::seconds(deadline->tv_sec) + std::chrono::nanoseconds(deadline->tv_nsec);
  __wrap_pthread_mutex_unlock(mutex);  // No other fiber runs before Wait: no wake-up is lost.
  const bool woken = s->Wait(condition, TimePoint(at));
  s->Lock(mutex);
  return woken ? 0 : ETIMEDOUT;
}

void __wrap__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(std::condition_variable* self,
                                                                      std::unique_lock<std::mutex>& lock) {
  Scheduler* s = Scheduler::OnFiber();
  if (!s) return __real__ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE(self, lock);
  lock.unlock();
  s->Wait(self);
  lock.lock();
}

void __wrap__ZNSt18condition_variable10notify_oneEv(std::condition_variable* self) {
  if (Scheduler* s = Scheduler::Active()) s->Wake(self, 1);
  __real__ZNSt18condition_variable10notify_oneEv(self);
}

void __wrap__ZNSt18condition_variable10notify_allEv(std::condition_variable* self) {
  if (Scheduler* s = Scheduler::Active()) s->Wake(self);
  __real__ZNSt18condition_variable10notify_allEv(self);
}

int64_t __wrap__ZNSt6chrono3_V212steady_clock3nowEv() {
  const Scheduler* s = Scheduler::OnFiber();
  return s ? s->Now().time_since_epoch().count() : __real__ZNSt6chrono3_V212steady_clock3nowEv();
}

int64_t __wrap__ZNSt6chrono3_V212system_clock3nowEv() {
  const Scheduler* s = Scheduler::OnFiber();
  return s ? static_cast<int64_t>(s->WallNs()) : __real__ZNSt6chrono3_V212system_clock3nowEv();
}

// Names of nodes are made of these two.
unsigned __wrap__ZNSt13random_device9_M_getvalEv(std::random_device* self) {
  Scheduler* s = Scheduler::OnFiber();
  return s ? static_cast<unsigned>(s->random().Next()) : __real__ZNSt13random_device9_M_getvalEv(self);
}

pid_t __wrap_getpid() { return Scheduler::OnFiber() ? 1 : __real_getpid(); }

int __wrap_gethostname(char* name, size_t size) {
  TERRACE_ASSERT(size > 4);
  std::snprintf(name, size, "sim");
  return 0;
}

void __wrap__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(std::thread* self,
                                                                                                  void* state,
                                                                                                  void (*depend)()) {
  if (Scheduler::Active()) {
    std::fprintf(stderr, "simulation: a component starts a thread of its own; give it an executor\n");
    std::abort();
  }
  __real__ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_StateESt14default_deleteIS1_EEPFvvE(self, state, depend);
}

}  // extern "C"
