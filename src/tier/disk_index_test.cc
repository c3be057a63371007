// What could go wrong here: bytes that are counted twice or not at all, so that the cap is broken or never reached
// again; a parent evicted before its child, or a frame that is being read; a frame that nothing can ever evict; an old
// frame that goes away on behalf of a new one of the same key; a clock that was wrong for a while, and makes what was
// used then stay for ever.
#include "tier/disk_index.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>

#include "base/hash.h"

namespace terrace {
namespace {

constexpr uint64_t kBytes = 8192;

Digest Key(uint64_t n) { return Sha256Of("key " + std::to_string(n)); }
const Digest kSpace = Sha256Of("space");

FrameInfo Info(uint64_t n, const Digest& parent = kSpace) {
  return {.space = kSpace, .key = Key(n), .parent = parent, .payload_bytes = 4096};
}

void Put(DiskIndex& index, const FrameInfo& info, int64_t now_ns) {
  ASSERT_TRUE(index.Reserve(info, kBytes));
  index.Commit(info, kBytes, now_ns);
}

std::optional<Digest> Evict(DiskIndex& index) {
  const auto victim = index.EvictOne();
  if (!victim) return std::nullopt;
  index.Free(victim->file_bytes);
  return victim->info.key;
}

TEST(DiskIndex, CountsBytesFromThePromiseUntilTheFileIsGone) {
  DiskIndex index(3 * kBytes);
  ASSERT_TRUE(index.Reserve(Info(1), kBytes));
  EXPECT_EQ(index.bytes(), kBytes);
  EXPECT_EQ(index.frames(), 0u);
  EXPECT_FALSE(index.Contains(Key(1)));
  index.Commit(Info(1), kBytes, 1);
  EXPECT_TRUE(index.Contains(Key(1)));
  EXPECT_EQ(index.frames(), 1u);
  ASSERT_TRUE(index.Reserve(Info(2), kBytes));
  index.Abort(Info(2), kBytes);
  EXPECT_EQ(index.bytes(), kBytes);
  EXPECT_EQ(index.Remove(Key(1)), kBytes);
  EXPECT_FALSE(index.Contains(Key(1)));
  EXPECT_EQ(index.bytes(), kBytes) << "its file is still there";
  index.Free(kBytes);
  EXPECT_EQ(index.bytes(), 0u);
  EXPECT_FALSE(index.Remove(Key(1)));
}

TEST(DiskIndex, PromisesNoMoreThanTheCap) {
  DiskIndex index(2 * kBytes);
  EXPECT_FALSE(index.Reserve(Info(0), 2 * kBytes + 1));
  EXPECT_FALSE(index.Reserve(Info(0), ~0ull));
  EXPECT_TRUE(index.Reserve(Info(0), kBytes));
  EXPECT_TRUE(index.Reserve(Info(1), kBytes));
  EXPECT_FALSE(index.Reserve(Info(2), 1));
  EXPECT_FALSE(index.OverCap());
  EXPECT_TRUE(index.AddListed(Key(9), kBytes, 1)) << "what is there is there";
  EXPECT_TRUE(index.OverCap());
  EXPECT_FALSE(index.Reserve(Info(2), 1));
}

TEST(DiskIndex, EvictsLeavesOnlyAndTheLongestUnusedFirst) {
  DiskIndex index(100 * kBytes);
  Put(index, Info(0), 1);
  Put(index, Info(1, Key(0)), 2);
  Put(index, Info(2, Key(0)), 3);
  Put(index, Info(3), 4);
  index.Use(Key(1), 10);
  EXPECT_EQ(Evict(index), Key(2));
  EXPECT_EQ(Evict(index), Key(3));
  EXPECT_EQ(Evict(index), Key(1));
  EXPECT_EQ(Evict(index), Key(0)) << "older than all, but it had children";
  EXPECT_EQ(Evict(index), std::nullopt);
  EXPECT_EQ(index.bytes(), 0u);
}

TEST(DiskIndex, AUseOfAFrameIsAUseOfItsAncestors) {
  DiskIndex index(100 * kBytes);
  Put(index, Info(0), 1);
  Put(index, Info(1, Key(0)), 1);
  Put(index, Info(5), 5);
  index.Use(Key(1), 10);
  index.Remove(Key(1));
  index.Free(kBytes);
  EXPECT_EQ(Evict(index), Key(5));
  EXPECT_EQ(Evict(index), Key(0));
}

TEST(DiskIndex, WhatIsUsedAfterTheClockWasSetBackIsUsedLater) {
  DiskIndex index(100 * kBytes);
  EXPECT_TRUE(index.AddListed(Key(0), kBytes, 1'000'000));  // From a time that has not come yet.
  index.SetInfo(Key(0), Info(0));
  Put(index, Info(1), 900'000);
  Put(index, Info(2), 10);
  Put(index, Info(3), 11);
  index.Use(Key(1), 12);
  index.Release(Key(2), index.Acquire(Key(2), 13)->id);
  for (const uint64_t n : {0, 3, 1, 2}) EXPECT_EQ(Evict(index), Key(n));
}

TEST(DiskIndex, WhatIsPutBackIsAsBeforeAndTheLastToGo) {
  DiskIndex index(100 * kBytes);
  for (uint64_t n = 0; n < 3; ++n) Put(index, Info(n), 1);
  const auto stays = index.EvictOne();
  ASSERT_TRUE(stays);
  EXPECT_FALSE(index.Contains(Key(0)));
  index.PutBack(*stays, 2);
  EXPECT_TRUE(index.Contains(Key(0)));
  EXPECT_EQ(index.frames(), 3u);
  EXPECT_EQ(index.bytes(), 3 * kBytes);
  EXPECT_EQ(index.After(std::nullopt, 10).size(), 3u);
  for (const uint64_t n : {1, 2, 0}) EXPECT_EQ(Evict(index), Key(n));
  EXPECT_EQ(index.bytes(), 0u);
}

TEST(DiskIndex, AChildOnItsWayHoldsItsParent) {
  DiskIndex index(100 * kBytes);
  Put(index, Info(0), 1);
  ASSERT_TRUE(index.Reserve(Info(1, Key(0)), kBytes));
  EXPECT_EQ(Evict(index), std::nullopt);
  index.Abort(Info(1, Key(0)), kBytes);
  EXPECT_EQ(Evict(index), Key(0));
}

TEST(DiskIndex, WhatIsBeingReadIsNotEvicted) {
  DiskIndex index(100 * kBytes);
  Put(index, Info(0), 1);
  const auto first = index.Acquire(Key(0), 2);
  const auto second = index.Acquire(Key(0), 3);
  ASSERT_TRUE(first && second);
  EXPECT_EQ(Evict(index), std::nullopt);
  index.Release(Key(0), first->id);
  EXPECT_EQ(Evict(index), std::nullopt);
  index.Release(Key(0), second->id);
  EXPECT_EQ(Evict(index), Key(0));
}

TEST(DiskIndex, AnOldReaderDoesNotTouchTheNewFrameOfItsKey) {
  DiskIndex index(100 * kBytes);
  Put(index, Info(0), 1);
  const auto reading = index.Acquire(Key(0), 2);
  ASSERT_TRUE(index.Remove(Key(0)));
  Put(index, Info(0), 3);
  const auto fresh = index.Acquire(Key(0), 4);
  index.Release(Key(0), reading->id);
  EXPECT_EQ(Evict(index), std::nullopt) << "the release was of the old one";
  EXPECT_FALSE(index.Remove(Key(0), reading->id));
  EXPECT_TRUE(index.Remove(Key(0), fresh->id));
}

TEST(DiskIndex, AFrameKnownByNameOnlyStaysUntilItsHeaderIsKnown) {
  DiskIndex index(100 * kBytes);
  EXPECT_TRUE(index.AddListed(Key(1), kBytes, 7));
  EXPECT_FALSE(index.AddListed(Key(1), kBytes, 7));
  EXPECT_TRUE(index.Contains(Key(1)));
  EXPECT_TRUE(index.After(std::nullopt, 10).empty());
  EXPECT_EQ(Evict(index), std::nullopt);
  EXPECT_TRUE(index.AddListed(Key(0), kBytes, 9));
  index.SetInfo(Key(1), Info(1, Key(0)));
  index.SetInfo(Key(0), Info(0));
  EXPECT_EQ(index.After(std::nullopt, 10).size(), 2u);
  EXPECT_EQ(Evict(index), Key(1));
  EXPECT_EQ(Evict(index), Key(0));
}

TEST(DiskIndex, AFrameThatIsItsOwnParentIsALeaf) {
  DiskIndex index(100 * kBytes);
  Put(index, Info(1, Key(1)), 1);
  EXPECT_EQ(Evict(index), Key(1));
}

TEST(DiskIndex, FramesThatAreEachOthersParentsAreEvicted) {
  DiskIndex index(3 * kBytes);
  Put(index, Info(1, Key(2)), 1);
  Put(index, Info(2, Key(1)), 2);
  Put(index, Info(3), 3);
  ASSERT_TRUE(Evict(index));
  ASSERT_TRUE(Evict(index));
  EXPECT_TRUE(index.Contains(Key(3))) << "used last";
  ASSERT_TRUE(index.AddListed(Key(4), kBytes, 4));  // As at a start.
  ASSERT_TRUE(index.AddListed(Key(5), kBytes, 4));
  index.SetInfo(Key(4), Info(4, Key(5)));
  index.SetInfo(Key(5), Info(5, Key(4)));
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(Evict(index)) << i;
  EXPECT_EQ(index.bytes(), 0u);
}

TEST(DiskIndex, AFileHearsOfAUseOnceAnHour) {
  DiskIndex index(100 * kBytes);
  const int64_t hour = std::chrono::nanoseconds(DiskIndex::kStampEvery).count();
  Put(index, Info(1), 100);
  const auto use = [&](int64_t now) {
    const auto reading = index.Acquire(Key(1), now);
    index.Release(Key(1), reading->id);
    return reading->stamp_file;
  };
  EXPECT_FALSE(use(100 + hour));
  EXPECT_TRUE(use(101 + hour));
  EXPECT_FALSE(use(101 + 2 * hour));
  EXPECT_TRUE(use(102 + 2 * hour));
  EXPECT_TRUE(use(50)) << "the clock was set back";
}

TEST(DiskIndex, PagesAreInOrderWithoutOverlap) {
  DiskIndex index(1000 * kBytes);
  std::vector<Digest> expected;
  for (uint64_t n = 0; n < 500; ++n) {
    Put(index, Info(n), 1);
    expected.push_back(Key(n));
  }
  std::sort(expected.begin(), expected.end());
  for (const size_t limit : {1, 7, 500, 1000}) {
    std::vector<Digest> seen;
    std::optional<Digest> cursor;
    for (;;) {
      const auto page = index.After(cursor, limit);
      if (page.empty()) break;
      ASSERT_LE(page.size(), limit);
      for (const FrameInfo& info : page) seen.push_back(info.key);
      cursor = seen.back();
    }
    EXPECT_EQ(seen, expected) << "by " << limit;
  }
}

// Against a model that looks at everything each time.
TEST(DiskIndex, ARandomSequenceEqualsAModel) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  struct Frame {
    FrameInfo info;
    int readers = 0;
    bool pending = false;
    std::vector<uint64_t> ids;
  };
  DiskIndex index(20 * kBytes);
  std::map<uint64_t, Frame> model;
  std::map<Digest, uint64_t> number;
  for (uint64_t n = 0; n < 40; ++n) number[Key(n)] = n;
  for (int step = 0; step < 20000; ++step) {
    const uint64_t n = random() % 40;
    const FrameInfo info = Info(n, n % 8 == 0 ? kSpace : Key(n - 1));
    const auto it = model.find(n);
    switch (random() % 6) {
      case 0:
        if (it != model.end()) break;
        ASSERT_EQ(index.Reserve(info, kBytes), model.size() < 20);
        if (model.size() < 20) model[n] = {.info = info, .pending = true};
        break;
      case 1:
        if (it == model.end() || !it->second.pending) break;
        if (random() % 4 == 0) {
          index.Abort(info, kBytes);
          model.erase(it);
        } else {
          index.Commit(info, kBytes, step);
          it->second.pending = false;
        }
        break;
      case 2: {
        const auto reading = index.Acquire(Key(n), step);
        ASSERT_EQ(reading.has_value(), it != model.end() && !it->second.pending);
        if (reading) it->second.ids.push_back(reading->id);
        break;
      }
      case 3:
        if (it == model.end() || it->second.ids.empty()) break;
        index.Release(Key(n), it->second.ids.back());
        it->second.ids.pop_back();
        break;
      case 4: {
        const auto victim = Evict(index);
        const auto evictable = [&](const Frame& frame) {
          return !frame.pending && frame.ids.empty() &&
                 std::ranges::none_of(model, [&](const auto& m) { return m.second.info.parent == frame.info.key; });
        };
        if (victim) {
          const auto gone = model.find(number.at(*victim));
          ASSERT_TRUE(gone != model.end() && evictable(gone->second)) << "step " << step;
          model.erase(gone);
        } else {
          ASSERT_TRUE(std::ranges::none_of(model, [&](const auto& m) { return evictable(m.second); }));
        }
        break;
      }
      case 5:
        if (random() % 4 != 0) break;
        if (const auto bytes = index.Remove(Key(n))) {
          index.Free(*bytes);
          ASSERT_TRUE(it != model.end() && !it->second.pending);
          model.erase(it);
        } else {
          ASSERT_TRUE(it == model.end() || it->second.pending);
        }
        break;
    }
    ASSERT_EQ(index.bytes(), model.size() * kBytes) << "step " << step;
    const auto visible = std::ranges::count_if(model, [](const auto& m) { return !m.second.pending; });
    ASSERT_EQ(index.frames(), static_cast<uint64_t>(visible)) << "step " << step;
  }
}

}  // namespace
}  // namespace terrace
