// Would catch: a program that a second signal does not end, because it waits elsewhere, because it is still starting,
// or because the kernel spares process 1 what has no handler; a first signal that ends what should be finished.
#include "base/stop_signals.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <thread>

namespace terrace {
namespace {

// A process of its own that runs `body` with its signals and tells the test how far it got.
class Program {
 public:
  Program(StopSignals::Early early, const std::function<void(StopSignals&, const std::function<void()>&)>& body) {
    EXPECT_EQ(pipe(pipe_), 0);
    pid_ = fork();
    if (pid_ == 0) {
      StopSignals signals(early);
      body(signals, [this] { [[maybe_unused]] const ssize_t written = write(pipe_[1], "", 1); });
      _exit(7);
    }
    close(pipe_[1]);
  }
  ~Program() {
    if (pid_ > 0) kill(pid_, SIGKILL);
    Status();
    close(pipe_[0]);
  }
  // False: it ended before.
  bool WaitForStep() {
    char byte = 0;
    return read(pipe_[0], &byte, 1) == 1;
  }
  void Send(int signal) const { kill(pid_, signal); }
  // Of the ended process, as a shell tells it.
  int Status() {
    int status = 0;
    if (pid_ > 0) waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  int pipe_[2] = {-1, -1};
  pid_t pid_ = -1;
};

using Early = StopSignals::Early;

TEST(StopSignals, TheFirstLetsTheProgramFinish) {
  for (const int signal : {SIGTERM, SIGINT}) {
    Program program(Early::kEnds, [](StopSignals& signals, const auto& step) {
      EXPECT_FALSE(signals.WaitFor(std::chrono::milliseconds(0)));
      step();
      signals.Wait();
    });
    ASSERT_TRUE(program.WaitForStep());
    program.Send(signal);
    EXPECT_EQ(program.Status(), 7);
  }
}

TEST(StopSignals, ASecondEndsAProgramThatHangs) {
  for (const int second : {SIGTERM, SIGINT}) {
    Program program(Early::kIsKept, [](StopSignals& signals, const auto& step) {
      step();
      signals.Wait();
      step();
      for (;;) pause();
    });
    ASSERT_TRUE(program.WaitForStep());
    program.Send(SIGTERM);
    ASSERT_TRUE(program.WaitForStep());
    program.Send(second);
    EXPECT_EQ(program.Status(), 128 + second);
  }
}

TEST(StopSignals, ASecondEndsAProgramThatHangsAtItsStart) {
  Program program(Early::kIsKept, [](StopSignals& signals, const auto& step) {
    step();
    while (!signals.came()) std::this_thread::yield();  // What it does instead of waiting.
    step();
    for (;;) pause();
  });
  ASSERT_TRUE(program.WaitForStep());
  program.Send(SIGTERM);
  ASSERT_TRUE(program.WaitForStep());
  program.Send(SIGTERM);
  EXPECT_EQ(program.Status(), 128 + SIGTERM);
}

TEST(StopSignals, OneBeforeTheFirstWaitIsKeptOrEnds) {
  Program kept(Early::kIsKept, [](StopSignals& signals, const auto& step) {
    step();
    while (!signals.came()) std::this_thread::yield();
    signals.Wait();
  });
  ASSERT_TRUE(kept.WaitForStep());
  kept.Send(SIGTERM);
  EXPECT_EQ(kept.Status(), 7);

  Program ends(Early::kEnds, [](StopSignals&, const auto& step) {
    step();
    for (;;) pause();
  });
  ASSERT_TRUE(ends.WaitForStep());
  ends.Send(SIGTERM);
  EXPECT_EQ(ends.Status(), 0);
}

TEST(StopSignals, AHangingProgramEndsInTime) {
  Program program(Early::kIsKept, [](StopSignals&, const auto&) {
    EndAtTheLatestAfter(std::chrono::seconds(1), "");
    for (;;) pause();
  });
  EXPECT_EQ(program.Status(), 1);
}

}  // namespace
}  // namespace terrace
