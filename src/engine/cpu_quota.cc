#include "engine/cpu_quota.h"

#include <algorithm>
#include <fstream>

namespace terrace {
namespace {

// "max" and -1 are no bound.
uint32_t CoresOfGroup(const std::string& folder) {
  std::ifstream v2(folder + "/cpu.max"), quota_v1(folder + "/cpu.cfs_quota_us"),
      period_v1(folder + "/cpu.cfs_period_us");
  int64_t quota = 0, period = 0;
  const bool found = (v2 >> quota >> period) || (quota_v1 >> quota && period_v1 >> period);
  if (!found || quota <= 0 || period <= 0) return kNoCpuQuota;
  return static_cast<uint32_t>(std::min<int64_t>((quota - 1) / period + 1, kNoCpuQuota));
}

}  // namespace

uint32_t CpuQuotaCores(const std::string& root) {
  uint32_t cores = kNoCpuQuota;
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // "4:cpu,cpuacct:/path" (v1) or "0::/path" (v2).
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool v2 = controllers == ",,";
    if (!v2 && controllers.find(",cpu,") == std::string::npos) continue;
    const std::string mount = root + (v2 ? "/sys/fs/cgroup" : "/sys/fs/cgroup/cpu");
    // In a container the mount point may be its own group, and the path the host's.
    cores = std::min(cores, CoresOfGroup(mount));
    for (std::string path = line.substr(second + 1); path.starts_with('/'); path.resize(path.find_last_of('/'))) {
      cores = std::min(cores, CoresOfGroup(mount + path));
    }
  }
  return cores;
}

}  // namespace terrace
