// Would catch: a queue that grows without bound before a slow disk, an engine that waits for it, chunks that are
// neither written nor counted as dropped; hits and misses that do not add up to what was asked, by tier or by reason;
// RAM that counts bytes nobody has, or pins what nobody holds; books that change though nothing happens; what arrived
// in time thrown away.
#include <gtest/gtest.h>

#include <atomic>
#include <cstring>
#include <deque>
#include <random>
#include <sstream>
#include <string>
#include <thread>

#include "terrace/metrics.h"
#include "terrace/store.h"
#include "tests/support/memory_tier.h"
#include "tests/support/step_executor.h"
#include "tier/fault_tier.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

TimePoint Soon() { return std::chrono::steady_clock::now() + 60s; }  // A failure, not a measure.

FrameInfo ChunkOf(uint8_t chain_low, uint8_t chain_high, uint32_t position, uint64_t bytes) {
  const auto name = [&](uint32_t at) {
    Digest d;
    d.bytes[0] = chain_low;
    d.bytes[1] = chain_high;
    d.bytes[2] = static_cast<uint8_t>(at);
    d.bytes[31] = 1;
    return d;
  };
  FrameInfo info;
  info.space = name(255);
  info.key = name(position);
  info.parent = position == 0 ? info.space : name(position - 1);
  info.first_token = position * 256;
  info.token_count = 256;
  info.payload_bytes = bytes;
  return info;
}

// Settles one save a second.
class SinkTier final : public Tier {
 public:
  explicit SinkTier(Executor& executor) : executor_(executor) { Tick(); }
  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    for (size_t i = 0; i < keys.size(); ++i) present[i] = stored.contains(keys[i]);
  }
  void Load(std::vector<LoadItem>, TimePoint, std::shared_ptr<LoadBatch>) override { FAIL(); }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    waiting_.emplace_back(std::move(items.at(0)), std::move(done));
  }
  void Erase(std::span<const Digest>) override {}
  Result<ScanPage> Scan(const std::string&, size_t) override { return ScanPage{}; }
  TierStats stats() const override { return {}; }
  CloseReport Close(TimePoint) override {
    while (!waiting_.empty()) Settle({.outcome = Outcome::kDeclined, .reason = Reason::kCancelled});
    return {};
  }
  std::map<Digest, FrameInfo> stored;

 private:
  void Tick() {
    executor_.PostAfter(1s, [this] { Tick(); });
    if (waiting_.empty()) return;
    const FrameInfo& info = waiting_.front().first.info;
    EXPECT_TRUE(info.parent == info.space || stored.contains(info.parent));
    stored.emplace(info.key, info);
    Settle({.outcome = Outcome::kHit});
  }
  void Settle(const SaveResult& result) {
    const auto [item, done] = std::move(waiting_.front());
    waiting_.pop_front();
    done->Settle(0, result);
  }
  Executor& executor_;
  const TierInfo info_{.name = "sink"};
  std::deque<std::pair<SaveItem, std::shared_ptr<SaveBatch>>> waiting_;
};

uint64_t CountOf(Metrics& metrics, const char* name, const std::string& tier, Reason reason) {
  Labels labels = {{"reason", ReasonName(reason)}};
  if (!tier.empty()) labels.insert(labels.begin(), {"tier", tier});
  return metrics.GetCounter(name, "", labels).value();
}

