// The signals that stop a program: SIGTERM and SIGINT. The first asks it to finish what it has begun; a second one ends
// it at once, whatever it waits for, with the exit code that shells give for the signal.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <mutex>
#include <string_view>
#include <thread>

namespace terrace {

// Made before the first thread starts, so that all threads block the signals and only the one here sees them: no call
// is interrupted, and a process with number 1, as in a container, gets them, too. One at a time.
class StopSignals {
 public:
  // What a signal does that comes before the program waits for one.
  enum class Early {
    kIsKept,  // The first wait returns at once.
    kEnds,    // The program, with 0: it has nothing to finish yet.
  };
  explicit StopSignals(Early early = Early::kIsKept);
  ~StopSignals();
  StopSignals(const StopSignals&) = delete;
  StopSignals& operator=(const StopSignals&) = delete;

  // True: one came. False: none within `time`.
  bool WaitFor(std::chrono::milliseconds time);
  void Wait();
  // True once one came, for work that looks now and then.
  const std::atomic<bool>& came() const { return came_; }

 private:
  void Watch();

  sigset_t set_{};
  std::mutex mutex_;
  std::condition_variable changed_;  // came_ became true.
  std::atomic<bool> came_{false};    // Set under the mutex; read without it by those who only look.
  std::atomic<bool> early_ends_;     // Until somebody waits. Stands alone.
  std::atomic<bool> over_{false};    // Set before the thread is woken by a signal of its own. Stands alone.
  std::thread thread_;
};

// The process ends after `time` with 1 and `last_words` on stderr, whatever hangs: a call on a mount whose server is
// gone may never return, and nobody can wait for its thread. The text must live as long as the process.
void EndAtTheLatestAfter(std::chrono::seconds time, std::string_view last_words);

}  // namespace terrace
