// What could go wrong: a limit overlooked (cgroup v1 or v2, a parent's, a container's), and the process killed for
// memory; or page cache taken for memory in use, and the cap cut for nothing.
#include "tier/ram_limit.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

namespace terrace {
namespace {

constexpr uint64_t kMiB = 1 << 20;

class RamLimit : public testing::Test {
 protected:
  RamLimit() {
    std::string name = (std::filesystem::temp_directory_path() / "terrace-limit-XXXXXX").string();
    EXPECT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    Write("proc/meminfo", "MemTotal:       16777216 kB\nMemFree:  1 kB\nMemAvailable:    8388608 kB\n");
  }
  ~RamLimit() override { std::filesystem::remove_all(root_); }

  void Write(const std::string& path, const std::string& text) {
    std::filesystem::create_directories((root_ / path).parent_path());
    std::ofstream(root_ / path) << text;
  }
  void WriteV2(const std::string& folder, const std::string& max, uint64_t current) {
    Write(folder + "/memory.max", max + "\n");
    Write(folder + "/memory.current", std::to_string(current) + "\n");
    Write(folder + "/memory.stat", "anon 5\nfile 99999999999\ninactive_file 1048576\nactive_file 2097152\n");
  }
  uint64_t Available() { return AvailableMemoryBytes(root_.string()); }

  std::filesystem::path root_;
};

TEST_F(RamLimit, WithoutGroupsItIsWhatTheKernelOffersLessAnEighth) { EXPECT_EQ(Available(), 7168 * kMiB); }

TEST_F(RamLimit, AGroupsLimitCountsLessItsUseWithoutPageCache) {
  Write("proc/self/cgroup", "0::/user/terrace\n");
  WriteV2("sys/fs/cgroup/user/terrace", std::to_string(1000 * kMiB), 203 * kMiB);
  EXPECT_EQ(Available(), 800 * kMiB / 8 * 7);
}

TEST_F(RamLimit, AParentsLimitCountsToo) {
  Write("proc/self/cgroup", "0::/user/terrace\n");
  WriteV2("sys/fs/cgroup/user", std::to_string(160 * kMiB), 3 * kMiB);
  WriteV2("sys/fs/cgroup/user/terrace", "max", 3 * kMiB);
  EXPECT_EQ(Available(), 140 * kMiB);
}

TEST_F(RamLimit, InAContainerTheMountIsTheGroup) {
  Write("proc/self/cgroup", "0::/kubepods/pod1/abc\n");
  WriteV2("sys/fs/cgroup", std::to_string(163 * kMiB), 6 * kMiB);
  EXPECT_EQ(Available(), 140 * kMiB);
}

TEST_F(RamLimit, TheFirstVersionOfGroupsIsReadAsWell) {
  Write("proc/self/cgroup", "9:name=systemd:/\n4:cpu,memory:/job\n0::/\n");
  Write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  Write("sys/fs/cgroup/memory/memory.usage_in_bytes", "5\n");
  Write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", std::to_string(80 * kMiB) + "\n");
  Write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", std::to_string(40 * kMiB) + "\n");
  Write("sys/fs/cgroup/memory/job/memory.stat", "inactive_file 7\ntotal_inactive_file 8388608\ntotal_active_file 0\n");
  EXPECT_EQ(Available(), 42 * kMiB);
}

TEST_F(RamLimit, MoreInUseThanAllowedLeavesNothing) {
  Write("proc/self/cgroup", "0::/\n");
  WriteV2("sys/fs/cgroup", "4096", 100 * kMiB);
  EXPECT_EQ(Available(), 0u);
}

TEST_F(RamLimit, WhatCannotBeReadIsNoLimit) {
  Write("proc/meminfo", "");
  Write("proc/self/cgroup", "nonsense\n7:\n:::\n");
  EXPECT_EQ(Available(), UINT64_MAX);
}

}  // namespace
}  // namespace terrace
