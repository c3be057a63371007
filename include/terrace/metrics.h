// Counters, gauges and histograms in Prometheus' text format. Names: terrace_<noun>_<unit>_total|bytes|seconds. Labels
// come from small fixed sets (tier, outcome, reason, route): never from requests.
//
// Get a metric once and keep the reference: it lives as long as the registry. Updates are lock-free and may come from
// any thread.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace terrace {

using Labels = std::vector<std::pair<std::string, std::string>>;

class Counter {
 public:
  void Add(uint64_t n = 1) { value_.fetch_add(n, std::memory_order_relaxed); }
  uint64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};  // Relaxed: a count stands alone, nothing is published by it.
};

class Gauge {
 public:
  void Set(int64_t v) { value_.store(v, std::memory_order_relaxed); }
  void Add(int64_t n) { value_.fetch_add(n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};  // Relaxed, as above.
};

// Buckets double from 1 ms to 131 s, for seconds.
class Histogram {
 public:
  static constexpr int kBuckets = 18;
  void Observe(double seconds);

 private:
  friend class Metrics;
  std::array<std::atomic<uint64_t>, kBuckets + 1> counts_{};  // Relaxed; the last is +Inf.
  std::atomic<uint64_t> sum_us_{0};
};

class Metrics {
 public:
  // The same name and labels give the same object. `help` is kept from the first call.
  Counter& GetCounter(const std::string& name, const std::string& help, const Labels& labels = {});
  Gauge& GetGauge(const std::string& name, const std::string& help, const Labels& labels = {});
  Histogram& GetHistogram(const std::string& name, const std::string& help, const Labels& labels = {});
  // A gauge read when asked for: `read` runs in Text(), with no lock of the registry held.
  void AddGaugeCallback(const std::string& name, const std::string& help, const Labels& labels,
                        std::function<double()> read);

  std::string Text() const;  // Prometheus exposition format, version 0.0.4.

 private:
  struct Family;
  Family& GetFamily(const std::string& name, const std::string& help, const char* type);  // With mutex_ held.
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Family>> families_;  // Guarded by mutex_; metrics inside are atomic.
};

}  // namespace terrace
