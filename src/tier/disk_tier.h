// The disk tier: a directory on a local disk that one process has to itself, one frame a file.
//
// Survives that process: a save settles as hit once its bytes and its name are durable, and a tier opened again finds
// it. Reads and writes go past the page cache in pieces of 1 MiB, several at once (io/disk_io.h); `into` of a load and
// `payload` of a save that begin at a multiple of 4 KiB, as the ram tier's do, are what the disk itself reads and
// writes. Others go through the page cache.
//
// After Open the directory's names are listed in the background, and from then on whatever is there is contained and
// can be loaded; then the headers are read, to know which frame is whose child. Until the names are known saves wait;
// until the headers are known (stats().index_ready) so do saves that would have to evict.
//
// bytes_max holds for frames and for files being written together, at any time. A directory that holds more at the
// start is trimmed in the background. A disk that is full though bytes_max is not reached is a smaller cap: frames are
// evicted to make room, and if that does not help, saves fail with kFull, at once but for one try a second.
//
// Beyond the contract of terrace/tier.h:
//   - what disagrees with its name, length or checksums, or has another format version, is removed and counted
//     (nobody else needs it, and it would count against the cap); a right frame of another space or payload size than
//     asked for is kForeign and stays;
//   - a save that found no room because everything else is being read is declined with kFull; one that failed because
//     the disk is full is kFailed with kFull.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/executor.h"
#include "io/disk_io.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace {

struct DiskTierOptions {
  std::string directory;  // Must exist: a disk that is not mounted must not fill the one below.
  uint64_t bytes_max = 0;
  DiskIoOptions io;                  // If none is given in DiskTierDeps.
  uint32_t file_permissions = 0640;  // Less the umask, as all permissions.
  uint32_t directory_permissions = 0750;
  size_t load_threads = 2;              // Of the tier's own pool: open files and verify what was read.
  size_t load_queue_items_max = 16384;  // Beyond: a miss with kFull.
  size_t save_queue_items_max = 1024;   // Beyond: declined with kFull.
};

// All outlive the tier. What is null: the tier has its own.
struct DiskTierDeps {
  FileIo& files;
  const Clock& clock;
  Metrics& metrics;
  DiskIo* io = nullptr;
  Executor* load = nullptr;
  Executor* save = nullptr;        // Runs one task at a time, in order.
  Executor* background = nullptr;  // Reads the index. The same.
};

TierInfo DiskTierInfo();  // Of every disk tier, open or not yet.

// Fails if the directory is missing, is none, can't be written, belongs to another kind of tier or format version, or
// is held by another process; the error is one line that says the remedy.
Result<std::unique_ptr<Tier>> OpenDiskTier(const DiskTierOptions& options, const DiskTierDeps& deps);

}  // namespace terrace
