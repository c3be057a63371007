// Is a bucket fit for us? What start-up asks, and doctor.
#pragma once

#include <string>

#include "s3/object_store.h"
#include "terrace/tier.h"

namespace terrace::s3 {

// PREFIX/name, or name.
std::string WithPrefix(const Endpoint& endpoint, const std::string& name);

struct CheckResult {
  std::string step;    // "list", "read", "write": where it ended.
  Failure failure;     // None: all is well.
  std::string format;  // Of terrace.format, if it was there and is not ours.
};

// Lists below the prefix, reads PREFIX/terrace.format, and writes it if it is not there. Blocks, on any thread but the
// store's.
CheckResult CheckBucket(ObjectStore& store, TimePoint deadline);

// One line: what was attempted where, what happened, the remedy.
Error CheckError(const CheckResult& result, const Endpoint& endpoint);

}  // namespace terrace::s3
