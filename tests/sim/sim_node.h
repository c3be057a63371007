// One life of a node's process: its store over its tiers, standing on simulated files, executors and time. A node that
// dies or restarts gets a new one.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "terrace/metrics.h"
#include "terrace/store.h"
#include "tests/sim/oracle.h"
#include "tests/sim/plan.h"
#include "tests/sim/probe_tier.h"
#include "tests/sim/sim_disk_io.h"
#include "tests/sim/sim_executor.h"
#include "tests/sim/sim_file_io.h"
#include "tests/sim/sim_log.h"
#include "tests/sim/simulation.h"

namespace terrace::sim {

// What all nodes stand on.
struct World {
  explicit World(const RunOptions& options)
      : plan(options.seed, options.with_disk, options.on_bucket, options.with_bounds),
        break_tier(options.break_tier),
        break_disk(options.break_disk),
        break_bounds(options.break_bounds),
        scheduler({.seed = plan.random.Next(), .preempt_one_in = plan.preempt_one_in, .steps_max = options.steps_max}),
        log(scheduler, options.log_all),
        disk(scheduler, log, plan.random.Fork()),
        oracle(disk, scheduler) {}

  Plan plan;
  const std::function<std::unique_ptr<Tier>(std::unique_ptr<Tier>)> break_tier, break_disk;
  const std::function<void(Bounds&)> break_bounds;
  Scheduler scheduler;
  SimLog log;
  SimDisk disk;
  Oracle oracle;
  bool calm = false;  // No more faults.

  // Of the node that this is a life of: "a" of "a3".
  LocalDisk& Local(const std::string& life) {
    auto& local = disks[life.substr(0, 1)];
    if (!local) local = std::make_unique<LocalDisk>(scheduler, log, life.substr(0, 1), plan.random.Fork());
    return *local;
  }
  std::map<std::string, std::unique_ptr<LocalDisk>> disks;  // Made when a node first begins.
};

// How old a temporary or journal must be to be removed.
inline constexpr std::chrono::seconds kStaleAge{900};
// Of a node's scans: what nobody told of is found by the next one.
inline constexpr std::chrono::seconds kScanInterval{30};
// Of a bucket: others hear of a frame by it, if nobody asks for it before.
inline constexpr std::chrono::seconds kListInterval{1};
// Of whoever keeps its bounds.
inline constexpr std::chrono::seconds kLeaseLife{6};
// Of a node's claim of room in a directory.
inline constexpr std::chrono::seconds kClaimLife{60};

class SimNode {
 public:
  // On a fiber. `name` is unique among all lives: "a1".
  SimNode(World& world, std::string name);
  ~SimNode();  // After Destroy.

  const std::string& name() const { return name_; }
  Store& store() { return *store_; }
  Metrics& metrics() { return metrics_; }
  SimFileIo& view() { return view_; }
  const std::vector<ProbeTier*>& probes() const { return probes_; }  // The shared one first.
  ProbeTier* disk_probe() const { return probes_.size() > 1 ? probes_[1] : nullptr; }
  TimePoint born() const { return born_; }

  uint64_t waits = 0;  // Chunks its clients asked for.

  // Dies now. Anywhere. Then KillExecutors, CloseStore and Destroy on a fiber; in peace the last two.
  void Die();
  // Dies within one of the next operations, and calls `died` then.
  void DieWithin(uint64_t operations, bool on_disk, std::function<void()> died) {
    (on_disk && local_view_ ? *local_view_ : view_).CrashAfter(operations, std::move(died));
  }
  void Heal();  // No more faults of its own making.
  bool dead() const { return view_.crashed(); }
  void KillExecutors();
  CloseReport CloseStore(TimePoint deadline);
  void Destroy();  // Once nobody uses the store.

 private:
  struct Executors {
    SimExecutor store, load, save, background, faults, guard;
  };
  struct DiskExecutors {
    DiskExecutors(Scheduler& scheduler, const std::string& node)
        : load(scheduler, node + "-disk-load", 2),
          save(scheduler, node + "-disk-save", 1),
          background(scheduler, node + "-disk-scan", 1),
          late(scheduler, node + "-disk-late", 1) {}
    SimExecutor load, save, background, late;
  };
  std::vector<SimExecutor*> executors();
  // A tier to be simulated is one function like these and a line in the constructor.
  std::unique_ptr<Tier> Guarded(std::unique_ptr<Tier> tier);
  Bounds BoundsToKeep() const;
  std::unique_ptr<Tier> OpenShared();  // A directory or a bucket.
  std::unique_ptr<Tier> OpenDirectory();
  std::unique_ptr<Tier> OpenBucket();
  std::unique_ptr<Tier> OpenDisk();

  World& world_;
  const std::string name_;
  const TimePoint born_;
  SimClock clock_;
  Metrics metrics_;
  FaultRates bucket_rates_;  // What the way to a bucket does besides.
  SimFileIo view_;
  Executors executors_;
  // With a disk.
  std::optional<SimFileIo> local_view_;
  std::optional<SimDiskIo> disk_io_;
  std::optional<DiskExecutors> disk_executors_;
  std::vector<ProbeTier*> probes_;
  std::unique_ptr<Store> store_;
};

}  // namespace terrace::sim
