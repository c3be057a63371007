// Asks a bucket for the end of prefixes that the index does not know, with few questions (s3_search.h). On the store's
// thread alone.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/clock.h"
#include "s3/object_store.h"
#include "terrace/tier.h"
#include "tier/s3_index.h"
#include "tier/s3_names.h"

namespace terrace {

class S3Probes {
 public:
  struct Deps {
    s3::ObjectStore& store;
    const Clock& clock;
    const S3Names& names;
    S3Index& index;
    std::function<bool(const Digest&)> is_leaving;  // It is being erased: not there, whatever the bucket says.
  };
  explicit S3Probes(Deps deps) : deps_(std::move(deps)) {}

  // Puts into the index what is found. `done` runs once, with what went wrong.
  void Begin(std::vector<Digest> keys, TimePoint deadline, Tier::Probed done);

 private:
  struct Probing;
  using ProbingPtr = std::shared_ptr<Probing>;
  void NextRound(const ProbingPtr& probing);
  void Answered(const ProbingPtr& probing, size_t position, bool present);
  void Ended(const ProbingPtr& probing, const std::optional<Error>& trouble);

  const Deps deps_;
};

}  // namespace terrace
