// Would catch: a client that can write to what others read, bend what it has committed, use a handle twice or one of
// another session, keep what it was lent after its end, take the node down or hold it up; a node that lets in who is
// not of its user and group.
#include "node/server.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/hash.h"
#include "client/wire.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;
using wire::Header;
using wire::Kind;
using wire::Message;

constexpr uint64_t kChunkBytes = 100'000;

TimePoint Now() { return std::chrono::steady_clock::now(); }
TimePoint Soon() { return Now() + 30s; }  // A failure, not a measure.

// A client by hand, which may do anything.
class Peer {
 public:
  explicit Peer(const std::string& socket) : fd_(ConnectTo(socket).value()) {}

  void Send(const std::vector<std::byte>& bytes) { ASSERT_EQ(SendMessage(fd_.get(), bytes), Sent::kYes); }
  // Nothing: the node has hung up.
  std::optional<Message> Receive(Fd* passed = nullptr) {
    std::vector<std::byte> bytes;
    for (const TimePoint deadline = Soon(); Now() < deadline;) {
      Fd fd;
      pollfd event{.fd = fd_.get(), .events = POLLIN, .revents = 0};
      poll(&event, 1, 30'000);
      switch (ReceiveMessage(fd_.get(), bytes, fd)) {
        case Received::kNothing: continue;
        case Received::kBroken: return std::nullopt;
        case Received::kMessage: break;
      }
      if (passed != nullptr) *passed = std::move(fd);
      return wire::Decode(bytes).value();
    }
    ADD_FAILURE() << "no answer";
    return std::nullopt;
  }
  // The arena.
  Fd Greet() {
    Fd arena;
    Send(wire::Encode(Header{.kind = Kind::kHello}));
    const auto welcome = Receive(&arena);
    EXPECT_TRUE(welcome && welcome->header.kind == Kind::kWelcome);
    if (welcome) arena_bytes = welcome->header.numbers[1];
    return arena;
  }
  Message Ask(const std::vector<std::byte>& bytes, Fd* passed = nullptr) {
    Send(bytes);
    return Receive(passed).value();
  }

  uint64_t arena_bytes = 0;

 private:
  Fd fd_;
};

class NodeServerTest : public testing::Test {
 protected:
  NodeServerTest() {
    info.space = Sha256Of("space");
    info.key = Sha256Of("key");
    info.parent = info.space;
    info.payload_bytes = kChunkBytes;
    Start({.segments_bytes_max = 16 << 20});
  }
  ~NodeServerTest() override {
    server.reset();
    unlink(socket.c_str());
  }
  void Start(NodeServerOptions options) {
    server.reset();
    Result<Fd> listener = ListenAt(socket);
    ASSERT_TRUE(listener) << listener.error().what;
    server = NodeServer::Start(options, *std::move(listener), *store, metrics).value();
  }
  void Keep() {
    SaveSlot slot = store->BeginSave(info).value();
    std::memcpy(slot.bytes.data(), bytes.data(), bytes.size());
    std::atomic<bool> visible{false};
    store->Commit(std::move(slot), [&](bool is) { visible = is; });
    while (!visible) std::this_thread::yield();
  }
  std::vector<std::byte> Load() const {
    return wire::Encode<Digest>(
        {.kind = Kind::kLoad, .call = 7, .space = info.space, .payload_bytes = kChunkBytes, .numbers = {30'000, 0}},
        {&info.key, 1});
  }
  template <class Is>
  bool Becomes(const Is& is) {
    const TimePoint deadline = Soon();
    while (!is()) {
      if (Now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }

  Metrics metrics;
  std::unique_ptr<Store> store = OpenStore({.ram_bytes_max = 16 << 20}, {}, metrics).value();
  const std::string socket = testing::TempDir() + "/terrace-server-" + std::to_string(getpid()) + ".sock";
  std::unique_ptr<NodeServer> server;
  FrameInfo info;
  const std::vector<std::byte> bytes = std::vector<std::byte>(kChunkBytes, std::byte{7});
};

TEST_F(NodeServerTest, WhatIsLentCanBeReadAndNotWrittenOrResized) {
  Keep();
  Peer peer(socket);
  const Fd arena = peer.Greet();
  const auto item = peer.Ask(Load()).Items<wire::LoadedItem>().at(0);
  ASSERT_EQ(item.outcome, Outcome::kHit);
  const auto mapping = Mapping::Map(arena.get(), peer.arena_bytes, false);
  ASSERT_TRUE(mapping);
  EXPECT_TRUE(std::ranges::equal(mapping->bytes().subspan(item.offset, kChunkBytes), bytes));
  EXPECT_EQ(Mapping::Map(arena.get(), peer.arena_bytes, true), nullptr);
  EXPECT_NE(mprotect(mapping->bytes().data(), 4096, PROT_READ | PROT_WRITE), 0);
  EXPECT_NE(ftruncate(arena.get(), 0), 0);
  struct stat status{};
  ASSERT_EQ(fstat(arena.get(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0400u);  // Nor can another user open it anew by way of /proc.
}

TEST_F(NodeServerTest, AHandleEndsWithItsLeaseAndIsNobodyElses) {
  Keep();
  Peer peer(socket);
  Peer other(socket);
  const Fd arena = peer.Greet();
  const Fd other_arena = other.Greet();
  const auto release = [](uint64_t handle) { return wire::Encode<uint64_t>({.kind = Kind::kRelease}, {&handle, 1}); };
  const auto leased = [&] { return peer.Ask(wire::Encode(Header{.kind = Kind::kStats})).header.numbers[1]; };
  const auto first = peer.Ask(Load()).Items<wire::LoadedItem>().at(0);
  EXPECT_EQ(leased(), kChunkBytes);
  other.Send(release(first.lease));
  other.Ask(wire::Encode(Header{.kind = Kind::kStats}));
  EXPECT_EQ(leased(), kChunkBytes);
  peer.Send(release(first.lease));
  EXPECT_EQ(leased(), 0u);
  const auto second = peer.Ask(Load()).Items<wire::LoadedItem>().at(0);
  EXPECT_NE(second.lease, first.lease);
  peer.Send(release(first.lease));  // Of before.
  EXPECT_EQ(leased(), kChunkBytes);
}

TEST_F(NodeServerTest, ALateScribbleReachesNobody) {
  Peer peer(socket);
  const Fd arena = peer.Greet();
  Fd memory;
  const Message granted =
      peer.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {4 * kChunkBytes, kChunkBytes}}), &memory);
  ASSERT_NE(granted.header.numbers[0], 0u);
  EXPECT_NE(ftruncate(memory.get(), 0), 0);  // The node reads it.
  const auto segment = Mapping::Map(memory.get(), granted.header.numbers[1], true);
  std::ranges::copy(bytes, segment->bytes().begin());
  const wire::CommitItem item{.segment = granted.header.numbers[0], .offset = 0, .info = info};
  const Message saved = peer.Ask(wire::Encode<wire::CommitItem>({.kind = Kind::kCommit}, {&item, 1}));
  ASSERT_EQ(saved.Items<wire::SavedItem>().at(0).outcome, Outcome::kHit);
  std::ranges::fill(segment->bytes(), std::byte{9});
  const auto mapping = Mapping::Map(arena.get(), peer.arena_bytes, false);
  const auto loaded = peer.Ask(Load()).Items<wire::LoadedItem>().at(0);
  EXPECT_TRUE(std::ranges::equal(mapping->bytes().subspan(loaded.offset, kChunkBytes), bytes));
}

TEST_F(NodeServerTest, CommitsOutsideOfALentSegmentAreDeclined) {
  Peer owner(socket);
  const Fd arena = owner.Greet();
  const uint64_t handle =
      owner.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {kChunkBytes, kChunkBytes}})).header.numbers[0];
  Peer peer(socket);
  const Fd other = peer.Greet();
  for (Peer* who : {&owner, &peer}) {
    for (const uint64_t offset : {uint64_t{4096}, UINT64_MAX - 10}) {
      const wire::CommitItem item{.segment = handle, .offset = offset, .info = info};
      const Message saved = who->Ask(wire::Encode<wire::CommitItem>({.kind = Kind::kCommit}, {&item, 1}));
      EXPECT_EQ(saved.Items<wire::SavedItem>().at(0).reason, Reason::kForeign);
    }
  }
  wire::CommitItem huge{.segment = handle, .offset = 0, .info = info};
  huge.info.payload_bytes = UINT64_MAX;
  const Message saved = owner.Ask(wire::Encode<wire::CommitItem>({.kind = Kind::kCommit}, {&huge, 1}));
  EXPECT_EQ(saved.Items<wire::SavedItem>().at(0).reason, Reason::kForeign);
}

TEST_F(NodeServerTest, WhoDiesLeavesNothingBehind) {
  Keep();
  {
    Peer peer(socket);
    const Fd arena = peer.Greet();
    EXPECT_EQ(peer.Ask(Load()).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
    EXPECT_NE(peer.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {16 << 20, 1}})).header.numbers[0], 0u);
    EXPECT_GT(store->ram_stats().pinned_bytes, 0u);
  }
  EXPECT_TRUE(Becomes([&] { return store->ram_stats().pinned_bytes == 0; }));
  Peer next(socket);
  const Fd arena = next.Greet();
  EXPECT_TRUE(Becomes([&] {
    return next.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {16 << 20, 16 << 20}})).header.numbers[0] !=
           0;
  }));
}

