#include "tier/ram_tier.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <thread>

#include "base/assert.h"
#include "base/hash.h"
#include "base/log.h"

namespace terrace {
namespace {

constexpr size_t kMaxShards = 4096;
constexpr uint64_t kSlotBytesMin = 4096;  // Of an arena.
constexpr uint64_t kFitsUntilRaise = 10;

size_t ShardCount() {
  // Four a core: two cores that work at once seldom meet.
  return std::min<size_t>(kMaxShards, std::bit_ceil(4 * std::max<size_t>(std::thread::hardware_concurrency(), 4)));
}

// In an arena that is empty.
bool Fits(const RamArena& arena, uint64_t payload_bytes) {
  const uint64_t cap = arena.cap();
  return payload_bytes <= cap && arena.RoundedBytes(payload_bytes) <= cap;
}

size_t SegmentCount(uint64_t payload_bytes) { return (payload_bytes + kSegmentBytes - 1) / kSegmentBytes; }

}  // namespace

Result<std::unique_ptr<RamTier>> RamTier::Open(const RamTierOptions& options) {
  const std::shared_ptr<RamRoom> room = options.room ? options.room : RoomOfThisMachine();
  const uint64_t given = room->Reserve({.asked_bytes = options.bytes_max});
  const Error too_small{Code::kInvalid, "ram: a cap of " + std::to_string(given) + " bytes (" +
                                            std::to_string(options.bytes_max) +
                                            " asked; the rest is in use, or reserved by other processes) has no room "
                                            "for one chunk of " +
                                            std::to_string(options.payload_bytes) + " bytes; give more with --ram"};
  if (given < kSlotBytesMin) return tl::unexpected<Error>(too_small);
  // The cap may rise later, but not above the machine.
  Result<std::shared_ptr<RamArena>> arena = RamArena::Open({.bytes_max = std::min(options.bytes_max, room->total()),
                                                            .huge_pages = RamArena::HugePagesOffered(),
                                                            .spare_bytes = [room] { return room->Spare(); }});
  if (!arena) return tl::unexpected<Error>(std::move(arena.error()));
  (*arena)->SetCap(given);
  if (!Fits(**arena, options.payload_bytes)) return tl::unexpected<Error>(too_small);
  if (given < options.bytes_max) {
    log::Warn("ram_cap_cut", {{"tier", "ram"}, {"asked_bytes", options.bytes_max}, {"given_bytes", given}});
  }
  return std::unique_ptr<RamTier>(new RamTier(options, std::move(*arena), room));
}

RamTier::RamTier(const RamTierOptions& options, std::shared_ptr<RamArena> arena, std::shared_ptr<RamRoom> room)
    : room_(std::move(room)),
      arena_(std::move(arena)),
      asked_bytes_(options.bytes_max),
      said_cap_(arena_->cap()),
      info_{.name = "ram",
            .best_in_flight = options.executor ? std::max<size_t>(std::thread::hardware_concurrency(), 1) : 1},
      shard_count_(ShardCount()),
      shards_(std::make_unique<Shard[]>(shard_count_)),
      jobs_(options.executor) {}

RamTier::~RamTier() { Close(TimePoint::min()); }

// DigestHash reads the first bytes, the shard comes from the last: the maps stay uniform.
RamTier::Shard& RamTier::ShardOf(const Digest& key) const {
  const size_t tail = key.bytes[30] + size_t{key.bytes[31]} * 256;
  return shards_[tail & (shard_count_ - 1)];
}

std::shared_ptr<RamTier::Entry> RamTier::Find(const Digest& key) const {
  Shard& shard = ShardOf(key);
  std::lock_guard lock(shard.mutex);
  const auto it = shard.entries.find(key);
  return it == shard.entries.end() ? nullptr : it->second;
}

RamLease RamTier::LeaseOn(const std::shared_ptr<Entry>& entry) {
  return {entry->memory.bytes(), entry->info, entry, entry->hashes};
}

void RamSlot::SetInfo(const FrameInfo& info) {
  TERRACE_ASSERT(info.payload_bytes == info_.payload_bytes);
  info_ = info;
}

// --- Room, visibility, leases ---

Result<RamSlot> RamTier::Reserve(const FrameInfo& info) {
  if (info.payload_bytes == 0) return Fail(Code::kInvalid, "ram: a chunk of 0 bytes");
  if (!Fits(*arena_, info.payload_bytes)) {
    return Fail(Code::kFull, "ram: a chunk of " + std::to_string(info.payload_bytes) +
                                 " bytes is more than the cap of " + std::to_string(arena_->cap()));
  }
  std::optional<RamArena::Slot> memory;
  {
    // Held from the first try to the last: nobody else can take what is evicted here.
    std::lock_guard lock(order_mutex_);
    if (closed_) return Fail(Code::kUnavailable, "ram: closed");
    // A child is about to come: its parent must not make room for it.
    if (const std::shared_ptr<Entry> parent = Find(info.parent)) Touch(*parent);
    while (!(memory = arena_->Claim(info.payload_bytes))) {
      if (!EvictOne()) {
        return Fail(Code::kFull, "ram: no room for " + std::to_string(info.payload_bytes) + " bytes: of " +
                                     std::to_string(arena_->cap()) + ", " + std::to_string(arena_->live_bytes()) +
                                     " are in use");
      }
    }
  }
  if (Result<void> touched = arena_->Touch(*memory); !touched) return tl::unexpected<Error>(touched.error());
  return RamSlot(std::move(*memory), info);
}

std::optional<RamLease> RamTier::Commit(RamSlot slot, std::shared_ptr<const SegmentHashes> hashes) {
  TERRACE_ASSERT(hashes && hashes->size() == SegmentCount(slot.info().payload_bytes));
  auto entry = std::make_shared<Entry>();
  entry->memory = std::move(slot.memory_);
  entry->info = slot.info_;
  entry->hashes = std::move(hashes);
  const Digest& key = entry->info.key;

  std::lock_guard lock(order_mutex_);
  if (closed_) return std::nullopt;
  Touch(*entry);
  {
    Shard& shard = ShardOf(key);
    std::lock_guard shard_lock(shard.mutex);
    const auto [it, inserted] = shard.entries.try_emplace(key, entry);
    if (!inserted) {
      Touch(*it->second);
      return LeaseOn(it->second);
    }
  }
  // A header that came from outside may say anything: a chunk that is its own parent would never be a leaf, nor would
  // any of several that are each other's.
  entry->parent = entry->info.parent;
  if (entry->parent != key) {
    ++child_counts_[entry->parent];
    if (const std::shared_ptr<Entry> parent = Find(entry->parent)) UnqueueLeaf(*parent);
  }
  if (!child_counts_.contains(key)) {
    QueueLeaf(*entry, entry->last_use.load(std::memory_order_relaxed));
  } else if (entry->parent != key) {
    circles_.Suspect(key);
    if (circles_.suspects() > child_counts_.size()) BreakCircles();
  }
  return LeaseOn(entry);
}

std::optional<RamLease> RamTier::Acquire(const Digest& key) {
  const std::shared_ptr<Entry> entry = Find(key);
  if (!entry) return std::nullopt;
  Touch(*entry);
  return LeaseOn(entry);
}

// --- Eviction ---
//
// A use only stamps its entry. leaves_ is put right here: an entry may stand in it with an older stamp than its own,
// never with a newer one. That a use counts for all ancestors needs no walk either: an ancestor can't be evicted before
// it is a leaf, and when its last child goes, it takes over the child's stamp.

bool RamTier::EvictOne() {
  BreakCircles();
  const size_t leaves = leaves_.size();
  // In the first half of the tries stamps are renewed; in the second they are taken as they are, so that others who use
  // entries all the time cannot keep us from finding one that is free.
  for (size_t tries = 2 * leaves; tries > 0; --tries) {
    const auto [stamp, entry] = *leaves_.begin();
    const uint64_t last_use = entry->last_use.load(std::memory_order_relaxed);
    if (last_use != stamp && tries > leaves) {
      QueueLeaf(*entry, last_use);
      continue;
    }
    std::shared_ptr<Entry> evicted;
    {
      Shard& shard = ShardOf(entry->info.key);
      std::lock_guard lock(shard.mutex);
      const auto it = shard.entries.find(entry->info.key);
      if (it->second.use_count() == 1) {
        evicted = std::move(it->second);
        shard.entries.erase(it);
      }
    }
    if (evicted) {
      Unlink(*evicted);
      return true;
    }
    Touch(*entry);  // Lent: in use now.
    QueueLeaf(*entry, entry->last_use.load(std::memory_order_relaxed));
  }
  return false;
}

void RamTier::QueueLeaf(Entry& entry, uint64_t stamp) {
  UnqueueLeaf(entry);
  entry.queued_as = stamp;
  leaves_.emplace(stamp, &entry);
}

void RamTier::UnqueueLeaf(Entry& entry) {
  if (entry.queued_as == 0) return;
  leaves_.erase({entry.queued_as, &entry});
  entry.queued_as = 0;
}

void RamTier::Unlink(Entry& entry) {
  UnqueueLeaf(entry);
  if (entry.parent != entry.info.key) ChildLeft(entry.parent, entry.last_use.load(std::memory_order_relaxed));
}

void RamTier::ChildLeft(const Digest& key, uint64_t last_use) {
  const auto siblings = child_counts_.find(key);
  const bool last = --siblings->second == 0;
  if (last) child_counts_.erase(siblings);
  const std::shared_ptr<Entry> parent = Find(key);
  if (!parent) return;
  const uint64_t inherited = std::max(parent->last_use.load(std::memory_order_relaxed), last_use);
  parent->last_use.store(inherited, std::memory_order_relaxed);
  if (last) QueueLeaf(*parent, inherited);
}

void RamTier::BreakCircles() {
  circles_.Break([this](const Digest& key) { return Find(key); },
                 [this](const Digest& parent) { ChildLeft(parent, 0); });
}

void RamTier::RemoveDamaged(const std::shared_ptr<Entry>& entry) {
  {
    std::lock_guard lock(order_mutex_);
    Shard& shard = ShardOf(entry->info.key);
    {
      std::lock_guard shard_lock(shard.mutex);
      const auto it = shard.entries.find(entry->info.key);
      if (it == shard.entries.end() || it->second != entry) return;  // Somebody else was faster.
      shard.entries.erase(it);
    }
    Unlink(*entry);
  }
  quarantined_.fetch_add(1, std::memory_order_relaxed);
  log::Error("frame_quarantined", {{"tier", "ram"},
                                   {"key", entry->info.key.Hex()},
                                   {"reason", ReasonName(Reason::kDamaged)},
                                   {"bytes", entry->info.payload_bytes}});
}

uint64_t RamTier::ScrubSome(uint64_t bytes_max) {
  std::lock_guard lock(scrub_mutex_);
  std::optional<Digest> first;
  bool wrapped = false;
  uint64_t read = 0;
  while (read < bytes_max) {
    std::shared_ptr<Entry> entry;
    VisitAfter(scrubbed_, 1, [&](const std::shared_ptr<Entry>& next) { entry = next; });
    if (!entry) {
      if (std::exchange(wrapped, true)) break;
      scrubbed_.reset();
      continue;
    }
    if (first == entry->info.key) break;
    if (!first) first = entry->info.key;
    scrubbed_ = entry->info.key;
    if (HashSegments(entry->memory.bytes()) != *entry->hashes) RemoveDamaged(entry);
    read += entry->info.payload_bytes;
  }
  return read;
}

void RamTier::FitTheMachine() {
  const int64_t spare = room_->Spare();
  const uint64_t resident = arena_->resident_bytes();
  const uint64_t before = arena_->cap();
  uint64_t cap = before;
  if (spare < 0) {
    // Out of what is there: what was only reserved is no help to anybody.
    cap = resident - std::min(resident, static_cast<uint64_t>(-spare));
  } else if (++fits_ % kFitsUntilRaise == 0 && before < arena_->bytes_max()) {
    cap = room_->Reserve({.asked_bytes = arena_->bytes_max(), .held_bytes = resident, .cap_bytes = before});
  }
  arena_->SetCap(cap);
  room_->SetUntouched(cap - std::min(cap, resident));
  if (arena_->live_bytes() > cap) {
    std::lock_guard lock(order_mutex_);
    while (!closed_ && arena_->live_bytes() > cap && EvictOne()) continue;
  }
  // Small steps are not worth a line.
  if (std::max(cap, said_cap_) - std::min(cap, said_cap_) <= said_cap_ / 8) return;
  const std::initializer_list<log::Field> fields = {
      {"tier", "ram"}, {"asked_bytes", asked_bytes_}, {"given_bytes", cap}};
  cap < said_cap_ ? log::Warn("ram_cap_cut", fields) : log::Info("ram_cap_raised", fields);
  said_cap_ = cap;
}

uint64_t RamTier::TouchAhead(uint64_t payload_bytes, uint64_t ready_bytes, uint64_t step_bytes) {
  uint64_t touched = 0;
  while (touched < step_bytes && arena_->TouchAhead(payload_bytes, ready_bytes)) {
    touched += arena_->RoundedBytes(payload_bytes);
  }
  return touched;
}

// --- Tier ---

void RamTier::Contains(std::span<const Digest> keys, std::span<uint8_t> present) {
  TERRACE_ASSERT(keys.size() == present.size());
  for (size_t i = 0; i < keys.size(); ++i) {
    Shard& shard = ShardOf(keys[i]);
    std::lock_guard lock(shard.mutex);
    present[i] = shard.entries.contains(keys[i]);
  }
}

void RamTier::Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  TERRACE_ASSERT(items.size() == done->size());
  for (size_t i = 0; i < items.size(); ++i) {
    auto item = std::make_shared<LoadItem>(std::move(items[i]));
    const auto settle = [item, done, i](LoadResult result) {
      *item = {};  // Whoever sees the result may count on the buffer being given back.
      done->Settle(i, std::move(result));
    };
    jobs_.Add({.run =
                   [this, item, deadline, done, settle] {
                     if (done->cancelled()) {
                       settle({.reason = Reason::kCancelled});
                     } else if (std::chrono::steady_clock::now() >= deadline) {
                       settle({.reason = Reason::kTimeout});
                     } else {
                       settle(LoadOne(*item));
                     }
                   },
               .drop = [settle] { settle({.reason = Reason::kUnavailable}); }});
  }
}

