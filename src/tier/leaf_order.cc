#include "tier/leaf_order.h"

#include <algorithm>

#include "base/assert.h"

namespace terrace {

void LeafOrder::Add(const Digest& key, const Digest& parent, int64_t used_ns) {
  Node& node = nodes_[key];
  if (node.here) return;
  node.here = true;
  node.parent = parent;
  node.used_ns = used_ns;
  if (node.dependent > 0 && parent != key) circles_.Suspect(key);
  Requeue(key, node);
  if (parent != key) Hold(parent);
  if (circles_.suspects() > nodes_.size()) BreakCircles();
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

void LeafOrder::BreakCircles() {
  circles_.Break(
      [this](const Digest& key) {
        const auto it = nodes_.find(key);
        return it != nodes_.end() && it->second.here ? &it->second : nullptr;
      },
      [this](const Digest& parent) { Release(parent); });
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
