// What could go wrong: the host refuses what the guest writes back of a process's state, as every processor does that
// has more than the guest knows; a write changes or loses what is beyond the guest's part; on a processor without more
// the call is another than the guest made.
#include "tests/nfs/guest_state.h"

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdarg>
#include <cstdint>
#include <cstring>
#include <vector>

namespace terrace::nfs {
namespace {

using ::testing::Each;
using Bytes = std::vector<std::uint8_t>;

// A host that has `state` of a process, and takes only the whole of it.
struct Host {
  Bytes state;
  bool gone = false;
  int writes = 0;
} host;

long HostPtrace(enum __ptrace_request request, ...) {
  std::va_list arguments;
  va_start(arguments, request);
  const auto pid = va_arg(arguments, pid_t);
  const auto type = va_arg(arguments, std::uintptr_t);
  auto* const io = va_arg(arguments, iovec*);
  va_end(arguments);
  EXPECT_EQ(pid, 7);
  EXPECT_EQ(type, static_cast<std::uintptr_t>(NT_X86_XSTATE));
  auto* const bytes = static_cast<std::uint8_t*>(io->iov_base);
  const auto fail = [](int error) {
    errno = error;
    return -1L;
  };
  if (host.gone) return fail(ESRCH);
  if (request == PTRACE_GETREGSET) {
    io->iov_len = std::min(io->iov_len, host.state.size());
    std::copy_n(host.state.data(), io->iov_len, bytes);
    return 0;
  }
  if (io->iov_len < host.state.size()) return fail(EFAULT);
  std::copy_n(bytes, host.state.size(), host.state.data());
  ++host.writes;
  return 0;
}

long Write(Bytes& given) {
  iovec io{.iov_base = given.data(), .iov_len = given.size()};
  return SetExtendedState(&HostPtrace, 7, &io);
}

TEST(GuestState, KeepsWhatTheGuestDoesNotKnow) {
  host = {.state = Bytes(11'000, 1)};
  Bytes known(2'696, 2);
  ASSERT_EQ(Write(known), 0);
  EXPECT_THAT(Bytes(host.state.begin(), host.state.begin() + 2'696), Each(2));
  EXPECT_THAT(Bytes(host.state.begin() + 2'696, host.state.end()), Each(1));
}

TEST(GuestState, IsWrittenAsItIsWhereItIsAll) {
  for (const std::size_t host_bytes : {832, 2'696}) {
    host = {.state = Bytes(host_bytes, 1)};
    Bytes known(2'696, 2);
    ASSERT_EQ(Write(known), 0);
    EXPECT_THAT(host.state, Each(2));
    EXPECT_EQ(host.writes, 1);
  }
}

TEST(GuestState, OfAProcessThatIsGoneIsAnError) {
  host = {.state = Bytes(11'000, 1), .gone = true};
  Bytes known(2'696, 2);
  EXPECT_EQ(Write(known), -1);
  EXPECT_EQ(errno, ESRCH);
}

// The kernel's ptrace, on this processor, whatever it is: an iovec that ends before what AVX adds is as short to it as
// the guest's is on one with AMX. The call in this program is guest_state.cc's, as in linux.uml.
class TracedChild : public ::testing::Test {
 protected:
  static constexpr std::size_t kWithoutAvx = 512 + 64;  // FXSAVE's bytes and XSAVE's header.
  static constexpr std::size_t kXmm0 = 160, kHeader = 512, kAvx = 1 << 2;

  void SetUp() override {
    pid_ = fork();
    ASSERT_GE(pid_, 0);
    if (pid_ == 0) {
      syscall(SYS_ptrace, PTRACE_TRACEME, 0, 0, 0);
      raise(SIGSTOP);
      _exit(0);
    }
    int status = 0;
    ASSERT_EQ(waitpid(pid_, &status, 0), pid_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }

  void TearDown() override {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }

  Bytes State() const {
    Bytes state(kStateBytesMax);
    iovec io{.iov_base = state.data(), .iov_len = state.size()};
    EXPECT_EQ(ptrace(PTRACE_GETREGSET, pid_, NT_X86_XSTATE, &io), 0);
    state.resize(io.iov_len);
    return state;
  }

  pid_t pid_ = -1;
};

TEST_F(TracedChild, TakesAShortStateAndKeepsTheRest) {
  Bytes before = State();
  ASSERT_GT(before.size(), kWithoutAvx) << "no AVX: Terrace does not run here";
  // The upper half of a register, which the short state does not cover.
  before[kHeader] |= kAvx;
  std::fill_n(before.begin() + kWithoutAvx, 16, std::uint8_t{5});
  iovec whole{.iov_base = before.data(), .iov_len = before.size()};
  ASSERT_EQ(ptrace(PTRACE_SETREGSET, pid_, NT_X86_XSTATE, &whole), 0);

  Bytes known(before.begin(), before.begin() + kWithoutAvx);
  known[kHeader] |= 1 << 1;
  std::fill_n(known.begin() + kXmm0, 16, std::uint8_t{9});
  iovec part{.iov_base = known.data(), .iov_len = known.size()};
  ASSERT_EQ(syscall(SYS_ptrace, PTRACE_SETREGSET, pid_, NT_X86_XSTATE, &part), -1) << "this kernel takes a part";
  ASSERT_EQ(ptrace(PTRACE_SETREGSET, pid_, NT_X86_XSTATE, &part), 0) << std::strerror(errno);

  const Bytes after = State();
  EXPECT_THAT(Bytes(after.begin() + kXmm0, after.begin() + kXmm0 + 16), Each(9));
  EXPECT_THAT(Bytes(after.begin() + kWithoutAvx, after.begin() + kWithoutAvx + 16), Each(5));
}

TEST_F(TracedChild, AnswersOtherCallsAsEver) {
  errno = 0;
  EXPECT_NE(ptrace(PTRACE_PEEKUSER, pid_, 8 * 16, nullptr), -1) << std::strerror(errno);  // RIP
  EXPECT_EQ(ptrace(PTRACE_CONT, pid_, nullptr, nullptr), 0);
  int status = 0;
  ASSERT_EQ(waitpid(pid_, &status, 0), pid_);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

}  // namespace
}  // namespace terrace::nfs
