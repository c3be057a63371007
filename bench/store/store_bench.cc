// What the store's parts cost beside the physical limit of the same bytes, and beside LMCache, in one run.
// `make bench WHAT=store` writes out/bench-store.json; docs/internals/figures.md says what each row means.
//
//   store_bench OUT.json SCRATCH_DIR PART... [--peer COMMAND...]
//
// Parts: memory (naming, index, ram), shared_fs, disk, peer. `peer` needs the command that starts lmcache_peer.py.
#include <algorithm>
#include <cstring>
#include <random>
#include <thread>

#include "base/hash.h"
#include "bench/harness.h"
#include "bench/store/disk_rows.h"
#include "bench/store/frames.h"
#include "bench/store/peer.h"
#include "bench/store/peer_rows.h"
#include "bench/store/shared_fs_rows.h"
#include "tier/ram_tier.h"

namespace terrace::bench {
namespace {

constexpr int kRounds = 9;
constexpr int kPeerRounds = 5;
const TimePoint kLater = std::chrono::steady_clock::now() + std::chrono::hours(1);

std::vector<std::byte> Random(size_t bytes) {
  std::mt19937_64 random(bytes);
  std::vector<std::byte> out(bytes);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t v = random();
    std::memcpy(out.data() + i, &v, 8);
  }
  return out;
}

void Naming(std::vector<Row>& rows) {
  std::vector<int32_t> tokens(256);
  const Digest parent = KeyOf(1);
  std::string same_bytes(13 + 32 + 4 + 1024 + 4, 'x');
  constexpr int kChunks = 20000;
  uint8_t sink = 0;
  const auto ours = [&] {
    return Seconds([&] {
      for (int i = 0; i < kChunks; ++i) {
        tokens[0] = i;
        sink ^= ChunkKey(parent, tokens).bytes[0];
      }
    });
  };
  const auto limit = [&] {
    return Seconds([&] {
      for (int i = 0; i < kChunks; ++i) {
        std::memcpy(same_bytes.data(), &i, sizeof i);
        sink ^= Sha256Of(same_bytes).bytes[0];
      }
    });
  };
  rows.push_back(
      Compare({.name = "naming a 256-token chunk, limit SHA-256", .size = same_bytes.size(), .unit = "chunks/s"},
              kRounds, kChunks, ours, limit));
  if (sink == 1) std::printf("\n");  // Keeps the hashes from being optimised away.
}

void Index(std::vector<Row>& rows) {
  auto ram = RamTier::Open({.bytes_max = 512 << 20}).value();
  constexpr uint64_t kFrames = 100000;
  auto hashes = std::make_shared<const SegmentHashes>(SegmentHashes{1});
  std::vector<Digest> keys;
  for (uint64_t i = 0; i < kFrames; ++i) {
    auto slot = ram->Reserve(InfoOf(i, 64)).value();
    ram->Commit(std::move(slot), hashes);
    keys.push_back(KeyOf(i));
  }
  std::shuffle(keys.begin(), keys.end(), std::mt19937_64(1));
  std::vector<uint8_t> present(512);
  Row index{.name = "index: keys looked up, 512 a call, 1 core", .unit = "keys/s"};
  index.limit = 1e6;
  rows.push_back(Rate(index, kRounds, kFrames / 512 * 512, [&] {
    return Seconds([&] {
      for (uint64_t at = 0; at + 512 <= kFrames; at += 512) ram->Contains(std::span(keys).subspan(at, 512), present);
    });
  }));
  Row lease{.name = "ram: leases, 1 core", .unit = "leases/s"};
  lease.limit = 2e5;
  rows.push_back(Rate(lease, kRounds, kFrames, [&] {
    return Seconds([&] {
      for (const Digest& key : keys) (void)ram->Acquire(key);
    });
  }));
}

void RamCopy(std::vector<Row>& rows, uint64_t bytes) {
  const uint64_t frames = (512ull << 20) / bytes;
  auto ram = RamTier::Open({.bytes_max = 768ull << 20}).value();
  const auto payload = Random(bytes);
  std::vector<RamLease> leases;
  for (uint64_t i = 0; i < frames; ++i) {
    auto slot = ram->Reserve(InfoOf(i, bytes)).value();
    std::memcpy(slot.bytes().data(), payload.data(), bytes);
    auto hashes = std::make_shared<const SegmentHashes>(HashSegments(payload));
    leases.push_back(*ram->Commit(std::move(slot), hashes));
  }
  auto into = std::make_shared<std::vector<std::byte>>(bytes * 4);  // Larger than the last-level cache's share.
  const auto place = [&](uint64_t i) { return std::span(*into).subspan(i % 4 * bytes, bytes); };
  const auto ours = [&] {
    return Seconds([&] {
      for (uint64_t i = 0; i < frames; ++i) {
        auto done = std::make_shared<LoadBatch>(1);
        std::vector<LoadItem> items;
        items.push_back({.key = KeyOf(i), .space = InfoOf(i, bytes).space, .into = place(i), .owner = into});
        ram->Load(std::move(items), kLater, done);
        if (done->Wait(0, kLater)->outcome != Outcome::kHit) std::abort();
      }
    });
  };
  const auto limit = [&] {
    return Seconds([&] {
      for (uint64_t i = 0; i < frames; ++i) std::memcpy(place(i).data(), leases[i].bytes.data(), bytes);
    });
  };
  rows.push_back(Compare({.name = "ram: copy load, verified, limit memcpy", .size = bytes, .unit = "GB/s"}, kRounds,
                         static_cast<double>(frames * bytes) / 1e9, ours, limit));
}

int Main(const std::string& out, const std::string& scratch, const std::vector<std::string>& parts,
         const std::vector<std::string>& peer_command) {
  std::vector<Row> rows;
  const auto run = [&](const std::function<void()>& part) { RunPart(rows, part); };
  const auto wanted = [&](const char* part) { return std::find(parts.begin(), parts.end(), part) != parts.end(); };
  constexpr uint64_t kMiB = 1 << 20;
  if (wanted("memory")) {
    run([&] { Naming(rows); });
    run([&] { Index(rows); });
    for (const uint64_t mib : {2, 6, 36}) run([&] { RamCopy(rows, mib * kMiB); });
  }
  if (wanted("shared_fs")) {
    run([&] { SharedFsRows(rows, kRounds, scratch, 2 * kMiB, 64); });
    run([&] { SharedFsRows(rows, kRounds, scratch, 8 * kMiB, 16); });
    run([&] { SharedFsRows(rows, kRounds, scratch, 36 * kMiB, 8); });
  }
  if (wanted("disk")) {
    for (const uint64_t mib : {2, 8, 36}) run([&] { DiskRows(rows, kRounds, scratch, mib * kMiB, 256 / mib); });
  }
  if (wanted("peer")) {
    Peer peer(peer_command);
    for (const PeerPair& pair : {PeerPair{"disk", "local_disk"}, PeerPair{"disk", "local_disk_direct"},
                                 PeerPair{"shared_fs", "fs"}, PeerPair{"shared_fs", "fs_native"}}) {
      run([&] { PeerRows(rows, kPeerRounds, peer, pair, scratch, 2 * kMiB, 64); });
      run([&] { PeerRows(rows, kPeerRounds, peer, pair, scratch, 8 * kMiB, 16); });
      run([&] { PeerRows(rows, kPeerRounds, peer, pair, scratch, 36 * kMiB, 8); });
    }
  }
  WriteRows(out, rows, {{"rounds", kRounds}, {"peer_rounds", kPeerRounds}});
  return 0;
}

}  // namespace
}  // namespace terrace::bench

int main(int argc, char** argv) {
  const auto [words, peer] = terrace::bench::ReadCommandLine(argc, argv);
  if (words.size() < 3) {
    std::fprintf(stderr, "usage: store_bench OUT.json SCRATCH_DIR PART... [--peer COMMAND...]\n");
    return 2;
  }
  return terrace::bench::Main(words[0], words[1], {words.begin() + 2, words.end()}, peer);
}
