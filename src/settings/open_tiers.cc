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
  error.what += "; or start without it for now: --allow-degraded";
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
  std::vector<std::unique_ptr<Tier>> opened;
  const auto guard = [&](std::unique_ptr<Tier> tier) {
    opened.push_back(std::make_unique<GuardTier>(std::move(tier), GuardOptions{}, timers, deps.clock));
  };
  if (!tiers.disk.directory.empty()) {
    const auto open = [disk = tiers.disk, deps] {
      return OpenDiskTier(disk, {.files = deps.io, .clock = deps.clock, .metrics = deps.metrics});
    };
    Result<std::unique_ptr<Tier>> disk =
        OpenOrJoin("--disk", DiskTierInfo(), open, kDiskRetry, tiers.allow_degraded, timers, deps.clock);
    if (!disk) return tl::unexpected(disk.error());
    guard(*std::move(disk));
  }
  const auto guard_shared = [&](std::unique_ptr<Tier> tier) {
    if (fault) tier = std::make_unique<FaultTier>(std::move(tier), *fault, timers);
    guard(std::move(tier));
  };
  if (!tiers.shared.directory.empty()) {
    Result<std::unique_ptr<Tier>> shared = OpenSharedFsTier(tiers.shared, deps);
    if (!shared) return Fail(DegradedIsAllowed(shared.error()), "--shared");
    guard_shared(*std::move(shared));
  }
  if (tiers.s3) {
    const auto open = [client = *tiers.s3, bucket = tiers.bucket, deps] {
      return OpenS3Tier(client, bucket, {.clock = deps.clock, .metrics = deps.metrics});
    };
    Result<std::unique_ptr<Tier>> s3 = OpenOrJoin("--s3-bucket", S3TierInfo(tiers.s3->parallel_max), open, kS3Retry,
                                                  tiers.allow_degraded, timers, deps.clock);
    if (!s3) return tl::unexpected(s3.error());
    guard_shared(*std::move(s3));
  }
  return opened;
}

}  // namespace terrace::settings
