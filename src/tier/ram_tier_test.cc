// What could go wrong: memory above the cap, or a claim refused while bytes are free or evictable; a pinned chunk
// evicted or overwritten under its lease; a parent evicted before its child; the order of eviction not that of use;
// damage served; a batch never settled after Close.
#include "tier/ram_tier.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "base/hash.h"
#include "base/log.h"

namespace terrace {
namespace {

using std::chrono::seconds;

TimePoint In(std::chrono::milliseconds time) { return std::chrono::steady_clock::now() + time; }

Digest Id(uint64_t n) { return Sha256Of("chunk " + std::to_string(n)); }

// Bytes that depend on the key and on every position.
std::vector<std::byte> Payload(const Digest& key, uint64_t bytes) {
  std::vector<std::byte> payload(bytes);
  uint64_t state;
  std::memcpy(&state, key.bytes.data(), sizeof state);
  for (std::byte& b : payload) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    b = static_cast<std::byte>(state >> 56);
  }
  return payload;
}

FrameInfo Info(const Digest& key, const Digest& parent, uint64_t bytes) {
  return {.space = Id(0), .key = key, .parent = parent, .token_count = 256, .payload_bytes = bytes};
}

// A machine with so much for us alone.
class FakeRoom final : public RamRoom {
 public:
  explicit FakeRoom(uint64_t bytes) : bytes_(bytes), spare(static_cast<int64_t>(bytes)) {}
  uint64_t total() const override { return bytes_; }
  uint64_t Reserve(const Wish& wish) override {
    return std::max(std::min(wish.asked_bytes, reservable ? reservable.load() : bytes_), wish.cap_bytes);
  }
  void SetUntouched(uint64_t bytes) override { untouched = bytes; }
  int64_t Spare() override { return spare; }

 private:
  const uint64_t bytes_;

