// Lets user-mode Linux 6.1 run on processors that came after it.
//
// It keeps what XSAVE saves of a guest's process in a buffer as large as AVX-512 makes that, and writes it back with
// ptrace(PTRACE_SETREGSET). The host accepts nothing but the whole state, and where the processor has more of it (AMX
// adds 8 KiB) it refuses: "Kernel panic - Attempted to kill init", in put_fp_registers. guest_state.cc is a library
// that run.py preloads into linux.uml and into nothing else, and which answers that call: what the guest does not
// know keeps the value that it has. Nothing of the guest uses it, because such state is off until the kernel is asked.
#pragma once

#include <sys/ptrace.h>
#include <sys/uio.h>

#include <cstddef>

namespace terrace::nfs {

// XSAVE's largest is 11 KiB so far. A larger one than this would be refused as without this library.
constexpr std::size_t kStateBytesMax = 64 << 10;

using Ptrace = long (*)(enum __ptrace_request, ...);

// Sets the extended state of `pid`, which `next` (the real ptrace) traces, to `given`, and leaves what is beyond its
// end. As with any ptrace of a process, there is one thread that may call it.
long SetExtendedState(Ptrace next, pid_t pid, iovec* given);

}  // namespace terrace::nfs
