// How much memory a process may hold beside all others, as far as the system tells.
//
// Two things are asked, since memory that was promised is not memory that was taken:
//
// - Reserve, at the start and now and then: a cap. It counts what is free and what other processes of ours have
//   reserved and not yet touched. A reservation is an empty memfd whose size is the number of bytes; others find it
//   under /proc, so that it is gone the moment its process is, however that ended. Processes of another user or another
//   PID namespace (a container) are not seen there.
// - Spare, whenever memory is about to be taken: what the machine can really give now, whoever took the rest. It holds
//   across users and containers, too, and sees programs that are none of ours.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace terrace {

// May be called from any thread.
class RamRoom {
 public:
  virtual ~RamRoom() = default;
  // Bytes of the machine, or of the smallest cgroup around this process. UINT64_MAX: not known.
  virtual uint64_t total() const = 0;
  struct Wish {
    uint64_t asked_bytes = 0;
    uint64_t held_bytes = 0;  // Of these, taken already.
    uint64_t cap_bytes = 0;   // Reserved before.
  };
  // A cap, of cap_bytes at least. Others count from here on what of it is not held.
  virtual uint64_t Reserve(const Wish& wish) = 0;
  // Of what was reserved, so much is not held yet.
  virtual void SetUntouched(uint64_t bytes) = 0;
  // Bytes that may be taken now; below 0: so many should be given back. INT64_MAX: not known.
  virtual int64_t Spare() = 0;
};

// `root` stands before /proc and /sys.
std::shared_ptr<RamRoom> RoomOfThisMachine(const std::string& root = "");

// What Reserve would give a process that asks for everything and starts now. UINT64_MAX if nothing is known.
//
// It is the least, over the machine (MemAvailable) and each memory cgroup (v1, v2) above this process, of what is left,
// page cache counted as free, less what others there have reserved and not touched, less a margin of an eighth for
// everybody else.
uint64_t AvailableMemoryBytes(const std::string& root = "");

}  // namespace terrace
