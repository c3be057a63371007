// Would catch: an engine that waits for a node that is dead or stopped, gets bytes that were never saved, or does not
// find the node again; a node that keeps what a dead engine was lent. Nodes and engines are processes of their own,
// this program anew, and are killed with -9 at any moment.
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <random>
#include <thread>

#include "base/hash.h"
#include "client/host.h"
#include "client/node_client.h"
#include "node/server.h"

namespace terrace {
namespace {

using namespace std::chrono_literals;

constexpr uint64_t kChunkBytes = 2 << 20;
constexpr size_t kChunks = 8;
const char* program = nullptr;

TimePoint Now() { return std::chrono::steady_clock::now(); }
TimePoint Soon() { return Now() + 60s; }  // A failure, not a measure.

int BeNode(const char* socket) {
  Result<std::unique_ptr<Host>> host = OpenHost({.ram_bytes_max = 64 << 20}, {.ram_bytes_max = 64 << 20});
  Result<Listener> listener = ListenAt(socket);
  if (!host || !listener) return 1;
  auto server =
      NodeServer::Start({.segments_bytes_max = 32 << 20}, std::move(listener->fd), *(*host)->store, (*host)->metrics);
  if (!server) return 1;
  for (;;) pause();
}

// This program anew, in a role.
pid_t SpawnAs(std::string role, std::string socket) {
  std::string name = program;
  char* argv[] = {name.data(), role.data(), socket.data(), nullptr};
  pid_t pid = 0;
  EXPECT_EQ(posix_spawn(&pid, program, nullptr, nullptr, argv, environ), 0);
  return pid;
}
void KillNow(pid_t pid) {
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

FrameInfo InfoOf(size_t i) {
  const auto key = [](size_t n) { return Sha256Of("chunk " + std::to_string(n)); };
  FrameInfo info;
  info.space = Sha256Of("space");
  info.key = key(i);
  info.parent = i == 0 ? info.space : key(i - 1);
  info.payload_bytes = kChunkBytes;
  return info;
}
std::byte ByteOf(size_t i) { return static_cast<std::byte>(i + 1); }

// A client that does all there is to do, as fast as it can, until it is killed.
int BeClient(const char* socket) {
  const auto client = NewNodeClient({.node_wait = 30s}, socket);
  std::mt19937 random(static_cast<uint32_t>(getpid()));
  const auto memory = std::make_shared<std::vector<std::byte>>(kChunkBytes);
  const auto into = std::make_shared<std::vector<std::byte>>(kChunkBytes);
  std::deque<std::shared_ptr<void>> held;  // Handles, with what they lend.
  for (;;) {
    const size_t which = random() % kChunks;
    LoadRequest request{.space = InfoOf(0).space, .keys = {InfoOf(which).key}, .payload_bytes = kChunkBytes};
    request.deadline = Now() + 1s;
    switch (random() % 6) {
      case 0: held.push_back(client->Lease(request)); break;
      case 1: held.push_back(client->BeginSave({InfoOf(100 + which)})); break;
      case 2: held.push_back(client->Prefetch(request)); break;
      case 3: {
        const auto save = client->Save({{InfoOf(200 + random() % 9), {*memory}}}, memory);
        if (random() % 2 == 0) save->Wait(Now() + 1s);
        held.push_back(save);
        break;
      }
      case 4: {
        const auto room = client->BeginSave({InfoOf(300 + which)});
        if (room->Wait(Now() + 1s)) held.push_back(client->Commit({*room->Poll(0)}));
        break;
      }
      default: {
        request.into = {{*into}};
        request.owner = into;
        const auto load = client->Load(std::move(request));
        if (random() % 2 == 0) load->Cancel();
        while (!load->Wait(Now() + 1s)) {
        }
      }
    }
    if (held.size() > 20) held.pop_front();
  }
}

class NodeDeath : public testing::Test {
 protected:
  ~NodeDeath() override {
    client.reset();
    Kill();
  }
  void Spawn() { node = SpawnAs("--be-node", socket); }
  void Kill() {
    if (node > 0) KillNow(node);
    node = 0;
  }
  void Join() {
    const TimePoint deadline = Soon();
    while (!client->connected()) {
      ASSERT_LT(Now(), deadline);
      std::this_thread::yield();
    }
  }
  void Part() {
    const TimePoint deadline = Soon();
    while (client->connected()) {
      ASSERT_LT(Now(), deadline);
      std::this_thread::yield();
    }
  }
  std::shared_ptr<CallOf<SavedChunk>> Save() {
    auto bytes = std::make_shared<std::vector<std::vector<std::byte>>>();
    std::vector<SaveChunk> chunks;
    for (size_t i = 0; i < kChunks; ++i) bytes->emplace_back(kChunkBytes, ByteOf(i));
    for (size_t i = 0; i < kChunks; ++i) chunks.push_back({InfoOf(i), {(*bytes)[i]}});
    return client->Save(std::move(chunks), bytes);
  }
  ClientStats StatsNow() {
    const auto call = client->Stats();
    EXPECT_TRUE(call->Wait(Soon()));
    return *call->Poll(0);
  }
  LoadRequest Request() {
    LoadRequest request{.space = InfoOf(0).space, .payload_bytes = kChunkBytes, .deadline = Soon()};
    for (size_t i = 0; i < kChunks; ++i) request.keys.push_back(InfoOf(i).key);
    return request;
  }
  std::shared_ptr<CallOf<LoadedChunk>> Load() {
    LoadRequest request = Request();
    buffers = std::make_shared<std::vector<std::byte>>(kChunks * kChunkBytes);
    for (size_t i = 0; i < kChunks; ++i)
      request.into.push_back({std::span(*buffers).subspan(i * kChunkBytes, kChunkBytes)});
    request.owner = buffers;
    return client->Load(std::move(request));
  }
  // Every item is settled, and what is a hit is right. Returns the hits.
  size_t Check(const CallOf<LoadedChunk>& call) {
    EXPECT_TRUE(call.Wait(Soon()));
    size_t hits = 0;
    for (size_t i = 0; i < kChunks && call.done(); ++i) {
      if (call.Poll(i)->outcome != Outcome::kHit) continue;
      ++hits;
      const auto bytes = std::span(*buffers).subspan(i * kChunkBytes, kChunkBytes);
      EXPECT_TRUE(std::ranges::all_of(bytes, [&](std::byte b) { return b == ByteOf(i); })) << i;
    }
    return hits;
  }

  const std::string socket = "@terrace-death-test-" + std::to_string(getpid());
  pid_t node = 0;
  std::shared_ptr<std::vector<std::byte>> buffers;
  std::unique_ptr<Client> client = NewNodeClient({}, socket);
};

TEST_F(NodeDeath, KilledAtAnyMomentItCostsHitsAndIsJoinedAgain) {
  std::mt19937 random(20261129);
  for (int round = 0; round < 6; ++round) {
    Spawn();
    Join();
    const auto saved = Save();
    if (round % 2 == 0) {
      ASSERT_TRUE(saved->Wait(Soon()));
    }
    const auto loaded = Load();
    const TimePoint until = Now() + std::chrono::microseconds(random() % 6000);
    while (Now() < until) std::this_thread::yield();
    Kill();
    ASSERT_TRUE(saved->Wait(Soon()));
    Check(*loaded);
    Part();
    const auto without = client->Lookup(Request().keys);
    ASSERT_TRUE(without->done()) << "at once";
    EXPECT_EQ(without->Poll(0)->miss_reason, Reason::kUnavailable);
    EXPECT_EQ(Check(*Load()), 0u);
  }
  Spawn();
  Join();
  ASSERT_TRUE(Save()->Wait(Soon()));
  EXPECT_EQ(Check(*Load()), kChunks);
}

TEST_F(NodeDeath, LeasedBytesOutliveTheNode) {
  Spawn();
  Join();
  ASSERT_TRUE(Save()->Wait(Soon()));
  const auto leased = client->Lease(Request());
  ASSERT_TRUE(leased->Wait(Soon()));
  Kill();
  Part();
  Spawn();
  Join();
  ASSERT_TRUE(Save()->Wait(Soon()));
  for (size_t i = 0; i < kChunks; ++i) {
    ASSERT_EQ(leased->Poll(i)->outcome, Outcome::kHit);
    EXPECT_TRUE(std::ranges::all_of(leased->Poll(i)->lease.bytes, [&](std::byte b) { return b == ByteOf(i); })) << i;
  }
}

TEST_F(NodeDeath, AStoppedNodeIsAMissAtTheDeadline) {
  Spawn();
  Join();
  ASSERT_TRUE(Save()->Wait(Soon()));
  kill(node, SIGSTOP);
  int status = 0;
  ASSERT_EQ(waitpid(node, &status, WUNTRACED), node);  // All its threads stand.
  ASSERT_TRUE(WIFSTOPPED(status));
  LoadRequest request = Request();
  request.deadline = Now() + 50ms;
  const auto call = client->Prefetch(request);
  ASSERT_TRUE(call->Wait(Soon()));
  EXPECT_EQ(call->Poll(0)->reason, Reason::kTimeout);
  kill(node, SIGCONT);
  EXPECT_EQ(Check(*Load()), kChunks);
}

TEST_F(NodeDeath, ClientsKilledAtAnyMomentLeaveNothingBehindAndHarmNobody) {
  const uint32_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  Spawn();
  Join();
  for (int round = 0; round < 3; ++round) {
    pid_t clients[] = {SpawnAs("--be-client", socket), SpawnAs("--be-client", socket)};
    while (StatsNow().sessions < 1 + std::size(clients)) ASSERT_TRUE(client->connected());
    ASSERT_TRUE(Save()->Wait(Soon()));  // What they have pushed out meanwhile, too.
    Check(*Load());
    const TimePoint until = Now() + std::chrono::microseconds(random() % 30'000);
    while (Now() < until) std::this_thread::yield();
    for (const pid_t pid : clients) KillNow(pid);
  }
  const TimePoint deadline = Soon();
  for (ClientStats stats = StatsNow(); stats.sessions > 1 || stats.leased_bytes > 0; stats = StatsNow()) {
    ASSERT_LT(Now(), deadline) << stats.sessions << " sessions, " << stats.leased_bytes << " bytes";
  }
  // All of the room for saves is there again, but for the half of it that this client has.
  FrameInfo large = InfoOf(400);
  large.payload_bytes = 15 << 20;
  const auto room = client->BeginSave({large});
  ASSERT_TRUE(room->Wait(Soon()));
  EXPECT_EQ(room->Poll(0)->outcome, Outcome::kHit) << ReasonName(room->Poll(0)->reason);
  ASSERT_TRUE(Save()->Wait(Soon()));
  EXPECT_EQ(Check(*Load()), kChunks);
}

}  // namespace

int Main(int argc, char** argv) {
  if (argc == 3) prctl(PR_SET_PDEATHSIG, SIGKILL);  // A test that dies leaves nobody behind.
  if (argc == 3 && std::strcmp(argv[1], "--be-node") == 0) return BeNode(argv[2]);
  if (argc == 3 && std::strcmp(argv[1], "--be-client") == 0) return BeClient(argv[2]);
  program = argv[0];
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}

}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
