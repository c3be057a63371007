#include "tier/s3_collector.h"

#include <algorithm>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <utility>

#include "base/log.h"
#include "s3/list_all.h"
#include "tier/leaf_order.h"

namespace terrace {
namespace {

using s3::Failure;
using s3::ObjectInfo;
using s3::Trouble;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr uint64_t kSlackShare = 16;
constexpr uint64_t kSlackMax = 4ull << 30;
constexpr size_t kStepCalls = 16;

// A tell costs a write, and a read by each node that comes to hold the lease. Without a ttl what is older than some
// hours hardly decides who is unused longest; with one, a use matters until it is over.
constexpr size_t kTellKeysMax = 65536;  // 2 MiB.
constexpr milliseconds kTellEvery{300'000};
constexpr seconds kTellsKept{6 * 3600};
// Read for one collection: 16384 tells are the uses that 200 nodes have told in 6 hours. Of more, some are not looked
// at.
constexpr size_t kTellsReadMax = 16384;
constexpr uint64_t kTellBytesReadMax = 256ull << 20;
constexpr size_t kTellsKnownMax = 1 << 16;  // Beyond, all are forgotten, and read again.
constexpr int kTellsOfTtl = 64;
constexpr milliseconds kTellEveryMin{1'000};
constexpr milliseconds kTellEveryMax{3'600'000};

// Of each of the two calls with which a node goes.
constexpr seconds kCloseMax{2};

constexpr const char* kWanted = "frames/wanted-";
constexpr size_t kWantsMax = 1000;  // Removed after one listing.

// Frames that a collection passes by because the server does not let them go. More are no peculiarity of theirs.
constexpr size_t kStuckMax = 16;

constexpr const char* kWhy[] = {"size", "ttl"};

std::string FreshName() {
  std::random_device random;
  char name[40];
  std::snprintf(name, sizeof name, "%08x%08x%08x", random(), random(), random());
  return name;
}

int64_t SecondsOf(TimePoint time) { return std::chrono::duration_cast<seconds>(time.time_since_epoch()).count(); }

// A body that somebody keeps while it is sent.
s3::PutRequest PutOf(std::string key, std::string bytes) {
  auto owner = std::make_shared<std::string>(std::move(bytes));
  return {.key = std::move(key), .body = {std::as_bytes(std::span(*owner))}, .owner = owner};
}

// Bytes of a small object, as they come.
std::shared_ptr<std::string> Gather(s3::GetRequest& request, size_t bytes_max) {
  auto text = std::make_shared<std::string>();
  request.sink = [text, bytes_max](const ObjectInfo&, uint64_t offset, std::span<const std::byte> piece) {
    text->resize(offset);
    text->append(reinterpret_cast<const char*>(piece.data()), piece.size());
    return text->size() <= bytes_max;
  };
  return text;
}

}  // namespace

uint64_t S3Bounds::slack() const { return std::min(bytes_max / kSlackShare, kSlackMax); }

S3Collector::S3Collector(const Options& options, std::string root, s3::ObjectStore& store, const Clock& clock,
                         Metrics& metrics, Hooks hooks)
    : options_(options),
      root_(std::move(root)),
      store_(store),
      clock_(clock),
      metrics_(metrics),
      hooks_(std::move(hooks)),
      node_(FreshName()) {}

void S3Collector::Begin() {
  LookAtLease();
  TellLater();
}

void S3Collector::Close(Ended done) {
  closing_ = true;
  Tell([this, done = std::move(done)] {
    if (!holds_lease()) return done();
    lease_until_ = {};
    store_.Delete(root_ + "collector.lease", clock_.Now() + kCloseMax,
                  [done](const Failure&, const ObjectInfo&) { done(); });
  });
}

int64_t S3Collector::ServerNow() const { return time_offset_ == 0 ? 0 : SecondsOf(clock_.Now()) + time_offset_; }

void S3Collector::LearnTime(int64_t now) {
  if (now != 0) time_offset_ = now - SecondsOf(clock_.Now());
}

void S3Collector::Failed(const char* step, const Failure& failure) {
  if (failure.trouble != Trouble::kCancelled) {
    log::Warn("s3_collector_failed", {{"step", step}, {"why", failure.Describe()}});
  }
}

// ---- The lease

// What stands there says whose it is; a write only over what was read keeps two from taking it at once, and where the
// server knows no such write, the one that wrote last finds itself there at the next look.
void S3Collector::LookAtLease() {
  const TimePoint begun = clock_.Now();
  s3::GetRequest request{.key = root_ + "collector.lease"};
  const auto text = Gather(request, 4096);
  store_.Get(std::move(request), [this, begun, text](const Failure& failure, const ObjectInfo& info) {
    if (closing_) return;
    if (failure.trouble == Trouble::kNotFound) return TakeLease("", begun);
    if (failure && failure.trouble != Trouble::kStopped) {
      Failed("lease", failure);
      return LookAgain();
    }
    LearnTime(info.now);
    const bool ours = !failure && text->starts_with(node_);
    const bool over = info.now - info.modified >= std::chrono::duration_cast<seconds>(options_.lease_life).count();
    if (ours || over) return TakeLease(info.etag, begun);
    LeaseIs(false, begun);
  });
}

void S3Collector::TakeLease(const std::string& etag, TimePoint begun) {
  // Another text each time: the ETag of the same bytes would be the same.
  s3::PutRequest request = PutOf(root_ + "collector.lease", node_ + " " + std::to_string(++lease_writes_) + "\n");
  request.only_if_absent = etag.empty();
  request.if_match = etag;
  store_.Put(std::move(request), [this, begun](const Failure& failure, const ObjectInfo&) {
    if (closing_) return;
    if (!failure) return LeaseIs(true, begun);
    if (failure.trouble == Trouble::kExists || failure.trouble == Trouble::kNotFound) return LeaseIs(false, begun);
    Failed("lease", failure);  // What is left of it is good still, since nobody takes it before its end.
    LookAgain();
  });
}

void S3Collector::LeaseIs(bool held, TimePoint begun) {
  const bool before = holds_lease();
  lease_until_ = held ? begun + options_.lease_life * 2 / 3 : TimePoint{};
  if (held && !before) {
    log::Info("s3_collector_begins", {{"endpoint", store_.endpoint().Describe()}});
    hooks_.list();
  }
  if (before && !held) log::Info("s3_collector_ends", {{"endpoint", store_.endpoint().Describe()}});
  if (!held) {
    frames_.clear();
    tells_read_.clear();
    bytes_ = bytes_beside_ = 0;
    listing_ = false;
  }
  LookAgain();
}

void S3Collector::LookAgain() {
  store_.executor().PostAfter(options_.lease_life / 3, [this] {
    if (!closing_) LookAtLease();
  });
}

// ---- Uses

milliseconds S3Collector::TellEvery() const {
  const milliseconds ttl = options_.bounds.ttl;
  return ttl.count() == 0 ? kTellEvery : std::clamp(ttl / kTellsOfTtl, kTellEveryMin, kTellEveryMax);
}

int64_t S3Collector::TellsKept() const {
  const milliseconds ttl = options_.bounds.ttl;
  const seconds kept = ttl.count() == 0 ? kTellsKept : std::chrono::ceil<seconds>(ttl + TellEvery());
  return kept.count();
}

void S3Collector::Used(const FrameInfo& info) {
  if (uses_.size() < kTellKeysMax) uses_.insert(info.key);
  const auto it = frames_.find(info.key);
  if (it == frames_.end()) return;
  it->second.used = std::max(it->second.used, ServerNow());
  it->second.parent = info.parent;
  it->second.knows_parent = true;
}

void S3Collector::Tell(Ended then) {
  if (uses_.empty()) return then();
  std::string body;
  for (const Digest& key : uses_) body.append(reinterpret_cast<const char*>(key.bytes.data()), key.bytes.size());
  uses_.clear();
  const std::string name = root_ + "uses/" + node_ + "-" + std::to_string(tells_++);
  s3::PutRequest request = PutOf(name, std::move(body));
  if (closing_) request.deadline = clock_.Now() + kCloseMax;
  store_.Put(std::move(request), [this, then = std::move(then)](const Failure& failure, const ObjectInfo&) {
    if (failure) Failed("tell", failure);  // Then these uses are known to nobody else.
    then();
  });
}

void S3Collector::TellLater() {
  store_.executor().PostAfter(TellEvery(), [this] {
    if (!closing_) Tell([this] { TellLater(); });
  });
}

// Those that nobody needs any more are removed, those that are new read.
void S3Collector::ReadTells() {
  struct Fresh {
    std::vector<std::string> names;
    uint64_t bytes = 0;
  };
  auto fresh = std::make_shared<Fresh>();
  if (tells_read_.size() > kTellsKnownMax) tells_read_.clear();
  s3::ListAll(
      store_, root_ + "uses/",
      [this, fresh](const s3::ListPage& page) {
        for (const auto& object : page.objects) {
          if (object.modified < page.now - TellsKept()) {
            tells_read_.erase(object.key);
            store_.Delete(object.key, TimePoint::max(), [](const Failure&, const ObjectInfo&) {});
          } else if (fresh->names.size() < kTellsReadMax && fresh->bytes + object.bytes <= kTellBytesReadMax &&
                     !tells_read_.contains(object.key)) {
            fresh->names.push_back(object.key);
            fresh->bytes += object.bytes;
          }
        }
      },
      [this, fresh](const Failure& failure, int64_t) {
        if (failure) {
          Failed("uses", failure);
          return Finish();
        }
        Run(
            [this, fresh](const Ended& ended) {
              if (fresh->names.empty()) return false;
              ReadTell(fresh->names.back(), ended);
              fresh->names.pop_back();
              return true;
            },
            [this] { ReadParents(); });
      });
}

void S3Collector::ReadTell(const std::string& name, const Ended& ended) {
  s3::GetRequest request{.key = name};
  const auto text = Gather(request, kTellKeysMax * sizeof(Digest::bytes));
  store_.Get(std::move(request), [this, name, text, ended](const Failure& failure, const ObjectInfo& info) {
    if (failure && failure.trouble != Trouble::kNotFound) Failed("uses", failure);
    if (!failure) {
      tells_read_.insert(name);
      Digest key;
      for (size_t at = 0; at + key.bytes.size() <= text->size(); at += key.bytes.size()) {
        std::memcpy(key.bytes.data(), text->data() + at, key.bytes.size());
        if (const auto it = frames_.find(key); it != frames_.end()) {
          it->second.used = std::max(it->second.used, info.modified);
        }
      }
    }
    ended();
  });
}

// ---- What is there

void S3Collector::BeginListing() {
  listing_ = holds_lease();
  wants_.clear();
  listed_bytes_ = 0;
  for (auto& [key, entry] : frames_) entry.listed = false;
}

void S3Collector::Listed(const Digest& key, uint64_t bytes, int64_t modified) {
  NoteFrameBytes(bytes);
  if (!listing_) return;
  listed_bytes_ += bytes;
  if (frames_.size() >= options_.frames_max && !frames_.contains(key)) return;
  Entry& entry = frames_[key];
  bytes_ += bytes - entry.bytes;
  entry.bytes = bytes;
  entry.used = std::max(entry.used, modified);
  entry.listed = true;
}

void S3Collector::SawBeside(const std::string& name) {
  const std::string begin = root_ + kWanted;
  if (!name.starts_with(begin)) return;
  uint64_t bytes = 0;
  const auto [end, error] = std::from_chars(name.data() + begin.size(), name.data() + name.size(), bytes);
  if (error != std::errc() || end != name.data() + name.size()) return;
  NoteFrameBytes(bytes);
  if (listing_ && wants_.size() < kWantsMax) wants_.push_back(name);
}

// For a frame that can't be kept at all, no room is made.
void S3Collector::NoteFrameBytes(uint64_t bytes) {
  if (bytes <= options_.bounds.bytes_max) frame_bytes_ = std::max(frame_bytes_, bytes);
}

void S3Collector::Wanted(uint64_t bytes) {
  NoteFrameBytes(bytes);
  const TimePoint now = clock_.Now();
  if (closing_ || holds_lease() || (bytes <= wanted_bytes_ && now < wanted_until_)) return;
  wanted_bytes_ = bytes;
  wanted_until_ = now + options_.lease_life;
  store_.Put(PutOf(root_ + kWanted + std::to_string(bytes), "\n"), [this](const Failure& failure, const ObjectInfo&) {
    if (!failure) return;
    Failed("want", failure);
    wanted_until_ = {};
  });
}

void S3Collector::Saved(const FrameInfo& info, uint64_t bytes) {
  if (!holds_lease() || frames_.size() >= options_.frames_max) return;
  Entry& entry = frames_[info.key];
  bytes_ += bytes - entry.bytes;
  entry = {.bytes = bytes, .used = ServerNow(), .parent = info.parent, .knows_parent = true, .listed = true};
  if (const auto parent = frames_.find(info.parent); parent != frames_.end()) {
    parent->second.used = std::max(parent->second.used, entry.used);
  }
}

uint64_t S3Collector::Erased(const Digest& key) {
  const auto it = frames_.find(key);
  if (it == frames_.end()) return 0;
  const uint64_t bytes = it->second.bytes;
  bytes_ -= bytes;
  frames_.erase(it);
  return bytes;
}

void S3Collector::EndListing(int64_t now) {
  LearnTime(now);
  if (!std::exchange(listing_, false) || !holds_lease()) return;
  for (auto it = frames_.begin(); it != frames_.end();) {
    const auto entry = it++;
    if (entry->second.listed) continue;
    bytes_ -= entry->second.bytes;
    frames_.erase(entry);
  }
  bytes_beside_ = listed_bytes_ - std::min(listed_bytes_, bytes_);
  for (const std::string& want : std::exchange(wants_, {})) {  // It is known now.
    store_.Delete(want, TimePoint::max(), [](const Failure&, const ObjectInfo&) {});
  }
  Decide();
}

// ---- A collection

// Else saves would be declined and nothing collected, for good.
uint64_t S3Collector::FrameRoom() const { return std::min(frame_bytes_, options_.bounds.bytes_max / 2); }

bool S3Collector::near_full(uint64_t bytes) const {
  const S3Bounds& bounds = options_.bounds;
  return bounds.bytes_max > 0 && bytes > bounds.bytes_max - std::max(bounds.slack() / 2, FrameRoom());
}

uint64_t S3Collector::BytesOver() const {
  const uint64_t bytes = bytes_ + bytes_beside_;
  const S3Bounds& bounds = options_.bounds;
  return near_full(bytes) ? bytes - (bounds.bytes_max - std::max(bounds.slack(), FrameRoom())) : 0;
}

int64_t S3Collector::TtlBegan() const {
  const int64_t now = ServerNow();
  const milliseconds ttl = options_.bounds.ttl;
  if (ttl.count() == 0 || now == 0) return std::numeric_limits<int64_t>::min();
  return now - std::chrono::ceil<seconds>(ttl).count();
}

bool S3Collector::AnyUnusedSince(int64_t when) const {
  return std::any_of(frames_.begin(), frames_.end(), [when](const auto& frame) { return frame.second.used < when; });
}

void S3Collector::Decide() {
  if (collecting_ || (BytesOver() == 0 && !AnyUnusedSince(TtlBegan()))) return;
  collecting_ = true;
  begun_ = clock_.Now();
  ReadTells();
}

void S3Collector::ReadParents() {
  orphans_.clear();
  for (const auto& [key, entry] : frames_) {
    if (!entry.knows_parent) orphans_.push_back(key);
  }
  Run(
      [this](const Ended& ended) {
        if (orphans_.empty()) return false;
        const Digest key = orphans_.back();
        orphans_.pop_back();
        hooks_.parent_of(key, [this, key, ended](const Failure& failure, const Digest& parent) {
          const auto it = frames_.find(key);
          if (failure.trouble == Trouble::kNotFound) {
            Erased(key);
          } else if (it != frames_.end() && s3::MayBeTheObjectsOwn(failure.trouble)) {
            unreadable_.insert(key);
          } else if (failure) {
            Failed("parents", failure);
          } else if (it != frames_.end()) {
            it->second.parent = parent;
            it->second.knows_parent = true;
          }
          ended();
        });
        return true;
      },
      [this] { Plan(); });
}

void S3Collector::Plan() {
  const int64_t unused_since = TtlBegan();
  const uint64_t bytes = BytesOver();
  why_ = bytes > 0 ? kSize : kTtl;
  LeafOrder order;
  for (const auto& [key, entry] : frames_) {
    // Whose parent could not be read now may be anybody's child: it stays, this time. One that the server will not give
    // would else stay for ever.
    if (entry.knows_parent) {
      order.Add(key, entry.parent, entry.used);
    } else if (unreadable_.contains(key)) {
      order.Add(key, key, entry.used);
    }
  }
  uint64_t planned = 0;
  for (auto next = order.Oldest(); next && (planned < bytes || next->used_ns < unused_since); next = order.Oldest()) {
    order.Remove(next->key);
    const Entry& entry = frames_.at(next->key);
    planned += entry.bytes;
    victims_.push_back({next->key, entry.used});
  }
  std::reverse(victims_.begin(), victims_.end());
  Evict();
}

void S3Collector::Evict() {
  Run(
      [this](const Ended& ended) {
        while (!victims_.empty()) {
          const Victim victim = victims_.back();
          victims_.pop_back();
          const auto it = frames_.find(victim.key);
          if (it == frames_.end()) continue;
          // Used since it was chosen, or made a parent, which is a use. What stays needs those before it.
          if (it->second.used > victim.used || needed_.contains(victim.key)) {
            needed_.insert(it->second.parent);
            continue;
          }
          hooks_.remove(victim.key, [this, victim, bytes = it->second.bytes, ended](const Failure& failure) {
            if (failure) {
              Stuck(victim.key, failure);
            } else {
              ++evicted_frames_;
              evicted_bytes_ += bytes;
            }
            ended();
          });
          return true;
        }
        return false;
      },
      [this] { Finish(); });
}

// One that can't be removed does not stop the others: it has its next turn after them.
void S3Collector::Stuck(const Digest& key, const Failure& failure) {
  if (stuck_++ == 0) Failed("evict", failure);
  if (!s3::MayBeTheObjectsOwn(failure.trouble) || stuck_ > kStuckMax)
    return victims_.clear();  // The next listing decides anew.
  if (const auto it = frames_.find(key); it != frames_.end()) {
    it->second.used = ServerNow() + 1;  // Times are whole seconds: behind what was used in this one, too.
    needed_.insert(it->second.parent);
  }
}

void S3Collector::Finish() {
  collecting_ = false;
  stuck_ = 0;
  unreadable_.clear();
  orphans_.clear();
  victims_.clear();
  needed_.clear();
  if (evicted_frames_ == 0) return;
  metrics_
      .GetCounter("terrace_tier_evicted_total", "Frames removed to keep a bound.",
                  {{"tier", "s3"}, {"reason", kWhy[why_]}})
      .Add(evicted_frames_);
  const auto took = std::chrono::duration_cast<milliseconds>(clock_.Now() - begun_);
  log::Info(
      "s3_collected",
      {{"reason", kWhy[why_]}, {"frames", evicted_frames_}, {"bytes", evicted_bytes_}, {"took_ms", took.count()}});
  evicted_frames_ = evicted_bytes_ = 0;
}

void S3Collector::Run(std::function<bool(const Ended& ended)> next, std::function<void()> then) {
  if (closing_ || !holds_lease()) return Finish();
  // One more than calls are under way, so that none that ends at once ends the step.
  auto left = std::make_shared<size_t>(1);
  auto more = std::make_shared<bool>(true);
  const Ended ended = [this, left, more, next, then] {
    if (--*left > 0) return;
    if (!*more) return then();
    store_.executor().PostAfter(options_.pause, [this, next, then] { Run(next, then); });
  };
  for (size_t i = 0; i < kStepCalls && *more; ++i) {
    ++*left;
    *more = next(ended);
    if (!*more) --*left;
  }
  ended();
}

}  // namespace terrace
