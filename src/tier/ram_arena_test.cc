// What could go wrong: the accounts say one thing and the kernel holds another; a place handed out twice; a claim
// refused for fragmentation; pages of a freed frame kept when another size needs them.
#include "tier/ram_arena.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <random>
#include <thread>

namespace terrace {
namespace {

constexpr uint64_t kMiB = 1 << 20;

std::shared_ptr<RamArena> Open(uint64_t bytes_max, bool huge_pages = false) {
  auto arena = RamArena::Open({.bytes_max = bytes_max, .huge_pages = huge_pages});
  EXPECT_TRUE(arena) << arena.error().what;
  return *arena;
}

uint64_t HeldByTheKernel(const RamArena& arena) {
  struct stat st;
  EXPECT_EQ(fstat(arena.fd(), &st), 0);
  return static_cast<uint64_t>(st.st_blocks) * 512;
}

TEST(RamArena, TouchesNothingAtTheStart) {
  const auto arena = Open(4ull << 30);
  EXPECT_EQ(HeldByTheKernel(*arena), 0u);
  EXPECT_TRUE(arena->Claim(kMiB));
}

TEST(RamArena, PagesFollowWhatIsLive) {
  const auto arena = Open(8 * kMiB);
  auto slot = arena->Claim(5 * kMiB + 1);
  ASSERT_TRUE(slot);
  ASSERT_TRUE(arena->Touch(*slot));
  EXPECT_EQ(slot->rounded_bytes(), 5 * kMiB + 4096);
  EXPECT_EQ(HeldByTheKernel(*arena), 5 * kMiB + 4096);
  EXPECT_EQ(arena->resident_bytes(), 5 * kMiB + 4096);
  const std::byte* const place = slot->bytes().data();
  slot.reset();
  EXPECT_EQ(arena->live_bytes(), 0u);
  EXPECT_EQ(HeldByTheKernel(*arena), 5 * kMiB + 4096) << "kept warm for the next of its size";
  slot = arena->Claim(5 * kMiB);
  EXPECT_EQ(slot->bytes().data(), place);
  slot.reset();
  slot = arena->Claim(4096);  // Another size, and there is room besides the warm place.
  EXPECT_EQ(arena->resident_bytes(), 5 * kMiB + 4096);
  slot = arena->Claim(8 * kMiB);
  EXPECT_FALSE(slot) << "a slot that is assigned to is dropped only afterwards";
  slot = arena->Claim(8 * kMiB);
  ASSERT_TRUE(slot);
  ASSERT_TRUE(arena->Touch(*slot));
  EXPECT_EQ(HeldByTheKernel(*arena), 8 * kMiB);
}

TEST(RamArena, ASlotNeverTouchedHoldsNoPages) {
  const auto arena = Open(8 * kMiB);
  arena->Claim(3 * kMiB).reset();
  EXPECT_EQ(arena->resident_bytes(), 0u);
  EXPECT_EQ(HeldByTheKernel(*arena), 0u);
}

TEST(RamArena, RandomClaimsFitExactlyWhenTheirSumDoes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr uint64_t kCap = 4 * kMiB;
  const auto arena = Open(kCap);
  struct Held {
    RamArena::Slot slot;
    uint64_t mark;
  };
  std::vector<Held> held;
  uint64_t live = 0;
  // A mark in the first and the last bytes: two slots that overlap would spoil one.
  const auto mark = [](const Held& h) {
    std::memcpy(h.slot.bytes().data(), &h.mark, 8);
    std::memcpy(h.slot.bytes().data() + h.slot.bytes().size() - 8, &h.mark, 8);
  };
  const auto marked = [](const Held& h) {
    return std::memcmp(h.slot.bytes().data(), &h.mark, 8) == 0 &&
           std::memcmp(h.slot.bytes().data() + h.slot.bytes().size() - 8, &h.mark, 8) == 0;
  };
  for (uint64_t step = 0; step < 5000; ++step) {
    const uint64_t bytes = 16 + (random() % 3 == 0 ? random() % (2 * kMiB) : random() % 20000);
    const uint64_t needed = arena->RoundedBytes(bytes);
    ASSERT_EQ(needed, (bytes + 4095) / 4096 * 4096);
    while (live + needed > kCap) {
      ASSERT_FALSE(arena->Claim(bytes));
      std::swap(held[random() % held.size()], held.back());
      ASSERT_TRUE(marked(held.back()));
      live -= held.back().slot.rounded_bytes();
      held.pop_back();
    }
    auto slot = arena->Claim(bytes);
    ASSERT_TRUE(slot) << "step " << step;
    ASSERT_TRUE(arena->Touch(*slot));
    held.push_back({std::move(*slot), step});
    mark(held.back());
    live += needed;
    ASSERT_EQ(arena->live_bytes(), live);
    ASSERT_LE(arena->resident_bytes(), kCap);
    if (step % 50 == 0) {
      ASSERT_EQ(HeldByTheKernel(*arena), arena->resident_bytes()) << "step " << step;
    }
  }
  for (const Held& h : held) EXPECT_TRUE(marked(h));
}

TEST(RamArena, RoomTouchedAheadIsWhatTheNextClaimsGet) {
  const auto arena = Open(8 * kMiB);
  EXPECT_TRUE(arena->TouchAhead(kMiB, 2 * kMiB));
  EXPECT_TRUE(arena->TouchAhead(kMiB, 2 * kMiB));
  EXPECT_FALSE(arena->TouchAhead(kMiB, 2 * kMiB)) << "enough is ready";
  EXPECT_EQ(HeldByTheKernel(*arena), 2 * kMiB);
  EXPECT_EQ(arena->live_bytes(), 0u);
  auto a = arena->Claim(kMiB);
  auto b = arena->Claim(kMiB);
  EXPECT_EQ(arena->resident_bytes(), 2 * kMiB);
  auto c = arena->Claim(5 * kMiB);
  EXPECT_TRUE(arena->TouchAhead(kMiB, 2 * kMiB));
  EXPECT_FALSE(arena->TouchAhead(kMiB, 2 * kMiB)) << "the cap is reached";
  EXPECT_TRUE(arena->Claim(kMiB));
}

TEST(RamArena, TouchingAheadNeverCostsAClaim) {
  constexpr uint64_t kCap = 2 * kMiB;
  const auto arena = Open(kCap);
  std::atomic<bool> done = false;
  std::thread background([&] {
    while (!done) arena->TouchAhead(300000, kCap);
  });
  for (int i = 0; i < 500; ++i) {
    const auto all = arena->Claim(kCap);  // Needs the very last bytes, warm or on their way.
    EXPECT_TRUE(all);
    EXPECT_LE(arena->resident_bytes(), kCap);
  }
  done = true;
  background.join();
}

// A place without pages was punched like any other, which the system refuses: no bytes are no hole.
TEST(RamArena, APlaceThatNeverGotPagesIsNoneToTakeThemFrom) {
  const auto arena = Open(8 * kMiB);
  auto touched = arena->Claim(kMiB);
  ASSERT_TRUE(arena->Touch(*touched));
  arena->Claim(3 * kMiB).reset();
  touched.reset();
  EXPECT_TRUE(arena->Claim(8 * kMiB));
  EXPECT_EQ(HeldByTheKernel(*arena), 0u);
}

TEST(RamArena, WhileTheSystemRefusesPagesClaimsFailAndNothingElse) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  constexpr uint64_t kCap = 4 * kMiB;
  bool refuses = false;
  const auto arena = RamArena::Open({.bytes_max = kCap,
                                     .populate =
                                         [&](std::span<std::byte> bytes) {
                                           // As a system does that runs short half-way.
                                           std::memset(bytes.data(), 1, refuses ? bytes.size() / 2 : bytes.size());
                                           return refuses ? ENOMEM : 0;
                                         }})
                         .value();
  std::vector<RamArena::Slot> held;
  for (int step = 0; step < 3000; ++step) {
    refuses = random() % 3 != 0;
    const uint64_t bytes = 16 + random() % (random() % 2 == 0 ? kMiB : 20000);
    if (random() % 4 == 0) arena->TouchAhead(bytes, kCap);
    auto slot = arena->Claim(bytes);
    if (!slot) {
      held.clear();
      slot = arena->Claim(bytes);
    }
    ASSERT_TRUE(slot) << "step " << step;
    const Result<void> touched = arena->Touch(*slot);
    if (touched) {
      held.push_back(std::move(*slot));
    } else {
      EXPECT_EQ(touched.error().code, Code::kFull);
    }
    slot.reset();
    ASSERT_EQ(HeldByTheKernel(*arena), arena->resident_bytes()) << "step " << step;
    ASSERT_LE(arena->resident_bytes(), kCap);
  }
}

TEST(RamArena, GrowsOnlyByWhatTheSystemHasToSpare) {
  int64_t spare = 2 * kMiB;
  const auto arena = RamArena::Open({.bytes_max = 64 * kMiB, .spare_bytes = [&] { return spare; }}).value();
  auto a = arena->Claim(kMiB);
  auto b = arena->Claim(kMiB);
  ASSERT_TRUE(a && b);
  ASSERT_TRUE(arena->Touch(*a) && arena->Touch(*b));
  spare = kMiB - 1;
  EXPECT_FALSE(arena->Claim(kMiB));
  b.reset();
  b = arena->Claim(kMiB);  // The pages are there.
  EXPECT_TRUE(b);
  b.reset();
  b = arena->Claim(8192);  // Another size: the warm place gives its pages for it.
  EXPECT_TRUE(b);
  EXPECT_LE(arena->resident_bytes(), 2 * kMiB);
}

TEST(RamArena, ALoweredCapTakesFreePagesNowAndOthersWhenTheyAreFree) {
  const auto arena = Open(8 * kMiB);
  auto a = arena->Claim(2 * kMiB);
  auto b = arena->Claim(2 * kMiB);
  ASSERT_TRUE(arena->Touch(*a) && arena->Touch(*b));
  b.reset();
  arena->SetCap(kMiB);
  EXPECT_EQ(HeldByTheKernel(*arena), 2 * kMiB);
  EXPECT_FALSE(arena->Claim(4096));
  a.reset();
  EXPECT_EQ(HeldByTheKernel(*arena), 0u);
  EXPECT_TRUE(arena->Claim(kMiB));
  arena->SetCap(64 * kMiB);
  EXPECT_EQ(arena->cap(), 8 * kMiB);
  EXPECT_TRUE(arena->Claim(8 * kMiB));
}

TEST(RamArena, HugePagesAreAccountedWhole) {
  const auto arena = Open(64 * kMiB, true);
  EXPECT_EQ(arena->RoundedBytes(8 * kMiB), 8 * kMiB);
  EXPECT_EQ(arena->RoundedBytes(5 * kMiB + 1), 5 * kMiB + 4096);
  EXPECT_EQ(arena->RoundedBytes(8 * kMiB + 1), 10 * kMiB);
  EXPECT_EQ(arena->RoundedBytes(36 * kMiB), 36 * kMiB);
  auto slot = arena->Claim(35 * kMiB);
  ASSERT_TRUE(slot);
  ASSERT_TRUE(arena->Touch(*slot));
  EXPECT_EQ(arena->live_bytes(), 36 * kMiB);
  EXPECT_EQ(HeldByTheKernel(*arena), 36 * kMiB);
}

TEST(RamArena, ASlotOutlivesTheLastHandleOfItsArena) {
  auto arena = Open(kMiB);
  auto slot = arena->Claim(kMiB);
  arena.reset();
  std::memset(slot->bytes().data(), 1, slot->bytes().size());
  EXPECT_EQ(slot->bytes()[kMiB - 1], std::byte{1});
}

TEST(RamArena, RefusesCapsOutOfReach) {
  EXPECT_EQ(RamArena::Open({.bytes_max = 4095}).error().code, Code::kInvalid);
  EXPECT_EQ(RamArena::Open({.bytes_max = 1ull << 50}).error().code, Code::kInvalid);
}

}  // namespace
}  // namespace terrace
