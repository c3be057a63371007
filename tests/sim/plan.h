// What a seed decides before anything runs: sizes, which faults this run has, and how often. Each run has some of the
// faults and not others, so that rare combinations and long quiet stretches both occur.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "tests/sim/random.h"
#include "tests/sim/sim_file_io.h"

namespace terrace::sim {

struct Plan {
  Plan(uint64_t seed, std::optional<bool> with_disk, bool on_bucket, std::optional<bool> with_bounds);
  std::string Describe() const;

  Random random;
  size_t nodes = 2;
  size_t clients = 1;              // A node.
  std::chrono::seconds chaos{60};  // How long faults come.
  uint32_t preempt_one_in = 0;
  std::vector<uint64_t> payload_bytes;       // One a space.
  size_t conversations = 6, chunks_max = 8;  // A space; chunks of a conversation.
  uint64_t ram_bytes = 0;
  uint64_t write_behind_bytes = 0;
  size_t save_in_flight = 4, load_threads = 4;
  size_t load_queue_items = 64, save_queue_items = 64;
  uint64_t quarantine_files = 4;
  FaultRates rates;
  bool guarded = false;     // Deadlines and breakers round the tiers, as in the program.
  std::string tier_faults;  // For a FaultTier above the share; empty: none.
  double erase = 0;         // Chance a turn.
  // Nodes share a bucket: what a mount alone does, does not happen.
  bool on_bucket = false;
  bool honours_conditions = true;
  // Bounds of the share; 0: none. Their numbers come from a generator of their own.
  uint64_t bound_bytes = 0;
  std::chrono::seconds bound_ttl{0};
  bool bounded() const { return bound_bytes > 0 || bound_ttl.count() > 0; }
  // The local disk of each node. Its numbers come from a generator of their own.
  bool has_disk = false;
  uint64_t disk_bytes = 0;
  bool disk_direct = true;   // It has O_DIRECT.
  bool cap_changes = false;  // Some lives have half of disk_bytes.
  bool power_fails = false;  // A node's death may take what its disk had not synced.
  FaultRates disk_rates;
  std::chrono::seconds disk_full{0}, disk_rot{0};  // As below.
  // Mean time between events of a kind; 0: never.
  std::chrono::seconds node_death{0}, node_restart{0}, server_crash{0}, outage{0}, full{0}, unmount{0}, stall{0},
      sabotage{0};

 private:
  void MakeDisk(Random disk);
  void MakeBounds(Random bounds);
};

}  // namespace terrace::sim
