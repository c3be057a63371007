#include "tier/leaf_order.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"

namespace terrace {

void LeafOrder::Add(const Digest& key, const Digest& parent, int64_t used_ns) {
  Node& node = nodes_[key];
  if (node.here) return;
  node.here = true;
  node.parent = parent;
  node.used_ns = used_ns;
  if (node.dependent > 0 && parent != key) suspects_.push_back(key);
  Requeue(key, node);
  if (parent != key) Hold(parent);
  // As many looks as chunks were added since the last time.
  if (suspects_.size() > nodes_.size()) BreakCircles();
}

void LeafOrder::Use(const Digest& key, int64_t used_ns) {
  const auto it = nodes_.find(key);
  if (it != nodes_.end() && it->second.here) SetUsed(key, it->second, used_ns);
}

void LeafOrder::Remove(const Digest& key) {
  const auto it = nodes_.find(key);
  if (it == nodes_.end() || !it->second.here) return;
  Node& node = it->second;
  node.here = false;
  Requeue(key, node);
  const Digest parent = node.parent;
  const int64_t used_ns = node.used_ns;
  if (node.dependent == 0) nodes_.erase(it);
  if (parent != key) Release(parent, used_ns);
}

void LeafOrder::Hold(const Digest& key) {
  Node& node = nodes_[key];
  ++node.dependent;
  Requeue(key, node);
}

void LeafOrder::Release(const Digest& key, int64_t used_ns) {
  const auto it = nodes_.find(key);
  TERRACE_ASSERT(it != nodes_.end() && it->second.dependent > 0);
  Node& node = it->second;
  --node.dependent;
  if (node.here) {
    SetUsed(key, node, used_ns);
  } else if (node.dependent == 0) {
    nodes_.erase(it);
  }
}

// From each suspect to its first ancestor, but not over ground that an earlier walk of this time has covered. A walk
// that meets its own way has found a circle.
void LeafOrder::BreakCircles() {
  const uint64_t first = walks_ + 1;
  for (const Digest& suspect : std::exchange(suspects_, {})) {
    const uint64_t walk = ++walks_;
    for (Digest key = suspect;;) {
      const auto it = nodes_.find(key);
      if (it == nodes_.end() || !it->second.here) break;
      Node& node = it->second;
      const bool met = node.walk == walk;
      if (met && node.parent != key) Release(std::exchange(node.parent, key));
      if (met || node.walk >= first || node.parent == key) break;
      node.walk = walk;
      key = node.parent;
    }
  }
}

std::optional<LeafOrder::Next> LeafOrder::Oldest() {
  BreakCircles();
  if (leaves_.empty()) return std::nullopt;
  return Next{.key = leaves_.begin()->second, .used_ns = leaves_.begin()->first};
}

void LeafOrder::Requeue(const Digest& key, Node& node) {
  const bool may_go = node.here && node.dependent == 0;
  if (may_go == node.queued) return;
  node.queued = may_go;
  if (may_go) {
    leaves_.emplace(node.used_ns, key);
  } else {
    leaves_.erase({node.used_ns, key});
  }
}

void LeafOrder::SetUsed(const Digest& key, Node& node, int64_t used_ns) {
  if (used_ns > node.used_ns) {
    if (node.queued) leaves_.erase({node.used_ns, key});
    node.queued = false;
    node.used_ns = used_ns;
  }
  Requeue(key, node);
}

}  // namespace terrace
