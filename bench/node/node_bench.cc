// What a node costs its clients: the same loads, saves and look-ups through its socket and in process, in turn, and
// kvblockd beside it. `make bench WHAT=node` writes out/bench-node.json; docs/internals/figures.md says what each row
// means.
//
//   node_bench OUT.json SCRATCH_DIR PART... [--peer COMMAND...]
//
// Parts: copy, calls, peer. `peer` needs the command that starts kvblockd_peer.py. The node is this program anew.
#include <spawn.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <memory>
#include <thread>

#include "base/hash.h"
#include "bench/harness.h"
#include "bench/store/frames.h"
#include "bench/store/peer.h"
#include "client/host.h"
#include "node/server.h"
#include "terrace/client.h"

namespace terrace::bench {
namespace {

constexpr int kRounds = 15;
constexpr int kWarmRounds = 25;  // About a second.
constexpr int kPeerRounds = 7;
constexpr uint64_t kRamBytes = 2ull << 30;  // The default.
constexpr uint64_t kMiB = 1 << 20;
constexpr size_t kKeys = 512;
constexpr int kCalls = 1000;

TimePoint Later() { return std::chrono::steady_clock::now() + std::chrono::minutes(1); }

int BeNode(const char* socket) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  auto host = OpenHost({.ram_bytes_max = kRamBytes}, {.ram_bytes_max = kRamBytes});
  Result<Listener> listener = ListenAt(socket);
  Check(host && listener, "the node");
  const auto server =
      NodeServer::Start({.segments_bytes_max = kRamBytes}, std::move(listener->fd), *(*host)->store, (*host)->metrics);
  Check(server.has_value(), "the node");
  for (;;) pause();
}

class Node {
 public:
  Node() : socket_("@terrace-bench-" + std::to_string(getpid())) {
    char program[] = "/proc/self/exe";
    char role[] = "--be-node";
    char* argv[] = {program, role, socket_.data(), nullptr};
    Check(posix_spawn(&pid_, program, nullptr, nullptr, argv, environ) == 0, "starting the node");
  }
  ~Node() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  Node(const Node&) = delete;
  Node& operator=(const Node&) = delete;
  std::unique_ptr<Client> Join() const {
    const TimePoint deadline = Later();
    for (;;) {
      auto client = Client::Open({.node = socket_});
      Check(client && std::chrono::steady_clock::now() < deadline, "joining the node");
      if ((*client)->connected()) return *std::move(client);
    }
  }

 private:
  std::string socket_;
  pid_t pid_ = 0;
};

// Frames that a client has saved, and memory to load them to.
class Batch {
 public:
  Batch(uint64_t bytes, uint64_t count) : frames_(bytes, count), into_(bytes, count) {}

  double gigabytes() const { return frames_.gigabytes(); }
  void NewNames() { frames_.NewNames(); }
  // Until RAM is full of it and all its pages are there: a save then takes the place of another.
  void FillRam(Client& client) {
    for (uint64_t bytes = 0; bytes < kRamBytes; bytes += frames_.bytes() * frames_.count()) {
      NewNames();
      Save(client);
    }
  }
  void Save(Client& client) const {
    std::vector<SaveChunk> chunks;
    for (uint64_t i = 0; i < frames_.count(); ++i) chunks.push_back({frames_.info(i), {frames_.payload(i)}});
    const auto call = client.Save(std::move(chunks), nullptr);
    Check(call->Wait(Later()), "save");
    for (size_t i = 0; i < call->size(); ++i) Check(call->Poll(i)->outcome == Outcome::kHit, "save");
  }
  // All in one call, or one after the other.
  void Load(Client& client, bool one_by_one = false) const {
    const uint64_t step = one_by_one ? 1 : frames_.count();
    for (uint64_t first = 0; first < frames_.count(); first += step) {
      LoadRequest request{
          .space = frames_.info(0).space, .payload_bytes = frames_.bytes(), .deadline = Later(), .stop_at_miss = false};
      for (uint64_t i = first; i < first + step; ++i) {
        request.keys.push_back(frames_.info(i).key);
        request.into.push_back({into_.payload(i)});
      }
      const auto call = client.Load(std::move(request));
      Check(call->Wait(Later()), "load");
      for (size_t i = 0; i < call->size(); ++i) Check(call->Poll(i)->outcome == Outcome::kHit, "load");
    }
  }

