#include "tier/disk_index.h"

#include <algorithm>
#include <cstdlib>
#include <mutex>

#include "base/assert.h"

namespace terrace {

DiskIndex::Entry* DiskIndex::Find(const Digest& key) {
  Shard& shard = ShardOf(key);
  const auto it = shard.find(key);
  return it == shard.end() ? nullptr : &it->second;
}

const DiskIndex::Entry* DiskIndex::Find(const Digest& key) const {
  const Shard& shard = ShardOf(key);
  const auto it = shard.find(key);
  return it == shard.end() ? nullptr : &it->second;
}

void DiskIndex::Contains(std::span<const Digest> keys, std::span<uint8_t> present) const {
  std::shared_lock lock(mutex_);
  for (size_t i = 0; i < keys.size(); ++i) present[i] = Find(keys[i]) != nullptr;
}

bool DiskIndex::Contains(const Digest& key) const {
  std::shared_lock lock(mutex_);
  return Find(key) != nullptr;
}

bool DiskIndex::AddListed(const Digest& key, uint64_t file_bytes, int64_t used_ns) {
  std::lock_guard lock(mutex_);
  const auto [it, added] = ShardOf(key).try_emplace(key);
  if (!added) return false;
  it->second = {.id = ++last_id_, .file_bytes = file_bytes, .used_ns = used_ns, .stamped_ns = used_ns};
  latest_ns_ = std::max(latest_ns_, used_ns);
  ++frames_;
  bytes_ += file_bytes;
  return true;
}

void DiskIndex::SetInfo(const Digest& key, const FrameInfo& info) {
  std::lock_guard lock(mutex_);
  Entry* entry = Find(key);
  if (!entry || entry->info) return;
  entry->info = info;
  order_.Add(key, info.parent, entry->used_ns);
}

bool DiskIndex::HasInfo(const Digest& key) const {
  std::shared_lock lock(mutex_);
  const Entry* entry = Find(key);
  return entry && entry->info;
}

void DiskIndex::NoteUnreadable(const Digest& key, uint64_t id) {
  std::lock_guard lock(mutex_);
  Entry* entry = Find(key);
  if (entry && entry->id == id) entry->unreadable = true;
}

std::optional<uint64_t> DiskIndex::Unreadable(const Digest& key) const {
  std::shared_lock lock(mutex_);
  const Entry* entry = Find(key);
  return entry && entry->unreadable ? std::optional(entry->id) : std::nullopt;
}

std::optional<DiskIndex::Reading> DiskIndex::Acquire(const Digest& key, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  Entry* entry = Find(key);
  if (!entry) return std::nullopt;
  const Reading reading{
      .id = entry->id,
      .file_bytes = entry->file_bytes,
      .info = entry->info,
      .stamp_file = now_ns != 0 && std::abs(now_ns - entry->stamped_ns) > std::chrono::nanoseconds(kStampEvery).count(),
  };
  if (reading.stamp_file) entry->stamped_ns = now_ns;
  ++entry->readers;
  order_.Hold(key);
  if (now_ns != 0) SetUsed(key, *entry, Later(now_ns));
  return reading;
}

void DiskIndex::Release(const Digest& key, uint64_t id) {
  std::lock_guard lock(mutex_);
  Entry* entry = Find(key);
  if (!entry || entry->id != id) return;
  --entry->readers;
  order_.Release(key);
}

void DiskIndex::Use(const Digest& key, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  if (Entry* entry = Find(key)) SetUsed(key, *entry, Later(now_ns));
}

std::optional<uint64_t> DiskIndex::Remove(const Digest& key, uint64_t id) {
  std::lock_guard lock(mutex_);
  Entry* entry = Find(key);
  if (!entry || (id != 0 && entry->id != id)) return std::nullopt;
  return Erase(key, *entry);
}

std::optional<DiskIndex::Evicted> DiskIndex::EvictOne() {
  std::lock_guard lock(mutex_);
  const auto next = order_.Oldest();
  if (!next) return std::nullopt;
  Entry* entry = Find(next->key);
  TERRACE_ASSERT(entry && entry->readers == 0);
  Evicted evicted{.info = *entry->info, .stamped_ns = entry->stamped_ns};
  evicted.file_bytes = Erase(next->key, *entry);
  return evicted;
}

void DiskIndex::PutBack(const Evicted& evicted, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  const FrameInfo& info = evicted.info;
  const auto [it, added] = ShardOf(info.key).try_emplace(info.key);
  TERRACE_ASSERT(added);
  it->second = {.id = ++last_id_, .file_bytes = evicted.file_bytes, .stamped_ns = evicted.stamped_ns, .info = info};
  ++frames_;
  order_.Add(info.key, info.parent, Later(now_ns));
}

void DiskIndex::Free(uint64_t file_bytes) {
  std::lock_guard lock(mutex_);
  TERRACE_ASSERT(bytes_ >= file_bytes);
  bytes_ -= file_bytes;
}

bool DiskIndex::Reserve(const FrameInfo& info, uint64_t file_bytes) {
  std::lock_guard lock(mutex_);
  if (bytes_ > bytes_max_ || file_bytes > bytes_max_ - bytes_) return false;
  bytes_ += file_bytes;
  if (info.parent != info.key) order_.Hold(info.parent);
  return true;
}

void DiskIndex::Commit(const FrameInfo& info, uint64_t file_bytes, int64_t now_ns) {
  std::lock_guard lock(mutex_);
  const auto [it, added] = ShardOf(info.key).try_emplace(info.key);
  TERRACE_ASSERT(added);
  it->second = {.id = ++last_id_, .file_bytes = file_bytes, .stamped_ns = now_ns, .info = info};
  ++frames_;
  order_.Add(info.key, info.parent, Later(now_ns));
  if (info.parent != info.key) order_.Release(info.parent);
}

void DiskIndex::Abort(const FrameInfo& info, uint64_t file_bytes) {
  std::lock_guard lock(mutex_);
  TERRACE_ASSERT(bytes_ >= file_bytes);
  bytes_ -= file_bytes;
  if (info.parent != info.key) order_.Release(info.parent);
}

std::vector<FrameInfo> DiskIndex::After(const std::optional<Digest>& cursor, size_t limit) const {
  std::vector<FrameInfo> page;
  std::vector<const FrameInfo*> here;
  std::shared_lock lock(mutex_);
  for (size_t s = cursor ? cursor->bytes[0] : 0; s < kDiskFanOut && page.size() < limit; ++s) {
    here.clear();
    for (const auto& [key, entry] : shards_[s]) {
      if (entry.info && (!cursor || *cursor < key)) here.push_back(&*entry.info);
    }
    const auto end = here.begin() + static_cast<ptrdiff_t>(std::min(here.size(), limit - page.size()));
    std::partial_sort(here.begin(), end, here.end(), [](const auto* a, const auto* b) { return a->key < b->key; });
    for (auto it = here.begin(); it != end; ++it) page.push_back(**it);
  }
  return page;
}

uint64_t DiskIndex::frames() const {
  std::shared_lock lock(mutex_);
  return frames_;
}

uint64_t DiskIndex::bytes() const {
  std::shared_lock lock(mutex_);
  return bytes_;
}

void DiskIndex::SetUsed(const Digest& key, Entry& entry, int64_t used_ns) {
  if (entry.info) return order_.Use(key, used_ns);
  entry.used_ns = std::max(entry.used_ns, used_ns);
}

uint64_t DiskIndex::Erase(const Digest& key, Entry& entry) {
  for (; entry.readers > 0; --entry.readers) order_.Release(key);
  if (entry.info) order_.Remove(key);
  const uint64_t file_bytes = entry.file_bytes;
  ShardOf(key).erase(key);
  --frames_;
  return file_bytes;
}

}  // namespace terrace
