// What could go wrong in any tier: part of a chunk or another chunk's bytes handed out as a hit; a failed or second
// save that spoils what was there; an item that is never settled, or settled while the tier still writes into its
// buffer; a buffer kept for ever; a close that loses what it had promised; a scan or statistics that tell of frames
// that are not there.
#include "tests/contract/tier_contract.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <thread>

#include "base/assert.h"
#include "base/hash.h"

namespace terrace {

World::World() {
  std::string name = (std::filesystem::temp_directory_path() / "terrace-contract-XXXXXX").string();
  TERRACE_ASSERT(mkdtemp(name.data()) != nullptr);
  directory = name;
}

World::~World() {
  executor.Stop();
  std::error_code ignored;
  std::filesystem::remove_all(directory, ignored);
}

namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<std::byte>;

constexpr uint64_t kSizes[] = {1, 4095, 4096, 4097, 1 << 20, (1 << 20) + 1, 6 << 20};

// No test waits longer; none depends on how long it takes.
TimePoint Soon() { return std::chrono::steady_clock::now() + seconds(60); }

const Digest kSpace = Sha256Of("space");

Digest Key(uint64_t n) { return Sha256Of("key " + std::to_string(n)); }

FrameInfo Info(uint64_t n, uint64_t payload_bytes) {
  return {.space = kSpace,
          .key = Key(n),
          .parent = n == 0 ? kSpace : Key(n - 1),
          .first_token = static_cast<uint32_t>(n * 256),
          .token_count = 256,
          .payload_bytes = payload_bytes};
}

// Bytes that depend on key, variant and position, so that no part of one fits into another.
Bytes Payload(uint64_t n, uint64_t payload_bytes, uint64_t variant = 0) {
  std::mt19937_64 random(n * 1000003 + variant);
  Bytes payload((payload_bytes + 7) / 8 * 8);
  for (size_t at = 0; at < payload.size(); at += 8) {
    const uint64_t word = random();
    std::memcpy(payload.data() + at, &word, 8);
  }
  payload.resize(payload_bytes);
  return payload;
}

// A buffer whose owner the tier gets, with a fence behind it that no load may touch.
struct Buffer {
  explicit Buffer(uint64_t payload_bytes) : bytes(payload_bytes + kFenceBytes, kFence) {}
  std::span<std::byte> payload() { return std::span(bytes).first(bytes.size() - kFenceBytes); }
  bool FenceIsWhole() const {
    return std::all_of(bytes.end() - kFenceBytes, bytes.end(), [](std::byte b) { return b == kFence; });
  }
  static constexpr ptrdiff_t kFenceBytes = 64;
  static constexpr std::byte kFence{0xa5};
  Bytes bytes;
};

class TierContract : public testing::TestWithParam<TierCase> {
 protected:
  void SetUp() override { Open(); }
  void TearDown() override {
    if (tier_) tier_->Close(Soon());
  }

