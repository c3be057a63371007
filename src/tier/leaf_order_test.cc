// What could go wrong here: a chunk offered while a child of it is here or somebody holds it; the wrong one of two
// leaves; a head that looks old because only its children were used; something held for ever, or offered when it is
// gone; parents that form a circle, of which nothing ever goes, or a shape of them that takes an age to look through.
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

TEST(LeafOrder, ParentsInACircleGoLikeOthers) {
  LeafOrder order;
  for (const int size : {1, 2, 3, 10}) {
    for (int n = 0; n < size; ++n) order.Add(Key(100 * size + n), Key(100 * size + (n + 1) % size), n);
    order.Add(Key(100 * size + 50), Key(100 * size), 50);  // A child beside the circle.
    order.Add(Key(100 * size + 51), Key(100 * size + 50), 51);
  }
  order.Add(Key(1), Sha256Of("space"), 1000);
  const std::vector<Digest> gone = Drain(order);
  EXPECT_EQ(gone.size(), 1u + 2 + 3 + 10 + 2 * 4 + 1);
  EXPECT_EQ(gone.back(), Key(1)) << "used last";
}

TEST(LeafOrder, ACircleThatIsClosedLaterIsBrokenThen) {
  LeafOrder order;
  order.Add(Key(1), Key(2), 1);
  order.Hold(Key(1));
  EXPECT_FALSE(order.Oldest());
  order.Add(Key(2), Key(3), 2);
  EXPECT_FALSE(order.Oldest());
  order.Add(Key(3), Key(1), 3);
  order.Release(Key(1));
  EXPECT_EQ(Drain(order).size(), 3u);
  order.Add(Key(1), Key(2), 1);  // Nothing of it is remembered.
  order.Add(Key(2), Sha256Of("space"), 2);
  EXPECT_EQ(Drain(order), (std::vector{Key(1), Key(2)}));
}

// Any parents at all: everything goes once, a child before its parent but for one place in each circle.
TEST(LeafOrder, AnyParentsAtAllCanBeDrained) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 200; ++round) {
    const int count = 1 + static_cast<int>(random() % 40);
    LeafOrder order;
    std::map<Digest, int> parent_of;
    std::map<Digest, int> numbers;
    for (int n = 0; n < count; ++n) numbers[Key(n)] = n;
    std::vector<int> parents(static_cast<size_t>(count));
    for (int& parent : parents) parent = static_cast<int>(random() % static_cast<unsigned>(count + 3));
    for (int n = 0; n < count; ++n) {
      order.Add(Key(n), Key(parents[static_cast<size_t>(n)]), static_cast<int64_t>(random() % 10));
      if (random() % 8 == 0) (void)order.Oldest();
    }
    const std::vector<Digest> gone = Drain(order);
    ASSERT_EQ(gone.size(), static_cast<size_t>(count));
    std::vector<size_t> place(static_cast<size_t>(count));
    for (size_t i = 0; i < gone.size(); ++i) place[static_cast<size_t>(numbers.at(gone[i]))] = i;
    int early = 0;  // Parents that went before a child.
    int circles = 0;
    for (int n = 0; n < count; ++n) {
      const int parent = parents[static_cast<size_t>(n)];
      if (parent < count && parent != n && place[static_cast<size_t>(parent)] < place[static_cast<size_t>(n)]) ++early;
      int at = n;  // Counted by the smallest of each circle.
      bool smallest = true;
      for (int steps = 0; steps <= count && at < count; ++steps) {
        at = parents[static_cast<size_t>(at)];
        smallest = smallest && at >= n;
        if (at == n) {
          circles += smallest && parent != n ? 1 : 0;
          break;
        }
      }
    }
    EXPECT_EQ(early, circles);
  }
}

TEST(LeafOrder, AbsurdShapesTakeNoLongerThanOthers) {
  constexpr int kMany = 20'000;
  LeafOrder order;
  const auto add = [&order](int n, int parent) { order.Add(Key(n), Key(parent), n); };
  for (int n = 1; n <= kMany; ++n) add(n, n - 1);                          // One chain, parents first.
  for (int n = 1; n <= kMany; ++n) add(kMany + n, kMany);                  // Many children of its end.
  for (int n = 1; n <= kMany; ++n) add(3 * kMany + n, 2 * kMany + n);      // Children, ...
  for (int n = 1; n <= kMany; ++n) add(2 * kMany + n, kMany);              // ... whose parents hang on the long chain.
  for (int n = kMany; n >= 1; --n) add(5 * kMany + n, 5 * kMany + n - 1);  // One chain, children first, ...
  add(5 * kMany, 6 * kMany);                                               // ... and closed to a circle.
  EXPECT_EQ(Drain(order).size(), 5u * kMany + 1);
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
