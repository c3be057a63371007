// The signals that stop a program: SIGTERM and SIGINT.
#pragma once

#include <pthread.h>

#include <chrono>
#include <csignal>
#include <ctime>

namespace terrace {

// Made before the first thread starts, so that all threads block them and only the waits here see them. After the first
// a second one ends the program at once, as people at a terminal expect.
class StopSignals {
 public:
  StopSignals() {
    sigemptyset(&set_);
    sigaddset(&set_, SIGTERM);
    sigaddset(&set_, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  }
  // True: one came. False: none within `time`.
  bool WaitFor(std::chrono::milliseconds time) {
    const timespec limit{.tv_sec = time.count() / 1000, .tv_nsec = time.count() % 1000 * 1'000'000};
    if (sigtimedwait(&set_, nullptr, &limit) < 0) return false;
    pthread_sigmask(SIG_UNBLOCK, &set_, nullptr);
    return true;
  }
  void Wait() {
    while (!WaitFor(std::chrono::hours(1))) {
    }
  }

 private:
  sigset_t set_{};
};

}  // namespace terrace