  void Open() {
    tier_ = GetParam().open(world_);
    const TimePoint deadline = Soon();
    while (!tier_->stats().index_ready && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    ASSERT_TRUE(tier_->stats().index_ready);
  }

  struct Frame {
    FrameInfo info;
    Bytes payload;
  };
  static Frame MakeFrame(uint64_t n, uint64_t payload_bytes, uint64_t variant = 0) {
    return {Info(n, payload_bytes), Payload(n, payload_bytes, variant)};
  }

  std::shared_ptr<SaveBatch> StartSave(const std::vector<Frame>& frames, bool with_hashes = false) {
    std::vector<SaveItem> items;
    for (const Frame& frame : frames) {
      auto payload = std::make_shared<Bytes>(frame.payload);
      SaveItem item{.info = frame.info, .payload = *payload, .owner = payload};
      if (with_hashes) item.hashes = std::make_shared<const SegmentHashes>(HashSegments(frame.payload));
      items.push_back(std::move(item));
    }
    auto done = std::make_shared<SaveBatch>(items.size());
    tier_->Save(std::move(items), done);
    return done;
  }
  std::vector<SaveResult> Save(const std::vector<Frame>& frames, bool with_hashes = false) {
    const auto done = StartSave(frames, with_hashes);
    EXPECT_TRUE(done->WaitAll(Soon()));
    std::vector<SaveResult> results;
    for (size_t i = 0; i < done->size(); ++i) results.push_back(done->Poll(i) ? *done->Poll(i) : SaveResult{});
    return results;
  }
  void MustSave(const std::vector<Frame>& frames) {
    for (const SaveResult& result : Save(frames)) {
      ASSERT_EQ(result.outcome, Outcome::kHit) << (result.error ? result.error->what : ReasonName(result.reason));
    }
  }

  struct Loaded {
    LoadResult result;
    std::shared_ptr<Buffer> buffer;
    bool Holds(const Bytes& payload) const {
      return std::equal(payload.begin(), payload.end(), buffer->payload().begin(), buffer->payload().end());
    }
  };
  std::vector<Loaded> Load(const std::vector<FrameInfo>& asked, TimePoint deadline = Soon()) {
    std::vector<Loaded> loaded;
    std::vector<LoadItem> items;
    for (const FrameInfo& info : asked) {
      auto buffer = std::make_shared<Buffer>(info.payload_bytes);
      items.push_back({.key = info.key, .space = info.space, .into = buffer->payload(), .owner = buffer});
      loaded.push_back({{}, buffer});
    }
    auto done = std::make_shared<LoadBatch>(items.size());
    tier_->Load(std::move(items), deadline, done);
    EXPECT_TRUE(done->WaitAll(Soon())) << "an item was never settled";
    for (size_t i = 0; i < loaded.size(); ++i) {
      if (const LoadResult* result = done->Poll(i)) loaded[i].result = *result;
      EXPECT_TRUE(loaded[i].buffer->FenceIsWhole()) << "written beyond the buffer";
    }
    return loaded;
  }
  void ExpectHit(const Frame& frame) {
    const Loaded loaded = Load({frame.info})[0];
    ASSERT_EQ(loaded.result.outcome, Outcome::kHit) << ReasonName(loaded.result.reason);
    EXPECT_EQ(loaded.result.reason, Reason::kNone);
    EXPECT_TRUE(loaded.Holds(frame.payload)) << frame.payload.size() << " bytes";
    EXPECT_EQ(loaded.result.info, frame.info);
    ASSERT_TRUE(loaded.result.hashes);
    EXPECT_EQ(*loaded.result.hashes, HashSegments(frame.payload));
  }
  void ExpectMiss(const FrameInfo& info, Reason reason) {
    const LoadResult result = Load({info})[0].result;
    EXPECT_EQ(result.outcome, Outcome::kMiss);
    EXPECT_EQ(result.reason, reason) << ReasonName(result.reason);
  }

  bool Has(const Digest& key) {
    uint8_t present = 0;
    tier_->Contains({&key, 1}, {&present, 1});
    return present != 0;
  }
  // All frames, by pages of `limit`. Each once.
  std::map<Digest, FrameInfo> ScanAll(size_t limit) {
    std::map<Digest, FrameInfo> found;
    std::string cursor;
    do {
      const Result<ScanPage> page = tier_->Scan(cursor, limit);
      EXPECT_TRUE(page) << page.error().what;
      if (!page) break;
      EXPECT_LE(page->frames.size(), limit);
      for (const FrameInfo& info : page->frames) EXPECT_TRUE(found.emplace(info.key, info).second) << "listed twice";
      cursor = page->next;
    } while (!cursor.empty());
    return found;
  }

  World world_;
  std::unique_ptr<Tier> tier_;
};

TEST_P(TierContract, WhatWasSavedIsLoadedToTheByteWhateverItsSize) {
  std::vector<Frame> frames;
  for (const uint64_t size : kSizes) frames.push_back(MakeFrame(frames.size(), size));
  MustSave(frames);
  for (const Frame& frame : frames) {
    EXPECT_TRUE(Has(frame.info.key));
    ExpectHit(frame);
  }
}

TEST_P(TierContract, HashesGivenWithASaveAreThoseOfTheLoad) {
  const Frame frame = MakeFrame(1, (2 << 20) + 5);
  ASSERT_EQ(Save({frame}, true)[0].outcome, Outcome::kHit);
  ExpectHit(frame);
}

TEST_P(TierContract, ABatchSettlesEachItemByItself) {
  const Frame here = MakeFrame(1, 5000);
  MustSave({here});
  const auto loaded = Load({Info(7, 5000), here.info, Info(8, 10), here.info});
  EXPECT_EQ(loaded[0].result.reason, Reason::kNotFound);
  EXPECT_EQ(loaded[2].result.reason, Reason::kNotFound);
  for (const size_t i : {1, 3}) {
    EXPECT_EQ(loaded[i].result.outcome, Outcome::kHit);
    EXPECT_TRUE(loaded[i].Holds(here.payload));
  }
  const Digest keys[] = {Key(7), Key(1), Key(8), Key(1)};
  std::vector<uint8_t> present(4, 77);
  tier_->Contains(keys, present);
  EXPECT_EQ(present, (std::vector<uint8_t>{0, 1, 0, 1}));
}

TEST_P(TierContract, EmptyBatchesAreFine) {
  EXPECT_TRUE(Load({}).empty());
  EXPECT_TRUE(Save({}).empty());
  tier_->Contains({}, {});
  tier_->Erase({});
}

TEST_P(TierContract, UnknownKeysAreMissesAndTakeNothing) {
  EXPECT_FALSE(Has(Key(1)));
  ExpectMiss(Info(1, 4096), Reason::kNotFound);
  tier_->Erase({{Key(1)}});
  EXPECT_EQ(tier_->stats().frames, 0u);
}

TEST_P(TierContract, AFrameOfAnotherSpaceIsForeign) {
  const Frame frame = MakeFrame(1, 5000);
  MustSave({frame});
  FrameInfo asked = frame.info;
  asked.space = Sha256Of("another space");
  ExpectMiss(asked, Reason::kForeign);
}

TEST_P(TierContract, AFrameOfAnotherSizeIsForeign) {
  for (const int64_t off : {-1, 1, 4096, -4999}) {
    const Frame frame = MakeFrame(static_cast<uint64_t>(5000 + off), 5000);
    MustSave({frame});
    FrameInfo asked = frame.info;
    asked.payload_bytes = static_cast<uint64_t>(5000 + off);
    ExpectMiss(asked, Reason::kForeign);
  }
}

// last-good.
TEST_P(TierContract, ASecondSaveKeepsTheFirst) {
  const Frame first = MakeFrame(1, 70000, 1);
  const auto fresh = Save({first});
  EXPECT_EQ(fresh[0].outcome, Outcome::kHit);
  EXPECT_FALSE(fresh[0].existed);
  const auto again = Save({MakeFrame(1, 70000, 2)});
  EXPECT_EQ(again[0].outcome, Outcome::kHit);
  EXPECT_TRUE(again[0].existed);
  EXPECT_EQ(tier_->stats().frames, 1u);
  ExpectHit(first);
}

TEST_P(TierContract, TheSameKeyTwiceInABatchIsSavedOnce) {
  const auto results = Save({MakeFrame(1, 9000), MakeFrame(1, 9000)});
  EXPECT_EQ(results[0].outcome, Outcome::kHit);
  EXPECT_EQ(results[1].outcome, Outcome::kHit);
  EXPECT_NE(results[0].existed, results[1].existed);
  EXPECT_EQ(tier_->stats().frames, 1u);
  ExpectHit(MakeFrame(1, 9000));
}

// last-good.
TEST_P(TierContract, ASaveThatIsNoFrameFailsAndLeavesNothing) {
  const Frame good = MakeFrame(1, 5000);
  MustSave({good});
  const Frame empty = MakeFrame(2, 0);
  Frame shorter = MakeFrame(3, 5000);
  shorter.payload.pop_back();
  const auto results = Save({empty, shorter});
  for (const SaveResult& result : results) {
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    ASSERT_TRUE(result.error);
    EXPECT_EQ(result.error->code, Code::kInvalid) << result.error->what;
  }
  EXPECT_FALSE(Has(empty.info.key));
  EXPECT_FALSE(Has(shorter.info.key));
  EXPECT_EQ(tier_->stats().frames, 1u);
  ExpectHit(good);
}

TEST_P(TierContract, ErasedFramesAreGoneAndCanBeSavedAnew) {
  MustSave({MakeFrame(1, 5000, 1), MakeFrame(2, 5000)});
  tier_->Erase({{Key(1), Key(99)}});
  EXPECT_FALSE(Has(Key(1)));
  EXPECT_NE(Load({Info(1, 5000)})[0].result.outcome, Outcome::kHit);
  ExpectHit(MakeFrame(2, 5000));
  const Frame anew = MakeFrame(1, 5000, 2);
  MustSave({anew});
  ExpectHit(anew);
}

// whole-or-nothing. Writers disagree about the bytes of a key, which in life never happens: so readers can tell.
TEST_P(TierContract, ReadersAndWritersOfTheSameKeysNeverMixBytes) {
  constexpr uint64_t kKeys = 4;
  constexpr uint64_t kVariants = 3;
  constexpr uint64_t kBytes = 150000;
  std::map<std::pair<uint64_t, uint64_t>, Frame> frames;
  for (uint64_t n = 0; n < kKeys; ++n) {
    for (uint64_t v = 0; v < kVariants; ++v) frames[{n, v}] = MakeFrame(n, kBytes, v);
  }
  std::atomic<uint64_t> hits{0};             // Read after the threads have ended.
  std::atomic<uint64_t> writing{kVariants};  // Readers go on until the last writer is done, and once more.
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kVariants; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < 40; ++i) {
        const uint64_t n = random() % kKeys;
        for (const SaveResult& result : Save({frames.at({n, t})})) EXPECT_EQ(result.outcome, Outcome::kHit);
        if (random() % 4 == 0) tier_->Erase({{Key(n)}});
      }
      if (t == 0) Save({frames.at({0, t})});  // Something is left to be read.
      --writing;
    });
    threads.emplace_back([&, t] {
      std::mt19937_64 random(100 + t);
      for (uint64_t last = 0; last < kKeys;) {
        if (writing.load() == 0) ++last;
        const uint64_t n = last > 0 ? last - 1 : random() % kKeys;
        const Loaded loaded = Load({Info(n, kBytes)})[0];
        if (loaded.result.outcome != Outcome::kHit) {
          EXPECT_TRUE(loaded.result.reason == Reason::kNotFound || loaded.result.reason == Reason::kMissing)
              << ReasonName(loaded.result.reason);
          continue;
        }
        hits.fetch_add(1);
        const auto is_this = [&](uint64_t v) {
          const Frame& frame = frames.at({n, v});
          return loaded.Holds(frame.payload) && *loaded.result.hashes == HashSegments(frame.payload);
        };
        EXPECT_TRUE(is_this(0) || is_this(1) || is_this(2)) << "bytes of no writer";
      }
    });
  }
  for (std::thread& t : threads) t.join();
  EXPECT_GT(hits.load(), 0u);
  EXPECT_EQ(tier_->stats().quarantined, 0u);
}

