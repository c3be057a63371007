// Would catch: a client that can write to what others read, bend what it has committed, use a handle twice or one of
// another session, keep what it was lent after its end, take the node down or hold it up; a node that lets in who is
// not of its user and group.
#include "node/server.h"

#include <grp.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <thread>

#include "base/hash.h"
#include "client/wire.h"
#include "tests/support/memory_tier.h"

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
  ~NodeServerTest() override { server.reset(); }
  void Start(NodeServerOptions options) {
    server.reset();
    Result<Listener> listener = ListenAt(socket);
    ASSERT_TRUE(listener) << listener.error().what;
    server = NodeServer::Start(options, std::move(listener->fd), *store, metrics).value();
  }
  void Keep() {
    SaveSlot slot = store->BeginSave(info).value();
    std::memcpy(slot.bytes.data(), bytes.data(), bytes.size());
    std::atomic<bool> visible{false};
    store->Commit(std::move(slot), [&](bool is) { visible = is; });
    while (!visible) std::this_thread::yield();
  }
  std::vector<std::byte> Load(uint64_t flags = 0, uint64_t call = 7) const {
    return wire::Encode<Digest>({.kind = Kind::kLoad,
                                 .call = call,
                                 .space = info.space,
                                 .payload_bytes = kChunkBytes,
                                 .numbers = {30'000, flags}},
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
  const std::string socket = "@terrace-server-test-" + std::to_string(getpid());  // No file that a dead test leaves.
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
  bad.push_back(wire::Encode(Header{.kind = Kind::kWelcome}));
  bad.push_back(wire::Encode(Header{.kind = Kind::kHello}));  // A second one.
  bad.push_back(wire::Encode(Header{.kind = Kind::kLookup, .numbers = {1}}));
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

TEST_F(NodeServerTest, WhoSpeaksAnotherVersionIsToldOurs) {
  Peer peer(socket);
  peer.Send(wire::Encode(Header{.version = wire::kVersion + 1, .kind = Kind::kHello}));
  const auto answer = peer.Receive();
  ASSERT_TRUE(answer);
  EXPECT_EQ(answer->header.version, wire::kVersion);
  EXPECT_NE(answer->header.kind, Kind::kWelcome);
  EXPECT_FALSE(peer.Receive());
}

// It may still be reading.
TEST_F(NodeServerTest, WhoIsCutKeepsWhatItWasLentUntilItHangsUpToo) {
  Keep();
  {
    Peer peer(socket);
    const Fd arena = peer.Greet();
    ASSERT_EQ(peer.Ask(Load()).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
    peer.Send({std::byte{1}});
    EXPECT_FALSE(peer.Receive());
    Peer next(socket);
    const Fd other = next.Greet();
    EXPECT_EQ(next.Ask(wire::Encode(Header{.kind = Kind::kStats})).header.numbers[1], kChunkBytes);
  }
  EXPECT_TRUE(Becomes([&] { return store->ram_stats().pinned_bytes == 0; }));
}

TEST_F(NodeServerTest, WhoComesWhenThereAreNoDescriptorsIsTurnedAwayAndOthersAreServed) {
  Peer steady(socket);
  const Fd arena = steady.Greet();
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const Fd lowest(dup(0));
  const rlimit one_more{.rlim_cur = static_cast<rlim_t>(lowest.get()) + 2, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &one_more), 0);
  std::optional<Peer> peer(socket);  // Has the last one.
  EXPECT_FALSE(peer->Receive());
  peer.reset();
  std::optional<Peer> again(socket);
  EXPECT_FALSE(again->Receive());
  again.reset();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);
  EXPECT_EQ(steady.Ask(wire::Encode(Header{.kind = Kind::kStats})).header.numbers[3], 1u);
  Peer(socket).Greet();
}

TEST_F(NodeServerTest, LeasesAndSegmentsOfOneAreBoundedInNumber) {
  Start({.leases_max = 2, .segments_bytes_max = 16 << 20, .segments_max = 2});
  Keep();
  Peer peer(socket);
  const Fd arena = peer.Greet();
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(peer.Ask(Load()).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
    EXPECT_NE(peer.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {4096, 1}})).header.numbers[0], 0u);
  }
  EXPECT_EQ(peer.Ask(Load()).Items<wire::LoadedItem>().at(0).reason, Reason::kFull);
  EXPECT_EQ(peer.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {4096, 1}})).header.numbers[0], 0u);
}

