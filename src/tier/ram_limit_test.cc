// What could go wrong: a limit overlooked (cgroup v1 or v2, a parent's, a container's), and the process killed for
// memory; page cache taken for memory in use, and the cap cut for nothing; or what others have reserved not counted,
// counted twice, or counted after they are gone.
#include "tier/ram_limit.h"

#include <gtest/gtest.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <utility>

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
  // Makes a process of this machine one of those under `root_`.
  void Show(pid_t process, const std::string& cgroup = "") {
    const std::filesystem::path real = "/proc/" + std::to_string(process);
    const std::filesystem::path shown = root_ / "proc" / std::to_string(process);
    std::filesystem::create_directories(shown);
    std::filesystem::create_directory_symlink(real / "fd", shown / "fd");
    if (!cgroup.empty()) Write("proc/" + std::to_string(process) + "/cgroup", cgroup);
  }
  // Another process that reserves so much of its own view of the machine, which is as large as ours.
  struct Other {
    pid_t pid = -1;
    uint64_t cap = 0;
  };
  Other Start(uint64_t asked, uint64_t held) {
    int told[2];
    EXPECT_EQ(pipe(told), 0);
    Other other;
    other.pid = fork();
    if (other.pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      const auto room = RoomOfThisMachine(root_.string());
      const uint64_t cap = room->Reserve({.asked_bytes = asked, .held_bytes = held});
      if (write(told[1], &cap, sizeof cap) != sizeof cap) _exit(1);
      for (;;) pause();
    }
    EXPECT_EQ(read(told[0], &other.cap, sizeof other.cap), static_cast<ssize_t>(sizeof other.cap));
    close(told[0]);
    close(told[1]);
    Show(other.pid);
    return other;
  }
  static void Kill(const Other& other) {
    kill(other.pid, SIGKILL);
    EXPECT_EQ(waitpid(other.pid, nullptr, 0), other.pid);
  }

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

TEST_F(RamLimit, WhatOthersReservedAndDidNotTouchIsTheirs) {
  const Other first = Start(100ull << 30, 0);
  EXPECT_EQ(first.cap, 7168 * kMiB);
  EXPECT_EQ(Available(), 1024 * kMiB - 512 * kMiB) << "less what is left alone";
  const Other second = Start(100ull << 30, 0);
  EXPECT_EQ(second.cap, 512 * kMiB);
  Kill(first);
  EXPECT_EQ(Available(), (8192 - 512) * kMiB / 8 * 7) << "gone with its process";
  Kill(second);
  EXPECT_EQ(Available(), 7168 * kMiB);
}

TEST_F(RamLimit, WhatOthersHoldIsCountedOnce) {
  const Other other = Start(1024 * kMiB, 1000 * kMiB);
  EXPECT_EQ(Available(), (8192 - 24) * kMiB / 8 * 7);
  Kill(other);
}

TEST_F(RamLimit, AForkedChildReservesNothingOfItsOwn) {
  const auto room = RoomOfThisMachine(root_.string());
  EXPECT_EQ(room->Reserve({.asked_bytes = 1024 * kMiB}), 1024 * kMiB);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;) pause();
  }
  Show(getpid());
  Show(child);
  EXPECT_EQ(Available(), (8192 - 1024) * kMiB / 8 * 7);
  // Its own is not in its way.
  EXPECT_EQ(room->Reserve({.asked_bytes = 100ull << 30, .cap_bytes = 1024 * kMiB}), 7168 * kMiB);
  Kill({.pid = child});
}

TEST_F(RamLimit, WhoComesLateGetsSomeIfItIsThere) {
  const Other first = Start(100ull << 30, 0);
  const Other second = Start(100ull << 30, 0);
  EXPECT_EQ(Available(), 256 * kMiB);
  Write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 524288 kB\n");
  EXPECT_EQ(Available(), 0u);
  Kill(first);
  Kill(second);
}

TEST_F(RamLimit, AReservationCountsInTheGroupsOfItsProcess) {
  Write("proc/self/cgroup", "0::/mine\n");
  WriteV2("sys/fs/cgroup/mine", std::to_string(1024 * kMiB), 3 * kMiB);
  const Other other = Start(512 * kMiB, 0);
  Write("proc/" + std::to_string(other.pid) + "/cgroup", "0::/other\n");
  EXPECT_EQ(Available(), 896 * kMiB);
  Write("proc/" + std::to_string(other.pid) + "/cgroup", "0::/mine/inner\n");
  EXPECT_EQ(Available(), 448 * kMiB);
  Kill(other);
}

TEST_F(RamLimit, WhoHasReservedKeepsItAndGetsMoreWhenOthersAreGone) {
  const auto room = RoomOfThisMachine(root_.string());
  const Other first = Start(100ull << 30, 0);
  const uint64_t cap = room->Reserve({.asked_bytes = 100ull << 30});
  EXPECT_EQ(cap, 512 * kMiB);
  // All of it is taken; what the machine has left is less by as much.
  Write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 7864320 kB\n");
  const RamRoom::Wish again = {.asked_bytes = 100ull << 30, .held_bytes = cap, .cap_bytes = cap};
  EXPECT_EQ(room->Reserve(again), cap);
  Kill(first);
  EXPECT_EQ(room->Reserve(again), 7168 * kMiB);
}

TEST_F(RamLimit, SpareIsWhatIsLeftButForAFloor) {
  const auto room = RoomOfThisMachine(root_.string());
  EXPECT_EQ(room->Spare(), static_cast<int64_t>((8192 - 512) * kMiB));
  Write("proc/self/cgroup", "0::/mine\n");
  WriteV2("sys/fs/cgroup/mine", std::to_string(320 * kMiB), 318 * kMiB);
  EXPECT_EQ(room->Spare(), -static_cast<int64_t>(5 * kMiB)) << "5 are left of 320, and 10 should be";
  Write("proc/meminfo", "");
  Write("proc/self/cgroup", "");
  EXPECT_EQ(room->Spare(), INT64_MAX);
}

}  // namespace
}  // namespace terrace
