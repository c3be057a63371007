// Would catch: a prefix taken for resident that is not, cells left behind or cut twice, a hole that would put a
// sequence's cells out of order, more kept than the bound, sequence ids that leak. Each step is replayed on a model of
// the engine's cells.
#include "engine/resident.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <random>
#include <set>
#include <string>

namespace terrace::engine {
namespace {

Digest Key(uint64_t number) {
  Digest key;
  std::memcpy(key.bytes.data(), &number, sizeof number);
  return key;
}

std::vector<Digest> Keys(std::initializer_list<uint64_t> numbers) {
  std::vector<Digest> keys;
  for (const uint64_t number : numbers) keys.push_back(Key(number));
  return keys;
}

// Slots as the engine sees them: which sequences hold each, and which chunk of them it is. The lowest free slot is
// filled first.
class Slots {
 public:
  struct Slot {
    std::set<int32_t> sequences;
    size_t chunk = 0;
    Digest key;
  };

  void Cut(int32_t sequence, size_t from) {
    for (auto at = slots_.begin(); at != slots_.end();) {
      Slot& slot = at->second;
      if (slot.chunk >= from) slot.sequences.erase(sequence);
      at = slot.sequences.empty() ? slots_.erase(at) : std::next(at);
    }
  }
  void Share(int32_t source, int32_t target, size_t chunks) {
    for (auto& [index, slot] : slots_) {
      if (slot.chunk < chunks && slot.sequences.contains(source)) slot.sequences.insert(target);
    }
  }
  void Add(int32_t sequence, size_t chunk, const Digest& key) { slots_[Lowest()] = {{sequence}, chunk, key}; }
  void Move(const ResidentPrefixes::Move& move) {
    Slot moved;
    for (const int32_t sequence : move.sequences) {
      const auto at = std::ranges::find_if(slots_, [&](const auto& entry) {
        return entry.second.chunk == move.chunk && entry.second.sequences.contains(sequence);
      });
      ASSERT_NE(at, slots_.end());
      moved.chunk = move.chunk;
      moved.key = at->second.key;
      moved.sequences.insert(sequence);
      at->second.sequences.erase(sequence);
      if (at->second.sequences.empty()) slots_.erase(at);
    }
    slots_[Lowest()] = moved;
  }
  // The keys of a sequence in order of its chunks; fails if its slots don't ascend.
  std::vector<Digest> Sequence(int32_t sequence) const {
    std::vector<Digest> keys;
    for (const auto& [index, slot] : slots_) {
      if (!slot.sequences.contains(sequence)) continue;
      EXPECT_EQ(slot.chunk, keys.size()) << "slot " << index;
      keys.push_back(slot.key);
    }
    return keys;
  }
  size_t size() const { return slots_.size(); }
  bool dense() const { return slots_.empty() || slots_.rbegin()->first == slots_.size() - 1; }

