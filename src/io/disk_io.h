// Large reads, writes and syncs of files, many at once: past the page cache, by io_uring where the kernel permits it,
// by threads where it does not. Metadata (rename, unlink, list) is not here: see file_io.h.
//
// A caller opens a file, submits operations on it, and is told of each when it ended. Of what was submitted, `depth`
// transfers are on their way to the device at a time, in the order submitted, but reads before writes: while reads
// wait, writes have a quarter of the depth. Syncs do not count. Operations on one file are not ordered among each
// other: wait for the writes before the sync.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "io/file_io.h"
#include "terrace/result.h"

namespace terrace {

// Addresses, lengths and offsets of operations on a direct file are multiples of this.
inline constexpr size_t kDirectAlignment = 4096;

class DiskFile {
 public:
  virtual ~DiskFile() = default;  // Closes. What is in flight keeps the file alive.
  // Past the page cache. False if it was not asked for, or the file system has no such thing.
  virtual bool direct() const = 0;
  virtual Result<FileStat> Stat() = 0;
  // Sets the time of modification to now, if the system lets us: recency that survives the process.
  virtual void Touch() = 0;
};

struct DiskOp {
  enum class Kind : uint8_t {
    kRead,
    kWrite,
    kSync,  // What was written, and the length, are durable. Of a directory: its names.
  };
  Kind kind = Kind::kSync;
  std::shared_ptr<DiskFile> file;
  uint64_t offset = 0;
  // Bytes in the order of the file; empty ones are skipped. A write only reads them. They stay valid until `done`.
  std::array<std::span<std::byte>, 3> parts;
  // Called once, on a thread of the DiskIo, maybe before Submit returns; it must be quick. Bytes read (fewer than asked
  // only at the end of the file) or written (all of them).
  std::function<void(Result<size_t>)> done;
};

// All methods may be called from any thread, `Submit` also from `done`.
class DiskIo {
 public:
  // Cancels what is queued and waits for what is in flight.
  virtual ~DiskIo() = default;

  struct OpenOptions {
    enum class Mode : uint8_t { kRead, kCreateNew, kDirectory } mode = Mode::kRead;
    bool direct = false;  // Where the file system has no such thing, the file is opened without.
    uint32_t permissions = 0640;
    // kCreateNew: space that is reserved now, so that a full disk shows before anything is written. On failure no file
    // is left.
    uint64_t preallocate_bytes = 0;
  };
  virtual Result<std::shared_ptr<DiskFile>> Open(const std::string& path, const OpenOptions& options) = 0;

  virtual void Submit(std::vector<DiskOp> ops) = 0;

  // From now on, what has not begun ends with kCancelled.
  virtual void CancelQueued() = 0;

  // Held by this process until dropped; the file says which process it is. kUnavailable, with that process's number in
  // the text, if another one (or another holder here) has it.
  virtual Result<std::shared_ptr<void>> Lock(const std::string& path) = 0;

  virtual const char* name() const = 0;  // "io_uring", "threads".
};

enum class DiskIoKind : uint8_t {
  kAuto,     // io_uring; threads if the kernel refuses it (old, or forbidden in a container), with one log event.
  kUring,    // Fails with kUnavailable where it is refused.
  kThreads,  // pread and pwrite.
};

struct DiskIoOptions {
  DiskIoKind kind = DiskIoKind::kAuto;
  // Transfers at the device at once. 8 of 1 MiB each saturate an NVMe or a virtual disk (docs/internals/disk.md).
  size_t depth = 8;
};
Result<std::unique_ptr<DiskIo>> OpenDiskIo(const DiskIoOptions& options = {});

}  // namespace terrace
