// Finds the end of a known prefix with few questions: which of n chunks, parents first, are there. It is a search, not
// a scan: in a chain a chunk is stored after its parent, so presence at one position proposes all before it. A hole is
// found when it is loaded. At most 3 rounds; at most 30 questions for 512 chunks, 40 for any number.
#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <vector>

namespace terrace {

class S3Search {
 public:
  static constexpr int kRounds = 3;
  // 9 questions a round find the end among 9 * 9 * 9 - 1 = 728 chunks in three.
  static constexpr size_t kQuestionsMin = 8;
  static constexpr size_t kQuestionsMax = 12;

  explicit S3Search(size_t chunks) : end_(chunks) {}

  // Positions to ask next, in ascending order; empty: it is over.
  std::vector<size_t> Round() {
    asked_.clear();
    const size_t unknown = end_ - known_;
    if (unknown == 0 || rounds_left_ == 0) return {};
    const size_t n = std::min(unknown, QuestionsFor(unknown, rounds_left_));
    --rounds_left_;
    // The first unknown one is always asked: if it is not there, nothing else matters.
    asked_.emplace(known_, std::nullopt);
    for (size_t i = 1; i <= n; ++i) {
      asked_.emplace(known_ + ((unknown + 1) * i + n) / (n + 1) - 1, std::nullopt);
    }
    std::vector<size_t> positions;
    for (const auto& [position, answer] : asked_) positions.push_back(position);
    return positions;
  }

  // True when the round is over: further answers would change nothing.
  bool Answer(size_t position, bool present) {
    const auto it = asked_.find(position);
    if (it == asked_.end()) return false;
    it->second = present;
    for (const auto& [at, answer] : asked_) {
      if (!answer) return false;
      if (!*answer) break;  // What lies behind the first absent one does not matter.
    }
    for (const auto& [at, answer] : asked_) {
      if (*answer) {
        known_ = at + 1;
      } else {
        end_ = at;
        break;
      }
    }
    return true;
  }

  size_t known() const { return known_; }  // Chunks proposed, from the first on.

 private:
  static size_t QuestionsFor(size_t unknown, int rounds) {
    size_t n = kQuestionsMin;
    const auto reach = [rounds](size_t questions) {
      size_t product = 1;
      for (int i = 0; i < rounds; ++i) product *= questions + 1;
      return product - 1;
    };
    while (n < kQuestionsMax && reach(n) < unknown) ++n;
    return n;
  }

  size_t known_ = 0;  // All before it are there, as far as we know.
  size_t end_;        // Absent, or behind the last.
  int rounds_left_ = kRounds;
  std::map<size_t, std::optional<bool>> asked_;  // In this round.
};

}  // namespace terrace
