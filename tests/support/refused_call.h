// A machine that is stricter than the one at hand: a child process whose kernel refuses a system call, as container
// runtimes and sysctls do.
#pragma once

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <iterator>

namespace terrace {

struct RefusedCall {
  uint32_t number = 0;  // SYS_...
  int error = 0;
  uint32_t first_argument = UINT32_MAX;  // Only with this one. UINT32_MAX: any.
};

// What `body` returns, which runs in the child; 255 if the call can't be refused.
inline int ResultWithout(const RefusedCall& call, const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) {
    const bool any = call.first_argument == UINT32_MAX;
    sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call.number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args)),
        BPF_JUMP(BPF_JMP | (any ? BPF_JGE : BPF_JEQ) | BPF_K, any ? 0 : call.first_argument, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(call.error)),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    sock_fprog filter{.len = std::size(rules), .filter = rules};
    const bool refused =
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
    _exit(refused ? body() : 255);
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status)) return 255;
  return WEXITSTATUS(status);
}

}  // namespace terrace
