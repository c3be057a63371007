// One suite for every kind of client. Would catch: bytes of another chunk or space, a hit before its bytes are there, a
// caller that is held up or never told, a buffer touched after its item was settled, RAM that stays taken by leases,
// segments or pins that are gone, a prefix that its own staging keeps out of RAM, calls left open by a close.
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "base/hash.h"
#include "client/local_client.h"
#include "client/node_client.h"
#include "node/server.h"
#include "terrace/client.h"
#include "terrace/metrics.h"
#include "tests/support/memory_tier.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kChunkBytes = 300'000;

TimePoint Now() { return std::chrono::steady_clock::now(); }
TimePoint Soon() { return Now() + 30s; }  // A failure, not a measure.

struct Chain {
  explicit Chain(uint8_t name, size_t length) : space(Sha256Of(std::string(1, static_cast<char>(name)))) {
    KeyChain chain(space, 2);
    const std::vector<int32_t> tokens(2 * length, name);
    chain.Extend(tokens);
    keys = chain.keys();
  }
  FrameInfo Info(size_t i) const {
    FrameInfo info;
    info.space = space;
    info.key = keys[i];
    info.parent = i == 0 ? space : keys[i - 1];
    info.first_token = static_cast<uint32_t>(2 * i);
    info.token_count = 2;
    info.payload_bytes = kChunkBytes;
    return info;
  }
  std::vector<std::byte> Bytes(size_t i) const {
    std::mt19937_64 random(space.bytes[0] * 1000u + i);
    std::vector<std::byte> bytes(kChunkBytes);
    for (size_t at = 0; at + 8 <= bytes.size(); at += 8) {
      const uint64_t word = random();
      std::memcpy(&bytes[at], &word, 8);
    }
    return bytes;
  }
  LoadRequest Request(TimePoint deadline = Soon()) const {
    return {.space = space, .keys = keys, .payload_bytes = kChunkBytes, .deadline = deadline};
  }

  Digest space;
  std::vector<Digest> keys;
};

// Room for the chunks of a load, each in three pieces.
struct Buffers {
  explicit Buffers(size_t chunks) : bytes(std::make_shared<std::vector<std::byte>>(chunks * kChunkBytes)) {}
  void GiveTo(LoadRequest& request) const {
    for (size_t i = 0; i < request.keys.size(); ++i) {
      const std::span<std::byte> all = std::span(*bytes).subspan(i * kChunkBytes, kChunkBytes);
      request.into.push_back({all.first(1000), all.subspan(1000, 100'000), all.subspan(101'000)});
    }
    request.owner = bytes;
  }
  std::vector<std::byte> Chunk(size_t i) const {
    const auto begin = bytes->begin() + static_cast<ptrdiff_t>(i * kChunkBytes);
    return {begin, begin + kChunkBytes};
  }
  std::shared_ptr<std::vector<std::byte>> bytes;
};

enum class Kind { kInProcess, kNode };