 private:
  Frames frames_;
  const Frames into_;
};

std::unique_ptr<Client> InProcess() {
  auto client = Client::Open({.settings = {{"ram", std::to_string(kRamBytes)}}});
  Check(client.has_value(), "a store in process");
  return *std::move(client);
}

void CopyRows(std::vector<Row>& rows, uint64_t bytes, uint64_t count) {
  const Node node;
  const auto ours = node.Join();
  const auto local = InProcess();
  Batch batch(bytes, count);
  batch.Save(*ours);
  batch.Save(*local);
  // Each store gets pages for the next chunks in the background, which would take from whoever is measured.
  for (int i = 0; i < kWarmRounds; ++i) {
    batch.Load(*ours);
    batch.Load(*local);
  }
  const auto compare = [&](const std::string& name, bool one_by_one) {
    rows.push_back(Compare(
        {.name = name + ", limit in process", .size = bytes, .unit = "GB/s"}, kRounds, batch.gigabytes(),
        [&] { return Seconds([&] { batch.Load(*ours, one_by_one); }); },
        [&] { return Seconds([&] { batch.Load(*local, one_by_one); }); }));
  };
  compare("copy load", false);
  compare("copy load, one chunk a call", true);
  rows.push_back(Compare(
      {.name = "copy load, first after joining, limit in process", .size = bytes, .unit = "GB/s"}, kRounds,
      batch.gigabytes(),
      [&] {
        const auto fresh = node.Join();
        return Seconds([&] { batch.Load(*fresh); });
      },
      [&] { return Seconds([&] { batch.Load(*local); }); }));
  batch.FillRam(*ours);
  batch.FillRam(*local);
  rows.push_back(Compare(
      {.name = "save, limit in process", .size = bytes, .unit = "GB/s"}, kRounds, batch.gigabytes(),
      [&] {
        batch.NewNames();
        return Seconds([&] { batch.Save(*ours); });
      },
      [&] {
        batch.NewNames();
        return Seconds([&] { batch.Save(*local); });
      }));
}

void CallRows(std::vector<Row>& rows) {
  const Node node;
  const auto client = node.Join();
  Batch batch(4096, kKeys);
  batch.Save(*client);
  std::vector<Digest> keys;
  for (uint64_t i = 0; i < kKeys; ++i) keys.push_back(KeyOf(i));
  std::vector<double> calls_us;
  const auto ask = [&] {
    return Seconds([&] {
      for (int i = 0; i < kCalls; ++i) {
        calls_us.push_back(1e6 * Seconds([&] { Check(client->Lookup(keys)->Wait(Later()), "look-up"); }));
      }
    });
  };
  Row row{.name = "look-ups of 512 keys through the socket, limit 300 us each", .size = kKeys, .unit = "calls/s"};
  row.limit = 1e6 / 300;
  rows.push_back(Rate(row, kRounds, kCalls, ask));
  std::sort(calls_us.begin(), calls_us.end());
  const double p99 = calls_us[calls_us.size() * 99 / 100];
  rows.push_back({.name = "look-ups of 512 keys through the socket, p99",
                  .size = kKeys,
                  .unit = "us",
                  .value = p99,
                  .limit = 300,
                  .ratio = 300 / p99});
}

void PeerRows(std::vector<Row>& rows, Peer& peer, uint64_t bytes, uint64_t count) {
  const Node node;
  const auto client = node.Join();
  Batch batch(bytes, count);
  batch.Save(*client);
  for (int i = 0; i < kWarmRounds; ++i) batch.Load(*client);
  peer.Ask({{"do", "open"}, {"bytes", bytes}, {"frames", count}});
  const auto beside = [&](const std::string& name, const std::string& what, const std::function<void()>& ours) {
    const Turns turns = TakeTurns(
        kPeerRounds, [&] { return Sample{Seconds(ours)}; },
        [&] { return Sample{peer.Ask({{"do", what}})["seconds"]}; });
    rows.push_back(RowOf({.name = name + ", peer kvblockd", .size = bytes, .unit = "GB/s"}, Beside::kPeer,
                         batch.gigabytes(), turns));
  };
  beside("copy load", "load", [&] { batch.Load(*client); });
  batch.FillRam(*client);
  beside("save", "save", [&] {
    batch.NewNames();
    batch.Save(*client);
  });
  peer.Ask({{"do", "close"}});
}

int Main(const std::string& out, const std::vector<std::string>& parts, const std::vector<std::string>& peer_command) {
  std::vector<Row> rows;
  const auto run = [&](const std::function<void()>& part) { RunPart(rows, part); };
  const auto wanted = [&](const char* part) { return std::find(parts.begin(), parts.end(), part) != parts.end(); };
  if (wanted("copy")) {
    run([&] { CopyRows(rows, 8 * kMiB, 32); });
    run([&] { CopyRows(rows, 36 * kMiB, 8); });
  }
  if (wanted("calls")) run([&] { CallRows(rows); });
  if (wanted("peer")) {
    Peer peer(peer_command);
    run([&] { PeerRows(rows, peer, 8 * kMiB, 32); });
    run([&] { PeerRows(rows, peer, 36 * kMiB, 8); });
  }
  WriteRows(out, rows, {{"rounds", kRounds}, {"peer_rounds", kPeerRounds}});
  return 0;
}

}  // namespace
}  // namespace terrace::bench

int main(int argc, char** argv) {
  const auto [words, peer] = terrace::bench::ReadCommandLine(argc, argv);
  if (words.size() == 2 && words[0] == "--be-node") return terrace::bench::BeNode(argv[2]);
  if (words.size() < 3) {
    std::fprintf(stderr, "usage: node_bench OUT.json SCRATCH_DIR PART... [--peer COMMAND...]\n");
    return 2;
  }
  return terrace::bench::Main(words[0], {words.begin() + 2, words.end()}, peer);
}