LoadResult RamTier::LoadOne(const LoadItem& item) {
  const std::shared_ptr<Entry> entry = Find(item.key);
  if (!entry) return {.reason = Reason::kNotFound};
  if (entry->info.space != item.space || entry->info.payload_bytes != item.into.size()) {
    return {.reason = Reason::kForeign};
  }
  Touch(*entry);
  if (CopyAndHash(entry->memory.bytes(), item.into) != *entry->hashes) {
    RemoveDamaged(entry);
    return {.reason = Reason::kDamaged};
  }
  return {.outcome = Outcome::kHit, .reason = Reason::kNone, .info = entry->info, .hashes = entry->hashes};
}

void RamTier::Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  TERRACE_ASSERT(items.size() == done->size());
  for (size_t i = 0; i < items.size(); ++i) {
    auto item = std::make_shared<SaveItem>(std::move(items[i]));
    const auto settle = [item, done, i](SaveResult result) {
      *item = {};
      done->Settle(i, std::move(result));
    };
    jobs_.Add({.run =
                   [this, item, done, settle] {
                     if (done->cancelled()) {
                       settle({.outcome = Outcome::kDeclined, .reason = Reason::kCancelled});
                     } else {
                       settle(SaveOne(*item));
                     }
                   },
               .drop = [settle] { settle({.outcome = Outcome::kDeclined, .reason = Reason::kUnavailable}); }});
  }
}

