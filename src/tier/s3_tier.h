// The s3 tier: a bucket that several nodes share, one frame an object, under PREFIX/frames/<3 hex>/<64 hex>.kvf: the
// same bytes under the same names as in a shared_fs directory.
//
// What any node saves, every node finds and loads, with no server besides the bucket. An object is whole or absent, and
// the first writer of a key wins where the server knows conditions; where not, the last one does, with the same bytes.
// Nothing that disagrees with its name or checksums is ever delivered.
//
// What is there is learnt from our own saves, from a listing in the background (at the start, then now and then), and
// by Probe, which a store calls for keys that it does not know: few questions, answers that live long if positive and
// `negative_ttl` if not. Probes propose, loads decide: a load asks the bucket whatever the index says.
//
// Beyond the contract of terrace/tier.h, as shared_fs:
//   - a right frame of another space or payload size than asked for is kForeign and stays where it is;
//   - a frame of a format version of another release is kVersion, stays, and a save of its key is declined with
//   kVersion;
//   - a frame that is damaged twice over is removed: a bucket has no quarantine, and the next save writes it anew;
//   - a save that failed for want of room is kFailed with reason kFull; one beyond `bounds` is declined with kFull.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/clock.h"
#include "s3/client.h"
#include "s3/object_store.h"
#include "terrace/metrics.h"
#include "terrace/result.h"
#include "terrace/tier.h"
#include "tier/s3_collector.h"

namespace terrace {

struct S3TierOptions {
  std::chrono::milliseconds negative_ttl{1'900};      // Others see a frame after 2 s: this, and a question.
  std::chrono::milliseconds positive_ttl{1'200'000};  // Twice the listing's interval.
  std::chrono::milliseconds list_interval{600'000};   // 1,000 names a call. Zero: never, and no bounds are kept.
  std::chrono::milliseconds list_pressed{60'000};     // While the bucket is nearly full.
  std::chrono::seconds upload_age{86'400};            // Uploads of that age were left by dead writers.
  uint64_t range_bytes_min = 4 << 20;                 // A frame is not read in smaller ranges than this.
  size_t load_queue_items_max = 16384;                // Beyond: a miss with kFull.
  size_t save_queue_items_max = 1024;                 // Beyond: declined with kFull.
  std::chrono::milliseconds save_timeout{60'000};     // Of a save, from its turn on, whatever stands in its way.
  std::chrono::milliseconds check_timeout{10'000};    // Of the start.
  S3Bounds bounds;
  std::chrono::milliseconds lease_life{300'000};  // Of whoever keeps them.
};

// All outlive the tier.
struct S3TierDeps {
  const Clock& clock;
  Metrics& metrics;
};

TierInfo S3TierInfo(size_t parallel);  // Of every s3 tier, open or not yet. `parallel`: calls at once, at most.

// Asks the bucket: may we list, read and write below the prefix, and is it of our format? Blocks. The error is one line
// that says what was attempted, what happened and the remedy.
Result<std::unique_ptr<Tier>> OpenS3Tier(const s3::ClientOptions& client, const S3TierOptions& options,
                                         const S3TierDeps& deps);
// Over any store of objects.
Result<std::unique_ptr<Tier>> OpenS3Tier(std::unique_ptr<s3::ObjectStore> store, const S3TierOptions& options,
                                         const S3TierDeps& deps);

}  // namespace terrace
