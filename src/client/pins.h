// Chunks that stay in RAM for a while because somebody asked for it: at most so many bytes, each until its time.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <unordered_map>

#include "base/executor.h"
#include "terrace/store.h"

namespace terrace {

class Pins {
 public:
  // `timers` lets go of what is due; it has stopped when the pins are destroyed.
  Pins(uint64_t bytes_max, Executor& timers) : bytes_max_(bytes_max), timers_(timers) {}

  // False: no room. Pinned already: the later end counts.
  bool Pin(Lease lease, TimePoint until);
  void Unpin(std::span<const Digest> keys);
  uint64_t bytes() const;

 private:
  struct Pinned {
    Lease lease;
    TimePoint until;
  };
  void Sweep();

  const uint64_t bytes_max_;
  Executor& timers_;
  mutable std::mutex mutex_;
  std::unordered_map<Digest, Pinned, DigestHash> pinned_;  // Guarded by mutex_.
  uint64_t bytes_ = 0;                                     // Guarded by mutex_.
  bool sweeping_ = false;                                  // Guarded by mutex_. A sweep is posted.
};

}  // namespace terrace
