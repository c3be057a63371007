// Who goes next when a bounded tier makes room: the chunk unused longest among those that no other one needs. Keys,
// parents and times alone, no I/O and no bytes: the disk tier keeps one all the time, a collector of a shared tier
// fills one for each collection. Used by one thread at a time.
//
// Leaf first: a chunk is offered only while no child of it is here and nobody holds it, since without it its children
// could never be hits. A use of a chunk is a use of all before it: what becomes a leaf takes over the time of its last
// child.
//
// A circle of parents (circles.h) is broken before something is offered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <set>
#include <unordered_map>
#include <utility>

#include "terrace/key.h"
#include "tier/circles.h"

namespace terrace {

class LeafOrder {
 public:
  // Nothing if it is here. A chunk that calls itself its parent has none; a parent need not be here.
  void Add(const Digest& key, const Digest& parent, int64_t used_ns);
  // Nothing if it is not here, or was used later.
  void Use(const Digest& key, int64_t used_ns);
  void Remove(const Digest& key);

  // As if it had one more child, until a Release: it is being read, or a child of it is on its way. It need not be
  // here.
  void Hold(const Digest& key);
  void Release(const Digest& key, int64_t used_ns = 0);

  struct Next {
    Digest key;
    int64_t used_ns = 0;
  };
  // Nothing if there is none.
  std::optional<Next> Oldest();

 private:
  struct Node {
    bool here = false;       // Else others call it their parent, or somebody holds it.
    bool queued = false;     // In leaves_, under used_ns.
    uint32_t dependent = 0;  // Children here, and holds.
    int64_t used_ns = 0;
    uint64_t walk = 0;  // For Circles, as is parent.
    Digest parent;      // The chunk itself: none.
  };
  void BreakCircles();
  void Requeue(const Digest& key, Node& node);  // In leaves_ if and only if it may go.
  void SetUsed(const Digest& key, Node& node, int64_t used_ns);

  std::unordered_map<Digest, Node, DigestHash> nodes_;
  std::set<std::pair<int64_t, Digest>> leaves_;  // Unused longest first.
  Circles circles_;
};

}  // namespace terrace
