#include "tests/nfs/guest_state.h"

#include <dlfcn.h>
#include <elf.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>

namespace terrace::nfs {

long SetExtendedState(Ptrace next, pid_t pid, iovec* given) {
  const auto type = static_cast<std::uintptr_t>(NT_X86_XSTATE);
  // Not on the stack: those of user-mode Linux are small.
  alignas(64) static std::byte state[kStateBytesMax];
  iovec whole{.iov_base = state, .iov_len = sizeof(state)};
  if (next(PTRACE_GETREGSET, pid, type, &whole) != 0 || whole.iov_len <= given->iov_len) {
    return next(PTRACE_SETREGSET, pid, type, given);
  }
  std::copy_n(static_cast<const std::byte*>(given->iov_base), given->iov_len, state);
  return next(PTRACE_SETREGSET, pid, type, &whole);
}

}  // namespace terrace::nfs

// In the place of the C library's.
extern "C" long ptrace(enum __ptrace_request request, ...) noexcept {
  static const auto next = reinterpret_cast<terrace::nfs::Ptrace>(dlsym(RTLD_NEXT, "ptrace"));
  std::va_list arguments;
  va_start(arguments, request);
  const auto pid = va_arg(arguments, pid_t);
  const auto address = va_arg(arguments, std::uintptr_t);
  auto* const data = va_arg(arguments, void*);
  va_end(arguments);
  if (request == PTRACE_SETREGSET && address == NT_X86_XSTATE) {
    return terrace::nfs::SetExtendedState(next, pid, static_cast<iovec*>(data));
  }
  return next(request, pid, address, data);
}
