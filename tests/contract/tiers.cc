// The tiers and stacks of decorators that keep the contract. A new one adds a line to AllTiers.
#include <utility>

#include "base/assert.h"
#include "base/clock.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "tests/contract/tier_contract.h"
#include "tests/support/disk_kinds.h"
#include "tier/disk_tier.h"
#include "tier/fault_tier.h"
#include "tier/guard_tier.h"
#include "tier/ram_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace {
namespace {

template <class T>
std::unique_ptr<Tier> MustOpen(Result<std::unique_ptr<T>> tier) {
  TERRACE_ASSERT(tier.has_value());
  return *std::move(tier);
}

std::unique_ptr<Tier> OpenRam(Executor* executor) {
  return MustOpen(RamTier::Open({.bytes_max = kContractBytes, .executor = executor}));
}

std::unique_ptr<Tier> WithoutFaults(std::unique_ptr<Tier> tier, World& world) {
  return std::make_unique<FaultTier>(std::move(tier), FaultSpec{}, world.executor);
}

std::unique_ptr<Tier> Delayed(std::unique_ptr<Tier> tier, World& world) {
  const FaultSpec spec{.load_delay = std::chrono::milliseconds(1), .save_delay = std::chrono::milliseconds(1)};
  return std::make_unique<FaultTier>(std::move(tier), spec, world.executor);
}

std::unique_ptr<Tier> Guarded(std::unique_ptr<Tier> tier, World& world) {
  static SystemClock clock;
  return std::make_unique<GuardTier>(std::move(tier), GuardOptions{}, world.executor, clock);
}

std::unique_ptr<Tier> OpenSharedFs(World& world, const SharedFsBounds& bounds = {}) {
  static const std::unique_ptr<FileIo> io = RealFileIo();
  static SystemClock clock;
  static Metrics metrics;
  return MustOpen(OpenSharedFsTier({.directory = world.directory, .bounds = bounds},
                                   {.io = *io, .clock = clock, .metrics = metrics}));
}

std::unique_ptr<Tier> OpenDisk(World& world, DiskIoKind kind) {
  static const std::unique_ptr<FileIo> io = RealFileIo();
  static SystemClock clock;
  static Metrics metrics;
  return MustOpen(OpenDiskTier({.directory = world.directory, .bytes_max = kContractBytes, .io = {.kind = kind}},
                               {.files = *io, .clock = clock, .metrics = metrics}));
}

}  // namespace

std::vector<TierCase> AllTiers() {
  std::vector<TierCase> all = {
      {"ram", [](World& world) { return OpenRam(&world.executor); }},
      {"ram_inline", [](World&) { return OpenRam(nullptr); }},
      {"fault_ram", [](World& world) { return WithoutFaults(OpenRam(&world.executor), world); }},
      {"shared_fs", [](World& world) { return OpenSharedFs(world); }},
      {"shared_fs_bounded",
       [](World& world) {
         return OpenSharedFs(world,
                             {.bytes_max = 2 * kContractBytes, .free_bytes_min = 1, .ttl = std::chrono::hours(1)});
       }},
      {"fault_shared_fs", [](World& world) { return WithoutFaults(OpenSharedFs(world), world); }},
      {"disk_threads", [](World& world) { return OpenDisk(world, DiskIoKind::kThreads); }},
      {"fault_disk", [](World& world) { return WithoutFaults(OpenDisk(world, DiskIoKind::kAuto), world); }},
      {"guard_disk", [](World& world) { return Guarded(OpenDisk(world, DiskIoKind::kAuto), world); }},
      {"guard_ram", [](World& world) { return Guarded(OpenRam(&world.executor), world); }},
      {"guard_shared_fs", [](World& world) { return Guarded(OpenSharedFs(world), world); }},
      {"fault_delay_ram", [](World& world) { return Delayed(OpenRam(nullptr), world); }},
  };
  if (HasUring()) {
    all.push_back({"disk_uring", [](World& world) { return OpenDisk(world, DiskIoKind::kUring); }});
  }
  return all;
}

}  // namespace terrace
