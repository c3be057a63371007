// Would catch: a container's share of CPU time that is overlooked, so that threads for all of the machine's cores wait
// for each other, or one that is taken for smaller than it is.
#include "engine/cpu_quota.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>

namespace terrace {
namespace {

class CpuQuota : public testing::Test {
 protected:
  CpuQuota() {
    std::string name = (std::filesystem::temp_directory_path() / "terrace-quota-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
  }
  ~CpuQuota() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  uint32_t Cores() { return CpuQuotaCores(root_.string()); }

  std::filesystem::path root_;
};

TEST_F(CpuQuota, IsNoneWithoutGroupsOrBounds) {
  EXPECT_EQ(Cores(), kNoCpuQuota);
  Write("proc/self/cgroup", "5:cpu,cpuacct:/a\n0::/a/b\n");
  Write("sys/fs/cgroup/a/b/cpu.max", "max 100000\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", "-1\n");
  Write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Cores(), kNoCpuQuota);
}

TEST_F(CpuQuota, IsRoundedUpToCores) {
  Write("proc/self/cgroup", "0::/\n");
  for (const auto& [text, cores] : {std::pair("200000 100000\n", 2u), {"150000 100000\n", 2u}, {"1000 100000\n", 1u}}) {
    Write("sys/fs/cgroup/cpu.max", text);
    EXPECT_EQ(Cores(), cores) << text;
  }
}

TEST_F(CpuQuota, IsTheLeastOfAllGroupsAbove) {
  Write("proc/self/cgroup", "0::/pods/pod1/c\n");
  Write("sys/fs/cgroup/pods/pod1/c/cpu.max", "800000 100000\n");
  Write("sys/fs/cgroup/pods/pod1/cpu.max", "max 100000\n");
  EXPECT_EQ(Cores(), 8u);
  Write("sys/fs/cgroup/pods/cpu.max", "300000 100000\n");
  EXPECT_EQ(Cores(), 3u);
}

TEST_F(CpuQuota, OfVersion1Counts) {
  Write("proc/self/cgroup", "7:memory:/x\n4:cpu,cpuacct:/docker/c\n");
  Write("sys/fs/cgroup/cpu/cpu.cfs_quota_us", "400000\n");  // The mount is the container's own group.
  Write("sys/fs/cgroup/cpu/cpu.cfs_period_us", "100000\n");
  EXPECT_EQ(Cores(), 4u);
}

}  // namespace
}  // namespace terrace
