#include "engine/cpu_quota.h"

#include <algorithm>
#include <fstream>

#include "io/cgroup.h"

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
  VisitCgroups(root, "cpu", [&](const std::string& folder, bool) { cores = std::min(cores, CoresOfGroup(folder)); });
  return cores;
}

}  // namespace terrace
