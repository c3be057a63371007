// How many calls go on at once, how long to wait before another try, and when a read is so late that a second one is
// worth it. Learns from what the server does; pure, and owned by one thread.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <random>

#include "terrace/tier.h"

namespace terrace::s3 {

class Pacer {
 public:
  struct Options {
    size_t parallel_max = 32;
    std::chrono::milliseconds backoff{50};
    std::chrono::milliseconds backoff_max{2000};
    std::chrono::milliseconds hedge_min{20};
  };
  Pacer(const Options& options, uint64_t seed)
      : options_(options), limit_(static_cast<double>(options.parallel_max)), random_(seed) {}

  // Calls at once: halved when the server asks for less, one more for each round of calls that went well.
  size_t limit() const { return static_cast<size_t>(limit_); }

  void Succeeded() { limit_ = std::min(limit_ + 1 / limit_, static_cast<double>(options_.parallel_max)); }
  // `begun`: of the call that was refused. Calls that were on their way together count once.
  void AskedForLess(TimePoint begun, TimePoint now) {
    if (begun < lowered_at_) return;
    lowered_at_ = now;
    limit_ = std::max(1.0, limit_ / 2);
  }

  // Before try `n` + 1 (n from 1): doubles each time; between half of it and all of it, at random.
  std::chrono::milliseconds Backoff(int n) {
    const auto full = std::min(options_.backoff * (1 << std::min(n - 1, 16)), options_.backoff_max);
    std::uniform_int_distribution<int64_t> part(full.count() / 2, full.count());
    return std::chrono::milliseconds(part(random_));
  }

  void ObserveFirstByte(std::chrono::microseconds took) {
    latest_[next_++ % latest_.size()] = took;
    if (next_ % 32 == 0) Learn();
  }
  // Wait so long for the first byte before a second request: the 95th percentile and half as much again, so that few
  // reads are doubled. Zero: nothing learnt yet, do not.
  std::chrono::milliseconds hedge_after() const { return hedge_after_; }

 private:
  void Learn() {
    std::array<std::chrono::microseconds, 128> sorted = latest_;
    const size_t n = std::min<size_t>(next_, sorted.size());
    auto* at = sorted.data() + n * 95 / 100;
    std::nth_element(sorted.data(), at, sorted.data() + n);
    hedge_after_ = std::max(options_.hedge_min, std::chrono::ceil<std::chrono::milliseconds>(*at * 3 / 2));
  }

  const Options options_;
  double limit_;
  TimePoint lowered_at_{};
  std::mt19937_64 random_;
  std::array<std::chrono::microseconds, 128> latest_{};
  size_t next_ = 0;
  std::chrono::milliseconds hedge_after_{0};
};

}  // namespace terrace::s3
