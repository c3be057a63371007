// What could go wrong here: a directory that is not there and is made.
#include "tier/disk_tier.h"

#include <gtest/gtest.h>

namespace terrace {
namespace {

TEST(DiskTierOpen, RefusesADirectoryThatIsMissing) {
  const auto files = RealFileIo();
  const SystemClock clock;
  Metrics metrics;
  const auto tier = OpenDiskTier({.directory = "/tmp/terrace-no-such", .bytes_max = 1 << 30},
                                 {.files = *files, .clock = clock, .metrics = metrics});
  ASSERT_FALSE(tier);
  EXPECT_NE(tier.error().what.find("create it, or mount"), std::string::npos) << tier.error().what;
}

}  // namespace
}  // namespace terrace