 public:
  std::atomic<int64_t> spare;
  std::atomic<uint64_t> reservable{0};  // 0: all.
  std::atomic<uint64_t> untouched{0};
};

std::unique_ptr<RamTier> Open(uint64_t bytes_max, Executor* executor = nullptr) {
  auto tier =
      RamTier::Open({.bytes_max = bytes_max, .executor = executor, .room = std::make_shared<FakeRoom>(1ull << 40)});
  EXPECT_TRUE(tier.has_value()) << tier.error().what;
  return std::move(*tier);
}

// Reserve, write, commit.
Result<RamLease> Put(RamTier& tier, const FrameInfo& info) {
  Result<RamSlot> slot = tier.Reserve(info);
  if (!slot) return tl::unexpected<Error>(slot.error());
  const std::vector<std::byte> payload = Payload(info.key, info.payload_bytes);
  std::memcpy(slot->bytes().data(), payload.data(), payload.size());
  auto lease = tier.Commit(std::move(*slot), std::make_shared<const SegmentHashes>(HashSegments(payload)));
  EXPECT_TRUE(lease.has_value());
  return std::move(*lease);
}

bool Has(RamTier& tier, const Digest& key) {
  uint8_t present = 0;
  tier.Contains({&key, 1}, {&present, 1});
  return present != 0;
}

bool HoldsPayload(const Lease& lease) {
  const std::vector<std::byte> expected = Payload(lease.info.key, lease.info.payload_bytes);
  return lease.bytes.size() == expected.size() &&
         std::memcmp(lease.bytes.data(), expected.data(), expected.size()) == 0;
}

LoadResult LoadNow(Tier& tier, const Digest& key, std::span<std::byte> into) {
  auto done = std::make_shared<LoadBatch>(1);
  tier.Load({{.key = key, .space = Id(0), .into = into}}, In(seconds(60)), done);
  const LoadResult* result = done->Wait(0, In(seconds(60)));
  EXPECT_NE(result, nullptr);
  return result ? *result : LoadResult{};
}

constexpr uint64_t kMiB = 1 << 20;

TEST(RamTier, LeaseKeepsBytesUntilDropped) {
  auto tier = Open(4 * kMiB);
  std::optional<RamLease> lease = *Put(*tier, Info(Id(1), Id(0), kMiB));
  tier->Erase({{Id(1)}});
  EXPECT_FALSE(Has(*tier, Id(1)));
  for (uint64_t n = 2; n < 20; ++n) ASSERT_TRUE(Put(*tier, Info(Id(n), Id(0), kMiB)));
  EXPECT_TRUE(HoldsPayload(*lease));
  tier->Close(In(seconds(1)));
  EXPECT_TRUE(HoldsPayload(*lease));
  EXPECT_EQ(tier->stats().bytes, kMiB);
  tier.reset();
  EXPECT_TRUE(HoldsPayload(*lease));
}

TEST(RamTier, LeaseIsALeaseOfTheStore) {
  auto tier = Open(4 * kMiB);
  const Lease lease = *Put(*tier, Info(Id(1), Id(0), kMiB));
  EXPECT_TRUE(HoldsPayload(lease));
  EXPECT_EQ(tier->stats().pinned_bytes, kMiB);
}

TEST(RamTier, ReservedRoomIsPinnedInvisibleAndFreeAgainWhenDropped) {
  auto tier = Open(2 * kMiB);
  {
    Result<RamSlot> a = tier->Reserve(Info(Id(1), Id(0), kMiB));
    Result<RamSlot> b = tier->Reserve(Info(Id(2), Id(0), kMiB));
    ASSERT_TRUE(a && b);
    EXPECT_FALSE(Has(*tier, Id(1)));
    EXPECT_EQ(tier->stats().pinned_bytes, 2 * kMiB);
    EXPECT_EQ(tier->Reserve(Info(Id(3), Id(0), 1)).error().code, Code::kFull);
  }
  EXPECT_EQ(tier->stats().bytes, 0u);
  EXPECT_TRUE(tier->Reserve(Info(Id(3), Id(0), 2 * kMiB)));
}

TEST(RamTier, FirstCommitOfAKeyWins) {
  auto tier = Open(4 * kMiB);
  const RamLease first = *Put(*tier, Info(Id(1), Id(0), kMiB));
  const RamLease second = *Put(*tier, Info(Id(1), Id(0), kMiB));
  EXPECT_EQ(first.bytes.data(), second.bytes.data());
  EXPECT_EQ(tier->stats().frames, 1u);
  EXPECT_EQ(tier->stats().bytes, kMiB);
}

TEST(RamTier, RefusesNoBytesAndMoreThanTheCap) {
  auto tier = Open(2 * kMiB);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(0), kMiB)));
  EXPECT_EQ(tier->Reserve(Info(Id(2), Id(0), 0)).error().code, Code::kInvalid);
  EXPECT_EQ(tier->Reserve(Info(Id(2), Id(0), 2 * kMiB + 1)).error().code, Code::kFull);
  EXPECT_EQ(tier->Reserve(Info(Id(2), Id(0), UINT64_MAX)).error().code, Code::kFull);
  EXPECT_TRUE(Has(*tier, Id(1))) << "a request that can never fit must not cost what is here";
}

TEST(RamTier, EvictsTheDeepestOfTheChainUnusedLongest) {
  auto tier = Open(6 * kMiB);
  // Two chains of three: 11 <- 12 <- 13 and 21 <- 22 <- 23.
  for (uint64_t chain : {10, 20}) {
    for (uint64_t i = 1; i <= 3; ++i) {
      ASSERT_TRUE(Put(*tier, Info(Id(chain + i), i == 1 ? Id(0) : Id(chain + i - 1), kMiB)));
    }
  }
  // A use at the end of the first chain is a use of all of it.
  ASSERT_TRUE(tier->Acquire(Id(13)));
  for (const uint64_t expected : {23, 22, 21, 13, 12, 11}) {
    ASSERT_TRUE(Has(*tier, Id(expected)));
    Result<RamSlot> room = tier->Reserve(Info(Id(100 + expected), Id(0), (7 - tier->stats().frames) * kMiB));
    ASSERT_TRUE(room);
    EXPECT_FALSE(Has(*tier, Id(expected))) << expected;
  }
}

TEST(RamTier, AChildThatCameBeforeItsParentHoldsIt) {
  auto tier = Open(3 * kMiB);
  ASSERT_TRUE(Put(*tier, Info(Id(2), Id(1), kMiB)));
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(0), kMiB)));
  std::optional<RamLease> pin = tier->Acquire(Id(2));
  EXPECT_EQ(tier->Reserve(Info(Id(3), Id(0), 2 * kMiB)).error().code, Code::kFull);
  EXPECT_TRUE(Has(*tier, Id(1)));
  pin.reset();
  EXPECT_TRUE(tier->Reserve(Info(Id(3), Id(0), 3 * kMiB)));
}

