#include "tier/shared_fs_collector.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <mutex>
#include <utility>

#include "base/log.h"
#include "tier/leaf_order.h"

namespace terrace {
namespace {

// How far below the bound a collection goes: a sixteenth, 4 GiB at most. It begins at half of that, so saves find room
// while one is under way; and a plan, which looks at every frame in the index, is made once for that many bytes.
constexpr uint64_t kSlackShare = 16;
constexpr uint64_t kSlackMax = 4ull << 30;
uint64_t SlackOf(uint64_t bytes) { return std::min(bytes / kSlackShare, kSlackMax); }

// A file system may give the space of deleted files back late, and a second look at once would evict twice.
constexpr std::chrono::seconds kFreeSpaceEvery{5};
constexpr std::chrono::milliseconds kTtlEveryMax{600'000};
constexpr std::chrono::milliseconds kTtlEveryMin{1'000};

// Our idea of the server's time, and of when we wrote a frame, is a little off.
constexpr int64_t kStampsDifferNs = 10'000'000'000;

// Frames that a collection passes by because they can't be removed. More are no peculiarity of theirs.
constexpr size_t kStuckMax = 16;

constexpr const char* kWhy[] = {"size", "free_space", "ttl"};

}  // namespace

SharedFsCollector::SharedFsCollector(const Options& options, SharedFsDir& dir, SharedFsIndex& index, const Clock& clock,
                                     Metrics& metrics)
    : options_(options), dir_(dir), index_(index), clock_(clock), metrics_(metrics) {}

void SharedFsCollector::Reset() {
  lease_until_ = lease_look_at_ = free_look_at_ = ttl_look_at_ = {};
  victims_.clear();
}

void SharedFsCollector::Close() {
  if (HoldsLease()) dir_.LeaveLease();
  Reset();
}

void SharedFsCollector::KeepLease(int64_t now_ns) {
  const TimePoint begun = clock_.Now();
  if (begun < lease_look_at_) return;
  lease_look_at_ = begun + options_.lease_life / 3;
  const bool held = HoldsLease();
  const Result<bool> holds = dir_.HoldLease(now_ns, options_.lease_life);
  // Trouble: what is left of the lease is good still, since nobody takes it before its end.
  if (!holds) return;
  lease_until_ = *holds ? begun + options_.lease_life * 2 / 3 : TimePoint{};
  if (*holds && !held) log::Info("shared_fs_collector_begins", {{"directory", dir_.root()}});
  if (held && !*holds) log::Info("shared_fs_collector_ends", {{"directory", dir_.root()}});
}

bool SharedFsCollector::NearFull(uint64_t claimed_bytes) const {
  const uint64_t bound = options_.bounds.frame_bytes_max();
  return bound > 0 && index_.bytes() + claimed_bytes > bound - SlackOf(bound) / 2;
}

uint64_t SharedFsCollector::BytesOver(uint64_t claimed_bytes) {
  const uint64_t free_min = options_.bounds.free_bytes_min;
  why_ = kSize;
  if (NearFull(claimed_bytes)) {
    const uint64_t bound = options_.bounds.frame_bytes_max();
    return index_.bytes() + claimed_bytes - (bound - SlackOf(bound));
  }
  if (free_min == 0 || clock_.Now() < free_look_at_) return 0;
  free_look_at_ = clock_.Now() + kFreeSpaceEvery;
  const auto space = dir_.FreeSpace();
  if (!space) return 0;
  const uint64_t free_bytes = space->free_bytes - std::min(space->free_bytes, claimed_bytes);
  if (free_bytes >= free_min + SlackOf(free_min) / 2) return 0;
  why_ = kFreeSpace;
  return free_min + SlackOf(free_min) - free_bytes;
}

bool SharedFsCollector::Tick(int64_t now_ns, uint64_t claimed_bytes) {
  ticked_at_ = clock_.Now();
  tick_ns_ = now_ns;
  KeepLease(now_ns);
  if (!HoldsLease()) {
    victims_.clear();
    Finish();
    return false;
  }
  if (!victims_.empty()) return true;
  if (const uint64_t bytes = BytesOver(claimed_bytes); bytes > 0) {
    Plan(why_, bytes, std::numeric_limits<int64_t>::min());
  }
  const auto ttl = options_.bounds.ttl;
  if (victims_.empty() && ttl.count() > 0 && clock_.Now() >= ttl_look_at_) {
    ttl_look_at_ = clock_.Now() + std::clamp(ttl / 8, kTtlEveryMin, kTtlEveryMax);
    Plan(kTtl, 0, now_ns - std::chrono::nanoseconds(ttl).count());
  }
  return !victims_.empty();
}

void SharedFsCollector::Plan(Why why, uint64_t bytes, int64_t used_before_ns) {
  why_ = why;
  begun_ = clock_.Now();
  evicted_frames_ = evicted_bytes_ = stuck_ = 0;
  needed_.clear();
  LeafOrder order;
  for (size_t i = 0; i < kFanOut; ++i) {
    index_.ForEach(
        i, [&](const Digest& key, const SharedFsIndex::Entry& entry) { order.Add(key, entry.parent, entry.used_ns); });
  }
  uint64_t planned = 0;
  for (auto next = order.Oldest(); next && (planned < bytes || next->used_ns < used_before_ns); next = order.Oldest()) {
    order.Remove(next->key);
    const auto entry = index_.Find(next->key);
    if (!entry) continue;
    planned += entry->file_bytes;
    victims_.push_back({next->key, entry->used_ns});
  }
  std::reverse(victims_.begin(), victims_.end());
}

bool SharedFsCollector::Step(const std::function<void(const Digest&)>& evicted) {
  for (size_t i = 0; i < kStepFrames && !victims_.empty() && HoldsLease(); ++i) {
    const Victim victim = victims_.back();
    victims_.pop_back();
    const Result<bool> gone = Evict(victim);
    if (!gone) {
      Stuck(victim, gone.error());
    } else if (*gone) {
      evicted(victim.key);
    }
  }
  if (!HoldsLease()) victims_.clear();
  if (victims_.empty()) Finish();
  return !victims_.empty();
}

// One that can't be removed does not stop the others: it has its next turn after them.
void SharedFsCollector::Stuck(const Victim& victim, const Error& error) {
  if (stuck_++ == 0) log::Warn("shared_fs_evict_failed", {{"error", error.what}});
  if (!IsTheNamesOwn(error.os_error) || stuck_ > kStuckMax) return victims_.clear();  // The next tick decides anew.
  const auto entry = index_.Find(victim.key);
  if (!entry) return;
  const bool is_file = error.os_error == EPERM || error.os_error == EACCES || error.os_error == EBUSY;
  if (!is_file) {
    index_.Erase(victim.key);  // A scan sets aside what stands there.
    return;
  }
  index_.Use(victim.key, NowNs());
  needed_.insert(entry->parent);
}

// False: it stays.
Result<bool> SharedFsCollector::Evict(const Victim& victim) {
  std::lock_guard lock(index_.names(victim.key));
  const auto entry = index_.Find(victim.key);
  if (!entry) return false;
  // Used since it was chosen, or made a parent, which is a use. What stays needs those before it.
  if (entry->used_ns > victim.used_ns || needed_.contains(victim.key)) {
    needed_.insert(entry->parent);
    return false;
  }
  // We may know it by the word of a node that wrote it long ago, and not of the one that wrote it anew.
  const auto written_ns = dir_.WrittenNs(victim.key);
  if (!written_ns) return tl::unexpected(written_ns.error());
  // A time to come is of a clock that was ahead, and says nothing.
  const int64_t now_ns = NowNs();
  if (*written_ns && **written_ns > victim.used_ns + kStampsDifferNs && **written_ns < now_ns + kStampsDifferNs) {
    index_.Use(victim.key, **written_ns);
    needed_.insert(entry->parent);
    return false;
  }
  if (const Result<void> removed = dir_.Remove(victim.key); !removed) return tl::unexpected(removed.error());
  index_.Erase(victim.key);
  ++evicted_frames_;
  evicted_bytes_ += entry->file_bytes;
  return true;
}

void SharedFsCollector::Finish() {
  if (evicted_frames_ == 0) return;
  metrics_
      .GetCounter("terrace_tier_evicted_total", "Frames removed to keep a bound.",
                  {{"tier", "shared_fs"}, {"reason", kWhy[why_]}})
      .Add(evicted_frames_);
  const auto took = std::chrono::duration_cast<std::chrono::milliseconds>(clock_.Now() - begun_);
  log::Info(
      "shared_fs_collected",
      {{"reason", kWhy[why_]}, {"frames", evicted_frames_}, {"bytes", evicted_bytes_}, {"took_ms", took.count()}});
  evicted_frames_ = evicted_bytes_ = 0;
}

}  // namespace terrace
