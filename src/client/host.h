// A store with all that it stands on, as settings describe it: what `terrace node` and a client in process open.
#pragma once

#include <memory>

#include "base/clock.h"
#include "base/executor.h"
#include "io/file_io.h"
#include "settings/open_tiers.h"
#include "terrace/metrics.h"
#include "terrace/store.h"

namespace terrace {

struct Host {
  // Destroyed in reverse: the store first, then what its tiers use.
  Metrics metrics;
  const SystemClock clock;
  const std::unique_ptr<FileIo> io = RealFileIo();
  ThreadPool timers{"terrace-timers", settings::kTimerThreads};
  std::unique_ptr<Store> store;
};

Result<std::unique_ptr<Host>> OpenHost(const settings::Tiers& tiers, const StoreOptions& options);

}  // namespace terrace