SaveResult RamTier::SaveOne(const SaveItem& item) {
  if (item.payload.size() != item.info.payload_bytes ||
      (item.hashes && item.hashes->size() != SegmentCount(item.payload.size()))) {
    return {.error = Error{Code::kInvalid,
                           "ram: save " + item.info.key.Hex() + ": payload or hashes are not of payload_bytes"}};
  }
  if (Acquire(item.info.key)) return {.outcome = Outcome::kHit, .existed = true};
  Result<RamSlot> slot = Reserve(item.info);
  if (!slot) {
    switch (slot.error().code) {
      case Code::kFull: return {.outcome = Outcome::kDeclined, .reason = Reason::kFull};
      case Code::kUnavailable: return {.outcome = Outcome::kDeclined, .reason = Reason::kUnavailable};
      default: return {.error = slot.error()};
    }
  }
  const std::span<std::byte> bytes = slot->bytes();
  std::shared_ptr<const SegmentHashes> hashes = item.hashes;
  if (hashes) {
    std::memcpy(bytes.data(), item.payload.data(), bytes.size());
  } else {
    hashes = std::make_shared<const SegmentHashes>(CopyAndHash(item.payload, bytes));
  }
  const std::optional<RamLease> lease = Commit(std::move(*slot), std::move(hashes));
  if (!lease) return {.outcome = Outcome::kDeclined, .reason = Reason::kUnavailable};
  return {.outcome = Outcome::kHit, .existed = lease->bytes.data() != bytes.data()};
}

