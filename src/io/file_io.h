// Files behind an interface, so that shared_fs and disk run on faulty and simulated file systems in tests. Calls are
// synchronous and run on the tier's own executor threads. A FileIo may be used from any thread; a File by one at a
// time, but for ReadAt, which several may call at once.
//
// Every error carries errno (Error::os_error), and operation and path in its text: `open /mnt/kv/terrace.format: EIO`.
// Its code is kFull for ENOSPC and EDQUOT, kDenied for EACCES, EPERM and EROFS, kTimeout for ETIMEDOUT, kIo for the
// rest. Permissions are cut by the process's umask.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/result.h"

namespace terrace {

struct FileStat {
  uint64_t bytes = 0;
  uint64_t device = 0;  // Tells file systems apart: a mount point differs from the directory it hides.
  uint64_t inode = 0;
  int64_t mtime_ns = 0;  // By the file server's clock, or the writer's: its NFS client may hold a delegation of stamps.
  uint32_t links = 0;
  bool is_file = false;  // A regular one.
  bool is_directory = false;
};

class File {
 public:
  virtual ~File() = default;  // Closes, ignoring the answer: call Close to hear it.
  // Reads up to into.size() bytes at `offset`; fewer only at the end of the file. Restarts on EINTR and short reads.
  virtual Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> into) = 0;
  // Writes all bytes or fails.
  virtual Result<void> WriteAt(uint64_t offset, std::span<const std::byte> bytes) = 0;
  virtual Result<void> Append(std::span<const std::byte> bytes) = 0;
  virtual Result<void> Sync() = 0;  // fdatasync: bytes and length are durable. On NFS this is where ENOSPC shows.
  virtual Result<FileStat> Stat() = 0;
  virtual Result<void> Close() = 0;
};

enum class OpenMode {
  kRead,
  kCreateNew,  // For writing; EEXIST if the name is taken.
  kAppend,     // Created if missing.
};

class FileIo {
 public:
  virtual ~FileIo() = default;
  virtual Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode, uint32_t permissions = 0640) = 0;
  virtual Result<FileStat> Stat(const std::string& path) = 0;
  // Of the name itself, where it is a symbolic link.
  virtual Result<FileStat> StatName(const std::string& path) { return Stat(path); }
  virtual Result<void> Link(const std::string& from, const std::string& to) = 0;    // EEXIST if `to` is there.
  virtual Result<void> Rename(const std::string& from, const std::string& to) = 0;  // Replaces.
  virtual Result<void> Unlink(const std::string& path) = 0;
  // One level: a parent that is missing stays missing (it may be a mount point whose mount is gone). Fine if there.
  virtual Result<void> MakeDir(const std::string& path, uint32_t permissions = 0750) = 0;
  // Names in a directory, without . and .., any order.
  virtual Result<std::vector<std::string>> List(const std::string& path) = 0;
  struct Space {
    uint64_t free_bytes = 0;
    uint64_t total_bytes = 0;
  };
  virtual Result<Space> FreeSpace(const std::string& path) = 0;
};

std::unique_ptr<FileIo> RealFileIo();

}  // namespace terrace
