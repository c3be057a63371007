// Is this machine fit to run an instance?
#pragma once

#include <cstdint>
#include <string>

#include "doctor/report.h"

namespace terrace::doctor {

struct MachineNeeds {
  uint64_t ram_bytes = 0;    // --ram.
  uint64_t connections = 0;  // To a bucket, at once.
  bool has_disk = false;     // Reads and writes by io_uring.
};
// `root` stands before /proc and /sys, in tests.
void CheckMachine(const MachineNeeds& needs, Report& report, const std::string& root = "");

// `server_ns` is a time that the server of the tier told between the two readings of our own clock.
void CheckClock(const std::string& id, const std::string& server, int64_t server_ns, int64_t resolution_ns,
                int64_t before_ns, int64_t after_ns, Report& report);

}  // namespace terrace::doctor
