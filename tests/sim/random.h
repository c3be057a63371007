// Random numbers that are the same on every machine and library: std's distributions are not.
#pragma once

#include <cstdint>

namespace terrace::sim {

class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  // One step of splitmix64.
  uint64_t Next() {
    uint64_t x = state_ += 0x9e3779b97f4a7c15;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
    x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
    return x ^ (x >> 31);
  }
  uint64_t Below(uint64_t n) { return Next() % n; }  // n > 0.
  uint64_t Between(uint64_t low, uint64_t high) { return low + Below(high - low + 1); }
  bool Chance(double p) { return p > 0 && static_cast<double>(Next() >> 11) * 0x1p-53 < p; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  // A generator of its own, so that what one part draws moves no other.
  Random Fork() { return Random(Next()); }

 private:
  uint64_t state_;
};

}  // namespace terrace::sim