// D23. Nothing but Advance lets time pass or work be done, so no call of the store could have waited for either.
TEST(StoreFaults, ASourceAHundredTimesFasterThanTheDiskIsBoundedCountedAndNeverWaits) {
  constexpr uint64_t kChunk = 1 << 20;
  constexpr uint64_t kLimit = 16 << 20;
  ManualClock clock;
  StepExecutor executor(clock);
  Metrics metrics;
  StoreOptions options;
  options.ram_bytes_max = 64 << 20;
  options.write_behind_bytes_max = kLimit;
  options.executor = &executor;
  std::vector<std::unique_ptr<Tier>> tiers;
  tiers.push_back(std::make_unique<SinkTier>(executor));
  SinkTier& sink = static_cast<SinkTier&>(*tiers.back());
  const auto store = OpenStore(options, std::move(tiers), metrics).value();
  const auto dropped = [&] {
    uint64_t all = 0;
    for (int i = 1; i < kReasonCount; ++i) {
      all += CountOf(metrics, "terrace_saves_dropped_total", "sink", static_cast<Reason>(i));
    }
    return all;
  };

  uint32_t offered = 0;
  for (int tenth = 0; tenth < 300; ++tenth) {
    for (int i = 0; i < 10; ++i, ++offered) {  // 100 MiB a second, in prompts of 20 chunks.
      const uint32_t chain = offered / 20;
      Result<SaveSlot> slot = store->BeginSave(
          ChunkOf(static_cast<uint8_t>(chain), static_cast<uint8_t>(chain >> 8), offered % 20, kChunk));
      ASSERT_TRUE(slot) << slot.error().what;
      store->Commit(*std::move(slot));
    }
    executor.Advance(100ms);
    const auto queued = metrics.GetGauge("terrace_write_behind_bytes", "", {{"tier", "sink"}}).value();
    ASSERT_LE(queued, static_cast<int64_t>(kLimit));
    ASSERT_LE(store->ram_stats().pinned_bytes, kLimit);
    ASSERT_EQ(sink.stored.size() + store->pending_saves() + dropped(), offered);
  }
  EXPECT_GE(sink.stored.size(), 29u);  // The sink was never idle.
  EXPECT_GT(dropped(), 2900u);

  const CloseReport report = store->Close(std::chrono::steady_clock::now());
  EXPECT_GT(report.abandoned, 0u);
  EXPECT_EQ(sink.stored.size() + dropped(), offered);
}

struct Tally {
  std::array<std::atomic<uint64_t>, 3> hits{};
  std::array<std::atomic<uint64_t>, kReasonCount> misses{};
  std::atomic<uint64_t> asked{0};
};

constexpr uint64_t kChunkBytes = 10'000;
constexpr int kChains = 6;
constexpr uint32_t kLength = 12;
constexpr uint64_t kPendingMax = 8;

void Traffic(Store& store, const std::vector<Tier*>& lower, uint64_t seed, Tally& tally) {
  std::mt19937_64 random(seed);
  for (int turn = 0; turn < 250; ++turn) {
    const auto chain = static_cast<uint8_t>(random() % kChains);
    const auto length = static_cast<uint32_t>(1 + random() % kLength);
    std::vector<Digest> keys;
    for (uint32_t i = 0; i < length; ++i) keys.push_back(ChunkOf(chain, 0, i, kChunkBytes).key);
    const FrameInfo first = ChunkOf(chain, 0, 0, kChunkBytes);
    const auto job = store.Load(first.space, keys, kChunkBytes, Soon());
    uint32_t done = 0;
    for (; done < length; ++done) {
      // Now and then with no patience at all.
      const LoadJob::Item item = job->Wait(done, random() % 16 == 0 ? TimePoint::min() : Soon());
      ++tally.asked;
      if (item.outcome != Outcome::kHit) {
        ++tally.misses[static_cast<size_t>(item.reason)];
        break;
      }
      ++tally.hits[item.tier];
      EXPECT_EQ(item.lease.bytes[17], static_cast<std::byte>(chain * 16 + done));
    }
    for (; done < length; ++done) {
      if (!store.Needs(keys[done])) continue;
      Result<SaveSlot> slot = store.BeginSave(ChunkOf(chain, 0, done, kChunkBytes));
      if (!slot) break;
      std::memset(slot->bytes.data(), static_cast<int>(chain * 16 + done), kChunkBytes);
      store.Commit(*std::move(slot));
    }
    // Else four quick clients are done before the store's thread has its first turn.
    const TimePoint patience = Soon();
    while (store.pending_saves() > kPendingMax && std::chrono::steady_clock::now() < patience)
      std::this_thread::yield();
    if (random() % 8 == 0) lower[random() % lower.size()]->Erase(std::span(&keys[random() % length], 1));
  }
}

