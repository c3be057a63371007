// How much memory a process may still take, as far as the system tells.
#pragma once

#include <cstdint>
#include <string>

namespace terrace {

// The least of MemAvailable and of what each memory cgroup (v1, v2) above this process has left, page cache counted as
// free, less a margin of an eighth for everybody else. UINT64_MAX if nothing is known. `root` stands before /proc and
// /sys.
uint64_t AvailableMemoryBytes(const std::string& root = "");

}  // namespace terrace
