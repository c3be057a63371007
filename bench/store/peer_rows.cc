#include "bench/store/peer_rows.h"

#include <cstring>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "bench/store/frames.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "terrace/store.h"
#include "tier/disk_tier.h"
#include "tier/ram_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace::bench {
namespace {

constexpr uint64_t kLookups = 1 << 16;  // A run; LMCache's are fewer and counted as what they are.

struct Tiers {
  std::unique_ptr<FileIo> io = RealFileIo();
  SystemClock clock;
  Metrics metrics;

  std::unique_ptr<Tier> Open(const std::string& name, const std::string& directory) {
    if (name == "disk") {
      return OpenDiskTier({.directory = directory, .bytes_max = 64ull << 30},
                          {.files = *io, .clock = clock, .metrics = metrics})
          .value();
    }
    return OpenSharedFsTier({.directory = directory}, {.io = *io, .clock = clock, .metrics = metrics}).value();
  }
};

// From the engine's memory into the store: when the engine may go on, and when the tier below has everything, durable.
Sample SaveThroughStore(Store& store, const Frames& batch) {
  const double cpu = CpuSeconds(), own_cpu = CpuSeconds(CLOCK_THREAD_CPUTIME_ID);
  double accepted = 0, accepted_cpu = 0;
  const double durable = Seconds([&] {
    accepted = Seconds([&] {
      for (uint64_t i = 0; i < batch.count(); ++i) {
        auto slot = store.BeginSave(batch.info(i));
        Check(slot.has_value(), "room in RAM");
        std::memcpy(slot->bytes.data(), batch.payload(i).data(), batch.bytes());
        store.Commit(*std::move(slot));
      }
    });
    accepted_cpu = CpuSeconds(CLOCK_THREAD_CPUTIME_ID) - own_cpu;
    while (store.pending_saves() > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
  });
  return {accepted, durable, CpuSeconds() - cpu, accepted_cpu};
}

Sample Timed(const std::function<void()>& run) {
  const double cpu = CpuSeconds();
  const double seconds = Seconds(run);
  return {seconds, CpuSeconds() - cpu};
}

// A name that LMCache's users know.
std::string Named(const std::string& backend) {
  if (backend == "local_disk") return "local disk";
  if (backend == "local_disk_direct") return "local disk, O_DIRECT";
  if (backend == "fs_native") return "fs_native";
  return "fs";
}

}  // namespace

void PeerRows(std::vector<Row>& rows, int rounds, Peer& peer, const PeerPair& pair, const std::string& scratch,
              uint64_t bytes, uint64_t frames) {
  const std::string directory = scratch + "/ours", their_directory = scratch + "/theirs";
  MakeFreshDirectory(directory);
  MakeFreshDirectory(their_directory);
  Tiers tiers;
  Frames batch(bytes, frames);
  const double count = static_cast<double>(frames);
  const auto add = [&](const std::string& what, const std::string& unit, double amount, const Turns& turns,
                       size_t measure) {
    rows.push_back(
        RowOf({.name = pair.tier + ": " + what + ", peer LMCache " + Named(pair.backend), .size = bytes, .unit = unit},
              Beside::kPeer, amount, turns, measure));
  };
  peer.Ask({{"do", "open"},
            {"backend", pair.backend},
            {"directory", their_directory},
            {"bytes", bytes},
            {"frames", frames}});

  {
    std::vector<std::unique_ptr<Tier>> below;
    below.push_back(tiers.Open(pair.tier, directory));
    Tier& tier = *below[0];
    const uint64_t run_bytes = frames * bytes;
    const auto store = OpenStore({.ram_bytes_max = 2 * run_bytes, .write_behind_bytes_max = 2 * run_bytes},
                                 std::move(below), tiers.metrics)
                           .value();
    const auto save = [&] {
      batch.NewNames();
      Sample sample = SaveThroughStore(*store, batch);
      batch.Erase(tier);
      return sample;
    };
    for (int i = 0; i < 2; ++i) save();  // RAM is full from now on, and all its pages are there, as LMCache's are.
    const Turns turns = TakeTurns(rounds, save, [&] {
      const auto answer = peer.Ask({{"do", "save"}});
      return Sample{answer["accepted"], answer["durable"], answer["cpu"], answer["accepted_cpu"]};
    });
    add("save accepted", "GB/s", batch.gigabytes(), turns, 0);
    add("save accepted, of the engine's thread", "GB/cpu s", batch.gigabytes(), turns, 3);
    add("save until durable", "GB/s", batch.gigabytes(), turns, 1);
    add("save", "frames/cpu s", count, turns, 2);
  }

  const auto tier = tiers.Open(pair.tier, directory);
  batch.NewNames();
  batch.Save(*tier, frames);
  const bool direct = pair.tier == "disk";
  const auto ask_load = [&](bool warm, bool copy) {
    const auto answer = peer.Ask({{"do", "load"}, {"warm", warm}, {"copy", copy}});
    return Sample{answer["seconds"], answer["cpu"]};
  };
  const auto drop_pages = [&] {
    for (const auto& entry : std::filesystem::recursive_directory_iterator(directory)) {
      if (entry.path().extension() == ".kvf") DropPages(entry.path());
    }
  };
  const auto load = [&](bool warm) {
    if (!warm) drop_pages();
    return Timed([&] { batch.Load(*tier, frames); });
  };
  for (const bool warm : {false, true}) {
    const Turns turns = TakeTurns(rounds, [&] { return load(warm); }, [&] { return ask_load(warm, false); });
    // A disk tier passes by the page cache: it reads the device each time.
    const std::string what =
        std::string("load, ") + (warm ? direct ? "peer's pages warm" : "pages warm" : "pages dropped");
    add(what, "GB/s", batch.gigabytes(), turns, 0);
    add(what, "frames/cpu s", count, turns, 1);
  }
  if (direct) {
    // What the page cache is to them, RAM is to us: from either into memory of the engine's own.
    auto ram = RamTier::Open({.bytes_max = 2 * frames * bytes}).value();
    batch.Save(*ram, frames);
    const std::string what = "load from ram into the engine, peer's pages warm";
    const Turns turns = TakeTurns(
        rounds, [&] { return Timed([&] { batch.Load(*ram, frames); }); }, [&] { return ask_load(true, true); });
    add(what, "GB/s", batch.gigabytes(), turns, 0);
    add(what, "frames/cpu s", count, turns, 1);
  }

  std::vector<Digest> keys;
  for (uint64_t i = 0; i < frames; ++i) keys.push_back(batch.info(i).key);
  std::vector<uint8_t> present(frames);
  const Turns lookups = TakeTurns(
      rounds,
      [&] {
        const double seconds = Seconds([&] {
          for (uint64_t n = 0; n < kLookups; n += frames) tier->Contains(keys, present);
        });
        Check(std::find(present.begin(), present.end(), 0) == present.end(), "lookup");
        return Sample{seconds / kLookups};
      },
      [&] { return Sample{peer.Ask({{"do", "lookup"}})["seconds"]}; });
  add("lookup", "keys/s", 1, lookups, 0);

  peer.Ask({{"do", "close"}});
  tier->Close(tiers.clock.Now());
  std::filesystem::remove_all(directory);
  std::filesystem::remove_all(their_directory);
}

}  // namespace terrace::bench
