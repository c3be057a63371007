#include "settings/open_tiers.h"

#include <chrono>
#include <utility>

#include "tier/disk_tier.h"
#include "tier/guard_tier.h"
#include "tier/late_tier.h"
#include "tier/s3_tier.h"

namespace terrace::settings {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kDiskRetry{1'000};
constexpr milliseconds kS3Retry{5'000};

Error DegradedIsAllowed(Error error) {
  error.what += "; or start without it for now: --allow-degraded (TERRACE_ALLOW_DEGRADED=true)";
  return error;
}

// Refuses what can't be opened; with --allow-degraded it is joined when it can. `flag` names it.
Result<std::unique_ptr<Tier>> OpenOrJoin(const char* flag, TierInfo info, const LateTier::Opener& open,
                                         milliseconds retry, bool allow_degraded, Executor& timers,
                                         const Clock& clock) {
  if (allow_degraded) return std::make_unique<LateTier>(std::move(info), open, retry, timers, clock);
  Result<std::unique_ptr<Tier>> tier = open();
  if (!tier) return Fail(DegradedIsAllowed(tier.error()), flag);
  return tier;
}

}  // namespace

Result<std::vector<std::unique_ptr<Tier>>> OpenTiers(const Tiers& tiers, const std::optional<FaultSpec>& fault,
                                                     const SharedFsDeps& deps, Executor& timers) {
  using Opened = Result<std::unique_ptr<Tier>>;
  const auto open_disk = [&]() -> Opened {
    const auto open = [disk = tiers.disk, deps] {
      return OpenDiskTier(disk, {.files = deps.io, .clock = deps.clock, .metrics = deps.metrics});
    };
    return OpenOrJoin("--disk", DiskTierInfo(), open, kDiskRetry, tiers.allow_degraded, timers, deps.clock);
  };
  const auto open_shared = [&]() -> Opened {
    Opened shared = OpenSharedFsTier(tiers.shared, deps);
    if (!shared) return Fail(DegradedIsAllowed(shared.error()), "--shared");
    return shared;
  };
  const auto open_bucket = [&]() -> Opened {
    const auto open = [client = *tiers.s3, bucket = tiers.bucket, deps] {
      return OpenS3Tier(client, bucket, {.clock = deps.clock, .metrics = deps.metrics});
    };
    return OpenOrJoin("--s3-bucket", S3TierInfo(tiers.s3->parallel_max), open, kS3Retry, tiers.allow_degraded, timers,
                      deps.clock);
  };
  const bool has_disk = !tiers.disk.directory.empty();
  const bool has_shared = !tiers.shared.directory.empty();

  // Opening a directory makes folders in it, and a start that is refused leaves none: a mount that is missing is found
  // first, then a bucket that can't be reached, then a directory for one process alone that another one has.
  if (has_shared && !tiers.allow_degraded && !deps.io.Stat(tiers.shared.directory)) {
    if (Opened shared = open_shared(); !shared) return tl::unexpected(shared.error());
  }
  Opened bucket = nullptr;
  Opened disk = nullptr;
  Opened shared = nullptr;
  if (tiers.s3) bucket = open_bucket();
  if (!bucket) return tl::unexpected(bucket.error());
  if (has_disk) disk = open_disk();
  if (!disk) return tl::unexpected(disk.error());
  if (has_shared) shared = open_shared();
  if (!shared) return tl::unexpected(shared.error());

  std::vector<std::unique_ptr<Tier>> opened;
  const auto guard = [&](std::unique_ptr<Tier> tier, bool may_fault) {
    if (!tier) return;
    if (fault && may_fault) tier = std::make_unique<FaultTier>(std::move(tier), *fault, timers);
    opened.push_back(std::make_unique<GuardTier>(std::move(tier), GuardOptions{}, timers, deps.clock));
  };
  guard(*std::move(disk), false);
  guard(*std::move(shared), true);
  guard(*std::move(bucket), true);
  return opened;
}

}  // namespace terrace::settings
