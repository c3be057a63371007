// One life of a node's process: its store over its tiers, standing on simulated files, executors and time. A node that
// dies or restarts gets a new one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/metrics.h"
#include "terrace/store.h"
#include "tests/sim/oracle.h"
#include "tests/sim/plan.h"
#include "tests/sim/probe_tier.h"
#include "tests/sim/sim_executor.h"
#include "tests/sim/sim_file_io.h"
#include "tests/sim/sim_log.h"
#include "tests/sim/simulation.h"

namespace terrace::sim {

// What all nodes stand on.
struct World {
  explicit World(const RunOptions& options)
      : plan(options.seed),
        break_tier(options.break_tier),
        scheduler({.seed = plan.random.Next(), .preempt_one_in = plan.preempt_one_in, .steps_max = options.steps_max}),
        log(scheduler, options.log_all),
        disk(scheduler, log, plan.random.Fork()),
        oracle(disk, scheduler) {}

  Plan plan;
  const std::function<std::unique_ptr<Tier>(std::unique_ptr<Tier>)> break_tier;
  Scheduler scheduler;
  SimLog log;
  SimDisk disk;
  Oracle oracle;
  bool calm = false;  // No more faults.
};

// How old a temporary or journal must be to be removed.
inline constexpr std::chrono::seconds kStaleAge{900};
// Of a node's scans: what nobody told of is found by the next one.
inline constexpr std::chrono::seconds kScanInterval{30};

class SimNode {
 public:
  // On a fiber. `name` is unique among all lives: "a1".
  SimNode(World& world, std::string name);
  ~SimNode();  // After Destroy.

  const std::string& name() const { return name_; }
  Store& store() { return *store_; }
  Metrics& metrics() { return metrics_; }
  SimFileIo& view() { return view_; }
  const std::vector<ProbeTier*>& probes() const { return probes_; }
  TimePoint born() const { return born_; }

  uint64_t waits = 0;  // Chunks its clients asked for.

  // Dies now. Anywhere. Then KillExecutors, CloseStore and Destroy on a fiber; in peace the last two.
  void Die() { view_.Crash(); }
  bool dead() const { return view_.crashed(); }
  void KillExecutors();
  CloseReport CloseStore(TimePoint deadline);
  void Destroy();  // Once nobody uses the store.

 private:
  struct Executors {
    SimExecutor store, load, save, background, faults;
  };
  std::array<SimExecutor*, 5> executors() {
    return {&executors_.store, &executors_.load, &executors_.save, &executors_.background, &executors_.faults};
  }
  // A tier to be simulated is one function like this and a line in the constructor.
  std::unique_ptr<Tier> OpenShared();

  World& world_;
  const std::string name_;
  const TimePoint born_;
  SimClock clock_;
  Metrics metrics_;
  SimFileIo view_;
  Executors executors_;
  std::vector<ProbeTier*> probes_;
  std::unique_ptr<Store> store_;
};

}  // namespace terrace::sim
