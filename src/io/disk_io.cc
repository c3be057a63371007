#include "io/disk_io.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "io/disk_queue.h"

namespace terrace {
namespace disk_io {
namespace {

Code CodeOf(int os_error) {
  switch (os_error) {
    case ENOSPC:
    case EDQUOT: return Code::kFull;
    case EACCES:
    case EPERM:
    case EROFS: return Code::kDenied;
    default: return Code::kIo;
  }
}

// Of one operation, one after the other. Signals come singly; what says EAGAIN for ever has to end some time.
constexpr int kInterruptionsMax = 100;

const char* OperationName(DiskOp::Kind kind) {
  switch (kind) {
    case DiskOp::Kind::kRead: return "read";
    case DiskOp::Kind::kWrite: return "write";
    case DiskOp::Kind::kSync: return "sync";
  }
  return "";
}

int OpenRestarting(const std::string& path, int flags, uint32_t permissions) {
  int fd;
  do {
    // O_NONBLOCK: a FIFO that somebody put in the place of a file must not hang us.
    fd = ::open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK, static_cast<mode_t>(permissions));
  } while (fd < 0 && errno == EINTR);
  // io_uring takes it as a wish to hear EAGAIN rather than wait, on some file systems.
  if (fd >= 0) (void)::fcntl(fd, F_SETFL, flags & O_DIRECT);
  return fd;
}

}  // namespace

tl::unexpected<Error> FailWith(int os_error, const char* operation, const std::string& path) {
  const char* name = strerrorname_np(os_error);
  return Fail(CodeOf(os_error), std::string(operation) + " " + path + ": " + (name ? name : std::to_string(os_error)),
              os_error);
}

OsFile::~OsFile() { ::close(fd_); }

Result<FileStat> OsFile::Stat() {
  struct stat st;
  if (::fstat(fd_, &st) != 0) return FailWith(errno, "fstat", path_);
  return FileStat{
      .bytes = static_cast<uint64_t>(st.st_size),
      .device = st.st_dev,
      .inode = st.st_ino,
      .mtime_ns = static_cast<int64_t>(st.st_mtim.tv_sec) * 1'000'000'000 + st.st_mtim.tv_nsec,
      .links = static_cast<uint32_t>(st.st_nlink),
      .is_file = S_ISREG(st.st_mode),
      .is_directory = S_ISDIR(st.st_mode),
  };
}

void OsFile::Touch() { (void)::futimens(fd_, nullptr); }

Result<std::shared_ptr<DiskFile>> OsDiskIo::Open(const std::string& path, const OpenOptions& options) {
  using Mode = OpenOptions::Mode;
  int flags = O_RDONLY;
  if (options.mode == Mode::kCreateNew) flags = O_RDWR | O_CREAT | O_EXCL;
  if (options.mode == Mode::kDirectory) flags = O_RDONLY | O_DIRECTORY;
  const char* operation = options.mode == Mode::kCreateNew ? "create" : "open";

  bool direct = options.direct;
  int fd = OpenRestarting(path, flags | (direct ? O_DIRECT : 0), options.permissions);
  if (fd < 0 && errno == EINVAL && direct) {
    direct = false;
    // Some file systems find out only after they have made the file.
    if (options.mode == Mode::kCreateNew) (void)::unlink(path.c_str());
    fd = OpenRestarting(path, flags, options.permissions);
  }
  if (fd < 0) return FailWith(errno, operation, path);
  auto file = std::make_shared<OsFile>(fd, path, direct, options.mode == Mode::kDirectory);
  if (options.preallocate_bytes > 0) {
    int answer;
    do {
      answer = ::fallocate(fd, 0, 0, static_cast<off_t>(options.preallocate_bytes));
    } while (answer != 0 && errno == EINTR);
    // A file system that can't reserve says ENOSPC later.
    if (answer != 0 && errno != EOPNOTSUPP && errno != ENOSYS) {
      const int os_error = errno;
      (void)::unlink(path.c_str());
      return FailWith(os_error, "reserve space for", path);
    }
  }
  return file;
}

Result<std::shared_ptr<void>> OsDiskIo::Lock(const std::string& path) {
  const int fd = OpenRestarting(path, O_RDWR | O_CREAT, 0640);
  if (fd < 0) return FailWith(errno, "open", path);
  std::shared_ptr<OsFile> file = std::make_shared<OsFile>(fd, path, false);
  if (::flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno != EWOULDBLOCK) return FailWith(errno, "lock", path);
    char holder[32] = {};
    const ssize_t n = ::pread(fd, holder, sizeof holder - 1, 0);
    std::string pid = n > 0 ? std::string(holder, strcspn(holder, "\n")) : "unknown";
    return Fail(Code::kUnavailable, path + " is held by process " + pid, EWOULDBLOCK);
  }
  const std::string pid = std::to_string(::getpid()) + "\n";
  if (::ftruncate(fd, 0) != 0 || ::pwrite(fd, pid.data(), pid.size(), 0) != static_cast<ssize_t>(pid.size())) {
    // The number is for people only; on a full disk the lock holds all the same.
    if (errno != ENOSPC && errno != EDQUOT) return FailWith(errno, "write", path);
  }
  return std::shared_ptr<void>(std::move(file));  // Closing it unlocks.
}

