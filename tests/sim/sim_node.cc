#include "tests/sim/sim_node.h"

#include <utility>

#include "base/assert.h"
#include "tests/sim/sim_object_store.h"
#include "tier/disk_tier.h"
#include "tier/fault_tier.h"
#include "tier/guard_tier.h"
#include "tier/late_tier.h"
#include "tier/s3_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace::sim {
namespace {

std::string DiskFramePath(const Digest& key) {
  const std::string hex = key.Hex();
  return "frames/" + hex.substr(0, 2) + "/" + hex + ".kvf";
}

}  // namespace

SimNode::SimNode(World& world, std::string name)
    : world_(world),
      name_(std::move(name)),
      born_(world.scheduler.Now()),
      clock_(world.scheduler),
      bucket_rates_(world.plan.rates),
      view_(world.disk, world.scheduler, world.log, name_, world.plan.rates, world.plan.random.Fork()),
      executors_{.store = {world.scheduler, name_ + "-store", 1},
                 .load = {world.scheduler, name_ + "-load", world.plan.load_threads},
                 .save = {world.scheduler, name_ + "-save", 2},
                 .background = {world.scheduler, name_ + "-index", 1},
                 .faults = {world.scheduler, name_ + "-faults", 2},
                 .guard = {world.scheduler, name_ + "-guard", 3}} {
  if (world.calm) Heal();
  std::vector<std::unique_ptr<Tier>> tiers;
  tiers.push_back(Guarded(OpenShared()));
  if (world.plan.has_disk) tiers.insert(tiers.begin(), Guarded(OpenDisk()));
  store_ = OpenStore({.ram_bytes_max = world.plan.ram_bytes,
                      .write_behind_bytes_max = world.plan.write_behind_bytes,
                      .save_in_flight_max = world.plan.save_in_flight,
                      .executor = &executors_.store},
                     std::move(tiers), metrics_)
               .value();
  world.log.Event(name_, "begins");
}

std::unique_ptr<Tier> SimNode::Guarded(std::unique_ptr<Tier> tier) {
  if (!world_.plan.guarded) return tier;
  return std::make_unique<GuardTier>(std::move(tier), GuardOptions{}, executors_.guard, clock_);
}

Bounds SimNode::BoundsToKeep() const {
  Bounds bounds{.bytes_max = world_.plan.bound_bytes, .ttl = world_.plan.bound_ttl};
  if (world_.break_bounds) world_.break_bounds(bounds);
  return bounds;
}

std::unique_ptr<Tier> SimNode::OpenDirectory() {
  SharedFsOptions options;
  options.directory = SimFileIo::kRoot;
  const Bounds bounds = BoundsToKeep();
  options.bounds = {.bytes_max = bounds.bytes_max, .ttl = bounds.ttl};
  options.claim_life = kClaimLife;
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
  return std::move(tier).value();
}

std::unique_ptr<Tier> SimNode::OpenBucket() {
  S3TierOptions options;
  options.load_queue_items_max = world_.plan.load_queue_items;
  options.save_queue_items_max = world_.plan.save_queue_items;
  options.list_interval = options.list_pressed = kListInterval;
  const Bounds bounds = BoundsToKeep();
  options.bounds = {.bytes_max = bounds.bytes_max, .ttl = bounds.ttl};
  options.lease_life = kLeaseLife;
  const auto open = [this, options] {
    return OpenS3Tier(
        std::make_unique<SimObjectStore>(world_.disk, view_, world_.scheduler, world_.log, name_, bucket_rates_,
                                         world_.plan.honours_conditions, world_.plan.random.Fork()),
        options, {.clock = clock_, .metrics = metrics_});
  };
  return std::make_unique<LateTier>(S3TierInfo(world_.plan.load_threads), open, std::chrono::seconds(1),
                                    executors_.background, clock_);
}

