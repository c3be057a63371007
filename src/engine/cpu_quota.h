// How much CPU time a container is given.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

namespace terrace {

inline constexpr uint32_t kNoCpuQuota = std::numeric_limits<uint32_t>::max();

// The least that a CPU cgroup (v1, v2) above this process grants, in cores, rounded up. More threads than that are
// stopped together for most of each period. `root` stands before /proc and /sys.
uint32_t CpuQuotaCores(const std::string& root = "");

}  // namespace terrace
