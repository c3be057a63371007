// One run: some nodes, each a store of its own over one simulated share, chaos for a while, then peace and the proof
// that everything came right. Everything follows from the seed. README.md is the guide.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "terrace/tier.h"

namespace terrace::sim {

// Of the share; 0: none.
struct Bounds {
  uint64_t bytes_max = 0;
  std::chrono::seconds ttl{0};
};

struct RunOptions {
  uint64_t seed = 1;
  uint64_t steps_max = 20'000'000;  // Of the scheduler; beyond, the run hangs.
  bool log_all = false;             // Every step, not only faults and events.
  std::optional<bool> with_disk;    // Nodes have a local disk, too. Not said: the seed decides.
  bool on_bucket = false;           // They share a bucket instead of a directory.
  std::optional<bool>
      with_bounds;  // The share has bounds. Not said: the seed decides for a bucket; a directory has none.
  // Put a fault that nobody may have into the shared tier, or into the disk, to see that it is seen.
  std::function<std::unique_ptr<Tier>(std::unique_ptr<Tier>)> break_tier, break_disk;
  std::function<void(Bounds&)> break_bounds;  // Nodes keep other ones than the run has.
};

struct RunReport {
  bool ok = false;
  std::string failure;           // The first contradiction, with !ok.
  std::vector<std::string> log;  // Lines with a newline.
  uint64_t digest = 0;           // Of every step.
  uint64_t steps = 0;
  uint64_t faults = 0;
  double virtual_seconds = 0;
  // What the run had to do with, so that nobody mistakes an idle simulation for a right one.
  uint64_t chunks_asked = 0, hits_ram = 0, hits_below = 0, saves_written = 0, lives = 0, deaths = 0;
  uint64_t collected = 0;  // Right frames, to keep bounds.
};

RunReport RunSeed(const RunOptions& options);

}  // namespace terrace::sim
