// Would catch: wrong bytes from a cache, a prefix with a hole, a frame that is visible before it is whole and durable
// or before its parent, a save said to be done that is not, a right frame taken away or not found again, a wait without
// end, a call that blocks its caller, books that do not balance, RAM above its cap, temporaries left behind: whatever
// the share, the server and the other nodes do, and whenever a node dies.
//
// Must be survived without a wrong answer or a hang, and without losing what was saved:
//   - EIO, ENOSPC (at once, or late at Sync or Close), torn writes, slow operations, answers that are lost though the
//     operation took place, ESTALE, names remembered as not there, old attributes, listings in any order, refused
//     links;
//   - the server unreachable or down for 20 s, hard mount or soft; a share that is unmounted; a node that is stopped;
//   - the death of a node within any operation, its unsynced bytes gone; a clean restart;
//   - nodes that save, erase and set aside the same chunks at the same time;
//   - where they share a bucket: calls that fail, are late, take place after their deadline or have their answer lost,
//     bodies that break off and come again, conditions that the server does not honour, a bucket that is not there at
//     the start, bounds that any of them keeps, or several at once;
//   - on a node's own disk: EIO, torn writes, syncs that fail, a disk that others fill, a cap that is lowered, the
//     death of its process; and the loss of its power, which takes what was not synced, some pages by half.
// Must be survived without a wrong answer or a hang, though frames are lost to it:
//   - a crash of the server, which may take back the newest names and the bytes not synced;
//   - bits that rot, on the share and on the disks, and a peer gone mad that writes anything under any name, false
//     news included;
//   - a right frame written in the moment in which another node takes the damaged one at its place away.
// Where nodes share a directory with bounds: as above, and no more bytes than that at any moment, until the server
// crashes, which may take back the word of who writes what; then again in peace.
// Not simulated: the S3 client itself, whose unit tests have a server that misbehaves, and a mount that keeps space
// free. Not simulated, and not promised: a client of the file server that lies about Sync, a server that gives
// stale listings, a peer that forges whole frames (XXH3 finds damage, not malice), and RAM that goes bad.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "tests/sim/simulation.h"
#include "tests/support/forwarding_tier.h"

// A run that is cut short, by a deadlock or a death, leaves its fibers and what their stacks hold: no leak of the
// product.
extern "C" const char* __asan_default_options() { return "detect_leaks=0"; }