void RamTier::Erase(std::span<const Digest> keys) {
  for (const Digest& key : keys) {
    std::lock_guard lock(order_mutex_);
    std::shared_ptr<Entry> erased;
    {
      Shard& shard = ShardOf(key);
      std::lock_guard shard_lock(shard.mutex);
      auto node = shard.entries.extract(key);
      if (node) erased = std::move(node.mapped());
    }
    if (erased) Unlink(*erased);
  }
}

template <class Visit>
void RamTier::VisitAfter(const std::optional<Digest>& cursor, size_t limit, const Visit& visit) const {
  const size_t first = cursor ? static_cast<size_t>(&ShardOf(*cursor) - shards_.get()) : 0;
  std::vector<const std::shared_ptr<Entry>*> here;
  for (size_t s = first; s < shard_count_ && limit > 0; ++s) {
    here.clear();
    std::lock_guard lock(shards_[s].mutex);
    for (const auto& [key, entry] : shards_[s].entries) {
      if (s != first || !cursor || *cursor < key) here.push_back(&entry);
    }
    const auto end = here.begin() + static_cast<ptrdiff_t>(std::min(here.size(), limit));
    std::partial_sort(here.begin(), end, here.end(),
                      [](const auto* a, const auto* b) { return (*a)->info.key < (*b)->info.key; });
    for (auto it = here.begin(); it != end; ++it) visit(**it);
    limit -= static_cast<size_t>(end - here.begin());
  }
}