 private:
  size_t Lowest() const {
    size_t lowest = 0;
    for (const auto& [index, slot] : slots_) {
      if (index != lowest) break;
      ++lowest;
    }
    return lowest;
  }
  std::map<size_t, Slot> slots_;
};

constexpr auto kAll = [](const Digest&) { return true; };
constexpr auto kNone = [](const Digest&) { return false; };

// Runs one request on both; returns how many chunks were shared.
size_t Request(ResidentPrefixes& resident, Slots& slots, const std::vector<Digest>& keys, size_t usable,
               const std::function<bool(const Digest&)>& may_leave, std::vector<Digest> decoded = {}) {
  const auto plan = resident.Begin(keys, usable, may_leave);
  for (const auto& cut : plan.cuts) slots.Cut(cut.sequence, cut.from_chunk);
  for (const auto& move : plan.moves) slots.Move(move);
  EXPECT_TRUE(slots.dense());
  slots.Share(plan.source, plan.sequence, plan.shared);
  std::vector<Digest> all = keys;
  all.insert(all.end(), decoded.begin(), decoded.end());
  bool keeps = true;
  for (size_t i = plan.shared; i < all.size(); ++i) {
    slots.Add(plan.sequence, i, all[i]);
    keeps = keeps && resident.Append(plan.sequence, all[i]);
  }
  EXPECT_EQ(slots.Sequence(plan.sequence), all);
  for (const auto& cut : resident.Finish(plan.sequence)) slots.Cut(cut.sequence, cut.from_chunk);
  EXPECT_EQ(slots.size(), resident.chunks());
  return plan.shared;
}

TEST(ResidentPrefixes, RepeatFindsAllButWhatMustBeComputed) {
  ResidentPrefixes resident(8, 1, 4);
  Slots slots;
  const auto keys = Keys({1, 2, 3});
  EXPECT_EQ(Request(resident, slots, keys, 3, kAll), 0u);
  EXPECT_EQ(resident.Known(keys), 3u);
  EXPECT_EQ(Request(resident, slots, keys, 3, kAll), 3u);
  EXPECT_EQ(Request(resident, slots, keys, 2, kAll), 2u);
  EXPECT_EQ(slots.size(), 3u);
}

TEST(ResidentPrefixes, GrowingConversationKeepsOneSequence) {
  ResidentPrefixes resident(8, 1, 2);
  Slots slots;
  EXPECT_EQ(Request(resident, slots, Keys({1}), 1, kNone), 0u);
  EXPECT_EQ(Request(resident, slots, Keys({1, 2}), 2, kNone), 1u);
  EXPECT_EQ(Request(resident, slots, Keys({1, 2, 3}), 3, kNone), 2u);
  EXPECT_EQ(slots.size(), 3u);
}

TEST(ResidentPrefixes, WhatMayLeaveLeavesBeforeOthersCompute) {
  ResidentPrefixes resident(8, 1, 4);
  Slots slots;
  Request(resident, slots, Keys({1, 2, 3}), 3, kAll);
  EXPECT_EQ(Request(resident, slots, Keys({1, 9}), 2, kAll), 1u);
  EXPECT_EQ(resident.Known(Keys({1, 2, 3})), 1u);
  EXPECT_EQ(resident.Known(Keys({1, 9})), 2u);
}

TEST(ResidentPrefixes, WhatMayNotLeaveStaysAndIsFoundAgain) {
  ResidentPrefixes resident(8, 1, 4);
  Slots slots;
  Request(resident, slots, Keys({1, 2, 3}), 3, kNone);
  EXPECT_EQ(Request(resident, slots, Keys({1, 9}), 2, kNone), 1u);
  EXPECT_EQ(Request(resident, slots, Keys({1, 2, 3}), 3, kNone), 3u);
  EXPECT_EQ(resident.chunks(), 4u);
}

TEST(ResidentPrefixes, OldestLeavesOverTheBoundAndTheRestMovesDown) {
  ResidentPrefixes resident(4, 1, 8);
  Slots slots;
  Request(resident, slots, Keys({1, 2}), 2, kNone);
  Request(resident, slots, Keys({3, 4}), 2, kNone);
  Request(resident, slots, Keys({5, 6}), 2, kNone);
  EXPECT_EQ(resident.chunks(), 4u);
  EXPECT_EQ(resident.Known(Keys({1, 2})), 0u);
  EXPECT_EQ(Request(resident, slots, Keys({3, 4, 7}), 3, kNone), 2u);
}

TEST(ResidentPrefixes, PromptLargerThanTheBoundKeepsItsHead) {
  ResidentPrefixes resident(2, 1, 4);
  Slots slots;
  Request(resident, slots, Keys({1, 2, 3, 4}), 4, kNone);
  EXPECT_EQ(resident.Known(Keys({1, 2, 3, 4})), 2u);
}

TEST(ResidentPrefixes, NothingIsKeptWithoutABudget) {
  ResidentPrefixes resident(0, 1, 4);
  Slots slots;
  Request(resident, slots, Keys({1, 2}), 2, kNone);
  EXPECT_EQ(slots.size(), 0u);
  EXPECT_EQ(Request(resident, slots, Keys({1, 2}), 2, kNone), 0u);
}

TEST(ResidentPrefixes, TextGeneratedAgainIsNotKeptTwice) {
  ResidentPrefixes resident(8, 1, 4);
  Slots slots;
  Request(resident, slots, Keys({1}), 1, kNone, Keys({2, 3}));
  EXPECT_EQ(resident.chunks(), 3u);
  Request(resident, slots, Keys({1}), 1, kNone, Keys({2, 3}));
  EXPECT_EQ(resident.chunks(), 3u);
  EXPECT_EQ(slots.size(), 3u);
}

TEST(ResidentPrefixes, ClearForgetsEvenDuringARequest) {
  ResidentPrefixes resident(8, 1, 4);
  Slots slots;
  Request(resident, slots, Keys({1, 2}), 2, kNone);
  const auto plan = resident.Begin(Keys({1, 2}), 2, kNone);
  resident.Clear();
  EXPECT_EQ(resident.Known(Keys({1})), 0u);
  EXPECT_TRUE(resident.Append(plan.sequence, Key(1)));
  (void)resident.Finish(plan.sequence);
  EXPECT_EQ(resident.Known(Keys({1})), 1u);
}

TEST(ResidentPrefixes, RandomRequestsKeepCellsAndBookkeepingTheSame) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  for (int round = 0; round < 300; ++round) {
    ResidentPrefixes resident(random() % 10, 1, 2 + random() % 4);
    Slots slots;
    for (int step = 0; step < 30; ++step) {
      // A tree of prompts: each chunk's name is its path, as with real keys.
      std::vector<Digest> keys;
      uint64_t path = 1;
      for (size_t i = random() % 6; i > 0; --i) keys.push_back(Key(path = path * 3 + random() % 2));
      std::vector<Digest> decoded;
      for (size_t i = random() % 3; i > 0; --i) decoded.push_back(Key(path = path * 3 + random() % 2));
      const size_t usable = keys.size() - (keys.empty() ? 0 : random() % 2);
      const auto may_leave = [bits = random()](const Digest& key) { return ((bits >> (key.bytes[0] % 8)) & 1) != 0; };
      Request(resident, slots, keys, usable, may_leave, decoded);
      if (HasFailure()) return;
    }
  }
}

}  // namespace
}  // namespace terrace::engine
