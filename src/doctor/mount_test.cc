// What could go wrong: the wrong mount is judged (one below, one covered, a name that only begins alike), an option
// that hurts is passed over, a good mount is scolded.
#include "doctor/mount.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace terrace::doctor {
namespace {

constexpr const char* kMountinfo =
    "21 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro\n"
    "30 21 0:40 / /mnt/kv rw,noatime - nfs4 old:/a rw,vers=4.1,hard\n"
    "31 21 0:41 / /mnt/kv rw,noatime shared:7 master:3 - nfs4 server:/export "
    "rw,vers=4.2,rsize=1048576,wsize=1048576,soft,proto=tcp,timeo=50,retrans=2,lookupcache=pos\n"
    "32 31 0:42 / /mnt/kv/deep rw - tmpfs tmpfs rw\n"
    "33 21 0:43 / /mnt/kv\\040two ro - xfs /dev/sdb ro\n"
    "broken line\n";

std::string Names(const std::vector<Finding>& findings, Severity severity) {
  std::string names;
  for (const Finding& finding : findings) {
    if (finding.severity == severity) names += finding.id + " ";
  }
  return names;
}

Mount Nfs(std::vector<std::string> options) {
  return {.point = "/mnt/kv", .type = "nfs4", .source = "s:/e", .options = std::move(options)};
}

TEST(Mount, IsTheLastOneThatCoversThePath) {
  EXPECT_EQ(FindMount(kMountinfo, "/home/a")->type, "ext4");
  EXPECT_EQ(FindMount(kMountinfo, "/mnt/kv")->source, "server:/export");
  EXPECT_EQ(FindMount(kMountinfo, "/mnt/kv/x/y")->source, "server:/export");
  EXPECT_EQ(FindMount(kMountinfo, "/mnt/kv/deep/y")->type, "tmpfs");
  EXPECT_EQ(FindMount(kMountinfo, "/mnt/kvother")->type, "ext4");
  EXPECT_EQ(FindMount(kMountinfo, "/mnt/kv two/a")->type, "xfs");
  EXPECT_FALSE(FindMount("", "/mnt"));
}

TEST(Mount, HasTheOptionsOfMountAndFileSystem) {
  const Mount mount = *FindMount(kMountinfo, "/mnt/kv");
  EXPECT_TRUE(mount.HasOption("noatime"));
  EXPECT_EQ(mount.Option("timeo"), "50");
  EXPECT_EQ(mount.Option("time"), std::nullopt);
}

TEST(Mount, TheDocumentedNfsMountIsFine) {
  const auto findings = JudgeMount(*FindMount(kMountinfo, "/mnt/kv"), DirectoryUse::kShared);
  EXPECT_EQ(Names(findings, Severity::kNote) + Names(findings, Severity::kProblem), "");
}

TEST(Mount, EachOptionThatHurtsIsNamedWithARemedy) {
  const auto notes = [](std::vector<std::string> options) {
    const auto findings = JudgeMount(Nfs(std::move(options)), DirectoryUse::kShared);
    for (const Finding& finding : findings) {
      EXPECT_TRUE(finding.severity == Severity::kOk || !finding.remedy.empty()) << finding.id;
    }
    return Names(findings, Severity::kNote) + Names(findings, Severity::kProblem);
  };
  EXPECT_EQ(notes({"vers=4.2", "hard"}), "shared.hard ");
  EXPECT_EQ(notes({"vers=3", "soft", "timeo=50"}), "shared.version ");
  EXPECT_EQ(notes({"vers=4.2", "soft", "timeo=5"}), "shared.timeo ");
  EXPECT_EQ(notes({"soft", "noac"}), "shared.noac ");
  EXPECT_EQ(notes({"soft", "acregmax=600"}), "shared.acregmax ");
  EXPECT_EQ(notes({"soft", "lookupcache=none"}), "shared.lookupcache ");
  EXPECT_EQ(notes({"soft", "nosharecache", "sync"}), "shared.nosharecache shared.sync ");
  EXPECT_EQ(notes({"soft", "rsize=32768", "wsize=262144"}), "shared.rsize ");
  EXPECT_EQ(notes({"soft", "proto=udp"}), "shared.proto ");
  EXPECT_EQ(notes({"soft", "ro"}), "shared.read_only ");
}

TEST(Mount, FileSystemsThatAreWrongForTheUseAreNamed) {
  const auto judge = [](const char* type, DirectoryUse use, Severity severity) {
    return Names(JudgeMount({.point = "/", .type = type, .source = "x"}, use), severity);
  };
  EXPECT_EQ(judge("tmpfs", DirectoryUse::kDisk, Severity::kProblem), "disk.memory ");
  EXPECT_EQ(judge("tmpfs", DirectoryUse::kShared, Severity::kNote), "shared.local ");
  EXPECT_EQ(judge("ext4", DirectoryUse::kShared, Severity::kNote), "shared.local ");
  EXPECT_EQ(judge("ext4", DirectoryUse::kDisk, Severity::kNote), "");
  EXPECT_EQ(judge("overlay", DirectoryUse::kDisk, Severity::kNote), "disk.overlay ");
  EXPECT_EQ(judge("nfs4", DirectoryUse::kDisk, Severity::kNote), "disk.hard disk.network ");
}

}  // namespace
}  // namespace terrace::doctor
