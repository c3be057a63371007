#include "store/write_behind.h"

#include <utility>

#include "base/log.h"

namespace terrace {

WriteBehind::WriteBehind(Tier& tier, const Options& options, Metrics& metrics)
    : tier_(tier),
      options_(options),
      metrics_(metrics),
      saved_(metrics.GetCounter("terrace_chunks_saved_total", "Chunks written to a tier below RAM.",
                                {{"tier", tier.info().name}, {"outcome", "written"}})),
      saved_bytes_(metrics.GetCounter("terrace_saved_bytes_total", "Payload bytes written to a tier below RAM.",
                                      {{"tier", tier.info().name}})),
      existed_(metrics.GetCounter("terrace_chunks_saved_total", "Chunks written to a tier below RAM.",
                                  {{"tier", tier.info().name}, {"outcome", "existed"}})),
      failed_(metrics.GetCounter("terrace_chunks_saved_total", "Chunks written to a tier below RAM.",
                                 {{"tier", tier.info().name}, {"outcome", "failed"}})),
      pending_bytes_(metrics.GetGauge("terrace_write_behind_bytes", "Payload bytes in RAM that wait for a lower tier.",
                                      {{"tier", tier.info().name}})) {}

void WriteBehind::CountDrop(Reason reason) {
  metrics_
      .GetCounter("terrace_saves_dropped_total", "Chunks not written to a tier below RAM, by reason.",
                  {{"tier", tier_.info().name}, {"reason", ReasonName(reason)}})
      .Add();
}

void WriteBehind::Enqueue(SaveItem item) {
  const Digest key = item.info.key;
  const Digest parent = item.info.parent;
  const Digest asked[] = {key, parent};
  uint8_t present[] = {0, 0};
  tier_.Contains(asked, present);
  if (present[0]) return;
  const bool is_first = parent == item.info.space;
  {
    std::lock_guard lock(mutex_);
    if (entries_.contains(key)) return;
    const auto parent_entry = entries_.find(parent);
    if (draining_) return CountDrop(Reason::kCancelled);
    if (!is_first && !present[1] && parent_entry == entries_.end()) return CountDrop(Reason::kParentMissing);
    if (bytes_ + item.info.payload_bytes > options_.bytes_max) return CountDrop(Reason::kFull);
    bytes_ += item.info.payload_bytes;
    pending_bytes_.Set(static_cast<int64_t>(bytes_));
    Entry entry{std::move(item), {}, parent_entry != entries_.end()};
    if (entry.waits_for_parent) {
      parent_entry->second.children.push_back(key);
    } else {
      ready_.push_back(key);
    }
    entries_.emplace(key, std::move(entry));
  }
  Submit();
}

void WriteBehind::Submit() {
  for (;;) {
    SaveItem item;
    {
      std::lock_guard lock(mutex_);
      if (in_flight_ >= options_.in_flight_max || ready_.empty()) return;
      item = entries_.at(ready_.front()).item;
      ready_.pop_front();
      ++in_flight_;
    }
    const Digest key = item.info.key;
    auto batch =
        std::make_shared<SaveBatch>(1, [this, key](size_t, const SaveResult& result) { Settled(key, result); });
    std::vector<SaveItem> items;
    items.push_back(std::move(item));
    tier_.Save(std::move(items), std::move(batch));
  }
}

void WriteBehind::Settled(const Digest& key, const SaveResult& result) {
  Entry done;  // Unpins outside the lock.
  {
    std::lock_guard lock(mutex_);
    const auto it = entries_.find(key);
    done = std::move(it->second);
    entries_.erase(it);
    --in_flight_;
    bytes_ -= done.item.info.payload_bytes;
    pending_bytes_.Set(static_cast<int64_t>(bytes_));
    if (result.outcome == Outcome::kHit) {
      (result.existed ? existed_ : saved_).Add();
      if (!result.existed) saved_bytes_.Add(done.item.info.payload_bytes);
      for (const Digest& child : done.children) {
        entries_.at(child).waits_for_parent = false;
        ready_.push_back(child);
      }
    } else {
      failed_.Add();
      for (const Digest& child : done.children) DropTree(child, Reason::kParentMissing);
    }
    if (entries_.empty()) idle_.notify_all();
  }
  if (result.error) {
    log::Warn("save_failed", {{"tier", tier_.info().name}, {"key", key.Hex()}, {"why", result.error->what}});
  }
  Submit();
}

void WriteBehind::DropTree(const Digest& key, Reason reason) {
  std::vector<Digest> doomed = {key};
  while (!doomed.empty()) {
    const auto it = entries_.find(doomed.back());
    doomed.pop_back();
    doomed.insert(doomed.end(), it->second.children.begin(), it->second.children.end());
    bytes_ -= it->second.item.info.payload_bytes;
    entries_.erase(it);
    CountDrop(reason);
  }
  pending_bytes_.Set(static_cast<int64_t>(bytes_));
}

bool WriteBehind::Has(const Digest& key) const {
  std::lock_guard lock(mutex_);
  return entries_.contains(key);
}

uint64_t WriteBehind::pending() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

uint64_t WriteBehind::bytes() const {
  std::lock_guard lock(mutex_);
  return bytes_;
}

uint64_t WriteBehind::Drain(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  draining_ = true;
  if (idle_.wait_until(lock, deadline, [&] { return entries_.empty(); })) return 0;
  const uint64_t before = entries_.size();
  for (const Digest& key : std::exchange(ready_, {})) DropTree(key, Reason::kCancelled);
  return before - entries_.size();  // What is left is in the tier's hands (or waits for it) until the tier closes.
}

}  // namespace terrace