TEST(RamTier, AChunkThatSaysItIsItsOwnParentLeavesLikeAnyOther) {
  auto tier = Open(2 * kMiB);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(1), 2 * kMiB)));
  EXPECT_TRUE(Put(*tier, Info(Id(2), Id(0), 2 * kMiB)));
  EXPECT_FALSE(Has(*tier, Id(1)));
}

TEST(RamTier, ChunksThatAreEachOthersParentsLeaveLikeOthers) {
  for (const uint64_t size : {2, 3, 6}) {
    auto tier = Open(8 * kMiB);
    for (uint64_t n = 0; n < size; ++n) ASSERT_TRUE(Put(*tier, Info(Id(10 + n), Id(10 + (n + 1) % size), kMiB)));
    ASSERT_TRUE(Put(*tier, Info(Id(20), Id(10), kMiB)));  // A child beside the circle.
    ASSERT_TRUE(Put(*tier, Info(Id(30), Id(0), kMiB)));
    Result<RamSlot> room = tier->Reserve(Info(Id(40), Id(0), 7 * kMiB));
    ASSERT_TRUE(room) << size << ": " << room.error().what;
    EXPECT_TRUE(Has(*tier, Id(30))) << "used last";
  }
}

TEST(RamTier, AChunkOfACircleThatIsLentStaysAndHoldsNoOther) {
  auto tier = Open(4 * kMiB);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(2), kMiB)));
  ASSERT_TRUE(Put(*tier, Info(Id(2), Id(3), kMiB)));
  ASSERT_TRUE(Put(*tier, Info(Id(3), Id(1), kMiB)));
  std::optional<RamLease> pin = tier->Acquire(Id(2));
  EXPECT_FALSE(tier->Reserve(Info(Id(9), Id(0), 4 * kMiB)));
  EXPECT_TRUE(HoldsPayload(*pin));
  pin.reset();
  EXPECT_TRUE(tier->Reserve(Info(Id(9), Id(0), 4 * kMiB)));
}

TEST(RamTier, ANewChildDoesNotTakeItsParentsPlace) {
  auto tier = Open(2 * kMiB);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(0), kMiB)));
  ASSERT_TRUE(Put(*tier, Info(Id(9), Id(0), kMiB)));
  ASSERT_TRUE(Put(*tier, Info(Id(2), Id(1), kMiB)));
  EXPECT_TRUE(Has(*tier, Id(1)));
  EXPECT_FALSE(Has(*tier, Id(9)));
}

// D12.
TEST(RamTier, FullOfUnpinnedChunksItStillStagesAndLookupsPinNothing) {
  auto tier = Open(8 * kMiB);
  std::vector<Digest> keys;
  for (uint64_t n = 1; n <= 8; ++n) {
    ASSERT_TRUE(Put(*tier, Info(Id(n), Id(n - 1), kMiB)));
    keys.push_back(Id(n));
  }
  std::vector<uint8_t> present(keys.size());
  for (int i = 0; i < 1000; ++i) tier->Contains(keys, present);
  EXPECT_EQ(present, std::vector<uint8_t>(keys.size(), 1));
  EXPECT_EQ(tier->stats().pinned_bytes, 0u);
  EXPECT_TRUE(HoldsPayload(*Put(*tier, Info(Id(100), Id(0), kMiB))));
  EXPECT_EQ(tier->stats().pinned_bytes, 0u);
}

TEST(RamTier, LoadServesNoDamageAndRemovesIt) {
  auto tier = Open(8 * kMiB);
  const RamLease lease = *Put(*tier, Info(Id(1), Id(0), 3 * kMiB));
  const_cast<std::byte&>(lease.bytes[2 * kMiB + 17]) ^= std::byte{4};
  std::vector<std::byte> into(3 * kMiB);
  const LoadResult result = LoadNow(*tier, Id(1), into);
  EXPECT_EQ(result.outcome, Outcome::kMiss);
  EXPECT_EQ(result.reason, Reason::kDamaged);
  EXPECT_FALSE(Has(*tier, Id(1)));
  EXPECT_EQ(tier->stats().quarantined, 1u);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(0), 3 * kMiB)));
  EXPECT_EQ(LoadNow(*tier, Id(1), into).outcome, Outcome::kHit);
}

