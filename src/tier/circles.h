// Parents come from headers that anybody may have written, and may form a circle: then none of it would ever be a leaf.
// Whoever keeps an order of leaves notes what may close a circle, and has circles broken before it offers a leaf.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include "terrace/key.h"

namespace terrace {

// Not thread-safe.
class Circles {
 public:
  // A chunk that was added when something called it its parent already: what closes a circle is such.
  void Suspect(const Digest& key) { suspects_.push_back(key); }
  size_t suspects() const { return suspects_.size(); }
  void Clear() { suspects_.clear(); }

  // From each suspect to its first ancestor, but not over ground that an earlier walk of this call has covered. A walk
  // that meets its own way has found a circle, and where it does, a chunk is nobody's child from now on. So that the
  // cost is a few looks for each chunk that was added, call it when there are more suspects than chunks, at the latest.
  //
  // `find(key)`: a pointer to a node with `Digest parent` (its own key: none) and `uint64_t walk` (0 at first; ours),
  // or null if the chunk is not here. `orphaned(parent)`: a child of `parent` has none any more.
  template <class Find, class Orphaned>
  void Break(const Find& find, const Orphaned& orphaned) {
    const uint64_t first = walks_ + 1;
    for (const Digest& suspect : std::exchange(suspects_, {})) {
      const uint64_t walk = ++walks_;
      for (Digest key = suspect;;) {
        const auto node = find(key);
        if (!node) break;
        const bool met = node->walk == walk;
        if (met && node->parent != key) orphaned(std::exchange(node->parent, key));
        if (met || node->walk >= first || node->parent == key) break;
        node->walk = walk;
        key = node->parent;
      }
    }
  }

 private:
  std::vector<Digest> suspects_;
  uint64_t walks_ = 0;
};

}  // namespace terrace
