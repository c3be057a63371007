// One suite of the Tier contract (include/terrace/tier.h) for every implementation and every stack of decorators. To
// add one, add a line to tiers.cc.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include "base/executor.h"
#include "terrace/tier.h"

namespace terrace {

// What a tier stands on during one test. It outlives the tier, and a tier opened again finds here what the last one
// left.
struct World {
  World();   // Makes the directory, empty.
  ~World();  // Removes it.
  World(const World&) = delete;
  World& operator=(const World&) = delete;

  std::string directory;
  ThreadPool executor{"contract", 2};
};

struct TierCase {
  std::string name;  // Shows in the names of the tests: letters, digits and underscores.
  // Never fails (asserts). The tier has room for kContractBytes.
  std::function<std::unique_ptr<Tier>(World&)> open;
  friend void PrintTo(const TierCase& tier, std::ostream* out) { *out << tier.name; }
};
inline constexpr uint64_t kContractBytes = 64 << 20;

// All of them: tiers.cc.
std::vector<TierCase> AllTiers();

}  // namespace terrace