TEST(RamTier, ScrubberFindsDamageWithinOneRound) {
  auto tier = Open(32 * kMiB);
  for (uint64_t n = 1; n <= 20; ++n) ASSERT_TRUE(Put(*tier, Info(Id(n), Id(0), kMiB)));
  EXPECT_EQ(tier->ScrubSome(5 * kMiB), 5 * kMiB);
  EXPECT_EQ(tier->ScrubSome(100 * kMiB), 20 * kMiB) << "one round is enough for one call";
  {
    const std::optional<RamLease> lease = tier->Acquire(Id(7));
    const_cast<std::byte&>(lease->bytes[5]) ^= std::byte{1};
  }
  uint64_t read = 0;
  while (read < 20 * kMiB) read += tier->ScrubSome(3 * kMiB);
  EXPECT_FALSE(Has(*tier, Id(7)));
  EXPECT_EQ(tier->stats().quarantined, 1u);
  EXPECT_EQ(tier->stats().frames, 19u);
  EXPECT_EQ(Open(kMiB)->ScrubSome(kMiB), 0u);
}

TEST(RamTier, RoomIsMadeReadyInSteps) {
  auto tier = Open(8 * kMiB);
  constexpr uint64_t kAll = ~uint64_t{0};
  const Result<RamSlot> slot = tier->Reserve(Info(Id(1), Id(0), kMiB));
  ASSERT_TRUE(slot);
  EXPECT_EQ(tier->TouchAhead(kMiB, 4 * kMiB, 2 * kMiB), 2 * kMiB) << "a step";
  EXPECT_EQ(tier->TouchAhead(kMiB, 4 * kMiB, kAll), 2 * kMiB);
  EXPECT_EQ(tier->TouchAhead(kMiB, 4 * kMiB, kAll), 0u);
  EXPECT_EQ(tier->resident_bytes(), 5 * kMiB);
  EXPECT_EQ(tier->stats().bytes, kMiB);
  EXPECT_EQ(tier->TouchAhead(kMiB, 100 * kMiB, kAll), 3 * kMiB);
}

TEST(RamTier, ACapAboveTheMachineIsCutAndSaid) {
  std::string line;
  log::SetSink([&](log::Level, std::string_view text) { line = text; });
  auto tier = RamTier::Open({.bytes_max = 64 * kMiB, .room = std::make_shared<FakeRoom>(16 * kMiB)});
  log::SetSink(nullptr);
  ASSERT_TRUE(tier);
  EXPECT_EQ((*tier)->stats().bytes_max, 16 * kMiB);
  EXPECT_NE(line.find("event=ram_cap_cut"), std::string::npos) << line;
  EXPECT_NE(line.find("asked_bytes=67108864"), std::string::npos) << line;
  EXPECT_NE(line.find("given_bytes=16777216"), std::string::npos) << line;
}

// Fills the tier with chunks of 1 MiB that are nobody's parents.
void Fill(RamTier& tier, int chunks) {
  for (int i = 0; i < chunks; ++i) ASSERT_TRUE(Put(tier, Info(Id(1000 + i), Id(0), kMiB)));
}

TEST(RamTier, StopsGrowingWhenTheMachineHasNoMoreAndServesOn) {
  const auto room = std::make_shared<FakeRoom>(1ull << 40);
  const auto tier = RamTier::Open({.bytes_max = 64 * kMiB, .room = room}).value();
  Fill(*tier, 4);
  room->spare = 0;
  // The last grant may still be open.
  const TimePoint deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (tier->TouchAhead(3 * kMiB, 64 * kMiB, 1) > 0) ASSERT_LT(std::chrono::steady_clock::now(), deadline);
  const uint64_t resident = tier->resident_bytes();
  Fill(*tier, 80);  // Each takes the place of another.
  EXPECT_LE(tier->resident_bytes(), resident);
  EXPECT_TRUE(Has(*tier, Id(1079)));
}

