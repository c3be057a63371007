// Would catch: a message, well formed or not, that takes the node down, makes it read outside of what it has, or
// reaches the calls of another client.
#include <gtest/gtest.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "base/hash.h"
#include "client/node_client.h"
#include "client/wire.h"
#include "node/server.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;
using wire::Header;
using wire::Kind;

constexpr uint64_t kChunkBytes = 50'000;
constexpr size_t kChunks = 8;

TimePoint Now() { return std::chrono::steady_clock::now(); }
TimePoint Soon() { return Now() + 30s; }  // A failure, not a measure.

FrameInfo InfoOf(size_t i) {
  FrameInfo info;
  info.space = Sha256Of("space");
  info.key = Sha256Of("chunk " + std::to_string(i));
  info.parent = info.space;
  info.payload_bytes = kChunkBytes;
  return info;
}

// Sends what a client could, with a seed: kinds at random, sizes and handles that are right, nearly right, or huge.
class Vandal {
 public:
  Vandal(std::string socket, uint64_t seed) : socket_(std::move(socket)), random_(seed) {}

  void Act() {
    if (!fd_) Connect();
    std::vector<std::byte> message = Message();
    if (OneIn(12)) message[random_() % message.size()] ^= static_cast<std::byte>(1 << random_() % 8);
    if (OneIn(40)) message.resize(random_() % (2 * message.size()));
    // No message is one of zero bytes, and a full socket is the node's to empty.
    if (message.empty() || SendMessage(fd_.get(), message) != Sent::kYes) return Drain();
    if (OneIn(4)) Drain();
    if (OneIn(200)) fd_ = Fd();
  }

 private:
  bool OneIn(uint64_t n) { return random_() % n == 0; }
  uint64_t Number() {
    const uint64_t some[] = {0, 1, 4096, kChunkBytes, 1 << 20, UINT64_MAX, UINT64_MAX - 4095, random_()};
    return some[random_() % std::size(some)];
  }
  Digest Key() { return OneIn(5) ? Sha256Of("none") : InfoOf(random_() % kChunks).key; }
  std::vector<Digest> Keys() {
    std::vector<Digest> keys(random_() % 6);
    for (Digest& key : keys) key = Key();
    return keys;
  }

  void Connect() {
    fd_ = ConnectTo(socket_).value();
    segment_ = 0;
    leases_.clear();
    if (!OneIn(10)) SendMessage(fd_.get(), wire::Encode(Header{.kind = Kind::kHello}));
  }

  std::vector<std::byte> Message() {
    Header header{.call = 1 + random_() % 3};
    const auto is_load = [&](Kind kind) {
      header.kind = kind;
      header.space = InfoOf(0).space;
      header.payload_bytes = OneIn(6) ? Number() : kChunkBytes;
      header.numbers = {OneIn(2) ? 1000 : Number(), random_() % 4, kind == Kind::kPin ? Number() : 0};
      return wire::Encode<Digest>(header, Keys());
    };
    switch (random_() % 14) {
      case 0: return wire::Encode<Digest>({.kind = Kind::kLookup, .call = header.call}, Keys());
      case 1: return wire::Encode<Digest>({.kind = Kind::kProbe, .call = header.call, .numbers = {Number()}}, Keys());
      case 2: return wire::Encode<Digest>({.kind = Kind::kNeeds, .call = header.call}, Keys());
      case 3: return wire::Encode<Digest>({.kind = Kind::kUnpin, .call = header.call}, Keys());
      case 4: return is_load(Kind::kPrefetch);
      case 5: return is_load(Kind::kPin);
      case 6: return wire::Encode(Header{.kind = Kind::kCancel, .call = header.call});
      case 7: return wire::Encode(Header{.kind = Kind::kStats, .call = header.call});
      case 8: {
        std::vector<uint64_t> handles = {Number()};
        if (!leases_.empty()) handles.push_back(leases_[random_() % leases_.size()]);
        return wire::Encode<uint64_t>({.kind = Kind::kRelease}, handles);
      }
      case 9: return wire::Encode(Header{.kind = Kind::kSegment, .call = header.call, .numbers = {Number(), Number()}});
      case 10:
      case 11: {
        // Its own bytes under its own keys: whoever may use the node may add to it.
        wire::CommitItem item{.segment = OneIn(5) ? Number() : segment_, .offset = Number(), .info = InfoOf(0)};
        item.info.key = Sha256Of("vandal " + std::to_string(random_() % 20));
        item.info.payload_bytes = OneIn(3) ? Number() : 4096;
        return wire::Encode<wire::CommitItem>({.kind = Kind::kCommit, .call = header.call}, {&item, 1});
      }
      default: return is_load(Kind::kLoad);
    }
  }

