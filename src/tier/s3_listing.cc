#include "tier/s3_listing.h"

#include <algorithm>
#include <optional>

#include "base/log.h"
#include "s3/list_all.h"

namespace terrace {
namespace {

using s3::Failure;
using s3::Trouble;
using std::chrono::milliseconds;

constexpr int64_t kBytesMost = int64_t{1} << 61;  // No bucket has as many, and sums of two are right.
constexpr milliseconds kTtlListMin{1'000};
constexpr int kListingsOfTtl = 8;

}  // namespace

void S3Listing::Begin() { ListAll(); }

void S3Listing::Soon() {
  if (running_) {
    again_ = true;
  } else {
    ListAll();
  }
}

void S3Listing::Wrote(uint64_t bytes) {
  changed_bytes_ += static_cast<int64_t>(bytes);
  LookIfPressed();
}

bool S3Listing::HasRoom(uint64_t more) {
  if (options_.bounds.bytes_max == 0 || bytes() + more <= options_.bounds.bytes_max) return true;
  deps_.collector->Wanted(more);
  LookIfPressed();
  return false;
}

uint64_t S3Listing::bytes() const {
  return static_cast<uint64_t>(std::max<int64_t>(listed_bytes_ + changed_bytes_, 0));
}

// A bucket that was half empty may be full long before its next listing is due.
void S3Listing::LookIfPressed() {
  if (running_ || !deps_.collector || !deps_.collector->near_full(bytes())) return;
  if (deps_.clock.Now() - begun_ >= options_.pressed) ListAll();
}

void S3Listing::ListAll() {
  if (options_.interval.count() == 0) {
    ready_.store(true, std::memory_order_relaxed);
    return;
  }
  running_ = true;
  again_ = false;
  ++number_;
  begun_ = deps_.clock.Now();
  seen_bytes_ = 0;
  changed_before_ = changed_bytes_;
  if (deps_.collector) deps_.collector->BeginListing();
  s3::ListAll(
      deps_.store, deps_.names.root(), [this](const s3::ListPage& page) { TakePage(page); },
      [this](const Failure& failure, int64_t now) {
        if (failure.trouble != Trouble::kCancelled) Listed(failure, now);
      });
}

void S3Listing::TakePage(const s3::ListPage& page) {
  for (const auto& object : page.objects) {
    const std::optional<Digest> key = deps_.names.KeyOf(object.key);
    if (!key && deps_.collector) deps_.collector->SawBeside(object.key);
    if (!key || deps_.is_leaving(*key)) continue;
    if (object.bytes > 0) deps_.index.Saw(*key, object.bytes, deps_.clock.Now());
    seen_bytes_ = std::min(seen_bytes_ + static_cast<int64_t>(object.bytes), kBytesMost);
    if (deps_.collector) deps_.collector->Listed(*key, object.bytes, object.modified);
  }
}

void S3Listing::Listed(const Failure& failure, int64_t now) {
  running_ = false;
  if (failure) {
    log::Warn("s3_list_failed", {{"why", failure.Describe()}});
  } else {
    deps_.index.ForgetOlder(begun_);
    listed_bytes_ = seen_bytes_;
    changed_bytes_ -= changed_before_;
    if (deps_.collector) deps_.collector->EndListing(now);
    if (!ready()) {
      const auto took = std::chrono::duration_cast<milliseconds>(deps_.clock.Now() - begun_);
      log::Info("tier_index_ready", {{"tier", "s3"},
                                     {"frames", deps_.index.frames()},
                                     {"bytes", deps_.index.bytes()},
                                     {"took_ms", took.count()}});
    }
  }
  // Without a list, probes find what there is.
  ready_.store(true, std::memory_order_relaxed);
  deps_.store.executor().PostAfter(After(), [this, number = number_] {
    if (number == number_) ListAll();  // Else somebody wanted one meanwhile.
  });
}

milliseconds S3Listing::After() const {
  if (!deps_.collector) return options_.interval;
  if (again_) return milliseconds(0);
  milliseconds after = options_.interval;
  if (deps_.collector->near_full(bytes())) after = std::min(after, options_.pressed);
  const milliseconds ttl = options_.bounds.ttl;
  if (ttl.count() > 0 && deps_.collector->holds_lease()) {
    after = std::min(after, std::max(ttl / kListingsOfTtl, kTtlListMin));
  }
  return after;
}

}  // namespace terrace