TEST_F(NodeServerTest, WhatIsNoMessageEndsItsSessionAndNoOther) {
  Peer steady(socket);
  const Fd arena = steady.Greet();
  std::vector<std::vector<std::byte>> bad = {{std::byte{1}}, std::vector<std::byte>(200'000)};
  Header header{.kind = Kind::kLookup};
  bad.push_back(wire::Encode(Header{.kind = Kind::kWelcome}));
  bad.push_back(wire::Encode(Header{.kind = Kind::kHello}));  // A second one.
  header.version = wire::kVersion + 1;
  bad.push_back(wire::Encode(header));
  header = {.kind = Kind::kLookup, .numbers = {1}};
  bad.push_back(wire::Encode(header));
  bad.push_back(wire::Encode<std::byte>({.kind = Kind::kLookup}, std::vector<std::byte>(31)));
  for (size_t i = 0; i < bad.size(); ++i) {
    Peer peer(socket);
    const Fd fd = peer.Greet();
    peer.Send(bad[i]);
    EXPECT_FALSE(peer.Receive()) << i;
  }
  Peer rude(socket);
  rude.Send(wire::Encode(Header{.kind = Kind::kStats}));  // No hello.
  EXPECT_FALSE(rude.Receive());
  EXPECT_EQ(steady.Ask(wire::Encode(Header{.kind = Kind::kStats})).header.kind, Kind::kStatistics);
}

TEST_F(NodeServerTest, SessionsAreBoundedAndSoIsWhatIsLent) {
  server.reset();
  unlink(socket.c_str());
  Start({.sessions_max = 2, .leased_bytes_max = kChunkBytes, .segments_bytes_max = 1 << 20});
  Keep();
  Peer first(socket);
  Peer second(socket);
  const Fd arena = first.Greet();
  const Fd other = second.Greet();
  Peer third(socket);
  EXPECT_FALSE(third.Receive());
  EXPECT_EQ(first.Ask(Load()).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  EXPECT_EQ(second.Ask(Load()).Items<wire::LoadedItem>().at(0).reason, Reason::kFull);
  EXPECT_EQ(first.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {9 << 20, 0}})).header.numbers[1],
            1u << 20);
  EXPECT_EQ(second.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {4096, 4096}})).header.numbers[0], 0u);
}