TEST(RamTier, GivesBackWhatAShortMachineNeeds) {
  const auto room = std::make_shared<FakeRoom>(1ull << 40);
  const auto tier = RamTier::Open({.bytes_max = 64 * kMiB, .room = room}).value();
  Fill(*tier, 40);
  EXPECT_EQ(tier->TouchAhead(3 * kMiB, 3 * kMiB, kMiB), 3 * kMiB);
  std::string line;
  log::SetSink([&](log::Level, std::string_view text) { line = text; });
  room->spare = -static_cast<int64_t>(13 * kMiB);
  tier->FitTheMachine();
  log::SetSink(nullptr);
  EXPECT_EQ(tier->resident_bytes(), 30 * kMiB);
  EXPECT_EQ(tier->stats().bytes_max, 30 * kMiB);
  EXPECT_TRUE(Has(*tier, Id(1039)));
  EXPECT_FALSE(Has(*tier, Id(1009))) << "used longest ago";
  EXPECT_NE(line.find("event=ram_cap_cut"), std::string::npos) << line;
  EXPECT_NE(line.find("given_bytes=31457280"), std::string::npos) << line;
}

TEST(RamTier, WhatIsLentStaysWhenTheCapIsLowered) {
  const auto room = std::make_shared<FakeRoom>(1ull << 40);
  const auto tier = RamTier::Open({.bytes_max = 64 * kMiB, .room = room}).value();
  Fill(*tier, 8);
  std::optional<RamLease> lease = tier->Acquire(Id(1000));
  room->spare = -static_cast<int64_t>(100 * kMiB);
  tier->FitTheMachine();
  EXPECT_EQ(tier->stats().bytes_max, 0u);
  EXPECT_EQ(tier->resident_bytes(), kMiB);
  EXPECT_EQ(HashSegments(lease->bytes), *lease->hashes);
  EXPECT_EQ(tier->Reserve(Info(Id(1), Id(0), kMiB)).error().code, Code::kFull);
  lease.reset();
  tier->FitTheMachine();
  EXPECT_EQ(tier->resident_bytes(), 0u);
}

TEST(RamTier, TheCapRisesWhenOthersHaveGone) {
  const auto room = std::make_shared<FakeRoom>(64 * kMiB);
  room->reservable = 8 * kMiB;
  const auto tier = RamTier::Open({.bytes_max = 1ull << 40, .room = room}).value();
  EXPECT_EQ(tier->stats().bytes_max, 8 * kMiB);
  Fill(*tier, 8);
  room->reservable = 48 * kMiB;
  std::string line;
  log::SetSink([&](log::Level, std::string_view text) { line = text; });
  for (int i = 0; i < 10; ++i) tier->FitTheMachine();
  log::SetSink(nullptr);
  EXPECT_EQ(tier->stats().bytes_max, 48 * kMiB);
  EXPECT_EQ(room->untouched, 40 * kMiB);
  EXPECT_NE(line.find("event=ram_cap_raised"), std::string::npos) << line;
  Fill(*tier, 40);
  EXPECT_TRUE(Has(*tier, Id(1000)));
}

TEST(RamTier, ACapWithoutRoomForOneChunkIsAnError) {
  const auto tier =
      RamTier::Open({.bytes_max = 4 * kMiB, .payload_bytes = 6 * kMiB, .room = std::make_shared<FakeRoom>(1ull << 40)});
  ASSERT_FALSE(tier);
  EXPECT_EQ(tier.error().code, Code::kInvalid);
  EXPECT_NE(tier.error().what.find("4194304"), std::string::npos) << tier.error().what;
  EXPECT_NE(tier.error().what.find("6291456"), std::string::npos) << tier.error().what;
  EXPECT_FALSE(RamTier::Open({.bytes_max = 0}));
}

// Runs tasks when told.
class HeldExecutor final : public Executor {
 public:
  bool Post(Task task) override {
    tasks_.push_back(std::move(task));
    return true;
  }
  bool PostAfter(std::chrono::milliseconds, Task) override { return false; }
  void RunAll() {
    for (; !tasks_.empty(); tasks_.pop_front()) tasks_.front()();
  }

 private:
  std::deque<Task> tasks_;
};

