// What could go wrong here: a chunk offered while a child of it is here or somebody holds it; the wrong one of two
// leaves; a head that looks old because only its children were used; something held for ever, or offered when it is
// gone.
#include "tier/leaf_order.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"

namespace terrace {
namespace {

Digest Key(int n) { return Sha256Of("key " + std::to_string(n)); }

std::vector<Digest> Drain(LeafOrder& order) {
  std::vector<Digest> keys;
  while (const auto next = order.Oldest()) {
    keys.push_back(next->key);
    order.Remove(next->key);
  }
  return keys;
}

TEST(LeafOrder, TheLeafUnusedLongestGoesFirstAndParentsAfterTheirChildren) {
  LeafOrder order;
  order.Add(Key(1), Sha256Of("space"), 1);
  order.Add(Key(2), Key(1), 2);
  order.Add(Key(3), Key(2), 9);
  order.Add(Key(4), Key(1), 5);
  EXPECT_EQ(Drain(order), (std::vector{Key(4), Key(3), Key(2), Key(1)}));
}

TEST(LeafOrder, AUseOfAChunkIsAUseOfAllBeforeIt) {
  LeafOrder order;
  order.Add(Key(1), Sha256Of("space"), 1);
  order.Add(Key(2), Key(1), 2);
  order.Add(Key(3), Sha256Of("space"), 5);
  order.Use(Key(2), 7);
  EXPECT_EQ(Drain(order), (std::vector{Key(3), Key(2), Key(1)}));
}

TEST(LeafOrder, AnEarlierUseChangesNothing) {
  LeafOrder order;
  order.Add(Key(1), Key(1), 5);
  order.Add(Key(2), Key(2), 6);
  order.Use(Key(2), 1);
  order.Use(Key(3), 1);
  EXPECT_EQ(Drain(order), (std::vector{Key(1), Key(2)}));
}

TEST(LeafOrder, WhatIsHeldStays) {
  LeafOrder order;
  order.Hold(Key(1));  // Before it is here.
  order.Add(Key(1), Key(1), 1);
  order.Hold(Key(1));
  EXPECT_FALSE(order.Oldest());
  order.Release(Key(1), 9);
  EXPECT_FALSE(order.Oldest());
  order.Release(Key(1));
  ASSERT_TRUE(order.Oldest());
  EXPECT_EQ(order.Oldest()->used_ns, 9);
}

TEST(LeafOrder, AChildWithoutItsParentIsALeafAndHoldsItWhenItComes) {
  LeafOrder order;
  order.Add(Key(2), Key(1), 2);
  order.Add(Key(1), Sha256Of("space"), 1);
  order.Add(Key(1), Sha256Of("other"), 8);  // Once.
  EXPECT_EQ(Drain(order), (std::vector{Key(2), Key(1)}));
}

TEST(LeafOrder, ItAgreesWithASimpleModel) {
  struct Chunk {
    int parent;
    int64_t used;
  };
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  LeafOrder order;
  std::map<int, Chunk> model;
  const auto remove = [&](int n) {
    const Chunk gone = model.at(n);
    model.erase(n);
    if (const auto parent = model.find(gone.parent); parent != model.end()) {
      parent->second.used = std::max(parent->second.used, gone.used);
    }
    order.Remove(Key(n));
  };
  for (int64_t now = 1; now < 5000; ++now) {
    const int n = static_cast<int>(random() % 60);
    switch (random() % 4) {
      case 0:
        if (!model.contains(n)) {
          model[n] = {.parent = n / 2, .used = now};
          order.Add(Key(n), Key(n / 2), now);
        }
        break;
      case 1:
        if (model.contains(n)) model[n].used = now;
        order.Use(Key(n), now);
        break;
      case 2:
        if (model.contains(n)) remove(n);
        break;
      default: {
        const auto next = order.Oldest();
        int expected = -1;
        for (const auto& [m, chunk] : model) {
          const bool leaf = std::none_of(model.begin(), model.end(), [&, me = m](const auto& other) {
            return other.first != me && other.second.parent == me;
          });
          if (leaf && (expected < 0 || chunk.used < model[expected].used)) expected = m;
        }
        ASSERT_EQ(next.has_value(), expected >= 0);
        if (!next) break;
        // Two may have the same time: a parent takes over its child's.
        const auto found =
            std::find_if(model.begin(), model.end(), [&](const auto& entry) { return Key(entry.first) == next->key; });
        ASSERT_NE(found, model.end());
        ASSERT_EQ(found->second.used, model[expected].used);
        ASSERT_EQ(next->used_ns, found->second.used);
        remove(found->first);
      }
    }
  }
}

}  // namespace
}  // namespace terrace
