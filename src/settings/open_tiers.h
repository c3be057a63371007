// Opens the tiers that the settings name, each behind its deadlines and breakers.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "base/executor.h"
#include "settings/instance.h"
#include "terrace/tier.h"
#include "tier/fault_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace::settings {

inline constexpr size_t kTimerThreads = 4;  // Of the executor below: one more than there may be tiers (see GuardTier).

// From fastest to slowest. What can't be opened is an error that names its flag, unless the settings allow to start
// without it. `fault` is for shared_fs and s3. What `deps` refers to and `timers` outlive the tiers.
Result<std::vector<std::unique_ptr<Tier>>> OpenTiers(const Tiers& tiers, const std::optional<FaultSpec>& fault,
                                                     const SharedFsDeps& deps, Executor& timers);

}  // namespace terrace::settings