TEST_P(TierContract, BuffersAreGivenBackOnceSettled) {
  auto payload = std::make_shared<Bytes>(Payload(1, 5000));
  const std::weak_ptr<Bytes> saved = payload;
  auto save = std::make_shared<SaveBatch>(1);
  std::vector<SaveItem> saves;
  saves.push_back({.info = Info(1, 5000), .payload = *payload, .owner = std::move(payload)});
  tier_->Save(std::move(saves), save);
  ASSERT_TRUE(save->WaitAll(Soon()));

  auto buffer = std::make_shared<Buffer>(5000);
  auto unused = std::make_shared<Buffer>(5000);
  const std::weak_ptr<Buffer> hit = buffer;
  const std::weak_ptr<Buffer> miss = unused;
  auto load = std::make_shared<LoadBatch>(2);
  std::vector<LoadItem> loads;
  loads.push_back({.key = Key(1), .space = kSpace, .into = buffer->payload(), .owner = std::move(buffer)});
  loads.push_back({.key = Key(2), .space = kSpace, .into = unused->payload(), .owner = std::move(unused)});
  tier_->Load(std::move(loads), Soon(), load);
  ASSERT_TRUE(load->WaitAll(Soon()));

  // The settling thread may still be on its way out.
  const TimePoint deadline = Soon();
  const auto held = [&] { return !saved.expired() || !hit.expired() || !miss.expired(); };
  while (held() && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_FALSE(held());
}

TEST_P(TierContract, ADeadlineThatHasPassedIsATimeout) {
  const Frame frame = MakeFrame(1, 5000);
  MustSave({frame});
  const auto loaded = Load({frame.info, frame.info}, std::chrono::steady_clock::now() - milliseconds(1));
  for (const Loaded& l : loaded) {
    EXPECT_EQ(l.result.outcome, Outcome::kMiss);
    EXPECT_EQ(l.result.reason, Reason::kTimeout) << ReasonName(l.result.reason);
  }
  ExpectHit(frame);
}

TEST_P(TierContract, ACancelledBatchIsSettledAllTheSame) {
  const Frame frame = MakeFrame(1, 5000);
  MustSave({frame});
  auto buffer = std::make_shared<Buffer>(5000);
  auto done = std::make_shared<LoadBatch>(1);
  done->Cancel();
  tier_->Load({{.key = Key(1), .space = kSpace, .into = buffer->payload(), .owner = buffer}}, Soon(), done);
  ASSERT_TRUE(done->WaitAll(Soon()));
  if (done->Poll(0)->outcome == Outcome::kHit) {
    EXPECT_TRUE(std::equal(frame.payload.begin(), frame.payload.end(), buffer->payload().begin()));
  } else {
    EXPECT_EQ(done->Poll(0)->reason, Reason::kCancelled);
  }
}

TEST_P(TierContract, StatisticsCountWhatIsThere) {
  const TierStats before = tier_->stats();
  EXPECT_EQ(before.frames, 0u);
  std::vector<Frame> frames;
  std::vector<Digest> keys;
  uint64_t payload_bytes = 0;
  for (uint64_t n = 0; n < 5; ++n) {
    frames.push_back(MakeFrame(n, 4097 * (n + 1)));
    keys.push_back(Key(n));
    payload_bytes += frames.back().payload.size();
  }
  MustSave(frames);
  const TierStats full = tier_->stats();
  EXPECT_EQ(full.frames, frames.size());
  EXPECT_GE(full.bytes - before.bytes, payload_bytes);
  EXPECT_LE(full.bytes - before.bytes, payload_bytes + frames.size() * 2 * 4096) << "a header and padding each";
  EXPECT_TRUE(full.bytes_max == 0 || full.bytes <= full.bytes_max);
  tier_->Erase(keys);
  const TimePoint deadline = Soon();  // Erase may end in the background.
  while (tier_->stats().bytes != before.bytes && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::yield();
  }
  EXPECT_EQ(tier_->stats().bytes, before.bytes);
  EXPECT_EQ(tier_->stats().frames, 0u);
}

TEST_P(TierContract, AScanListsWhatWasSavedOnce) {
  std::map<Digest, FrameInfo> expected;
  std::vector<Frame> frames;
  for (uint64_t n = 0; n < 23; ++n) {
    frames.push_back(MakeFrame(n, 1 + n * 777));
    expected.emplace(Key(n), frames.back().info);
  }
  EXPECT_TRUE(ScanAll(10).empty());
  MustSave(frames);
  for (const size_t limit : {1, 5, 23, 100}) EXPECT_EQ(ScanAll(limit), expected) << "by " << limit;
  tier_->Erase({{Key(3), Key(22)}});
  expected.erase(Key(3));
  expected.erase(Key(22));
  EXPECT_EQ(ScanAll(5), expected);
}

TEST_P(TierContract, AfterCloseEverythingIsSettledAndNothingIsAHit) {
  const Frame frame = MakeFrame(1, 5000);
  MustSave({frame});
  EXPECT_TRUE(tier_->Close(Soon()).clean);
  EXPECT_TRUE(tier_->Close(Soon()).clean) << "a second close has nothing to abandon";
  const auto refused = [](Reason reason) { return reason == Reason::kUnavailable || reason == Reason::kCancelled; };
  const LoadResult load = Load({frame.info})[0].result;
  EXPECT_NE(load.outcome, Outcome::kHit);
  EXPECT_TRUE(refused(load.reason)) << ReasonName(load.reason);
  const SaveResult save = Save({MakeFrame(2, 5000)})[0];
  EXPECT_NE(save.outcome, Outcome::kHit);
  EXPECT_TRUE(refused(save.reason)) << ReasonName(save.reason);
  tier_->Erase({{Key(1)}});
  tier_->stats();
}

// honest-close.
TEST_P(TierContract, CloseSettlesWhatIsOnItsWayAndKeepsWhatItCalledAHit) {
  std::vector<Frame> frames;
  for (uint64_t n = 0; n < 12; ++n) frames.push_back(MakeFrame(n, 1 << 20));
  const auto saves = StartSave(frames);
  const CloseReport report = tier_->Close(Soon());
  uint64_t abandoned = 0;
  for (size_t i = 0; i < frames.size(); ++i) {
    ASSERT_NE(saves->Poll(i), nullptr) << "not settled when Close returned";
    if (saves->Poll(i)->outcome != Outcome::kHit) ++abandoned;
  }
  EXPECT_EQ(report.clean, abandoned == 0);
  if (!tier_->info().durable) return;
  tier_.reset();
  Open();
  for (size_t i = 0; i < frames.size(); ++i) {
    if (saves->Poll(i)->outcome == Outcome::kHit) ExpectHit(frames[i]);
  }
}

TEST_P(TierContract, CloseWithoutTimeSettlesEverything) {
  std::vector<Frame> frames;
  for (uint64_t n = 0; n < 12; ++n) frames.push_back(MakeFrame(n, 1 << 20));
  const auto saves = StartSave(frames);
  tier_->Close(std::chrono::steady_clock::now());
  for (size_t i = 0; i < frames.size(); ++i) EXPECT_NE(saves->Poll(i), nullptr);
}

TEST_P(TierContract, WhatIsDurableIsFoundAgainAndNothingElse) {
  std::vector<Frame> frames;
  for (const uint64_t size : kSizes) frames.push_back(MakeFrame(frames.size(), size));
  MustSave(frames);
  const auto listed = ScanAll(100);
  tier_->Close(Soon());
  tier_.reset();
  Open();
  if (!tier_->info().durable) {
    EXPECT_EQ(tier_->stats().frames, 0u);
    EXPECT_EQ(tier_->stats().bytes, 0u);
    return;
  }
  EXPECT_EQ(tier_->stats().frames, frames.size());
  EXPECT_EQ(ScanAll(100), listed);
  for (const Frame& frame : frames) ExpectHit(frame);
}

// Against the simplest model there is: a map.
TEST_P(TierContract, ARandomSequenceEqualsAMap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::map<uint64_t, Frame> model;
  for (int step = 0; step < 300; ++step) {
    const uint64_t n = random() % 12;
    switch (random() % 3) {
      case 0: {
        const Frame frame = MakeFrame(n, 1 + random() % 20000, random());
        const SaveResult result = Save({frame}, random() % 2 == 0)[0];
        ASSERT_EQ(result.outcome, Outcome::kHit) << "step " << step;
        ASSERT_EQ(result.existed, model.contains(n)) << "step " << step;
        model.emplace(n, frame);
        break;
      }
      case 1:
        if (model.contains(n)) {
          ExpectHit(model.at(n));
        } else {
          ASSERT_EQ(Load({Info(n, 4096)})[0].result.outcome, Outcome::kMiss);
        }
        break;
      case 2:
        if (random() % 2 == 0) {
          tier_->Erase({{Key(n)}});
          model.erase(n);
        }
        break;
    }
    ASSERT_EQ(Has(Key(n)), model.contains(n)) << "step " << step;
    ASSERT_EQ(tier_->stats().frames, model.size()) << "step " << step;
    uint64_t bytes = 0;  // Payloads padded; at rest with a header before them.
    for (const auto& [key, frame] : model) {
      bytes += (tier_->info().durable ? 4096 : 0) + (frame.payload.size() + 4095) / 4096 * 4096;
    }
    const TimePoint deadline = Soon();  // Erase may end in the background.
    while (tier_->stats().bytes != bytes && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    ASSERT_EQ(tier_->stats().bytes, bytes) << "step " << step;
  }
}

INSTANTIATE_TEST_SUITE_P(Tiers, TierContract, testing::ValuesIn(AllTiers()),
                         [](const testing::TestParamInfo<TierCase>& tier) { return tier.param.name; });

}  // namespace
}  // namespace terrace