namespace terrace::sim {
namespace {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr uint64_t kSeeds = 60;  // Each takes ten times as long.
#else
constexpr uint64_t kSeeds = 200;
#endif
constexpr uint64_t kBucketSeeds = kSeeds / 3;
constexpr uint64_t kBoundedSeeds = kSeeds / 5;
constexpr size_t kLogLinesMax = 400;

std::string Explain(uint64_t seed, const RunReport& report) {
  std::string text = "seed " + std::to_string(seed) + ": " + report.failure +
                     "\nreproduce: build/dev/tests/sim/sim --seed " + std::to_string(seed) + " --log\n";
  const size_t skip = report.log.size() - std::min(report.log.size(), kLogLinesMax);
  text += report.log.front();
  for (size_t i = std::max<size_t>(skip, 1); i < report.log.size(); ++i) text += report.log[i];
  return text;
}

TEST(Simulation, SeedsHold) {
  RunReport sum;
  for (uint64_t seed = 1; seed <= kSeeds; ++seed) {
    const RunReport report = RunSeed({.seed = seed});
    ASSERT_TRUE(report.ok) << Explain(seed, report);
    sum.faults += report.faults;
    sum.deaths += report.deaths;
    sum.hits_ram += report.hits_ram;
    sum.hits_below += report.hits_below;
    sum.saves_written += report.saves_written;
  }
  // An idle simulation is right about nothing.
  EXPECT_GT(sum.faults, 50 * kSeeds);
  EXPECT_GT(sum.deaths, kSeeds / 2);
  EXPECT_GT(sum.hits_ram, 100 * kSeeds);
  EXPECT_GT(sum.hits_below, 50 * kSeeds);
  EXPECT_GT(sum.saves_written, 10 * kSeeds);
}

TEST(Simulation, SeedsHoldOnADirectoryWithBounds) {
  RunReport sum;
  for (uint64_t seed = 1; seed <= kBoundedSeeds; ++seed) {
    const RunReport report = RunSeed({.seed = seed, .with_bounds = true});
    ASSERT_TRUE(report.ok) << "--bounds yes, " << Explain(seed, report);
    sum.saves_written += report.saves_written;
    sum.collected += report.collected;
  }
  EXPECT_GT(sum.saves_written, 10 * kBoundedSeeds);
  EXPECT_GT(sum.collected, kBoundedSeeds);
}

// Nodes on a bucket, by the same chaos and the same proof.
TEST(Simulation, SeedsHoldOnABucket) {
  RunReport sum;
  for (uint64_t seed = 1; seed <= kBucketSeeds; ++seed) {
    const RunReport report = RunSeed({.seed = seed, .on_bucket = true});
    ASSERT_TRUE(report.ok) << "--share bucket, " << Explain(seed, report);
    sum.faults += report.faults;
    sum.deaths += report.deaths;
    sum.hits_below += report.hits_below;
    sum.saves_written += report.saves_written;
    sum.collected += report.collected;
  }
  EXPECT_GT(sum.faults, 10 * kBucketSeeds);
  EXPECT_GT(sum.deaths, kBucketSeeds / 2);
  EXPECT_GT(sum.hits_below, 50 * kBucketSeeds);
  EXPECT_GT(sum.saves_written, 10 * kBucketSeeds);
  EXPECT_GT(sum.collected, kBucketSeeds);
  EXPECT_EQ(RunSeed({.seed = 7, .on_bucket = true}).digest, RunSeed({.seed = 7, .on_bucket = true}).digest);
}

TEST(Simulation, TheSameSeedGivesTheSameLog) {
  for (const uint64_t seed : {3, 5, 124}) {
    const RunReport first = RunSeed({.seed = seed, .log_all = true});
    const RunReport second = RunSeed({.seed = seed, .log_all = true});
    EXPECT_EQ(first.digest, second.digest);
    EXPECT_EQ(first.steps, second.steps);
    EXPECT_TRUE(first.log == second.log);
    EXPECT_GT(first.log.size(), 1000u);
    EXPECT_NE(first.digest, RunSeed({.seed = seed + 1}).digest);
  }
}

// --- Seeds that found something.

// They were found on the share alone.
void Holds(uint64_t seed) {
  const RunReport report = RunSeed({.seed = seed, .with_disk = false});
  EXPECT_TRUE(report.ok) << Explain(seed, report);
}

// Loads under way were found by key alone, so who asked for another space by mistake got the bytes.
TEST(SimulationSeed, N45AWrongAskerSharesNoLoad) { Holds(45); }
TEST(SimulationSeed, N258AWrongAskerSharesNoLoad) { Holds(258); }
// RAM all one chain, its last chunk still held by the thread that had loaded it: full for a moment, not for good.
TEST(SimulationSeed, N316FullForAMomentHeals) { Holds(316); }

// The absence of a directory that a client remembered hid the frames in it, until the next scan.
TEST(SimulationSeed, N444AnAbsentDirectoryIsLookedForAgain) { Holds(444); }

// --- Would it see it? A tier with a fault of the kind that nobody may have, in a run that is right without it.

template <class T>
std::string WhatIsFound() {
  constexpr uint64_t kSeed = 1;
  const RunReport report = RunSeed({.seed = kSeed, .with_disk = false, .break_tier = [](std::unique_ptr<Tier> tier) {
                                      return std::make_unique<T>(std::move(tier));
                                    }});
  EXPECT_FALSE(report.ok);
  return report.failure;
}

template <class T>
std::string WhatIsFoundOnDisk() {
  constexpr uint64_t kSeed = 1;
  const RunReport report = RunSeed({.seed = kSeed, .with_disk = true, .break_disk = [](std::unique_ptr<Tier> tier) {
                                      return std::make_unique<T>(std::move(tier));
                                    }});
  EXPECT_FALSE(report.ok);
  return report.failure;
}

class DeliversWrongBytes final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) override {
    const std::span<std::byte> into = items[0].into;
    inner_->Load(std::move(items), deadline, std::make_shared<LoadBatch>(1, [into, done](size_t, const LoadResult& r) {
                   if (r.outcome == Outcome::kHit) into[into.size() / 2] ^= std::byte{4};
                   done->Settle(0, r);
                 }));
  }
};
TEST(SimulationSees, WrongBytes) {
  EXPECT_THAT(WhatIsFound<DeliversWrongBytes>(), testing::HasSubstr("delivers wrong bytes"));
}

class ForgetsToSave final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Save(std::vector<SaveItem>, std::shared_ptr<SaveBatch> done) override {
    done->Settle(0, {.outcome = Outcome::kHit});
  }
};
TEST(SimulationSees, ASaveThatWasNone) {
  EXPECT_THAT(WhatIsFound<ForgetsToSave>(), testing::HasSubstr("settles a save as hit that never had its name"));
}

TEST(SimulationSees, ASaveOnDiskThatWasNone) {
  EXPECT_THAT(WhatIsFoundOnDisk<ForgetsToSave>(), testing::HasSubstr("settles a save as hit that never had its name"));
}

class ForgetsWhatItHas final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    inner_->Contains(keys, present);
    for (size_t i = 0; i < keys.size(); ++i) present[i] = present[i] && keys[i].bytes[1] % 4 != 0;
  }
};
TEST(SimulationSees, AFrameOnDiskThatIsForgotten) {
  EXPECT_THAT(WhatIsFoundOnDisk<ForgetsWhatItHas>(), testing::HasSubstr("has a frame that the tier does not find"));
}

class CountsWrong final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  TierStats stats() const override {
    TierStats stats = inner_->stats();
    stats.bytes += 4096;
    return stats;
  }
};
TEST(SimulationSees, BytesOnDiskThatAreNotThere) {
  EXPECT_THAT(WhatIsFoundOnDisk<CountsWrong>(), testing::HasSubstr("and the tier counts"));
}

