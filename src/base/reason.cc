#include "terrace/tier.h"

namespace terrace {

const char* ReasonName(Reason reason) {
  switch (reason) {
    case Reason::kNone: return "none";
    case Reason::kNotFound: return "not_found";
    case Reason::kMissing: return "missing";
    case Reason::kEmpty: return "empty";
    case Reason::kTruncated: return "truncated";
    case Reason::kDamaged: return "damaged";
    case Reason::kForeign: return "foreign";
    case Reason::kVersion: return "version";
    case Reason::kTimeout: return "timeout";
    case Reason::kUnavailable: return "unavailable";
    case Reason::kFull: return "full";
    case Reason::kParentMissing: return "parent_missing";
    case Reason::kWeightsPending: return "weights_pending";
    case Reason::kIndexLoading: return "index_loading";
    case Reason::kShortPrompt: return "short_prompt";
    case Reason::kNotCacheable: return "not_cacheable";
    case Reason::kCancelled: return "cancelled";
  }
  return "unknown";
}

}  // namespace terrace