// Asks with no patience for what can't come yet. Of so many at least one is not refused by an injected fault.
void WaitInVain(Store& store, MemoryTier& tier, Tally& tally) {
  tier.Hold();
  for (uint32_t n = 0; n < 16; ++n) {
    const auto chain = static_cast<uint8_t>(n / kLength);
    const uint32_t at = n % kLength;
    const FrameInfo info = ChunkOf(chain, 0, at, kChunkBytes);
    tier.Put(info, std::vector<std::byte>(kChunkBytes, static_cast<std::byte>(chain * 16 + at)));
    const LoadJob::Item item =
        store.Load(info.space, std::span(&info.key, 1), kChunkBytes, Soon())->Wait(0, TimePoint::min());
    ++tally.asked;
    ASSERT_NE(item.outcome, Outcome::kHit);
    ++tally.misses[static_cast<size_t>(item.reason)];
  }
  tier.Release();
}

TEST(StoreFaults, UnderRandomTrafficWithFaultsTheBooksBalance) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  ThreadPool timers("timers", 2);
  Metrics metrics;
  std::vector<std::unique_ptr<Tier>> tiers;
  std::vector<Tier*> lower;
  std::vector<MemoryTier*> memories;
  for (const char* name : {"memory0", "memory1"}) {
    auto memory = std::make_unique<MemoryTier>(name);
    lower.push_back(memory.get());
    memories.push_back(memory.get());
    FaultSpec spec =
        FaultSpec::Parse("load.error=0.05,load.corrupt=0.05,save.error=0.05,save.enospc=0.02,contains.lie=0.02")
            .value();
    spec.seed = seed;
    tiers.push_back(std::make_unique<FaultTier>(std::move(memory), spec, timers));
  }
  StoreOptions options;
  options.ram_bytes_max = 40 * 12'288;  // Half of what there is.
  options.write_behind_bytes_max = 20 * kChunkBytes;
  const auto store = OpenStore(options, std::move(tiers), metrics).value();
  Tally tally;
  WaitInVain(*store, *memories[0], tally);
  std::vector<std::thread> clients;
  for (uint64_t i = 0; i < 4; ++i) {
    clients.emplace_back([&, i] { Traffic(*store, lower, seed + i, tally); });
  }
  for (std::thread& client : clients) client.join();
  // Once, and not for good: now and then the store checks what is in RAM, and holds each chunk while it does.
  const auto idle = [&] { return store->pending_saves() == 0 && store->ram_stats().pinned_bytes == 0; };
  bool was_idle = idle();
  for (const TimePoint patience = Soon(); !was_idle && std::chrono::steady_clock::now() < patience;) {
    std::this_thread::yield();
    was_idle = idle();
  }
  EXPECT_TRUE(was_idle) << store->pending_saves() << " saves, pinned bytes: " << store->ram_stats().pinned_bytes;

  uint64_t answered = 0;
  for (size_t t = 0; t < store->tier_names().size(); ++t) {
    const std::string& name = store->tier_names()[t];
    EXPECT_EQ(metrics.GetCounter("terrace_chunk_hits_total", "", {{"tier", name}}).value(), tally.hits[t]) << name;
    EXPECT_EQ(metrics.GetCounter("terrace_loaded_bytes_total", "", {{"tier", name}}).value(),
              tally.hits[t] * kChunkBytes)
        << name;
    answered += tally.hits[t];
    if (t > 0) {
      EXPECT_EQ(metrics.GetGauge("terrace_write_behind_bytes", "", {{"tier", name}}).value(), 0) << name;
    }
  }
  EXPECT_EQ(tally.misses[static_cast<size_t>(Reason::kNone)], 0u);
  for (int i = 1; i < kReasonCount; ++i) {
    const auto reason = static_cast<Reason>(i);
    const uint64_t misses = tally.misses[static_cast<size_t>(i)];
    EXPECT_EQ(CountOf(metrics, "terrace_chunk_misses_total", "", reason), misses) << ReasonName(reason);
    answered += misses;
  }
  EXPECT_EQ(answered, tally.asked);
  EXPECT_GT(tally.hits[0], 0u);
  EXPECT_GT(tally.misses[static_cast<size_t>(Reason::kTimeout)], 0u);

  uint64_t frames = 0;
  for (uint8_t chain = 0; chain < kChains; ++chain) {
    for (uint32_t i = 0; i < kLength; ++i) {
      const Digest key = ChunkOf(chain, 0, i, kChunkBytes).key;
      const PrefixHit hit = store->Lookup(std::span(&key, 1));
      frames += hit.chunks == 1 && hit.tier[0] == 0;
    }
  }
  EXPECT_EQ(store->ram_stats().frames, frames);
  EXPECT_EQ(store->ram_stats().bytes, frames * 12'288);

  const auto text = [&] {
    std::istringstream lines(metrics.Text());
    std::string kept;
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("terrace_tier_pinned_bytes")) kept += line + "\n";
    }
    return kept;
  };
  const std::string before = text();
  for (int i = 0; i < 1000; ++i) (void)store->health();
  EXPECT_EQ(text(), before);
  timers.Stop();
}