TEST_F(NodeServerTest, StrangersAreTurnedAwayAndTheFileIsNotTheirs) {
  struct stat file{};
  ASSERT_EQ(stat(socket.c_str(), &file), 0);
  EXPECT_EQ(file.st_mode & 0777, 0660u);
  EXPECT_FALSE(ListenAt(socket));  // Another node.
  if (getuid() != 0) return;       // Nobody else can be played.
  ASSERT_EQ(chmod(socket.c_str(), 0666), 0);
  const pid_t child = fork();
  if (child == 0) {
    // No gtest from here on.
    if (setgid(65534) != 0 || setuid(65534) != 0) _exit(2);
    const Result<Fd> fd = ConnectTo(socket);
    if (!fd) _exit(3);
    SendMessage(fd->get(), wire::Encode(Header{.kind = Kind::kHello}));
    pollfd event{.fd = fd->get(), .events = POLLIN, .revents = 0};
    poll(&event, 1, 30'000);
    std::vector<std::byte> answer;
    Fd passed;
    _exit(ReceiveMessage(fd->get(), answer, passed) == Received::kBroken ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

TEST_F(NodeServerTest, AStopEndsSessionsAndReports) {
  Peer peer(socket);
  const Fd arena = peer.Greet();
  const NodeServer::Report report = server->Stop(Soon());
  EXPECT_EQ(report.sessions, 1u);
  EXPECT_EQ(report.calls_cut, 0u);
  EXPECT_FALSE(peer.Receive());
  EXPECT_FALSE(ConnectTo(socket));
}

}  // namespace
}  // namespace terrace
