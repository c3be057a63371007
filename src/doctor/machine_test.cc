// What could go wrong: a cap above what the machine has passes, a clock that is off is not told, or one that is right
// is; JSON that no program can read; an exit code that hides a problem.
#include "doctor/machine.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

namespace terrace::doctor {
namespace {

class MachineTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "terrace-machine-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    root_ = name;
    std::filesystem::create_directories(root_ + "/proc/self");
    std::filesystem::create_directories(root_ + "/sys/kernel/mm/transparent_hugepage");
    std::ofstream(root_ + "/proc/meminfo") << "MemAvailable: 1048576 kB\n";
  }
  void TearDown() override { std::filesystem::remove_all(root_); }

  Severity Of(const std::string& id, const MachineNeeds& needs) {
    Report report(nullptr, nullptr, false);
    CheckMachine(needs, report, root_);
    for (const Finding& finding : report.findings()) {
      if (finding.id == id) return finding.severity;
    }
    ADD_FAILURE() << "nothing about " << id;
    return Severity::kOk;
  }
  std::string root_;
};

TEST_F(MachineTest, ACapAboveWhatThereIsIsTold) {
  EXPECT_EQ(Of("machine.memory", {.ram_bytes = 512 << 20}), Severity::kOk);
  EXPECT_EQ(Of("machine.memory", {.ram_bytes = 1 << 30}), Severity::kNote);  // An eighth is left to others.
}

TEST_F(MachineTest, MoreConnectionsThanFilesAreTold) {
  EXPECT_EQ(Of("machine.nofile", {.connections = uint64_t{1} << 40}), Severity::kNote);
}

TEST_F(MachineTest, HugePagesThatAreForbiddenAreTold) {
  const std::string file = root_ + "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  std::ofstream(file) << "always within_size advise [never] deny force\n";
  EXPECT_EQ(Of("machine.huge_pages", {}), Severity::kNote);
  std::ofstream(file) << "always within_size [advise] never deny force\n";
  EXPECT_EQ(Of("machine.huge_pages", {}), Severity::kOk);
}

TEST(Clock, IsJudgedByWhatIsCertain) {
  constexpr int64_t kSecond = 1'000'000'000;
  const auto judge = [&](int64_t server_ns) {
    Report report(nullptr, nullptr, false);
    // Asked from second 1000 to 1001; the server tells whole seconds.
    CheckClock("s3.clock", "the server", server_ns, kSecond, 1000 * kSecond, 1001 * kSecond, report);
    return report.findings().at(0).severity;
  };
  EXPECT_EQ(judge(999 * kSecond), Severity::kOk);  // Told as 999, it may have been 999.99.
  EXPECT_EQ(judge(1001 * kSecond), Severity::kOk);
  EXPECT_EQ(judge(1002 * kSecond), Severity::kOk);
  EXPECT_EQ(judge(1004 * kSecond), Severity::kNote);
  EXPECT_EQ(judge(990 * kSecond), Severity::kNote);
  EXPECT_EQ(judge(2000 * kSecond), Severity::kProblem);
  EXPECT_EQ(judge(100 * kSecond), Severity::kProblem);
}

TEST(Report, IsOneJsonDocumentWhateverServersSay) {
  Report report(nullptr, nullptr, true);
  report.Add({"s3.list", Severity::kProblem, "bytes \xff\xfe and \"quotes\"", "mend it", {{"ms", 1.5}, {"word", "x"}}});
  report.Add({"s3.read", Severity::kOk, "fine", "", {}});
  const auto json = nlohmann::json::parse(report.Json());
  EXPECT_EQ(json["status"], "problem");
  EXPECT_EQ(json["findings"][0]["section"], "s3");
  EXPECT_EQ(json["findings"][0]["measured"]["ms"], 1.5);
  EXPECT_EQ(json["findings"][1]["severity"], "ok");
  EXPECT_EQ(report.Summary(), "1 problem, 0 notes, 1 ok");
}

TEST(Report, SpreadIsMedianAndNinetyNinth) {
  std::vector<double> ms;
  for (int i = 1; i <= 200; ++i) ms.push_back(i);
  Figures figures;
  Spread("load", ms, figures);
  EXPECT_EQ(std::get<double>(figures[0].second), 101);
  EXPECT_EQ(std::get<double>(figures[1].second), 199);
}

}  // namespace
}  // namespace terrace::doctor
