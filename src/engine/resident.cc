#include "engine/resident.h"

#include <algorithm>

#include "base/assert.h"

namespace terrace::engine {

ResidentPrefixes::ResidentPrefixes(size_t chunks_max, int32_t first_sequence, size_t sequences)
    : chunks_max_(chunks_max) {
  TERRACE_ASSERT(sequences >= 2);  // One to compute and one to keep.
  for (size_t i = sequences; i-- > 0;) free_sequences_.push_back(first_sequence + static_cast<int32_t>(i));
}

ResidentPrefixes::Path& ResidentPrefixes::Find(int32_t sequence) {
  const auto path = std::ranges::find(paths_, sequence, &Path::sequence);
  TERRACE_ASSERT(path != paths_.end());
  return *path;
}

size_t ResidentPrefixes::Common(const Path& path, std::span<const Digest> keys) {
  return static_cast<size_t>(std::ranges::mismatch(path.keys, keys).in1 - path.keys.begin());
}

void ResidentPrefixes::PopLocked(Path& path) {
  const auto chunk = chunks_.find(path.keys.back());
  if (--chunk->second.paths == 0) chunks_.erase(chunk);
  path.keys.pop_back();
}

void ResidentPrefixes::TruncateLocked(Path& path, size_t chunks, std::vector<Cut>& cuts) {
  if (path.keys.size() <= chunks) return;
  while (path.keys.size() > chunks) PopLocked(path);
  cuts.push_back({path.sequence, chunks});
}

// Sequences without chunks go back to the free ids; their cells have been cut.
void ResidentPrefixes::DropEmptyLocked() {
  std::erase_if(paths_, [&](const Path& path) {
    if (path.active || !path.keys.empty()) return false;
    free_sequences_.push_back(path.sequence);
    return true;
  });
}

std::vector<ResidentPrefixes::Move> ResidentPrefixes::CompactLocked() {
  std::vector<std::pair<const Digest, Chunk>*> by_slot;
  for (auto& entry : chunks_) by_slot.push_back(&entry);
  std::ranges::sort(by_slot, {}, [](const auto* entry) { return entry->second.slot; });
  std::vector<Move> moves;
  for (size_t slot = 0; slot < by_slot.size(); ++slot) {
    auto& [key, chunk] = *by_slot[slot];
    if (chunk.slot == slot) continue;
    chunk.slot = slot;
    Move move;
    for (const Path& path : paths_) {
      const auto found = std::ranges::find(path.keys, key);
      if (found == path.keys.end()) continue;
      move.chunk = static_cast<size_t>(found - path.keys.begin());
      move.sequences.push_back(path.sequence);
    }
    moves.push_back(std::move(move));
  }
  return moves;
}

ResidentPrefixes::Plan ResidentPrefixes::Begin(std::span<const Digest> keys, size_t usable,
                                               const std::function<bool(const Digest&)>& may_leave) {
  TERRACE_ASSERT(usable <= keys.size());
  // Decide first, without the lock: `may_leave` calls out.
  std::vector<size_t> stay;
  for (const Path& path : paths_) {
    TERRACE_ASSERT(!path.active);  // One request at a time: batching has to decide what concurrent ones may cut.
    const size_t common = Common(path, keys);
    size_t length = path.keys.size();
    while (length > common && may_leave(path.keys[length - 1])) --length;
    // A chunk that the request computes anew (its last, if the prompt ends with it) must not be here twice.
    if (common > usable) length = usable;
    stay.push_back(length);
  }

  Plan plan;
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < paths_.size(); ++i) TruncateLocked(paths_[i], stay[i], plan.cuts);
  DropEmptyLocked();
  if (free_sequences_.empty()) {
    TruncateLocked(*std::ranges::min_element(paths_, {}, &Path::last_use), 0, plan.cuts);
    DropEmptyLocked();
  }
  plan.moves = CompactLocked();

  Path path{.sequence = free_sequences_.back(), .keys = {}, .last_use = ++clock_, .active = true};
  free_sequences_.pop_back();
  for (Path& other : paths_) {
    const size_t common = std::min(Common(other, keys), usable);
    if (common == 0) continue;
    other.last_use = clock_;
    if (common <= plan.shared) continue;
    plan.shared = common;
    plan.source = other.sequence;
  }
  path.keys.assign(keys.begin(), keys.begin() + static_cast<ptrdiff_t>(plan.shared));
  for (const Digest& key : path.keys) ++chunks_.at(key).paths;
  plan.sequence = path.sequence;
  paths_.push_back(std::move(path));
  return plan;
}

bool ResidentPrefixes::Append(int32_t sequence, const Digest& key) {
  const std::lock_guard lock(mutex_);
  if (!chunks_.emplace(key, Chunk{.slot = chunks_.size(), .paths = 1}).second) return false;
  Find(sequence).keys.push_back(key);
  return true;
}

std::vector<ResidentPrefixes::Cut> ResidentPrefixes::Finish(int32_t sequence) {
  std::vector<Cut> cuts;
  const std::lock_guard lock(mutex_);
  Path& ended = Find(sequence);
  ended.active = false;
  cuts.push_back({sequence, ended.keys.size()});  // Tokens after the last whole chunk.
  for (Path& path : paths_) {
    if (path.sequence != sequence && Common(path, ended.keys) == path.keys.size()) TruncateLocked(path, 0, cuts);
  }
  DropEmptyLocked();
  while (chunks_.size() > chunks_max_) {
    Path& oldest = *std::ranges::min_element(paths_, {}, &Path::last_use);
    TruncateLocked(oldest, oldest.keys.size() - 1, cuts);
    DropEmptyLocked();
  }
  return cuts;
}

void ResidentPrefixes::Clear() {
  const std::lock_guard lock(mutex_);
  chunks_.clear();
  for (Path& path : paths_) path.keys.clear();
  DropEmptyLocked();
}

size_t ResidentPrefixes::Known(std::span<const Digest> keys) const {
  const std::lock_guard lock(mutex_);
  size_t known = 0;
  while (known < keys.size() && chunks_.contains(keys[known])) ++known;
  return known;
}

size_t ResidentPrefixes::chunks() const {
  const std::lock_guard lock(mutex_);
  return chunks_.size();
}

}  // namespace terrace::engine
