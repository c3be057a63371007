// Is a directory fit for the disk tier or the shared one? Everything that it makes there is in one folder of its own,
// `terrace-doctor-SECONDS-RANDOM`, which it removes, and so are those that a doctor which was killed has left.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>

#include "doctor/mount.h"
#include "doctor/report.h"

namespace terrace::doctor {

// What bandwidth is measured with, and for how long each way; 0: not.
struct Measure {
  uint64_t frame_bytes = 16 << 20;
  std::chrono::milliseconds time{2000};
};

// Bytes a second; 0: not measured.
struct Bandwidth {
  double read = 0;
  double write = 0;
  double latency_s = 0;  // Of a small read.
};

struct DirectoryCheck {
  DirectoryUse use = DirectoryUse::kShared;
  std::string path;
  uint64_t bytes_max = 0;       // Of the tier; 0: no bound.
  uint64_t free_bytes_min = 0;  // That the tier keeps free.
  Measure measure;
};

// Blocks; on a mount whose server is gone, maybe for ever. `stop`: come to an end.
Bandwidth CheckDirectory(const DirectoryCheck& check, const std::atomic<bool>& stop, Report& report);

// "terrace-doctor-1790000000-1f2e3d4c": for what is made for a moment, and found again if it stayed.
std::string ProbeName();
// It is a probe's, of an hour ago or more.
bool IsOldProbe(const std::string& name);

}  // namespace terrace::doctor