TEST(RamTier, CloseSettlesWhatTheExecutorNeverRan) {
  HeldExecutor executor;
  auto tier = Open(4 * kMiB, &executor);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(0), kMiB)));
  auto buffer = std::make_shared<std::vector<std::byte>>(kMiB);
  auto done = std::make_shared<LoadBatch>(1);
  tier->Load({{.key = Id(1), .space = Id(0), .into = *buffer, .owner = buffer}}, In(seconds(60)), done);
  EXPECT_EQ(done->Poll(0), nullptr);
  const CloseReport report = tier->Close(TimePoint::min());
  EXPECT_EQ(report.abandoned, 1u);
  EXPECT_FALSE(report.clean);
  ASSERT_NE(done->Poll(0), nullptr);
  EXPECT_EQ(done->Poll(0)->reason, Reason::kUnavailable);
  EXPECT_EQ(buffer.use_count(), 1);
  tier.reset();
  executor.RunAll();  // What it still holds touches nothing.
}

TEST(RamTier, ALoadThatWaitedPastItsDeadlineIsATimeout) {
  HeldExecutor executor;
  auto tier = Open(4 * kMiB, &executor);
  ASSERT_TRUE(Put(*tier, Info(Id(1), Id(0), kMiB)));
  std::vector<std::byte> into(kMiB);
  auto late = std::make_shared<LoadBatch>(1);
  auto cancelled = std::make_shared<LoadBatch>(1);
  tier->Load({{.key = Id(1), .space = Id(0), .into = into}}, std::chrono::steady_clock::now(), late);
  tier->Load({{.key = Id(1), .space = Id(0), .into = into}}, In(seconds(60)), cancelled);
  cancelled->Cancel();
  executor.RunAll();
  EXPECT_EQ(late->Poll(0)->reason, Reason::kTimeout);
  EXPECT_EQ(cancelled->Poll(0)->reason, Reason::kCancelled);
}

