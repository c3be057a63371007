// Would catch: a caller with no thread to wait on that is never told, told before there is anything to take, or told
// under a lock; a commit whose end nobody hears of.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <future>
#include <thread>

#include "base/hash.h"
#include "terrace/metrics.h"
#include "terrace/store.h"
#include "tests/support/forwarding_tier.h"
#include "tests/support/memory_tier.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kChunkBytes = 100'000;

TimePoint Soon() { return std::chrono::steady_clock::now() + 30s; }  // A failure, not a measure.

class StoreAsync : public testing::Test {
 protected:
  StoreAsync() {
    auto tier = std::make_unique<MemoryTier>();
    lower = tier.get();
    std::vector<std::unique_ptr<Tier>> tiers;
    tiers.push_back(std::move(tier));
    store = OpenStore({.ram_bytes_max = 16 << 20}, std::move(tiers), metrics).value();
    info.space = Sha256Of("space");
    info.key = Sha256Of("key");
    info.parent = info.space;
    info.payload_bytes = kChunkBytes;
  }

  Metrics metrics;
  FrameInfo info;
  const std::vector<std::byte> bytes = std::vector<std::byte>(kChunkBytes, std::byte{7});
  MemoryTier* lower = nullptr;
  std::unique_ptr<Store> store;
};

TEST_F(StoreAsync, TellsOnceThatAChunkHasLanded) {
  lower->Put(info, bytes);
  lower->Hold();
  const auto job = store->Load(info.space, {&info.key, 1}, kChunkBytes, Soon());
  std::promise<void> told;  // A second call would throw.
  EXPECT_FALSE(job->ReadyOr(0, [&] { told.set_value(); }));
  std::future<void> landed = told.get_future();
  EXPECT_EQ(landed.wait_for(0s), std::future_status::timeout);
  lower->Release();
  ASSERT_EQ(landed.wait_until(Soon()), std::future_status::ready);
  ASSERT_TRUE(job->ReadyOr(0, [] { FAIL(); }));
  const LoadJob::Item item = job->Wait(0, TimePoint::min());
  ASSERT_EQ(item.outcome, Outcome::kHit);
  EXPECT_EQ(*item.lease.hashes, HashSegments(item.lease.bytes));
  const RamMemory memory = store->ram_memory();
  EXPECT_GE(item.lease.bytes.data(), memory.bytes.data());
  EXPECT_LE(&item.lease.bytes.back(), &memory.bytes.back());
}

TEST_F(StoreAsync, AMissIsReadyAtOnce) {
  const auto job = store->Load(info.space, {&info.key, 1}, kChunkBytes, Soon());
  ASSERT_TRUE(job->ReadyOr(0, [] { FAIL(); }));
  EXPECT_EQ(job->Wait(0, TimePoint::min()).reason, Reason::kNotFound);
}

// Whoever asks for the same chunk with less time begins the load, and its end is not the other's.
TEST_F(StoreAsync, TheLoadOfAnAskerWithLessTimeIsBegunAnew) {
  lower->Put(info, bytes);
  lower->FailLoads(Reason::kTimeout, 1);
  lower->Hold();
  const auto hasty = store->Load(info.space, {&info.key, 1}, kChunkBytes, Soon());
  const auto patient = store->Load(info.space, {&info.key, 1}, kChunkBytes, Soon());
  std::promise<void> told;
  EXPECT_FALSE(patient->ReadyOr(0, [&] { told.set_value(); }));
  lower->Release();
  ASSERT_EQ(told.get_future().wait_until(Soon()), std::future_status::ready);
  std::promise<void> again;
  if (!patient->ReadyOr(0, [&] { again.set_value(); })) {
    ASSERT_EQ(again.get_future().wait_until(Soon()), std::future_status::ready);
  }
  EXPECT_EQ(patient->Wait(0, TimePoint::min()).outcome, Outcome::kHit);
}

// Claims every chunk and settles a load within the call, as a breaker that has just opened does.
class RefusingTier final : public ForwardingTier {
 public:
  RefusingTier() : ForwardingTier(std::make_unique<MemoryTier>()) {}
  void Contains(std::span<const Digest>, std::span<uint8_t> present) override { std::ranges::fill(present, 1); }
  void Load(std::vector<LoadItem> items, TimePoint, std::shared_ptr<LoadBatch> done) override {
    on_load(items.at(0).key);
    done->Settle(0, {.reason = Reason::kMissing});
  }
  std::function<void(const Digest& key)> on_load = [](const Digest&) {};
};

// Who waits for a load that another job begins is told by that job's thread. If it held its own job's lock meanwhile,
// two requests with a prefix in common could stop each other for ever.
TEST(StoreAsyncJobs, WhoIsToldMayAskAnyJob) {
  constexpr uint64_t kBytes = 1 << 20;
  Metrics metrics;
  auto tier = std::make_unique<RefusingTier>();
  RefusingTier& refusing = *tier;
  std::vector<std::unique_ptr<Tier>> tiers;
  tiers.push_back(std::move(tier));
  const auto store = OpenStore({.ram_bytes_max = 4 * kBytes}, std::move(tiers), metrics).value();
  const Digest space = Sha256Of("space");
  const std::vector<Digest> keys = {Sha256Of("0"), Sha256Of("1"), Sha256Of("2"), Sha256Of("3")};
  const auto job = store->Load(space, keys, kBytes, Soon());  // Begins two: half of RAM.
  std::shared_ptr<LoadJob> joined;
  std::promise<void> answered;
  std::thread asker;
  bool told = false;
  refusing.on_load = [&](const Digest& key) {
    if (key != keys[2]) return;
    joined = store->Load(space, {&key, 1}, kBytes, Soon());
    EXPECT_FALSE(joined->ReadyOr(0, [&] {
      told = true;
      asker = std::thread([&] {
        EXPECT_TRUE(job->ReadyOr(1, [] { FAIL(); }));
        answered.set_value();
      });
      EXPECT_EQ(answered.get_future().wait_until(Soon()), std::future_status::ready);
    }));
  };
  EXPECT_TRUE(job->ReadyOr(1, [] { FAIL(); }));  // Begins the third.
  ASSERT_TRUE(told);
  asker.join();
}

TEST_F(StoreAsync, ACommitSaysThatItsChunkIsVisible) {
  SaveSlot slot = store->BeginSave(info).value();
  std::memcpy(slot.bytes.data(), bytes.data(), bytes.size());
  std::promise<bool> visible;
  store->Commit(std::move(slot), [&](bool is) { visible.set_value(is); });
  ASSERT_TRUE(visible.get_future().get());
  EXPECT_EQ(store->Lookup({&info.key, 1}).chunks, 1u);

  SaveSlot late = store->BeginSave(info).value();
  store->Close(Soon());
  std::promise<bool> refused;
  store->Commit(std::move(late), [&](bool is) { refused.set_value(is); });
  EXPECT_FALSE(refused.get_future().get());
}

}  // namespace
}  // namespace terrace