Result<ScanPage> RamTier::Scan(const std::string& cursor, size_t limit) {
  std::optional<Digest> after;
  if (!cursor.empty()) {
    after = Digest::FromHex(cursor);
    if (!after) return Fail(Code::kInvalid, "ram: scan: \"" + cursor + "\" is no cursor of this tier");
  }
  if (limit == 0) return Fail(Code::kInvalid, "ram: scan with limit 0");
  ScanPage page;
  VisitAfter(after, limit, [&](const std::shared_ptr<Entry>& entry) { page.frames.push_back(entry->info); });
  if (page.frames.size() == limit) page.next = page.frames.back().key.Hex();
  return page;
}

TierStats RamTier::stats() const {
  TierStats stats;
  uint64_t evictable = 0;
  for (size_t s = 0; s < shard_count_; ++s) {
    std::lock_guard lock(shards_[s].mutex);
    stats.frames += shards_[s].entries.size();
    for (const auto& [key, entry] : shards_[s].entries) {
      if (entry.use_count() == 1) evictable += entry->memory.rounded_bytes();
    }
  }
  stats.bytes = arena_->live_bytes();
  stats.bytes_max = arena_->cap();
  // Also what is reserved, and what was erased while lent. Both sums move meanwhile.
  stats.pinned_bytes = stats.bytes - std::min(stats.bytes, evictable);
  stats.quarantined = quarantined_.load(std::memory_order_relaxed);
  return stats;
}

CloseReport RamTier::Close(TimePoint deadline) {
  CloseReport report;
  report.abandoned = jobs_.Close(deadline);
  report.clean = report.abandoned == 0;
  std::lock_guard lock(order_mutex_);
  closed_ = true;
  leaves_.clear();
  child_counts_.clear();
  circles_.Clear();
  for (size_t s = 0; s < shard_count_; ++s) {
    std::unordered_map<Digest, std::shared_ptr<Entry>, DigestHash> forgotten;
    std::lock_guard shard_lock(shards_[s].mutex);
    forgotten.swap(shards_[s].entries);
  }
  return report;
}

}  // namespace terrace