  void Drain() {
    std::vector<std::byte> bytes;
    for (;;) {
      Fd passed;
      const Received received = ReceiveMessage(fd_.get(), bytes, passed);
      if (received == Received::kNothing) return;
      if (received == Received::kBroken) {
        fd_ = Fd();
        return;
      }
      const auto message = wire::Decode(bytes);
      if (!message) continue;  // Of another version: it may have changed that byte.
      if (message->header.kind == Kind::kGranted && message->header.numbers[0] != 0)
        segment_ = message->header.numbers[0];
      if (message->header.kind != Kind::kLoaded) continue;
      for (const auto& item : message->Items<wire::LoadedItem>()) leases_.push_back(item.lease);
    }
  }

  const std::string socket_;
  std::mt19937_64 random_;
  Fd fd_;
  uint64_t segment_ = 0;
  std::vector<uint64_t> leases_;
};

TEST(NodeServerAbuse, WhatOneClientSendsIsNothingToAnother) {
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  Metrics metrics;
  const auto store = OpenStore({.ram_bytes_max = 32 << 20}, {}, metrics).value();
  const std::string socket = "@terrace-abuse-test-" + std::to_string(getpid());
  auto server =
      NodeServer::Start({.segments_bytes_max = 4 << 20}, ListenAt(socket).value().fd, *store, metrics).value();
  const auto client = NewNodeClient({.node_wait = 30s}, socket);
  ASSERT_TRUE(client->connected());

  const auto bytes = std::make_shared<std::vector<std::vector<std::byte>>>();
  std::vector<SaveChunk> chunks;
  for (size_t i = 0; i < kChunks; ++i) bytes->emplace_back(kChunkBytes, static_cast<std::byte>(i + 1));
  for (size_t i = 0; i < kChunks; ++i) chunks.push_back({InfoOf(i), {(*bytes)[i]}});
  const auto saved = client->Save(std::move(chunks), bytes);
  ASSERT_TRUE(saved->Wait(Soon()));
  LoadRequest all{.space = InfoOf(0).space, .payload_bytes = kChunkBytes};
  for (size_t i = 0; i < kChunks; ++i) all.keys.push_back(InfoOf(i).key);
  all.deadline = Now() + 1h;
  const auto pinned = client->Pin(all, 1h);  // The vandal's own chunks push out others.
  ASSERT_TRUE(pinned->Wait(Soon()));

  std::atomic<bool> over{false};
  std::thread vandal([&] {
    Vandal first(socket, seed);
    Vandal second(socket, seed + 1);
    for (int i = 0; i < 4000; ++i) (i % 2 == 0 ? first : second).Act();
    over.store(true);
  });
  size_t rounds = 0;
  for (; !over.load() || rounds < 10; ++rounds) {
    LoadRequest request = all;
    request.deadline = Soon();
    const auto into = std::make_shared<std::vector<std::byte>>(kChunks * kChunkBytes);
    for (size_t i = 0; i < kChunks; ++i) {
      request.into.push_back({std::span(*into).subspan(i * kChunkBytes, kChunkBytes)});
    }
    request.owner = into;
    const auto load = client->Load(std::move(request));
    ASSERT_TRUE(load->Wait(Soon()));
    for (size_t i = 0; i < kChunks; ++i) {
      // The vandals may take all that is lent, and unpin what they like: a miss is right, other bytes are not.
      if (load->Poll(i)->outcome != Outcome::kHit) continue;
      ASSERT_TRUE(std::all_of(into->begin() + static_cast<ptrdiff_t>(i * kChunkBytes),
                              into->begin() + static_cast<ptrdiff_t>((i + 1) * kChunkBytes),
                              [&](std::byte b) { return b == static_cast<std::byte>(i + 1); }))
          << i;
    }
  }
  vandal.join();
  EXPECT_TRUE(client->connected());
  for (const TimePoint deadline = Soon();;) {
    const auto stats = client->Stats();
    ASSERT_TRUE(stats->Wait(Soon()));
    if (stats->Poll(0)->sessions == 1 && stats->Poll(0)->leased_bytes == 0) break;
    ASSERT_LT(Now(), deadline) << "sessions " << stats->Poll(0)->sessions << ", leased "
                               << stats->Poll(0)->leased_bytes;
  }
}

}  // namespace
}  // namespace terrace