Transfer::Transfer(DiskOp op) : op_(std::move(op)) {
  for (const std::span<std::byte> part : op_.parts) {
    if (!part.empty()) vectors_[count_++] = {part.data(), part.size()};
  }
}

bool Transfer::Advance(int64_t result) {
  if ((result == -EINTR || result == -EAGAIN) && ++interruptions_ < kInterruptionsMax) return false;
  if (result < 0) {
    os_error_ = static_cast<int>(-result);
    return true;
  }
  if (op_.kind == DiskOp::Kind::kSync) return true;
  if (result == 0) {
    // The end of the file, or a disk that takes nothing and does not say why.
    if (op_.kind == DiskOp::Kind::kWrite) os_error_ = EIO;
    return true;
  }
  moved_ += static_cast<size_t>(result);
  for (size_t n = static_cast<size_t>(result); n > 0;) {
    iovec& v = vectors_[first_];
    const size_t here = std::min(n, v.iov_len);
    v.iov_base = static_cast<std::byte*>(v.iov_base) + here;
    v.iov_len -= here;
    n -= here;
    if (v.iov_len == 0) ++first_;
  }
  // A direct read that stops between two blocks has met the end of the file, and may not go on from there.
  const bool at_end = op_.kind == DiskOp::Kind::kRead && file().direct() && moved_ % kDirectAlignment != 0;
  return first_ == count_ || at_end;
}

void Transfer::Finish() {
  if (os_error_ != 0) {
    op_.done(FailWith(os_error_, OperationName(op_.kind), file().path()));
  } else {
    op_.done(moved_);
  }
}

void EndCancelled(DiskOp& op) { op.done(Fail(Code::kCancelled, std::string(OperationName(op.kind)) + ": cancelled")); }

void Queue::Push(DiskOp op) {
  switch (op.kind) {
    case DiskOp::Kind::kRead: reads_.push_back(std::move(op)); break;
    case DiskOp::Kind::kWrite: writes_.push_back(std::move(op)); break;
    case DiskOp::Kind::kSync: syncs_.push_back(std::move(op)); break;
  }
}

std::optional<DiskOp> Queue::Pop(std::deque<DiskOp>& from) {
  if (from.empty()) return std::nullopt;
  std::optional<DiskOp> op = std::move(from.front());
  from.pop_front();
  return op;
}

std::optional<DiskOp> Queue::PopTransfer(size_t writes_in_flight) {
  const bool read_next = !reads_.empty() && (writes_.empty() || writes_in_flight >= writes_max_while_reads_wait_);
  return Pop(read_next ? reads_ : writes_);
}

std::vector<DiskOp> Queue::TakeAll() {
  std::vector<DiskOp> all;
  for (std::deque<DiskOp>* queue : {&reads_, &writes_, &syncs_}) {
    while (auto op = Pop(*queue)) all.push_back(*std::move(op));
  }
  return all;
}

}  // namespace disk_io

Result<std::unique_ptr<DiskIo>> OpenDiskIo(const DiskIoOptions& options) {
  TERRACE_ASSERT(options.depth > 0);
  if (options.kind == DiskIoKind::kThreads) return disk_io::OpenThreads(options.depth);
  auto uring = disk_io::OpenUring(options.depth);
  if (uring || options.kind == DiskIoKind::kUring) return uring;
  log::Info("disk_io_threads", {{"why", uring.error().what}});
  return disk_io::OpenThreads(options.depth);
}

}  // namespace terrace