TEST_F(NodeServerTest, SessionsAreBoundedAndSoIsWhatIsLent) {
  Start({.sessions_max = 2, .leased_bytes_max = 2 * kChunkBytes, .segments_bytes_max = 1 << 20});
  Keep();
  Peer first(socket);
  Peer second(socket);
  const Fd arena = first.Greet();
  const Fd other = second.Greet();
  Peer third(socket);
  EXPECT_FALSE(third.Receive());
  EXPECT_EQ(first.Ask(Load()).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  EXPECT_EQ(second.Ask(Load()).Items<wire::LoadedItem>().at(0).reason, Reason::kFull);
  const auto segment = [](uint64_t wanted, uint64_t chunk) {
    return wire::Encode(Header{.kind = Kind::kSegment, .numbers = {wanted, chunk}});
  };
  EXPECT_EQ(second.Ask(segment(9 << 20, 0)).header.numbers[1], 1u << 19) << "others come, too";
  EXPECT_EQ(first.Ask(segment(9 << 20, 1 << 19)).header.numbers[1], 1u << 19);
  EXPECT_EQ(second.Ask(wire::Encode(Header{.kind = Kind::kSegment, .numbers = {4096, 4096}})).header.numbers[0], 0u);
}

// What a client copies from RAM and never gives back, or holds on to, is in nobody else's way.
TEST_F(NodeServerTest, ASessionThatKeepsAllItIsLentLeavesRoomForOthers) {
  constexpr size_t kLoads = 40;
  Start({.leased_bytes_max = 16 * kChunkBytes, .segments_bytes_max = 16 << 20});
  Keep();
  std::vector<std::unique_ptr<Peer>> hogs;
  for (const uint64_t flags : {uint64_t{0}, wire::kInTurn}) {
    for (int i = 0; i < 3; ++i) {
      Peer& hog = *hogs.emplace_back(std::make_unique<Peer>(socket));
      const Fd arena = hog.Greet();
      size_t refused = 0;
      for (size_t load = 0; load < kLoads; ++load) {
        hog.Send(Load(flags, 100 + load));
        // What is to be copied in turn waits for room, and for its deadline.
        if (flags == 0 && hog.Receive()->Items<wire::LoadedItem>().at(0).reason == Reason::kFull) ++refused;
      }
      EXPECT_EQ(refused > 0, flags == 0);
    }
  }
  Peer neighbour(socket);
  const Fd arena = neighbour.Greet();
  for (int i = 0; i < 10; ++i) {
    const auto item = neighbour.Ask(Load(wire::kInTurn)).Items<wire::LoadedItem>().at(0);
    ASSERT_EQ(item.outcome, Outcome::kHit) << ReasonName(item.reason);
    neighbour.Send(wire::Encode<uint64_t>({.kind = Kind::kRelease}, {&item.lease, 1}));
  }
}

TEST_F(NodeServerTest, LoadsOfOneSessionTakeTurnsAndNoneIsRefused) {
  constexpr size_t kLoads = 50;
  Start({.leased_bytes_max = 8 * kChunkBytes, .segments_bytes_max = 16 << 20});
  Keep();
  Peer peer(socket);
  const Fd arena = peer.Greet();
  for (size_t load = 0; load < kLoads; ++load) peer.Send(Load(wire::kInTurn, load));
  for (size_t load = 0; load < kLoads; ++load) {
    const auto loaded = peer.Receive();
    ASSERT_TRUE(loaded);
    const auto item = loaded->Items<wire::LoadedItem>().at(0);
    ASSERT_EQ(item.outcome, Outcome::kHit) << load << ": " << ReasonName(item.reason);
    peer.Send(wire::Encode<uint64_t>({.kind = Kind::kRelease}, {&item.lease, 1}));
  }
}

TEST_F(NodeServerTest, WhoHangsInTheMiddleOfCopyingIsCutAndItsRoomTakenBack) {
  Start({.leased_bytes_max = 4 * kChunkBytes, .copy_max = 100ms, .segments_bytes_max = 16 << 20});
  Keep();
  Peer hung(socket);
  const Fd arena = hung.Greet();
  EXPECT_EQ(hung.Ask(Load(wire::kInTurn)).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  EXPECT_EQ(hung.Ask(Load(0)).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  EXPECT_FALSE(hung.Receive()) << "the node hangs up";
  Peer other(socket);
  const Fd others = other.Greet();
  const auto leased = [&] { return other.Ask(wire::Encode(Header{.kind = Kind::kStats})).header.numbers[1]; };
  EXPECT_EQ(leased(), kChunkBytes) << "what it holds it may be reading";
}

TEST_F(NodeServerTest, WhoTalksAndGivesNothingBackIsCutAsWell) {
  Start({.leased_bytes_max = 4 * kChunkBytes, .copy_max = 100ms, .segments_bytes_max = 16 << 20});
  Keep();
  Peer talker(socket);
  const Fd arena = talker.Greet();
  EXPECT_EQ(talker.Ask(Load(wire::kInTurn)).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  const TimePoint deadline = Soon();
  do {
    ASSERT_LT(Now(), deadline);
    talker.Send(wire::Encode(Header{.kind = Kind::kStats}));
  } while (talker.Receive());
}

TEST_F(NodeServerTest, WhoOnlyHoldsWhatItWasLentMayBeSilent) {
  Start({.leased_bytes_max = 4 * kChunkBytes, .copy_max = 1ms, .segments_bytes_max = 16 << 20});
  Keep();
  Peer idle(socket);
  const Fd arena = idle.Greet();
  EXPECT_EQ(idle.Ask(Load(0)).Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  Peer other(socket);
  const Fd others = other.Greet();
  const TimePoint until = Now() + 30ms;  // Far beyond copy_max.
  while (Now() < until) other.Ask(wire::Encode(Header{.kind = Kind::kStats}));
  EXPECT_EQ(idle.Ask(wire::Encode(Header{.kind = Kind::kStats})).header.numbers[1], kChunkBytes);
}

class SocketFileTest : public testing::Test {
 protected:
  SocketFileTest() {
    EXPECT_NE(mkdtemp(folder.data()), nullptr);
    path = folder + "/node.sock";
  }
  ~SocketFileTest() override { std::filesystem::remove_all(folder); }
  // A bound socket as somebody leaves it who is killed.
  void LeaveDead() const {
    const Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path.copy(address.sun_path, path.size());
    ASSERT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  }
  size_t Files() const { return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {})); }

  std::string folder = testing::TempDir() + "/terrace-server-XXXXXX";
  std::string path;
};

TEST_F(SocketFileTest, IsForOwnerAndGroupAndGoesWithItsListener) {
  {
    const Result<Listener> listener = ListenAt(path);
    ASSERT_TRUE(listener) << listener.error().what;
    struct stat file{};
    ASSERT_EQ(stat(path.c_str(), &file), 0);
    EXPECT_EQ(file.st_mode & 0777, 0660u);
    EXPECT_FALSE(ListenAt(path)) << "another node";
    EXPECT_FALSE(MayBeAnybodys(path));
    EXPECT_TRUE(ConnectTo(path));
  }
  EXPECT_EQ(Files(), 0u);
  ASSERT_EQ(chmod(folder.c_str(), 01777), 0);
  EXPECT_TRUE(MayBeAnybodys(path));
}

TEST_F(SocketFileTest, OfADeadListenerIsReplaced) {
  LeaveDead();
  EXPECT_TRUE(ListenAt(path));
  EXPECT_EQ(Files(), 0u);
}

// A path that was mistyped: connect says of an ordinary file what it says of a dead socket.
TEST_F(SocketFileTest, WhatIsNoSocketStaysAsItIs) {
  std::ofstream(path) << "precious";
  const Result<Listener> listener = ListenAt(path);
  ASSERT_FALSE(listener);
  EXPECT_NE(listener.error().what.find("no socket"), std::string::npos) << listener.error().what;
  std::string text;
  std::ifstream(path) >> text;
  EXPECT_EQ(text, "precious");
  std::filesystem::remove(path);
  std::filesystem::create_symlink(folder + "/elsewhere", path);
  EXPECT_FALSE(ListenAt(path));
  EXPECT_TRUE(std::filesystem::is_symlink(path));
  std::filesystem::remove(path);
  std::filesystem::create_directory(path);
  EXPECT_FALSE(ListenAt(path));
  EXPECT_EQ(Files(), 1u);
}

TEST_F(SocketFileTest, OfAnotherProgramStaysAsItIs) {
  const Fd other(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  path.copy(address.sun_path, path.size());
  ASSERT_EQ(bind(other.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  ASSERT_EQ(listen(other.get(), 1), 0);
  EXPECT_FALSE(ListenAt(path));
  const Fd client(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_EQ(connect(client.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
}

TEST_F(SocketFileTest, OfTheNextNodeIsNotRemovedByTheLast) {
  Listener last = ListenAt(path).value();
  std::filesystem::remove(path);  // By hand.
  const Listener next = ListenAt(path).value();
  last.file.Remove();
  EXPECT_TRUE(ConnectTo(path));
}

TEST_F(SocketFileTest, OfManyThatComeAtOnceOneListens) {
  for (int round = 0; round < 20; ++round) {
    LeaveDead();
    std::vector<std::thread> nodes;
    std::vector<std::optional<Listener>> listeners(4);
    for (auto& listener : listeners) {
      nodes.emplace_back([&] {
        if (auto mine = ListenAt(path)) listener.emplace(*std::move(mine));
      });
    }
    for (std::thread& node : nodes) node.join();
    EXPECT_EQ(std::ranges::count_if(listeners, [](const auto& listener) { return listener.has_value(); }), 1);
    EXPECT_TRUE(ConnectTo(path));
    listeners.clear();
    ASSERT_EQ(Files(), 0u);
  }
}

TEST_F(SocketFileTest, AFolderThatIsMissingIsNamed) {
  const Result<Listener> listener = ListenAt(folder + "/none/node.sock");
  ASSERT_FALSE(listener);
  EXPECT_NE(listener.error().what.find("make the folder " + folder + "/none"), std::string::npos)
      << listener.error().what;
}

TEST(Peer, IsOneOfUsByUserOrGroup) {
  constexpr uid_t kUser = 1000;
  constexpr gid_t kGroup = 2000;
  EXPECT_TRUE(IsOneOf({.uid = kUser, .gid = 7}, kUser, kGroup));
  EXPECT_TRUE(IsOneOf({.uid = 0, .gid = 7}, kUser, kGroup));
  EXPECT_TRUE(IsOneOf({.uid = 8, .gid = kGroup}, kUser, kGroup));
  EXPECT_TRUE(IsOneOf({.uid = 8, .gid = 7, .groups = {1, kGroup}}, kUser, kGroup));
  EXPECT_FALSE(IsOneOf({.uid = 8, .gid = 7, .groups = {1, kUser}}, kUser, kGroup));
  EXPECT_FALSE(IsOneOf({.uid = kGroup, .gid = 0}, kUser, kGroup));
}

// What the kernel says of a process of another user. Only root can play one; who we are ourselves is let in anyway.
TEST_F(NodeServerTest, AProcessIsLetInByWhoItIs) {
  struct Who {
    uid_t user;
    gid_t group;
    bool welcome;
  };
  std::vector<Who> all = {{getuid(), getgid(), true}};
  if (getuid() == 0) {
    all.push_back({65534, 65534, false});
    all.push_back({65534, getgid(), true});
  }
  for (const Who& who : all) {
    const pid_t child = fork();
    if (child == 0) {
      // No gtest from here on.
      if (getuid() == 0 && setgroups(0, nullptr) != 0) _exit(2);
      if (setgid(who.group) != 0 || setuid(who.user) != 0) _exit(3);
      const Result<Fd> fd = ConnectTo(socket);
      if (!fd) _exit(4);
      SendMessage(fd->get(), wire::Encode(Header{.kind = Kind::kHello}));
      pollfd event{.fd = fd->get(), .events = POLLIN, .revents = 0};
      poll(&event, 1, 30'000);
      std::vector<std::byte> answer;
      Fd passed;
      const bool welcome = ReceiveMessage(fd->get(), answer, passed) == Received::kMessage && passed;
      _exit(welcome == who.welcome ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    EXPECT_EQ(WEXITSTATUS(status), 0) << who.user << " " << who.group;
  }
}

// A stopping node answers: a client's other calls are still under way.
TEST_F(NodeServerTest, AStoppingNodeFinishesWhatIsUnderWayAndRefusesWhatComes) {
  auto tier = std::make_unique<MemoryTier>();
  MemoryTier& below = *tier;
  std::vector<std::unique_ptr<Tier>> tiers;
  tiers.push_back(std::move(tier));
  server.reset();
  store = OpenStore({.ram_bytes_max = 16 << 20}, std::move(tiers), metrics).value();
  Start({.segments_bytes_max = 16 << 20});
  below.Put(info, bytes);
  below.Hold();
  Peer peer(socket);
  const Fd arena = peer.Greet();
  peer.Send(Load());
  ASSERT_TRUE(below.WaitForLoads(1, Soon()));
  NodeServer::Report report;
  std::thread stopper([&] { report = server->Stop(Soon()); });
  while (ConnectTo(socket)) std::this_thread::yield();  // Until nobody listens.
  FrameInfo other = info;
  other.key = Sha256Of("other");
  const Message refused = peer.Ask(wire::Encode<Digest>(
      {.kind = Kind::kLoad, .call = 8, .space = info.space, .payload_bytes = kChunkBytes, .numbers = {30'000, 0}},
      {&other.key, 1}));
  EXPECT_EQ(refused.header.call, 8u);
  EXPECT_EQ(refused.Items<wire::LoadedItem>().at(0).reason, Reason::kUnavailable);
  below.Release();
  const auto loaded = peer.Receive();
  ASSERT_TRUE(loaded);
  EXPECT_EQ(loaded->Items<wire::LoadedItem>().at(0).outcome, Outcome::kHit);
  EXPECT_FALSE(peer.Receive()) << "then it hangs up";
  stopper.join();
  EXPECT_EQ(report.calls_cut, 0u);
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
