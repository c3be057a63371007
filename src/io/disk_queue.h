// What the two kinds of DiskIo share: files, the order in which operations go to the device, and their progress. Not
// for users of DiskIo.
#pragma once

#include <sys/uio.h>

#include <array>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "io/disk_io.h"

namespace terrace::disk_io {

tl::unexpected<Error> FailWith(int os_error, const char* operation, const std::string& path);

// A DiskFile of the operating system.
class OsFile final : public DiskFile {
 public:
  OsFile(int fd, std::string path, bool direct, bool is_directory = false)
      : fd_(fd), path_(std::move(path)), direct_(direct), is_directory_(is_directory) {}
  ~OsFile() override;
  bool direct() const override { return direct_; }
  Result<FileStat> Stat() override;
  void Touch() override;
  int fd() const { return fd_; }
  bool is_directory() const { return is_directory_; }
  const std::string& path() const { return path_; }

 private:
  const int fd_;
  const std::string path_;
  const bool direct_;
  const bool is_directory_;
};

// Open and Lock of the operating system.
class OsDiskIo : public DiskIo {
 public:
  Result<std::shared_ptr<DiskFile>> Open(const std::string& path, const OpenOptions& options) override;
  Result<std::shared_ptr<void>> Lock(const std::string& path) override;
};

// An operation under way: what of it is left, after short transfers.
class Transfer {
 public:
  explicit Transfer(DiskOp op);
  const DiskOp& op() const { return op_; }
  const OsFile& file() const { return static_cast<const OsFile&>(*op_.file); }
  std::span<const iovec> left() const { return std::span(vectors_).subspan(first_, count_ - first_); }
  uint64_t offset() const { return op_.offset + moved_; }
  // `result` of the system call: bytes moved, or -errno. True: it ended, call Finish; false: do what is left.
  bool Advance(int64_t result);
  void Finish();

 private:
  DiskOp op_;
  std::array<iovec, 3> vectors_{};
  size_t first_ = 0;
  size_t count_ = 0;
  size_t moved_ = 0;
  int interruptions_ = 0;
  int os_error_ = 0;
};

void EndCancelled(DiskOp& op);

// Waiting operations. Not thread-safe: its owner has the lock.
class Queue {
 public:
  explicit Queue(size_t depth) : writes_max_while_reads_wait_(depth < 4 ? 1 : depth / 4) {}

  void Push(DiskOp op);
  // The next transfer, given that so many writes are in flight.
  std::optional<DiskOp> PopTransfer(size_t writes_in_flight);
  std::optional<DiskOp> PopSync() { return Pop(syncs_); }
  std::vector<DiskOp> TakeAll();

 private:
  static std::optional<DiskOp> Pop(std::deque<DiskOp>& from);

  const size_t writes_max_while_reads_wait_;
  std::deque<DiskOp> reads_, writes_, syncs_;
};

// Nothing if the kernel refuses: kUnavailable with its errno.
Result<std::unique_ptr<DiskIo>> OpenUring(size_t depth);
std::unique_ptr<DiskIo> OpenThreads(size_t depth);

}  // namespace terrace::disk_io