std::unique_ptr<Tier> SimNode::OpenShared() {
  std::unique_ptr<Tier> shared = world_.plan.on_bucket ? OpenBucket() : OpenDirectory();
  if (world_.break_tier) shared = world_.break_tier(std::move(shared));
  auto probe = std::make_unique<ProbeTier>(
      std::move(shared), name_, world_.oracle,
      ProbeTier::Watch{.is_saved = [this](const Digest& key, bool) { return world_.oracle.chunk(key).ever_named; },
                       .erase_is_asked = [this](const Digest& key) { world_.oracle.AllowRemoval(name_, key); },
                       .failed = [this](const Digest& key) { world_.oracle.AllowRemoval(name_, key); }});
  probes_.push_back(probe.get());
  if (world_.plan.tier_faults.empty() || world_.calm) return probe;
  FaultSpec spec = FaultSpec::Parse(world_.plan.tier_faults).value();
  spec.seed = world_.plan.random.Next();
  return std::make_unique<FaultTier>(std::move(probe), spec, executors_.faults);
}

std::unique_ptr<Tier> SimNode::OpenDisk() {
  Plan& plan = world_.plan;
  LocalDisk& disk = world_.Local(name_);
  FaultRates rates = world_.calm ? FaultRates{} : plan.disk_rates;
  rates.instant = 0.9;
  local_view_.emplace(disk.files, world_.scheduler, world_.log, name_ + "/disk", rates, plan.random.Fork());
  disk_io_.emplace(disk, *local_view_, world_.scheduler, world_.log, name_, rates, plan.disk_direct,
                   plan.random.Fork());
  disk_executors_.emplace(world_.scheduler, name_);
  DiskTierOptions options;
  options.directory = SimFileIo::kRoot;
  options.bytes_max = plan.disk_bytes;
  if (plan.cap_changes && !world_.calm && plan.random.OneIn(2)) options.bytes_max /= 2;
  options.load_queue_items_max = plan.load_queue_items;
  options.save_queue_items_max = plan.save_queue_items;
  auto late = std::make_unique<LateTier>(
      TierInfo{.name = "disk", .durable = true},
      [this, options] {
        return OpenDiskTier(options, {.files = *local_view_,
                                      .clock = clock_,
                                      .metrics = metrics_,
                                      .io = &*disk_io_,
                                      .load = &disk_executors_->load,
                                      .save = &disk_executors_->save,
                                      .background = &disk_executors_->background});
      },
      std::chrono::seconds(1), disk_executors_->late, clock_);
  std::unique_ptr<Tier> tier = std::move(late);
  if (world_.break_disk) tier = world_.break_disk(std::move(tier));
  auto probe = std::make_unique<ProbeTier>(
      std::move(tier), name_, world_.oracle,
      ProbeTier::Watch{.is_saved =
                           [this, &disk](const Digest& key, bool existed) {
                             if (existed || dead()) return true;  // A next life may have it by now.
                             const std::string path = DiskFramePath(key);
                             const InodePtr inode = disk.files.Find(path);
                             return inode && disk.files.NameIsDurable(path) &&
                                    (!inode->damage.empty() || world_.oracle.IsFrame(key, inode->durable));
                           },
                       .erase_is_asked = [](const Digest&) {}});
  probes_.push_back(probe.get());
  return probe;
}

std::vector<SimExecutor*> SimNode::executors() {
  std::vector<SimExecutor*> all = {&executors_.store,      &executors_.load,   &executors_.save,
                                   &executors_.background, &executors_.faults, &executors_.guard};
  if (disk_executors_) {
    all.insert(all.end(),
               {&disk_executors_->load, &disk_executors_->save, &disk_executors_->background, &disk_executors_->late});
  }
  return all;
}

void SimNode::Die() {
  if (dead()) return;
  view_.Crash();
  if (!local_view_) return;
  local_view_->Crash();
  LocalDisk& disk = world_.Local(name_);
  if (disk.locked_by == name_) disk.locked_by.clear();
  if (world_.plan.power_fails && world_.plan.random.OneIn(2)) {
    disk.files.Crash({});
  } else {
    disk.files.WriteBackLater();  // What the next life finds need not have been synced.
  }
}

void SimNode::Heal() {
  view_.Heal();
  bucket_rates_ = {};
  if (!local_view_) return;
  local_view_->Heal();
  disk_io_->Heal();
  world_.Local(name_).files.SetFull(false);
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
  if (disk_io_) disk_io_->Stop();
  store_.reset();
}

}  // namespace terrace::sim
