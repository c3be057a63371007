// What could go wrong: a probe stays behind, or removes what is not its own; a directory that no tier could use passes;
// a figure is told that was not measured; a note or problem without a remedy.
#include "doctor/directory.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>

namespace terrace::doctor {
namespace {

class DirectoryTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "terrace-doctor-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    path_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(path_); }

  // Severity by id.
  std::map<std::string, Severity> Run(const DirectoryCheck& check) {
    Report report(nullptr, nullptr, false);
    bandwidth_ = CheckDirectory(check, stop_, report);
    std::map<std::string, Severity> found;
    for (const Finding& finding : report.findings()) {
      found[finding.id] = finding.severity;
      text_ += finding.id + ": " + finding.what + "\n";
    }
    return found;
  }
  DirectoryCheck Small(DirectoryUse use) const {
    return {.use = use,
            .path = path_,
            .bytes_max = 1 << 30,
            .measure = {.frame_bytes = 1 << 20, .time = std::chrono::milliseconds(20)}};
  }
  std::set<std::string> Names() const {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(path_)) names.insert(entry.path().filename());
    return names;
  }

  std::string path_;
  std::string text_;
  std::atomic<bool> stop_{false};
  Bandwidth bandwidth_;
};

TEST_F(DirectoryTest, AGoodOneIsMeasuredAndLeftAsItWas) {
  std::ofstream(path_ + "/mine") << "x";
  const auto found = Run(Small(DirectoryUse::kShared));
  for (const char* id : {"shared.rights", "shared.latency", "shared.bandwidth", "shared.clock", "shared.format"}) {
    ASSERT_TRUE(found.contains(id)) << id << "\n" << text_;
    EXPECT_EQ(found.at(id), Severity::kOk) << text_;
  }
  EXPECT_GT(bandwidth_.read, 0);
  EXPECT_GT(bandwidth_.write, 0);
  EXPECT_GT(bandwidth_.latency_s, 0);
  EXPECT_EQ(Names(), std::set<std::string>{"mine"});
}

TEST_F(DirectoryTest, OneThatIsNotThereIsAProblem) {
  DirectoryCheck check = Small(DirectoryUse::kDisk);
  check.path += "/none";
  EXPECT_EQ(Run(check), (std::map<std::string, Severity>{{"disk.reach", Severity::kProblem}}));
  std::ofstream(check.path) << "a file";
  EXPECT_EQ(Run(check), (std::map<std::string, Severity>{{"disk.reach", Severity::kProblem}}));
}

TEST_F(DirectoryTest, AnotherTiersDirectoryIsAProblemAndNotWrittenTo) {
  std::ofstream(path_ + "/terrace.format") << "terrace shared_fs\nversion 1\nid 1\n";
  EXPECT_EQ(Run(Small(DirectoryUse::kShared)).at("shared.format"), Severity::kOk);
  const auto found = Run(Small(DirectoryUse::kDisk));
  EXPECT_EQ(found.at("disk.format"), Severity::kProblem);
  EXPECT_FALSE(found.contains("disk.rights"));
}

TEST_F(DirectoryTest, WithoutABoundOfASharedOneThereIsANote) {
  DirectoryCheck check = Small(DirectoryUse::kShared);
  check.measure.time = std::chrono::milliseconds(0);
  check.bytes_max = 0;
  const auto found = Run(check);
  EXPECT_EQ(found.at("shared.space"), Severity::kNote);
  EXPECT_FALSE(found.contains("shared.bandwidth"));
  check.bytes_max = uint64_t{1} << 62;
  EXPECT_EQ(Run(check).at("shared.space"), Severity::kNote);
  check.bytes_max = 0;
  check.measure.frame_bytes = uint64_t{1} << 60;
  EXPECT_EQ(Run(check).at("shared.space"), Severity::kProblem);
}

TEST_F(DirectoryTest, WhatAKilledDoctorLeftGoesAndNothingElse) {
  const std::string fresh = ProbeName();
  for (const std::string& name : {std::string("terrace-doctor-1000000000-00000001"), fresh,
                                  std::string("terrace-doctor-notes"), std::string("frames")}) {
    std::filesystem::create_directories(path_ + "/" + name);
    std::ofstream(path_ + "/" + name + "/x") << "x";
  }
  Run(Small(DirectoryUse::kShared));
  EXPECT_EQ(Names(), (std::set<std::string>{fresh, "terrace-doctor-notes", "frames"}));
}

TEST_F(DirectoryTest, AStopLeavesNothing) {
  stop_ = true;
  const auto found = Run(Small(DirectoryUse::kShared));
  EXPECT_FALSE(found.contains("shared.bandwidth"));
  EXPECT_TRUE(Names().empty());
}

}  // namespace
}  // namespace terrace::doctor
