#include "tests/sim/plan.h"

#include <algorithm>

#include "chunk/frame.h"

namespace terrace::sim {

using std::chrono::seconds;

Plan::Plan(uint64_t seed, std::optional<bool> with_disk, bool bucket, std::optional<bool> with_bounds)
    : random(seed), on_bucket(bucket) {
  guarded = seed % 3 == 2;
  const auto some = [&](double rate) { return random.OneIn(2) ? 0 : rate; };
  const auto every = [&](uint64_t low, uint64_t high) {
    return random.OneIn(2) ? seconds(0) : seconds(random.Between(low, high));
  };

  nodes = random.OneIn(3) ? 3 : 2;
  clients = random.Between(1, 3);
  chaos = seconds(random.Between(20, 90));
  preempt_one_in = random.OneIn(3) ? 0 : static_cast<uint32_t>(random.Between(2, 40));

  // Around pages and padding, and now and then around a segment of 1 MiB.
  static constexpr uint64_t kSizes[] = {64, 1000, 4095, 4096, 4097, 8192, 12'345, 20'480};
  static constexpr uint64_t kLarge[] = {(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (2 << 20) + 77};
  for (int space = 0; space < 2; ++space) payload_bytes.push_back(kSizes[random.Below(std::size(kSizes))]);
  const bool large = random.OneIn(12);
  if (large) {
    payload_bytes[0] = kLarge[random.Below(std::size(kLarge))];
    chaos = std::min(chaos, seconds(20));
    nodes = 2;
  }
  conversations = random.Between(2, 6);
  chunks_max = large ? 4 : random.Between(2, 12);
  const uint64_t largest = *std::max_element(payload_bytes.begin(), payload_bytes.end());
  const uint64_t rounded = (largest + 4095) / 4096 * 4096;
  // From less than one conversation to everything. Each client may hold a chunk and write another.
  ram_bytes = rounded * random.Between(2 + 3 * clients, 60);
  write_behind_bytes = random.OneIn(4) ? largest * random.Between(1, 4) : 512ull << 20;
  save_in_flight = random.Between(1, 4);
  load_threads = random.Between(1, 4);
  load_queue_items = random.OneIn(4) ? random.Between(1, 4) : 64;
  save_queue_items = random.OneIn(4) ? random.Between(1, 4) : 64;
  quarantine_files = random.Below(6);

  rates.io_error = some(0.01);
  rates.lost_reply = some(0.01);
  rates.stale = some(0.5);
  rates.slow = some(0.01);
  rates.torn_write = some(0.02);
  rates.sync_error = some(0.05);
  if (random.OneIn(2)) rates.negative_max = seconds(30);
  if (random.OneIn(2)) rates.attributes_max = seconds(30);
  rates.hard_mount = random.OneIn(2);
  rates.links_refused = random.OneIn(4);

  if (random.OneIn(6)) {
    static constexpr const char* kSpecs[] = {
        "load.error=0.1,save.error=0.1,save.enospc=0.05",
        "load.hang=0.05,save.hang=0.05,hang=5s",
        "load.delay=80ms,save.delay=200ms,load.corrupt=0.1",
    };
    tier_faults = kSpecs[random.Below(std::size(kSpecs))];
  }
  if (random.OneIn(3)) erase = 0.1;
  node_death = every(5, 40);
  node_restart = every(10, 40);
  server_crash = every(10, 60);
  outage = every(10, 40);
  full = every(10, 40);
  unmount = random.OneIn(3) ? every(15, 40) : seconds(0);
  stall = every(15, 40);
  sabotage = every(1, 15);

  if (on_bucket) {
    unmount = seconds(0);
    honours_conditions = !rates.links_refused;
  }
  Random bounds(seed ^ 0x0b0b0b0b);
  const bool some_buckets = bounds.OneIn(3);
  if (with_bounds.value_or(on_bucket && some_buckets)) MakeBounds(bounds);
  if (bounded() && !on_bucket) {
    // What is erased counts no more from the call on, and is there until its file is removed.
    erase = 0;
    if (tier_faults.find("corrupt") != std::string::npos) tier_faults.clear();
  }

  Random disk(~seed);
  has_disk = with_disk.value_or(disk.OneIn(2));
  if (has_disk) MakeDisk(disk);
}

void Plan::MakeDisk(Random disk) {
  const auto some = [&](double rate) { return disk.OneIn(2) ? 0 : rate; };
  const uint64_t largest = *std::max_element(payload_bytes.begin(), payload_bytes.end());
  // From two frames to more than there are.
  disk_bytes = FrameBytes(largest) * disk.Between(2, disk.OneIn(2) ? 10 : 100);
  disk_direct = !disk.OneIn(4);
  cap_changes = disk.OneIn(3);
  power_fails = disk.OneIn(2);
  disk_rates.io_error = some(0.002);
  disk_rates.slow = some(0.002);
  disk_rates.slow_max = seconds(2);
  disk_rates.torn_write = some(0.02);
  disk_rates.sync_error = some(0.03);
  if (disk.OneIn(2)) disk_full = seconds(disk.Between(10, 40));
  if (disk.OneIn(2)) disk_rot = seconds(disk.Between(2, 15));
}

void Plan::MakeBounds(Random bounds) {
  const uint64_t largest = *std::max_element(payload_bytes.begin(), payload_bytes.end());
  const uint64_t kind = bounds.Below(3);
  // From a few frames to about what there is.
  if (kind != 0) bound_bytes = FrameBytes(largest) * bounds.Between(4, 40);
  if (kind != 1) bound_ttl = seconds(bounds.Between(20, 60));
}

std::string Plan::Describe() const {
  std::string text = std::to_string(nodes) + " nodes x " + std::to_string(clients) + " clients, chaos " +
                     std::to_string(chaos.count()) + " s, payloads " + std::to_string(payload_bytes[0]) + " and " +
                     std::to_string(payload_bytes[1]) + ", ram " + std::to_string(ram_bytes) + ", write-behind " +
                     std::to_string(write_behind_bytes) + ", preempt 1/" + std::to_string(preempt_one_in);
  const auto rate = [&](const char* name, double value) {
    if (value > 0) text += std::string(", ") + name;
  };
  rate("io_error", rates.io_error);
  rate("lost_reply", rates.lost_reply);
  rate("stale", rates.stale);
  rate("slow", rates.slow);
  rate("torn_write", rates.torn_write);
  rate("sync_error", rates.sync_error);
  rate("negative", static_cast<double>(rates.negative_max.count()));
  rate("attributes", static_cast<double>(rates.attributes_max.count()));
  rate("hard_mount", rates.hard_mount);
  rate("links_refused", rates.links_refused);
  rate("erase", erase);
  const auto every = [&](const char* name, seconds value) { rate(name, static_cast<double>(value.count())); };
  every("node_death", node_death);
  every("node_restart", node_restart);
  every("server_crash", server_crash);
  every("outage", outage);
  every("full", full);
  every("unmount", unmount);
  every("stall", stall);
  every("sabotage", sabotage);
  if (has_disk) {
    text += ", disk " + std::to_string(disk_bytes);
    rate("disk_direct", disk_direct);
    rate("cap_changes", cap_changes);
    rate("power_fails", power_fails);
    rate("disk_io_error", disk_rates.io_error);
    rate("disk_slow", disk_rates.slow);
    rate("disk_torn_write", disk_rates.torn_write);
    rate("disk_sync_error", disk_rates.sync_error);
    every("disk_full", disk_full);
    every("disk_rot", disk_rot);
  }
  if (bound_bytes > 0) text += ", bounded to " + std::to_string(bound_bytes);
  if (bound_ttl.count() > 0) text += ", ttl " + std::to_string(bound_ttl.count()) + " s";
  rate("guarded", guarded);
  if (!tier_faults.empty()) text += ", tier faults " + tier_faults;
  return text;
}

}  // namespace terrace::sim
