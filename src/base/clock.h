// Time as a collaborator, so that tests and the simulation own it.
#pragma once

#include <chrono>
#include <cstdint>

#include "terrace/tier.h"

namespace terrace {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual TimePoint Now() const = 0;    // Monotonic.
  virtual uint64_t WallNs() const = 0;  // Nanoseconds since 1970, for stamps; never for deadlines.
};

class SystemClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now(); }
  uint64_t WallNs() const override {
    return static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::system_clock::now().time_since_epoch())
            .count());
  }
};

}  // namespace terrace