class ClientTest : public testing::TestWithParam<Kind> {
 protected:
  ~ClientTest() override {
    client.reset();
    server.reset();
  }
  void Open(uint64_t ram_bytes = 64 << 20, size_t calls_max = 4096) {
    auto tier = std::make_unique<MemoryTier>();
    lower = tier.get();
    std::vector<std::unique_ptr<Tier>> tiers;
    tiers.push_back(std::move(tier));
    store = OpenStore({.ram_bytes_max = ram_bytes}, std::move(tiers), metrics).value();
    if (GetParam() == Kind::kInProcess) {
      client = NewLocalClient({.calls_max = calls_max}, *store, store);
      return;
    }
    const std::string socket = "@terrace-client-test-" + std::to_string(getpid());
    Result<Listener> listener = ListenAt(socket);
    ASSERT_TRUE(listener) << listener.error().what;
    auto started = NodeServer::Start({.segments_bytes_max = 16 << 20}, std::move(listener->fd), *store, metrics);
    ASSERT_TRUE(started) << started.error().what;
    server = *std::move(started);
    client = NewNodeClient({.calls_max = calls_max, .node_wait = 30s}, socket);
    ASSERT_TRUE(client->connected()) << "from the first call on";
  }
  void PutBelow(const Chain& chain) {
    for (size_t i = 0; i < chain.keys.size(); ++i) lower->Put(chain.Info(i), chain.Bytes(i));
  }
  void Save(const Chain& chain) {
    const auto bytes = std::make_shared<std::vector<std::vector<std::byte>>>();
    std::vector<SaveChunk> chunks;
    for (size_t i = 0; i < chain.keys.size(); ++i) bytes->push_back(chain.Bytes(i));
    for (size_t i = 0; i < chain.keys.size(); ++i) {
      const std::span<const std::byte> all((*bytes)[i]);
      chunks.push_back({chain.Info(i), {all.first(5), all.subspan(5)}});
    }
    const auto call = client->Save(std::move(chunks), bytes);
    ASSERT_TRUE(call->Wait(Soon()));
    for (size_t i = 0; i < chain.keys.size(); ++i) {
      ASSERT_EQ(call->Poll(i)->outcome, Outcome::kHit) << i << " " << ReasonName(call->Poll(i)->reason);
    }
  }
  PrefixHit Lookup(const std::vector<Digest>& keys) {
    const auto call = client->Lookup(keys);
    EXPECT_TRUE(call->Wait(Soon()));
    return call->done() ? *call->Poll(0) : PrefixHit{};
  }
  void ExpectLoads(const Chain& chain, std::optional<uint8_t> tier = {}) {
    LoadRequest request = chain.Request();
    const Buffers buffers(chain.keys.size());
    buffers.GiveTo(request);
    const auto call = client->Load(std::move(request));
    ASSERT_TRUE(call->Wait(Soon()));
    for (size_t i = 0; i < chain.keys.size(); ++i) {
      const LoadedChunk& chunk = *call->Poll(i);
      ASSERT_EQ(chunk.outcome, Outcome::kHit) << i << " " << ReasonName(chunk.reason);
      EXPECT_EQ(chunk.tier, tier.value_or(chunk.tier)) << i;
      EXPECT_EQ(chunk.info, chain.Info(i));
      ASSERT_EQ(buffers.Chunk(i), chain.Bytes(i)) << i;
    }
  }
  ClientStats Stats() {
    const auto call = client->Stats();
    EXPECT_TRUE(call->Wait(Soon()));
    return *call->Poll(0);
  }
  // Until `is` is true of the statistics.
  template <class Is>
  bool Becomes(const Is& is) {
    const TimePoint deadline = Soon();
    while (!is(Stats())) {
      if (Now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  Metrics metrics;  // Outlives the store.
  MemoryTier* lower = nullptr;
  std::shared_ptr<Store> store;
  std::unique_ptr<NodeServer> server;
  std::unique_ptr<Client> client;
};

TEST_P(ClientTest, WhatIsSavedIsFoundAndComesBackInPieces) {
  Open();
  const Chain chain(1, 5);
  EXPECT_EQ(Lookup(chain.keys).miss_reason, Reason::kNotFound);
  Save(chain);
  const PrefixHit hit = Lookup(chain.keys);
  EXPECT_EQ(hit.chunks, 5u);
  EXPECT_EQ(hit.tier, std::vector<uint8_t>(5, 0));
  EXPECT_EQ(hit.miss_reason, Reason::kNone);
  ExpectLoads(chain, 0);
  EXPECT_EQ(client->tier_names(), (std::vector<std::string>{"ram", "memory"}));
  EXPECT_TRUE(client->connected());
  ASSERT_TRUE(Becomes([](const ClientStats& stats) { return stats.pending_saves == 0; }));
  EXPECT_EQ(lower->size(), 5u);
}

TEST_P(ClientTest, SavingAgainWritesNothing) {
  Open();
  const Chain chain(1, 2);
  Save(chain);
  ASSERT_TRUE(Becomes([](const ClientStats& stats) { return stats.pending_saves == 0; }));
  const auto bytes = std::make_shared<std::vector<std::byte>>(chain.Bytes(0));
  const auto call = client->Save({{chain.Info(0), {*bytes}}}, bytes);
  ASSERT_TRUE(call->Wait(Soon()));
  EXPECT_EQ(call->Poll(0)->outcome, Outcome::kHit);
  EXPECT_TRUE(call->Poll(0)->existed);
  const auto room = client->BeginSave({chain.Info(1)});
  ASSERT_TRUE(room->Wait(Soon()));
  EXPECT_TRUE(room->Poll(0)->existed);
  EXPECT_TRUE(room->Poll(0)->bytes.empty());
}

TEST_P(ClientTest, ASegmentIsFilledInPlaceAndCommitted) {
  Open();
  const Chain chain(1, 2);
  const auto room = client->BeginSave({chain.Info(0), chain.Info(1)});
  ASSERT_TRUE(room->Wait(Soon()));
  std::vector<SaveSegment> segments = {*room->Poll(0), *room->Poll(1)};
  for (size_t i = 0; i < segments.size(); ++i) {
    ASSERT_EQ(segments[i].outcome, Outcome::kHit);
    ASSERT_EQ(segments[i].bytes.size(), kChunkBytes);
    std::memcpy(segments[i].bytes.data(), chain.Bytes(i).data(), kChunkBytes);
  }
  EXPECT_EQ(Lookup(chain.keys).chunks, 0u);
  const auto saved = client->Commit(std::move(segments));
  ASSERT_TRUE(saved->Wait(Soon()));
  EXPECT_EQ(saved->Poll(1)->outcome, Outcome::kHit);
  ExpectLoads(chain, 0);
}

TEST_P(ClientTest, SegmentsThatAreDroppedGiveTheirRoomBack) {
  Open(2 << 20);
  const Chain chain(1, 1);
  for (int round = 0; round < 30; ++round) {
    const auto room = client->BeginSave({chain.Info(0)});
    ASSERT_TRUE(room->Wait(Soon()));
    ASSERT_EQ(room->Poll(0)->outcome, Outcome::kHit) << round << " " << ReasonName(room->Poll(0)->reason);
  }
  Save(chain);
}

TEST_P(ClientTest, ALoadFromBelowIsToldOfAndCanBePolled) {
  Open();
  const Chain chain(1, 3);
  PutBelow(chain);
  EXPECT_EQ(Lookup(chain.keys).tier, std::vector<uint8_t>(3, 1));
  lower->Hold();
  client->ClearEvent();
  LoadRequest request = chain.Request();
  const Buffers buffers(3);
  buffers.GiveTo(request);
  const auto call = client->Load(std::move(request));
  ASSERT_TRUE(lower->WaitForLoads(1, Soon()));
  EXPECT_EQ(call->Poll(0), nullptr);
  EXPECT_FALSE(call->done());
  pollfd event{.fd = client->event_fd(), .events = POLLIN};
  lower->Release();
  while (!call->done()) {
    ASSERT_EQ(poll(&event, 1, 30'000), 1);
    client->ClearEvent();
  }
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(call->Poll(i)->tier, 1);
    EXPECT_EQ(buffers.Chunk(i), chain.Bytes(i));
  }
  EXPECT_EQ(Lookup(chain.keys).tier, std::vector<uint8_t>(3, 0));
}

TEST_P(ClientTest, WhatIsNotThereByTheDeadlineIsAMissAndItsBufferIsLeftAlone) {
  Open();
  const Chain chain(1, 2);
  PutBelow(chain);
  lower->Hold();
  LoadRequest request = chain.Request(Now() + 20ms);
  const Buffers buffers(2);
  buffers.GiveTo(request);
  const auto call = client->Load(std::move(request));
  ASSERT_TRUE(call->Wait(Soon()));
  EXPECT_EQ(call->Poll(0)->reason, Reason::kTimeout);
  EXPECT_EQ(call->Poll(1)->reason, Reason::kTimeout);
  EXPECT_EQ(call->Poll(0)->outcome, Outcome::kMiss);
  lower->Release();
  ExpectLoads(chain);  // What came late is of use to the next one.
  EXPECT_EQ(buffers.Chunk(0), std::vector<std::byte>(kChunkBytes));
}

TEST_P(ClientTest, CancelSettlesAtOnceAndLetsGoOfTheBuffers) {
  Open();
  const Chain chain(1, 2);
  PutBelow(chain);
  lower->Hold();
  LoadRequest request = chain.Request();
  std::weak_ptr<std::vector<std::byte>> owner;
  {
    const Buffers buffers(2);
    buffers.GiveTo(request);
    owner = buffers.bytes;
  }
  const auto call = client->Load(std::move(request));
  EXPECT_FALSE(owner.expired());
  call->Cancel();
  ASSERT_TRUE(call->Wait(Soon()));
  EXPECT_EQ(call->Poll(1)->reason, Reason::kCancelled);
  const TimePoint deadline = Soon();
  while (!owner.expired() && Now() < deadline) std::this_thread::yield();
  EXPECT_TRUE(owner.expired());
  lower->Release();
}

TEST_P(ClientTest, DamageAndForeignSizesAndSpacesAreMissesWithTheirReason) {
  Open();
  const Chain chain(1, 1);
  PutBelow(chain);
  lower->FailLoads(Reason::kDamaged, 1);
  const auto damaged = client->Lease(chain.Request());
  ASSERT_TRUE(damaged->Wait(Soon()));
  EXPECT_EQ(damaged->Poll(0)->reason, Reason::kDamaged);
  ExpectLoads(chain, 1);
  LoadRequest other_space = chain.Request();
  other_space.space = Sha256Of("other");
  LoadRequest other_size = chain.Request();
  other_size.payload_bytes -= 8;
  for (LoadRequest* request : {&other_space, &other_size}) {
    const auto call = client->Lease(*request);
    ASSERT_TRUE(call->Wait(Soon()));
    EXPECT_EQ(call->Poll(0)->reason, Reason::kForeign);
  }
  LoadRequest no_room = chain.Request();
  const auto call = client->Load(no_room);
  ASSERT_TRUE(call->done());
  EXPECT_EQ(call->Poll(0)->reason, Reason::kForeign);
}

TEST_P(ClientTest, APrefixEndsWithItsFirstMissUnlessAskedOtherwise) {
  Open();
  const Chain chain(1, 4);
  for (const size_t i : {0, 1, 3}) lower->Put(chain.Info(i), chain.Bytes(i));
  LoadRequest request = chain.Request();
  request.stop_at_miss = false;
  const auto each = client->Prefetch(request);
  ASSERT_TRUE(each->Wait(Soon()));
  EXPECT_EQ(each->Poll(2)->reason, Reason::kNotFound);
  EXPECT_EQ(each->Poll(3)->outcome, Outcome::kHit);
  const auto prefix = client->Prefetch(chain.Request());
  ASSERT_TRUE(prefix->Wait(Soon()));
  EXPECT_EQ(prefix->Poll(1)->outcome, Outcome::kHit);
  EXPECT_EQ(prefix->Poll(3)->reason, Reason::kNotFound);
}

TEST_P(ClientTest, LeasedBytesStayWhileOthersComeAndGo) {
  Open(4 << 20);
  const Chain chain(1, 3);
  PutBelow(chain);
  auto call = client->Lease(chain.Request());
  ASSERT_TRUE(call->Wait(Soon()));
  for (uint8_t other = 2; other < 12; ++other) Save(Chain(other, 2));
  for (size_t i = 0; i < 3; ++i) {
    const LoadedChunk& chunk = *call->Poll(i);
    ASSERT_EQ(chunk.outcome, Outcome::kHit);
    ASSERT_EQ(chunk.lease.info, chain.Info(i));
    const auto expected = chain.Bytes(i);
    EXPECT_TRUE(std::ranges::equal(chunk.lease.bytes, expected));
  }
  EXPECT_GE(Stats().leased_bytes, 3 * kChunkBytes);
  call.reset();
  EXPECT_TRUE(Becomes([](const ClientStats& stats) { return stats.leased_bytes == 0 && stats.pending_saves == 0; }));
}

// Nothing is pinned longer than it takes to copy it.
TEST_P(ClientTest, APrefixMuchLargerThanRamIsLoadedThroughIt) {
  Open(4 << 20);
  const Chain chain(1, 60);
  PutBelow(chain);
  ExpectLoads(chain, 1);
}

TEST_P(ClientTest, PinnedChunksStayUntilTheyAreUnpinnedOrTheirTimeIsOver) {
  Open(4 << 20);  // Of which a quarter may be pinned.
  const Chain chain(1, 4);
  PutBelow(chain);
  const auto pinned = client->Pin(chain.Request(), 1h);
  ASSERT_TRUE(pinned->Wait(Soon()));
  EXPECT_EQ(pinned->Poll(2)->outcome, Outcome::kHit);
  EXPECT_EQ(pinned->Poll(3)->reason, Reason::kFull);
  EXPECT_EQ(Stats().pinned_bytes, 3 * kChunkBytes);
  for (uint8_t other = 2; other < 12; ++other) Save(Chain(other, 2));
  EXPECT_EQ(Lookup({chain.keys.data(), chain.keys.data() + 3}).tier, std::vector<uint8_t>(3, 0));
  client->Unpin({chain.keys[0], chain.keys[1]});
  EXPECT_TRUE(Becomes([](const ClientStats& stats) { return stats.pinned_bytes == kChunkBytes; }));
  const Chain brief(20, 1);
  PutBelow(brief);
  ASSERT_TRUE(client->Pin(brief.Request(), 1ms)->Wait(Soon()));
  EXPECT_TRUE(Becomes([](const ClientStats& stats) { return stats.pinned_bytes == kChunkBytes; }));
}

TEST_P(ClientTest, CallsAndTheirItemsAreBounded) {
  Open(64 << 20, 2);
  const Chain chain(1, 1);
  PutBelow(chain);
  lower->Hold();
  const auto first = client->Prefetch(chain.Request());
  const auto second = client->Prefetch(chain.Request());
  const auto third = client->Prefetch(chain.Request());
  ASSERT_TRUE(third->done());
  EXPECT_EQ(third->Poll(0)->reason, Reason::kFull);
  lower->Release();
  ASSERT_TRUE(first->Wait(Soon()) && second->Wait(Soon()));
  LoadRequest request = chain.Request();
  request.keys.resize(kCallItemsMax + 1);
  const auto large = client->Prefetch(std::move(request));
  ASSERT_TRUE(large->done());
  EXPECT_EQ(large->Poll(0)->reason, Reason::kFull);
  EXPECT_EQ(client->Prefetch({})->size(), 0u);
  EXPECT_TRUE(client->Prefetch({})->done());
  ExpectLoads(chain, 0);
}

TEST_P(ClientTest, AProbeAsksAndLooks) {
  Open();
  const Chain chain(1, 2);
  PutBelow(chain);
  const auto call = client->Probe(chain.keys, Soon());
  ASSERT_TRUE(call->Wait(Soon()));
  EXPECT_EQ(call->Poll(0)->chunks, 2u);
}

TEST_P(ClientTest, CloseSettlesWhatIsOpenAndRefusesTheRest) {
  Open();
  const Chain chain(1, 2);
  PutBelow(chain);
  lower->Hold();
  const auto open = client->Lease(chain.Request());
  client->Close(Now());
  ASSERT_TRUE(open->Wait(Soon()));
  EXPECT_EQ(open->Poll(0)->outcome, Outcome::kMiss);
  const auto late = client->Lease(chain.Request());
  ASSERT_TRUE(late->done());
  EXPECT_EQ(late->Poll(0)->reason, Reason::kUnavailable);
  EXPECT_EQ(Lookup(chain.keys).miss_reason, Reason::kUnavailable);
  client.reset();
  EXPECT_EQ(open->Poll(1)->outcome, Outcome::kMiss);  // Handles outlive their client.
}

TEST_P(ClientTest, ManyThreadsGetTheirOwnBytes) {
  Open(8 << 20);
  std::vector<std::thread> threads;
  for (uint8_t t = 0; t < 4; ++t) {
    threads.emplace_back([this, t] {
      for (int round = 0; round < 6; ++round) {
        const Chain own(static_cast<uint8_t>(10 + t), 3);
        const Chain shared(static_cast<uint8_t>(30 + round), 3);
        for (const Chain* chain : {&own, &shared}) {
          const auto bytes = std::make_shared<std::vector<std::vector<std::byte>>>();
          std::vector<SaveChunk> chunks;
          for (size_t i = 0; i < 3; ++i) bytes->push_back(chain->Bytes(i));
          for (size_t i = 0; i < 3; ++i) chunks.push_back({chain->Info(i), {(*bytes)[i]}});
          const auto saved = client->Save(std::move(chunks), bytes);
          ASSERT_TRUE(saved->Wait(Soon()));
          LoadRequest request = chain->Request();
          const Buffers buffers(3);
          buffers.GiveTo(request);
          const auto loaded = client->Load(std::move(request));
          if (round % 3 == 2) loaded->Cancel();
          ASSERT_TRUE(loaded->Wait(Soon()));
          for (size_t i = 0; i < 3; ++i) {
            const bool hit = loaded->Poll(i)->outcome == Outcome::kHit;
            ASSERT_TRUE(!hit || buffers.Chunk(i) == (*bytes)[i]);
          }
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

INSTANTIATE_TEST_SUITE_P(Kinds, ClientTest, testing::Values(Kind::kInProcess, Kind::kNode),
                         [](const auto& kind) { return kind.param == Kind::kInProcess ? "InProcess" : "Node"; });

}  // namespace
}  // namespace terrace
