// The shared_fs tier: a directory that several nodes mount (NFS, pNFS, any file system), one frame a file.
//
// What any node saves, every node finds and loads, with no server besides the file server and no lock. Promises: a
// frame's bytes are durable before its name appears, so a name is a whole frame whoever crashes when; the first writer
// of a key wins; nothing that disagrees with its name or checksums is ever delivered. The name itself survives a crash
// of the process. In a crash of the file server's host a fresh name may be lost: a miss (we pay no fsync of directories
// for it).
//
// Lookups are answered from an index in memory, never from the directory: a scan fills it in the background after Open,
// our own saves and the journals of the other nodes keep it. While the directory can't be reached (missing, unmounted,
// failing) everything is a miss and a declined save with kUnavailable, stats() says why, and the tier comes back by
// itself.
//
// Beyond the contract of terrace/tier.h:
//   - a right frame of another space or payload size than asked for is kForeign and stays where it is;
//   - a frame of a format version of another release is kVersion, stays, and a save of its key is declined with
//   kVersion;
//   - a save that failed for want of room is kFailed with reason kFull;
//   - with a bound of bytes a save waits for room, room_wait at most, and is declined with kFull, or kIndexLoading if
//     the tier does not know yet how much there is;
//   - while another node writes a large frame, a save of the same one waits for it a moment, on no thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/executor.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "terrace/result.h"
#include "terrace/tier.h"
#include "tier/shared_fs_collector.h"

namespace terrace {

struct SharedFsOptions {
  std::string directory;
  SharedFsBounds bounds;
  // Open does not look at the directory: the tier joins it when it is there and answers.
  bool open_lazily = false;
  uint32_t file_permissions = 0640;  // Less the umask, as all permissions.
  uint32_t directory_permissions = 0750;
  size_t load_threads = 4;                       // Of the tier's own pool.
  size_t load_queue_items_max = 16384;           // Beyond: a miss with kFull.
  size_t save_queue_items_max = 1024;            // Beyond: declined with kFull.
  std::chrono::milliseconds poll_interval{500};  // Of other nodes' journals, and of the directory's health.
  // The first scan fills the index; later ones find what no journal told of, and what an earlier one could not read.
  // They list each directory of frames once and read nothing that is known: 4,096 listings.
  std::chrono::seconds scan_interval{600};
  std::chrono::milliseconds flush_interval{
      200};  // Records of what we publish go out this often at most, at once when idle.
  std::chrono::seconds stale_age{
      3600};  // Temporaries and journals of dead nodes are removed, by the file server's clock.
  uint64_t quarantine_files_max = 64;
  uint64_t quarantine_bytes_max = 1ull << 30;   // Less if bounds.bytes_max is small.
  std::chrono::milliseconds room_wait{10'000};  // Of a save, for the collector to make room.
  // A node that has not renewed its claim of room for so long is dead for others. A collector's lease ends after half.
  std::chrono::milliseconds claim_life{60'000};
  std::chrono::milliseconds use_interval{300'000};  // Of a frame's uses others hear once in so long, at most.
};

// All outlive the tier. An executor that is null: the tier has threads of its own.
struct SharedFsDeps {
  FileIo& io;
  const Clock& clock;
  Metrics& metrics;
  Executor* load = nullptr;
  Executor* save = nullptr;        // Another one than `load`, so that loads never wait behind an fsync.
  Executor* background = nullptr;  // Scan, journals, cleaning. Runs one task at a time.
};

// Fails, unless open_lazily, if the directory is missing, is none, can't be written, or belongs to another format
// version; the error is one line that says the remedy.
Result<std::unique_ptr<Tier>> OpenSharedFsTier(const SharedFsOptions& options, const SharedFsDeps& deps);

}  // namespace terrace
