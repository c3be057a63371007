// TERRACE_ASSERT(condition): on in every build. For our own bugs only; nothing that arrives from a disk, socket or
// bucket may trigger one.
#pragma once

#include <cstdio>
#include <cstdlib>

#define TERRACE_ASSERT(condition)                                                            \
  do {                                                                                       \
    if (!(condition)) {                                                                      \
      std::fprintf(stderr, "%s:%d: assertion failed: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                          \
    }                                                                                        \
  } while (false)
