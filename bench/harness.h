// Rows of a benchmark: each value beside its physical limit, or beside another program, measured in the same run, the
// two alternating, so that a noisy machine hits both alike. A ratio is the median of the pairwise ratios; the spread is
// (max - min) / median of the value.
#pragma once

#include <time.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
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

// Of all threads of this process, in the kernel too; with CLOCK_THREAD_CPUTIME_ID of the calling one.
inline double CpuSeconds(clockid_t clock = CLOCK_PROCESS_CPUTIME_ID) {
  timespec t{};
  clock_gettime(clock, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) / 1e9;
}

// What one run took, by one or more measures, in seconds.
using Sample = std::vector<double>;
struct Turns {
  std::vector<Sample> ours, other;  // Pair by pair.
};

// Both run once before they count. Who begins changes from pair to pair.
inline Turns TakeTurns(int rounds, const std::function<Sample()>& ours, const std::function<Sample()>& other) {
  ours();
  other();
  Turns turns;
  for (int i = 0; i < rounds; ++i) {
    if (i % 2 == 0) turns.ours.push_back(ours());
    turns.other.push_back(other());
    if (i % 2 == 1) turns.ours.push_back(ours());
  }
  return turns;
}

enum class Beside { kLimit, kPeer };

// The row of one measure: `amount` of its unit a run.
inline Row RowOf(Row row, Beside beside, double amount, const Turns& turns, size_t measure = 0) {
  std::vector<double> values, others, ratios;
  for (size_t i = 0; i < turns.ours.size(); ++i) {
    const double a = turns.ours[i][measure], b = turns.other[i][measure];
    values.push_back(amount / a);
    others.push_back(amount / b);
    ratios.push_back(b / a);
  }
  row.value = Median(values);
  (beside == Beside::kLimit ? row.limit : row.peer) = Median(others);
  (beside == Beside::kLimit ? row.ratio : row.peer_ratio) = Median(ratios);
  row.spread =
      (*std::max_element(values.begin(), values.end()) - *std::min_element(values.begin(), values.end())) / row.value;
  return row;
}

inline Row Compare(Row row, int rounds, double amount, const std::function<double()>& ours,
                   const std::function<double()>& limit) {
  const Turns turns = TakeTurns(rounds, [&] { return Sample{ours()}; }, [&] { return Sample{limit()}; });
  return RowOf(std::move(row), Beside::kLimit, amount, turns);
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
  std::printf("%-64s %9llu %10.4g %-12s", r.name.c_str(), static_cast<unsigned long long>(r.size), r.value,
              r.unit.c_str());
  if (r.limit) std::printf(" limit %10.4g", *r.limit);
  if (r.ratio) std::printf(" ratio %6.3f", *r.ratio);
  if (r.peer) std::printf(" peer  %10.4g ratio %6.3f", *r.peer, r.peer_ratio.value_or(0));
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

// One part of a benchmark; the rows that it adds are printed.
inline void RunPart(std::vector<Row>& rows, const std::function<void()>& part) {
  const size_t before = rows.size();
  part();
  for (size_t i = before; i < rows.size(); ++i) Print(rows[i]);
}

// What scripts/bench reads. `about`: how the rows were made.
inline void WriteRows(const std::string& out, const std::vector<Row>& rows, nlohmann::json about) {
  about["rows"] = ToJson(rows);
  about["cores"] = std::thread::hardware_concurrency();
  std::ofstream(out) << about.dump(2) << '\n';
}

// The words of a command line up to `--peer`, and what follows it.
struct CommandLine {
  std::vector<std::string> words, peer;
};
inline CommandLine ReadCommandLine(int argc, char** argv) {
  const std::vector<std::string> all(argv + std::min(argc, 1), argv + argc);
  const auto peer = std::find(all.begin(), all.end(), "--peer");
  return {{all.begin(), peer}, {peer == all.end() ? peer : peer + 1, all.end()}};
}

}  // namespace terrace::bench
