#include "store/write_behind.h"

#include <unordered_set>
#include <utility>

#include "base/log.h"

namespace terrace {

// Goes with the item to the tier: the bytes count for as long as anybody keeps them.
struct WriteBehind::Pin {
  Pin(std::shared_ptr<Pinned> p, uint64_t n, std::shared_ptr<const void> o)
      : pinned(std::move(p)), bytes(n), owner(std::move(o)) {
    Add(bytes);
  }
  ~Pin() {
    owner.reset();
    Add(-bytes);
  }
  Pin(const Pin&) = delete;
  Pin& operator=(const Pin&) = delete;
  void Add(uint64_t n) const {
    pinned->bytes += n;
    pinned->gauge->Add(static_cast<int64_t>(n));
  }

  const std::shared_ptr<Pinned> pinned;
  const uint64_t bytes;
  std::shared_ptr<const void> owner;
};

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
      pinned_(std::make_shared<Pinned>()) {
  pinned_->gauge = &metrics.GetGauge("terrace_write_behind_bytes", "Payload bytes in RAM that wait for a lower tier.",
                                     {{"tier", tier.info().name}});
}

void WriteBehind::CountDrop(Reason reason) {
  metrics_
      .GetCounter("terrace_saves_dropped_total", "Chunks not written to a tier below RAM, by reason.",
                  {{"tier", tier_.info().name}, {"reason", ReasonName(reason)}})
      .Add();
}

bool WriteBehind::Enqueue(SaveItem item) {
  std::vector<SaveItem> chain;
  chain.push_back(std::move(item));
  return EnqueueChain(std::move(chain));
}

bool WriteBehind::EnqueueChain(std::vector<SaveItem> chain) {
  const Digest parent = chain.front().info.parent;
  std::vector<Digest> asked = {parent};
  for (const SaveItem& item : chain) asked.push_back(item.info.key);
  std::vector<uint8_t> present(asked.size());
  const bool was_here = Has(parent);
  tier_.Contains(asked, present);  // present[i] is of the parent of chain[i].
  std::vector<Entry> gone;
  Reason refused = Reason::kNone;
  bool bound_reached = false;
  {
    std::unique_lock lock(mutex_);
    if (was_here && !entries_.contains(parent)) {
      lock.unlock();  // Settled meanwhile: the tier knows it now, or never will.
      tier_.Contains(asked, present);
      lock.lock();
    }
    for (size_t i = 0; i < chain.size() && refused == Reason::kNone; ++i) {
      const FrameInfo& info = chain[i].info;
      if (present[i + 1] != 0 || entries_.contains(info.key)) continue;
      refused = WhyRefused(info, present[i] != 0 || info.parent == info.space);
      if (refused == Reason::kNone) {
        Insert(std::move(chain[i]));
      } else {
        CountDrop(refused);
        bound_reached = refused == Reason::kFull && !std::exchange(shedding_, true);
        if (bound_reached) CutBacklog(gone);
      }
    }
  }
  if (bound_reached) {
    log::Warn("write_behind_full",
              {{"tier", tier_.info().name}, {"bytes_max", options_.bytes_max}, {"dropped", gone.size() + 1}});
  }
  Submit();
  return refused == Reason::kNone;
}

Reason WriteBehind::WhyRefused(const FrameInfo& info, bool parent_is_there) {
  if (draining_) return Reason::kCancelled;
  if (!parent_is_there && !entries_.contains(info.parent)) return Reason::kParentMissing;
  const uint64_t backlog = bytes();
  shedding_ = shedding_ && backlog > options_.bytes_max / 2;
  return shedding_ || backlog + info.payload_bytes > options_.bytes_max ? Reason::kFull : Reason::kNone;
}

void WriteBehind::Insert(SaveItem item) {
  const Digest key = item.info.key;
  item.owner = std::make_shared<Pin>(pinned_, item.info.payload_bytes, std::move(item.owner));
  const auto parent = entries_.find(item.info.parent);
  if (parent == entries_.end()) {
    ready_.push_back(key);
  } else {
    parent->second.children.push_back(key);
  }
  entries_.emplace(key, Entry{std::move(item), {}, parent != entries_.end()});
}

void WriteBehind::Submit() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(submitting_, true)) return;
  }
  for (;;) {
    SaveItem item;
    {
      std::lock_guard lock(mutex_);
      if (in_flight_ >= options_.in_flight_max || ready_.empty()) {
        submitting_ = false;
        return;
      }
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
  const bool hit = result.outcome == Outcome::kHit;
  std::vector<Entry> gone;
  {
    std::lock_guard lock(mutex_);
    Take(entries_.find(key), gone);
    const std::vector<Digest> children = std::move(gone.front().children);
    --in_flight_;
    if (hit) {
      (result.existed ? existed_ : saved_).Add();
      if (!result.existed) saved_bytes_.Add(gone.front().item.info.payload_bytes);
      if (draining_) ++drained_.written;
      for (const Digest& child : children) {
        entries_.at(child).waits_for_parent = false;
        ready_.push_back(child);
      }
    } else {
      failed_.Add();
      CountDrop(result.reason);
      for (const Digest& child : children) DropTree(child, Reason::kParentMissing, gone);
      if (draining_) drained_.dropped += gone.size();
      // The tier is closed, or closing.
      const bool no_time = result.reason == Reason::kCancelled || result.reason == Reason::kUnavailable;
      if (draining_ && no_time) drained_.abandoned += gone.size();
    }
    if (entries_.empty()) idle_.notify_all();
  }
  gone.clear();
  if (result.error) {
    log::Warn("save_failed", {{"tier", tier_.info().name}, {"key", key.Hex()}, {"why", result.error->what}});
  }
  Submit();
}

void WriteBehind::Take(Entries::iterator it, std::vector<Entry>& gone) {
  gone.push_back(std::move(it->second));
  entries_.erase(it);
}

void WriteBehind::DropTree(const Digest& key, Reason reason, std::vector<Entry>& gone) {
  std::vector<Digest> doomed = {key};
  while (!doomed.empty()) {
    const auto it = entries_.find(doomed.back());
    doomed.pop_back();
    doomed.insert(doomed.end(), it->second.children.begin(), it->second.children.end());
    Take(it, gone);
    CountDrop(reason);
  }
}

void WriteBehind::CutBacklog(std::vector<Entry>& gone) {
  std::vector<Digest> doomed;
  for (const auto& [root, entry] : entries_) {
    if (entry.waits_for_parent) continue;
    std::vector<Digest> tree = {root};  // Breadth first: the deepest are the last.
    for (size_t i = 0; i < tree.size(); ++i) {
      const std::vector<Digest>& children = entries_.at(tree[i]).children;
      tree.insert(tree.end(), children.begin(), children.end());
    }
    const size_t quarter = (tree.size() - 1) / 4;
    doomed.insert(doomed.end(), tree.rbegin(), tree.rbegin() + static_cast<ptrdiff_t>(quarter));
  }
  // A chunk comes after its children, so each is a leaf in its turn.
  std::unordered_set<Digest, DigestHash> parents;
  for (const Digest& key : doomed) {
    const auto it = entries_.find(key);
    parents.insert(it->second.item.info.parent);
    Take(it, gone);
    CountDrop(Reason::kFull);
  }
  // Once for each parent: one may have very many children.
  for (const Digest& key : parents) {
    const auto parent = entries_.find(key);
    if (parent == entries_.end()) continue;
    std::erase_if(parent->second.children, [&](const Digest& child) { return !entries_.contains(child); });
  }
}

bool WriteBehind::Has(const Digest& key) const {
  std::lock_guard lock(mutex_);
  return entries_.contains(key);
}

uint64_t WriteBehind::pending() const {
  std::lock_guard lock(mutex_);
  return entries_.size();
}

void WriteBehind::Drain(TimePoint deadline) {
  std::vector<Entry> gone;  // Before the lock: unpinned after it.
  std::unique_lock lock(mutex_);
  draining_ = true;
  if (idle_.wait_until(lock, deadline, [&] { return entries_.empty(); })) return;
  // What is left then is in the tier's hands (or waits for it) until the tier closes.
  for (const Digest& key : std::exchange(ready_, {})) DropTree(key, Reason::kCancelled, gone);
  drained_.dropped += gone.size();
  drained_.abandoned += gone.size();
}

WriteBehind::Drained WriteBehind::drained() const {
  std::lock_guard lock(mutex_);
  return drained_;
}

}  // namespace terrace
