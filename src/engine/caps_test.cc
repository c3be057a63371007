// Would catch: a cap below one chunk that is accepted, so that nothing is kept and nobody says so; one that would do
// and is refused; a refusal that does not name the option.
#include "engine/caps.h"

#include <gtest/gtest.h>

#include "chunk/frame.h"

namespace terrace {
namespace {

constexpr uint64_t kChunk = 5 << 20;
const uint64_t kFrame = FrameBytes(kChunk);

std::string Refusal(const Caps& caps) {
  const Result<void> holds = HoldAChunk(caps, kChunk, 256);
  return holds ? "" : holds.error().what;
}

TEST(HoldAChunk, OneChunkIsEnough) {
  EXPECT_EQ(Refusal({.ram_bytes = kChunk}), "");
  EXPECT_EQ(Refusal({.ram_bytes = kChunk,
                     .disk_bytes = kFrame,
                     .shared_bytes = kFrame,
                     .shared_free_bytes_min = 100 << 20,
                     .shared_volume_bytes = (100 << 20) + kFrame}),
            "");
}

TEST(HoldAChunk, LessIsRefusedByNameWithTheSizeOfAChunk) {
  const std::string ram = Refusal({.ram_bytes = kChunk - 1});
  EXPECT_TRUE(ram.starts_with("--ram is less than one chunk (256 tokens of this model are 6 MiB)")) << ram;
  EXPECT_TRUE(Refusal({.ram_bytes = kChunk, .disk_bytes = kFrame - 1}).starts_with("--disk-size is less"));
  EXPECT_TRUE(Refusal({.ram_bytes = kChunk, .shared_bytes = kFrame - 1}).starts_with("--shared-size is less"));
}

TEST(HoldAChunk, FreeSpaceThatTheVolumeNeverHasIsRefused) {
  const Caps caps{.ram_bytes = kChunk, .shared_free_bytes_min = 1ull << 40, .shared_volume_bytes = 1ull << 30};
  const std::string error = Refusal(caps);
  EXPECT_TRUE(error.starts_with("--shared-free-min leaves no room")) << error;
  EXPECT_NE(error.find("which has 1024 MiB"), std::string::npos) << error;
  EXPECT_EQ(Refusal({.ram_bytes = kChunk, .shared_free_bytes_min = 1ull << 40}), "") << "the volume is not there yet";
}

}  // namespace
}  // namespace terrace
