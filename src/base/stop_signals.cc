#include "base/stop_signals.h"

#include <pthread.h>
#include <unistd.h>

namespace terrace {
namespace {

void Say(std::string_view text) {
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, text.data(), text.size());
}

std::string_view words_at_the_end;  // Set before the alarm that reads it.

}  // namespace

StopSignals::StopSignals(Early early) : early_ends_(early == Early::kEnds) {
  sigemptyset(&set_);
  sigaddset(&set_, SIGTERM);
  sigaddset(&set_, SIGINT);
  pthread_sigmask(SIG_BLOCK, &set_, nullptr);
  thread_ = std::thread([this] { Watch(); });
}

StopSignals::~StopSignals() {
  over_ = true;
  pthread_kill(thread_.native_handle(), SIGINT);
  thread_.join();
}

void StopSignals::Watch() {
  for (;;) {
    int number = 0;
    if (sigwait(&set_, &number) != 0) continue;
    if (over_) return;
    if (came_) {
      Say("terrace: a second signal; ended at once\n");
      _exit(128 + number);
    }
    if (early_ends_) _exit(0);
    const std::lock_guard lock(mutex_);
    came_ = true;
    changed_.notify_all();
  }
}

bool StopSignals::WaitFor(std::chrono::milliseconds time) {
  early_ends_ = false;
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, time, [&] { return came_.load(); });
}

void StopSignals::Wait() {
  early_ends_ = false;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return came_.load(); });
}

void EndAtTheLatestAfter(std::chrono::seconds time, std::string_view last_words) {
  words_at_the_end = last_words;
  // A handler, because process 1 does not die of the signal itself.
  struct sigaction action{};
  action.sa_handler = [](int) {
    Say(words_at_the_end);
    _exit(1);
  };
  sigaction(SIGALRM, &action, nullptr);
  alarm(static_cast<unsigned>(time.count()));
}

}  // namespace terrace