class Deadlines : public testing::Test {
 protected:
  Deadlines() {
    auto memory = std::make_unique<MemoryTier>();
    tier = memory.get();
    std::vector<std::unique_ptr<Tier>> tiers;
    tiers.push_back(std::move(memory));
    store = OpenStore({.ram_bytes_max = 1 << 20}, std::move(tiers), metrics).value();
    for (uint32_t i = 0; i < 3; ++i) {
      const FrameInfo info = ChunkOf(1, 0, i, kChunkBytes);
      tier->Put(info, std::vector<std::byte>(kChunkBytes, static_cast<std::byte>(i)));
      keys.push_back(info.key);
      space = info.space;
    }
  }
  Metrics metrics;
  std::unique_ptr<Store> store;
  MemoryTier* tier = nullptr;
  std::vector<Digest> keys;
  Digest space;
};

TEST_F(Deadlines, WhatArrivedBeforeTheDeadlineIsUsedAfterIt) {
  const auto head = store->Load(space, std::span(keys).first(2), kChunkBytes, Soon());
  for (size_t i = 0; i < 2; ++i) ASSERT_EQ(head->Wait(i, Soon()).outcome, Outcome::kHit);
  tier->Hold();
  const auto job = store->Load(space, keys, kChunkBytes, std::chrono::steady_clock::now() + 20ms);
  EXPECT_EQ(job->Wait(2, Soon()).reason, Reason::kTimeout);  // Returns at the deadline of the load.
  EXPECT_EQ(job->Wait(0, Soon()).outcome, Outcome::kHit);
  EXPECT_EQ(job->Wait(1, Soon()).outcome, Outcome::kHit);
  tier->Release();
}

TEST_F(Deadlines, WhoHasMoreTimeIsNotHeldToTheDeadlineOfWhoCameFirst) {
  tier->Hold();
  tier->FailLoads(Reason::kTimeout, 1);
  const auto hasty = store->Load(space, std::span(keys).first(1), kChunkBytes, Soon());
  const auto patient = store->Load(space, std::span(keys).first(1), kChunkBytes, Soon());
  tier->Release();
  EXPECT_EQ(patient->Wait(0, Soon()).outcome, Outcome::kHit);
  EXPECT_EQ(tier->loads(), 2u);
}

// D9.
TEST_F(Deadlines, WhatIsGoneBetweenLookupAndLoadIsMissingOnceAndClaimedNoMore) {
  EXPECT_EQ(store->Lookup(keys).chunks, 3u);
  tier->Hold();
  const auto job = store->Load(space, keys, kChunkBytes, Soon());
  ASSERT_TRUE(tier->WaitForLoads(3, Soon()));
  tier->Erase(std::span(keys).subspan(1, 1));
  tier->Release();
  EXPECT_EQ(job->Wait(0, Soon()).outcome, Outcome::kHit);
  EXPECT_EQ(job->Wait(1, Soon()).reason, Reason::kMissing);
  EXPECT_EQ(store->Lookup(keys).chunks, 1u);
  EXPECT_EQ(tier->loads(), 3u);
}

}  // namespace
}  // namespace terrace