class NeverAnswers final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    if (++saves_ != 5) inner_->Save(std::move(items), std::move(done));
  }

 private:
  int saves_ = 0;
};
TEST(SimulationSees, AnItemThatIsNeverSettled) {
  EXPECT_THAT(WhatIsFound<NeverAnswers>(), testing::HasSubstr("still has"));
}

// Keeps no first chunk, and tells a write-behind that it has it: what follows is written before its parent.
class ClaimsParents final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    inner_->Contains(keys, present);
    // A lookup's question begins with a first chunk, that for a chain to be saved with what comes before it.
    for (size_t i = 1; i < keys.size(); ++i) present[i] = present[i] != 0 || firsts_.contains(keys[i]);
  }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    if (items[0].info.first_token == 0) {
      firsts_.insert(items[0].info.key);
      return done->Settle(0, {.outcome = Outcome::kDeclined});
    }
    inner_->Save(std::move(items), std::move(done));
  }

 private:
  std::set<Digest> firsts_;
};
TEST(SimulationSees, AChildBeforeItsParent) {
  EXPECT_THAT(WhatIsFound<ClaimsParents>(), testing::HasSubstr("before its parent"));
}

class ErasesOthersFrames final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    const Digest key = items[0].info.key;
    inner_->Save(std::move(items), std::make_shared<SaveBatch>(1, [this, key, done](size_t, const SaveResult& r) {
                   done->Settle(0, r);
                   if (r.outcome == Outcome::kHit && ++saves_ == 3) inner_->Erase(std::span(&key, 1));
                 }));
  }

 private:
  int saves_ = 0;
};
TEST(SimulationSees, ARightFrameTakenAway) {
  EXPECT_THAT(WhatIsFound<ErasesOthersFrames>(), testing::HasSubstr("removes a right frame that nobody erased"));
}

TEST(SimulationSees, WhatGoesWrongOnABucket) {
  const auto found = [](auto break_tier) {
    return RunSeed({.seed = 1, .with_disk = false, .on_bucket = true, .with_bounds = false, .break_tier = break_tier})
        .failure;
  };
  EXPECT_THAT(found([](std::unique_ptr<Tier> tier) { return std::make_unique<DeliversWrongBytes>(std::move(tier)); }),
              testing::HasSubstr("delivers wrong bytes"));
  EXPECT_THAT(found([](std::unique_ptr<Tier> tier) { return std::make_unique<ErasesOthersFrames>(std::move(tier)); }),
              testing::HasSubstr("removes a right frame that nobody erased"));
}

// Nodes that keep other bounds than the run has.
TEST(SimulationSees, BoundsOfADirectoryThatAreNotKept) {
  constexpr uint64_t kSizeSeed = 4, kTtlSeed = 7;  // Of one of the two.
  const auto found = [](uint64_t seed, auto break_bounds) {
    return RunSeed({.seed = seed, .with_bounds = true, .break_bounds = break_bounds}).failure;
  };
  EXPECT_THAT(found(kSizeSeed, [](Bounds& bounds) { bounds.bytes_max *= 3; }), testing::HasSubstr("above its bound"));
  EXPECT_THAT(found(kTtlSeed, [](Bounds& bounds) { bounds.ttl *= 4; }), testing::HasSubstr("for twice the ttl"));
  EXPECT_THAT(found(kTtlSeed, [](Bounds& bounds) { bounds.ttl /= 4; }), testing::HasSubstr("that nobody erased"));
}

TEST(SimulationSees, BoundsOfABucketThatAreNotKept) {
  constexpr uint64_t kSizeSeed = 4, kTtlSeed = 7;  // Of a bucket with one of the two.
  const auto found = [](uint64_t seed, auto break_bounds) {
    return RunSeed({.seed = seed, .on_bucket = true, .with_bounds = true, .break_bounds = break_bounds}).failure;
  };
  EXPECT_THAT(found(kSizeSeed, [](Bounds& bounds) { bounds.bytes_max *= 3; }), testing::HasSubstr("above its bound"));
  EXPECT_THAT(found(kSizeSeed, [](Bounds& bounds) { bounds.bytes_max /= 4; }),
              testing::HasSubstr("that nobody erased"));
  EXPECT_THAT(found(kTtlSeed, [](Bounds& bounds) { bounds.ttl *= 4; }), testing::HasSubstr("for twice the ttl"));
  EXPECT_THAT(found(kTtlSeed, [](Bounds& bounds) { bounds.ttl /= 4; }), testing::HasSubstr("that nobody erased"));
}

class BlocksItsCaller final : public ForwardingTier {
 public:
  using ForwardingTier::ForwardingTier;
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    if (++calls_ % 50 == 0) (void)inner_->Scan("", 1);
    inner_->Contains(keys, present);
  }

 private:
  int calls_ = 0;
};
TEST(SimulationSees, ACallThatBlocks) {
  // Within a call that may wait itself, it is late.
  EXPECT_THAT(WhatIsFound<BlocksItsCaller>(),
              testing::AnyOf(testing::HasSubstr("blocked its caller"), testing::HasSubstr("after its deadline")));
}

}  // namespace
}  // namespace terrace::sim
