#include "tests/sim/sim_node.h"

#include <utility>

#include "base/assert.h"
#include "tier/fault_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace::sim {

SimNode::SimNode(World& world, std::string name)
    : world_(world),
      name_(std::move(name)),
      born_(world.scheduler.Now()),
      clock_(world.scheduler),
      view_(world.disk, world.scheduler, world.log, name_, world.plan.rates, world.plan.random.Fork()),
      executors_{.store = {world.scheduler, name_ + "-store", 1},
                 .load = {world.scheduler, name_ + "-load", world.plan.load_threads},
                 .save = {world.scheduler, name_ + "-save", 2},
                 .background = {world.scheduler, name_ + "-index", 1},
                 .faults = {world.scheduler, name_ + "-faults", 2}} {
  if (world.calm) view_.Heal();
  std::vector<std::unique_ptr<Tier>> tiers;
  tiers.push_back(OpenShared());
  store_ = OpenStore({.ram_bytes_max = world.plan.ram_bytes,
                      .write_behind_bytes_max = world.plan.write_behind_bytes,
                      .save_in_flight_max = world.plan.save_in_flight,
                      .executor = &executors_.store},
                     std::move(tiers), metrics_)
               .value();
  world.log.Event(name_, "begins");
}

std::unique_ptr<Tier> SimNode::OpenShared() {
  SharedFsOptions options;
  options.directory = SimFileIo::kRoot;
  options.open_lazily = true;
  options.load_threads = world_.plan.load_threads;
  options.load_queue_items_max = world_.plan.load_queue_items;
  options.save_queue_items_max = world_.plan.save_queue_items;
  options.stale_age = kStaleAge;
  options.scan_interval = kScanInterval;
  options.quarantine_files_max = world_.plan.quarantine_files;
  auto tier = OpenSharedFsTier(options, {.io = view_,
                                         .clock = clock_,
                                         .metrics = metrics_,
                                         .load = &executors_.load,
                                         .save = &executors_.save,
                                         .background = &executors_.background});
  std::unique_ptr<Tier> shared = std::move(tier).value();
  if (world_.break_tier) shared = world_.break_tier(std::move(shared));
  auto probe = std::make_unique<ProbeTier>(std::move(shared), name_, world_.oracle);
  probes_.push_back(probe.get());
  if (world_.plan.tier_faults.empty() || world_.calm) return probe;
  FaultSpec spec = FaultSpec::Parse(world_.plan.tier_faults).value();
  spec.seed = world_.plan.random.Next();
  return std::make_unique<FaultTier>(std::move(probe), spec, executors_.faults);
}

SimNode::~SimNode() { TERRACE_ASSERT(!store_); }

CloseReport SimNode::CloseStore(TimePoint deadline) {
  const CloseReport report = store_->Close(deadline);
  world_.log.Event(name_, std::string("closed, ") + (report.clean ? "clean" : "not clean") + ", abandoned " +
                              std::to_string(report.abandoned));
  for (const ProbeTier* probe : probes_) {
    const ProbeTier::Counts& counts = probe->counts();
    if (counts.loads == counts.loads_settled && counts.saves == counts.saves_settled) continue;
    world_.oracle.Contradiction(name_ + " closed its store with " +
                                std::to_string(counts.loads - counts.loads_settled) + " loads and " +
                                std::to_string(counts.saves - counts.saves_settled) + " saves not settled");
  }
  return report;
}

void SimNode::KillExecutors() {
  for (SimExecutor* executor : executors()) executor->Kill();
}

void SimNode::Destroy() {
  for (SimExecutor* executor : executors()) executor->Stop();
  store_.reset();
}

}  // namespace terrace::sim
