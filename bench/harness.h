// Rows of a benchmark: each value beside its physical limit, measured in the same run, the two alternating, so that a
// noisy machine hits both alike. A ratio is the median of the pairwise ratios; the spread is (max - min) / median of
// the value.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace terrace::bench {

struct Row {
  std::string name;
  uint64_t size = 0;  // Bytes of one item, or 0.
  std::string unit;
  double value = 0;
  std::optional<double> limit, ratio, peer, peer_ratio;
  double spread = 0;
};

inline double Median(std::vector<double> v) {
  std::sort(v.begin(), v.end());
  return v.empty() ? 0 : v[v.size() / 2];
}

inline double Seconds(const std::function<void()>& run) {
  const auto begun = std::chrono::steady_clock::now();
  run();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// `amount` of `unit` a run; both run once before they count.
inline Row Compare(Row row, int rounds, double amount, const std::function<double()>& ours,
                   const std::function<double()>& limit) {
  ours();
  limit();
  std::vector<double> values, limits, ratios;
  for (int i = 0; i < rounds; ++i) {
    const bool ours_first = i % 2 == 0;
    const double a = ours_first ? ours() : 0;
    const double b = limit();
    const double c = ours_first ? a : ours();
    values.push_back(amount / c);
    limits.push_back(amount / b);
    ratios.push_back(b / c);
  }
  row.value = Median(values);
  row.limit = Median(limits);
  row.ratio = Median(ratios);
  row.spread =
      (*std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end())) / row.value;
  return row;
}

// A rate without a partner to alternate with; `limit` is the figure asked for.
inline Row Rate(Row row, int rounds, double amount, const std::function<double()>& ours) {
  ours();
  std::vector<double> values;
  for (int i = 0; i < rounds; ++i) values.push_back(amount / ours());
  row.value = Median(values);
  if (row.limit) row.ratio = row.value / *row.limit;
  row.spread =
      (*std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end())) / row.value;
  return row;
}

inline void Print(const Row& r) {
  std::printf("%-44s %10llu %12.4g %-8s", r.name.c_str(), static_cast<unsigned long long>(r.size), r.value,
              r.unit.c_str());
  if (r.limit) std::printf(" limit %10.4g", *r.limit);
  if (r.ratio) std::printf(" ratio %6.3f", *r.ratio);
  if (r.peer) std::printf(" peer %10.4g ratio %6.3f", *r.peer, r.peer_ratio.value_or(0));
  std::printf(" spread %.2f\n", r.spread);
  std::fflush(stdout);
}

inline nlohmann::json ToJson(const std::vector<Row>& rows) {
  const auto number = [](const std::optional<double>& v) { return v ? nlohmann::json(*v) : nlohmann::json(nullptr); };
  nlohmann::json out = nlohmann::json::array();
  for (const Row& r : rows) {
    out.push_back({{"name", r.name},
                   {"size", r.size},
                   {"unit", r.unit},
                   {"value", r.value},
                   {"limit", number(r.limit)},
                   {"ratio", number(r.ratio)},
                   {"peer", number(r.peer)},
                   {"peer_ratio", number(r.peer_ratio)},
                   {"spread", r.spread}});
  }
  return out;
}

}  // namespace terrace::bench