// A naive model beside the tier: what may happen is written down, whatever the order of eviction.
TEST(RamTier, RandomUseKeepsCapPinsLeafFirstAndBytes) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t n) { return std::uniform_int_distribution<uint64_t>(0, n - 1)(random); };
  constexpr uint64_t kCap = 1 * kMiB;
  const uint64_t sizes[] = {1, 4095, 4096, 4097, 10000, 65536, 100001, 200000};

  auto tier = Open(kCap);
  std::map<Digest, FrameInfo> known;   // All that were ever committed.
  std::vector<Digest> keys = {Id(0)};  // Possible parents; the space first.
  std::map<Digest, RamLease> pins;     // What is lent.
  std::vector<RamSlot> slots;          // What is reserved.
  const auto resident = [&] {
    std::map<Digest, FrameInfo> here;
    for (const auto& [key, info] : known) {
      if (Has(*tier, key)) here.emplace(key, info);
    }
    return here;
  };
  const auto rounded = [](uint64_t bytes) { return (bytes + 4095) / 4096 * 4096; };

  for (int step = 0; step < 4000; ++step) {
    switch (below(8)) {
      case 0:
      case 1:
      case 2: {  // A new chunk below any other.
        const FrameInfo info = Info(Id(1000 + step), keys[below(keys.size())], sizes[below(std::size(sizes))]);
        const std::map<Digest, FrameInfo> before = resident();
        Result<RamSlot> slot = tier->Reserve(info);
        const std::map<Digest, FrameInfo> after = resident();
        // Pinned, or above something pinned: only these may stay.
        std::map<Digest, bool> held;
        for (const auto& [key, lease] : pins) {
          for (Digest at = key; !held[at];) {
            held[at] = true;
            const auto it = before.find(at);
            if (it == before.end()) break;
            at = it->second.parent;
          }
        }
        uint64_t needed = rounded(info.payload_bytes);
        for (const RamSlot& s : slots) needed += rounded(s.bytes().size());
        for (const auto& [key, lease] : pins) {
          if (!before.contains(key)) needed += rounded(lease.bytes.size());  // Erased while lent.
        }
        for (const auto& [key, i] : before) {
          if (held[key]) {
            EXPECT_TRUE(after.contains(key)) << "a held chunk was evicted";
            needed += rounded(i.payload_bytes);
          }
          if (!after.contains(key)) {
            for (const auto& [child, c] : after) EXPECT_NE(c.parent, key) << "a parent left before its child";
          }
        }
        ASSERT_EQ(slot.has_value(), needed <= kCap) << "step " << step;
        if (slot) slots.push_back(std::move(*slot));
        break;
      }
      case 3:
      case 4: {  // Commit one.
        if (slots.empty()) break;
        std::swap(slots[below(slots.size())], slots.back());
        RamSlot slot = std::move(slots.back());
        slots.pop_back();
        const FrameInfo info = slot.info();
        const auto payload = Payload(info.key, info.payload_bytes);
        std::memcpy(slot.bytes().data(), payload.data(), payload.size());
        ASSERT_TRUE(tier->Commit(std::move(slot), std::make_shared<const SegmentHashes>(HashSegments(payload))));
        known.emplace(info.key, info);
        keys.push_back(info.key);
        break;
      }
      case 5: {  // Lend one.
        const Digest key = keys[below(keys.size())];
        if (auto lease = tier->Acquire(key)) {
          EXPECT_TRUE(HoldsPayload(*lease));
          if (pins.size() < 6) pins.insert_or_assign(key, std::move(*lease));
        } else {
          EXPECT_FALSE(Has(*tier, key));
        }
        break;
      }
      case 6: {  // Take one back, or give up a reservation.
        if (!pins.empty()) {
          const auto it = std::next(pins.begin(), static_cast<ptrdiff_t>(below(pins.size())));
          EXPECT_TRUE(HoldsPayload(it->second)) << "bytes changed under a lease";
          pins.erase(it);
        }
        if (slots.size() > 4) slots.pop_back();
        break;
      }
      case 7: {
        if (below(4) == 0) tier->Erase({{keys[below(keys.size())]}});
        break;
      }
    }
    ASSERT_LE(tier->resident_bytes(), kCap);
    const TierStats stats = tier->stats();
    ASSERT_LE(stats.bytes, kCap);
  }
  uint64_t live = 0;
  for (const auto& [key, info] : resident()) live += rounded(info.payload_bytes);
  for (const RamSlot& s : slots) live += rounded(s.bytes().size());
  for (const auto& [key, lease] : pins) {
    if (!Has(*tier, key)) live += rounded(lease.bytes.size());
  }
  EXPECT_EQ(tier->stats().bytes, live);
  pins.clear();
  slots.clear();
  EXPECT_EQ(tier->stats().pinned_bytes, 0u);
  EXPECT_TRUE(tier->Reserve(Info(Id(1), Id(0), kCap))) << "a cycle or a lost child count keeps chunks for ever";
}

// Threads that save, load, lend and erase the same keys: no mixed bytes, no claim refused while nothing is pinned for
// long.
TEST(RamTier, ThreadsOnTheSameKeysNeverSeeForeignBytes) {
  constexpr uint64_t kKeys = 48;
  constexpr uint64_t kBytes = 40000;
  // Half of them, so that eviction never rests; more than the threads can pin, two each, and the parents of those.
  auto tier = Open(24 * 40960);
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      std::vector<std::byte> into(kBytes);
      for (int i = 0; i < 2000; ++i) {
        const uint64_t n = 1 + random() % kKeys;
        const Digest key = Id(n);
        switch (random() % 4) {
          case 0: {
            const Result<RamLease> lease = Put(*tier, Info(key, Id(n % 2 == 0 ? n - 1 : 0), kBytes));
            ASSERT_TRUE(lease) << lease.error().what;
            ASSERT_TRUE(HoldsPayload(*lease));
            break;
          }
          case 1:
            if (const auto lease = tier->Acquire(key)) {
              ASSERT_TRUE(HoldsPayload(*lease));
            }
            break;
          case 2: {
            const LoadResult result = LoadNow(*tier, key, into);
            if (result.outcome == Outcome::kHit) {
              ASSERT_EQ(into, Payload(key, kBytes));
            } else {
              ASSERT_EQ(result.reason, Reason::kNotFound);
            }
            break;
          }
          case 3:
            if (random() % 8 == 0) tier->Erase({{key}});
            if (random() % 8 == 0) tier->ScrubSome(kBytes);
            break;
        }
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_EQ(tier->stats().pinned_bytes, 0u);
  EXPECT_EQ(tier->stats().quarantined, 0u);
}

}  // namespace
}  // namespace terrace
