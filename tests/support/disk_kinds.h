// The kinds of DiskIo that this machine has: without io_uring, which containers mostly refuse, it is threads alone.
#pragma once

#include <string>
#include <vector>

#include "io/disk_io.h"

namespace terrace {

inline bool HasUring() {
  const auto uring = OpenDiskIo({.kind = DiskIoKind::kUring});
  return uring || uring.error().code != Code::kUnavailable;
}

inline std::vector<DiskIoKind> DiskKinds() {
  if (!HasUring()) return {DiskIoKind::kThreads};
  return {DiskIoKind::kUring, DiskIoKind::kThreads};
}

inline std::string DiskKindName(DiskIoKind kind) { return kind == DiskIoKind::kUring ? "Uring" : "Threads"; }

}  // namespace terrace
