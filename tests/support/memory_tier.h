// A lower tier with behaviour, for tests: keeps frames in a map, settles on a thread of its own or when the test says
// so.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "base/hash.h"
#include "terrace/tier.h"

namespace terrace {

class MemoryTier final : public Tier {
 public:
  explicit MemoryTier(std::string name = "memory") : info_{.name = std::move(name), .durable = true, .shared = true} {}

  const TierInfo& info() const override { return info_; }
  void Contains(std::span<const Digest> keys, std::span<uint8_t> present) override {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < keys.size(); ++i) present[i] = frames_.contains(keys[i]);
  }
  void Load(std::vector<LoadItem> items, TimePoint, std::shared_ptr<LoadBatch> done) override {
    for (size_t i = 0; i < items.size(); ++i) {
      {
        std::lock_guard lock(mutex_);
        ++loads_;
      }
      changed_.notify_all();
      pool_.Post([this, item = std::move(items[i]), done, i]() mutable {
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [&] { return !hold_; });
        }
        LoadResult result = Read(item);
        item.owner.reset();
        done->Settle(i, std::move(result));
      });
    }
  }
  void Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) override {
    for (size_t i = 0; i < items.size(); ++i) {
      pool_.Post([this, item = std::move(items[i]), done, i]() mutable {
        SaveResult result;
        {
          std::unique_lock lock(mutex_);
          changed_.wait(lock, [&] { return !hold_; });
          result.outcome = Outcome::kHit;
          result.existed = frames_.contains(item.info.key);
          if (!result.existed) frames_[item.info.key] = {item.info, {item.payload.begin(), item.payload.end()}};
        }
        item.owner.reset();
        done->Settle(i, std::move(result));
      });
    }
  }
  void Erase(std::span<const Digest> keys) override {
    std::lock_guard lock(mutex_);
    for (const Digest& key : keys) frames_.erase(key);
  }
  Result<ScanPage> Scan(const std::string&, size_t) override { return ScanPage{}; }
  TierStats stats() const override {
    std::lock_guard lock(mutex_);
    return stats_;
  }
  CloseReport Close(TimePoint) override {
    Release();
    pool_.Stop();
    return {};
  }

  // For tests.
  void Hold() {
    std::lock_guard lock(mutex_);
    hold_ = true;
  }
  void Release() {
    {
      std::lock_guard lock(mutex_);
      hold_ = false;
    }
    changed_.notify_all();
  }
  void FailLoads(Reason reason, size_t times = SIZE_MAX) {
    std::lock_guard lock(mutex_);
    fail_ = reason;
    fail_times_ = times;
  }
  void Corrupt(const Digest& key) {
    std::lock_guard lock(mutex_);
    frames_.at(key).second.at(0) ^= std::byte{1};
  }
  void SetStats(TierStats stats) {
    std::lock_guard lock(mutex_);
    stats_ = std::move(stats);
  }
  void Put(const FrameInfo& info, std::vector<std::byte> bytes) {
    std::lock_guard lock(mutex_);
    frames_[info.key] = {info, std::move(bytes)};
  }
  size_t loads() const {
    std::lock_guard lock(mutex_);
    return loads_;
  }
  bool WaitForLoads(size_t n, TimePoint deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return loads_ >= n; });
  }
  size_t size() const {
    std::lock_guard lock(mutex_);
    return frames_.size();
  }

 private:
  LoadResult Read(const LoadItem& item) {
    std::lock_guard lock(mutex_);
    LoadResult result;
    if (fail_ != Reason::kNone && fail_times_ > 0) {
      --fail_times_;
      result.outcome = fail_ == Reason::kUnavailable ? Outcome::kFailed : Outcome::kMiss;
      result.reason = fail_;
      return result;
    }
    const auto it = frames_.find(item.key);
    if (it == frames_.end()) {
      result.reason = Reason::kMissing;
      return result;
    }
    const auto& [info, bytes] = it->second;
    if (info.space != item.space || bytes.size() != item.into.size()) {
      result.reason = Reason::kForeign;
      return result;
    }
    std::copy(bytes.begin(), bytes.end(), item.into.begin());
    result.outcome = Outcome::kHit;
    result.reason = Reason::kNone;
    result.info = info;
    result.hashes = std::make_shared<const SegmentHashes>(HashSegments(bytes));
    return result;
  }

  const TierInfo info_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Digest, std::pair<FrameInfo, std::vector<std::byte>>> frames_;  // Guarded by mutex_.
  bool hold_ = false;                                                      // Guarded by mutex_.
  Reason fail_ = Reason::kNone;                                            // Guarded by mutex_.
  size_t fail_times_ = 0;                                                  // Guarded by mutex_.
  size_t loads_ = 0;                                                       // Guarded by mutex_.
  TierStats stats_;                                                        // Guarded by mutex_.
  ThreadPool pool_{"memory-tier", 2};
};

}  // namespace terrace
