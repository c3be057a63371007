// What happened, line by line, with virtual time: injected faults, and with `all` every step. The digest covers all
// steps whether they are kept or not: two runs of one seed must agree on it.
#pragma once

#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include "base/hash.h"
#include "tests/sim/scheduler.h"

namespace terrace::sim {

class SimLog {
 public:
  SimLog(const Scheduler& scheduler, bool all) : scheduler_(scheduler), start_(scheduler.Now()), all_(all) {}

  void Fault(const std::string& who, const std::string& what) {
    ++faults_;
    Add(who, "FAULT " + what, true);
  }
  void Event(const std::string& who, const std::string& what) { Add(who, what, true); }
  void Step(const std::string& who, const std::string& what) { Add(who, what, all_); }

  const std::vector<std::string>& lines() const { return lines_; }
  uint64_t faults() const { return faults_; }
  uint64_t digest() const { return digest_; }

 private:
  void Add(const std::string& who, const std::string& what, bool keep) {
    const uint64_t chain[] = {digest_, static_cast<uint64_t>((scheduler_.Now() - start_).count()), HashOf(who),
                              HashOf(what)};
    digest_ = Xxh3_64(std::as_bytes(std::span(chain)));
    if (!keep) return;
    char time[32];
    std::snprintf(time, sizeof time, "%12.6f ", std::chrono::duration<double>(scheduler_.Now() - start_).count());
    lines_.push_back(time + who + " " + what + "\n");
  }
  static uint64_t HashOf(const std::string& text) { return Xxh3_64(std::as_bytes(std::span(text))); }

  const Scheduler& scheduler_;
  const TimePoint start_;
  const bool all_;
  std::vector<std::string> lines_;
  uint64_t faults_ = 0;
  uint64_t digest_ = 0;
};

}  // namespace terrace::sim
