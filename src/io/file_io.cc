#include "io/file_io.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

namespace terrace {
namespace {

Code CodeOf(int os_error) {
  switch (os_error) {
    case ENOSPC:
    case EDQUOT: return Code::kFull;
    case EACCES:
    case EPERM:
    case EROFS: return Code::kDenied;
    case ETIMEDOUT: return Code::kTimeout;
    default: return Code::kIo;
  }
}

tl::unexpected<Error> FailWith(int os_error, const char* operation, const std::string& path) {
  const char* name = strerrorname_np(os_error);
  return Fail(CodeOf(os_error), std::string(operation) + " " + path + ": " + (name ? name : std::to_string(os_error)),
              os_error);
}

FileStat FromOs(const struct stat& st) {
  return {
      .bytes = static_cast<uint64_t>(st.st_size),
      .device = st.st_dev,
      .inode = st.st_ino,
      .mtime_ns = static_cast<int64_t>(st.st_mtim.tv_sec) * 1'000'000'000 + st.st_mtim.tv_nsec,
      .links = static_cast<uint32_t>(st.st_nlink),
      .is_file = S_ISREG(st.st_mode),
      .is_directory = S_ISDIR(st.st_mode),
  };
}

class RealFile final : public File {
 public:
  RealFile(int fd, std::string path) : fd_(fd), path_(std::move(path)) {}
  ~RealFile() override {
    if (fd_ >= 0) ::close(fd_);
  }

  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> into) override {
    size_t done = 0;
    while (done < into.size()) {
      const ssize_t n = ::pread(fd_, into.data() + done, into.size() - done, static_cast<off_t>(offset + done));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return FailWith(errno, "read", path_);
      if (n == 0) break;
      done += static_cast<size_t>(n);
    }
    return done;
  }

  Result<void> WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
    return WriteAll(bytes, [&](const std::byte* data, size_t size, size_t done) {
      return ::pwrite(fd_, data, size, static_cast<off_t>(offset + done));
    });
  }

  Result<void> Append(std::span<const std::byte> bytes) override {
    return WriteAll(bytes, [&](const std::byte* data, size_t size, size_t) { return ::write(fd_, data, size); });
  }

  Result<void> Sync() override {
    if (::fdatasync(fd_) != 0) return FailWith(errno, "fdatasync", path_);
    return {};
  }

  Result<FileStat> Stat() override {
    struct stat st;
    if (::fstat(fd_, &st) != 0) return FailWith(errno, "fstat", path_);
    return FromOs(st);
  }

  Result<void> Close() override {
    const int fd = std::exchange(fd_, -1);
    // Whatever close says, the descriptor is gone: it must not be closed again.
    if (::close(fd) != 0) return FailWith(errno, "close", path_);
    return {};
  }

 private:
  template <class Write>
  Result<void> WriteAll(std::span<const std::byte> bytes, Write write) {
    size_t done = 0;
    while (done < bytes.size()) {
      const ssize_t n = write(bytes.data() + done, bytes.size() - done, done);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) return FailWith(n < 0 ? errno : EIO, "write", path_);
      done += static_cast<size_t>(n);
    }
    return {};
  }

  int fd_;  // -1 once closed.
  const std::string path_;
};

class OsFileIo final : public FileIo {
 public:
  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode, uint32_t permissions) override {
    // O_NONBLOCK: a FIFO that somebody put in the place of a file must not hang us; regular files ignore it.
    int flags = O_CLOEXEC | O_NONBLOCK;
    switch (mode) {
      case OpenMode::kRead: flags |= O_RDONLY; break;
      case OpenMode::kCreateNew: flags |= O_WRONLY | O_CREAT | O_EXCL; break;
      case OpenMode::kAppend: flags |= O_WRONLY | O_CREAT | O_APPEND; break;
    }
    int fd;
    do {
      fd = ::open(path.c_str(), flags, static_cast<mode_t>(permissions));
    } while (fd < 0 && errno == EINTR);
    if (fd < 0) return FailWith(errno, mode == OpenMode::kRead ? "open" : "create", path);
    return std::make_unique<RealFile>(fd, path);
  }

  Result<FileStat> Stat(const std::string& path) override {
    struct stat st;
    if (::stat(path.c_str(), &st) != 0) return FailWith(errno, "stat", path);
    return FromOs(st);
  }

  Result<FileStat> StatName(const std::string& path) override {
    struct stat st;
    if (::lstat(path.c_str(), &st) != 0) return FailWith(errno, "lstat", path);
    return FromOs(st);
  }

  Result<void> Link(const std::string& from, const std::string& to) override {
    if (::link(from.c_str(), to.c_str()) != 0) return FailWith(errno, "link", to);
    return {};
  }

  Result<void> Rename(const std::string& from, const std::string& to) override {
    if (::rename(from.c_str(), to.c_str()) != 0) return FailWith(errno, "rename", to);
    return {};
  }

  Result<void> Unlink(const std::string& path) override {
    if (::unlink(path.c_str()) != 0) return FailWith(errno, "unlink", path);
    return {};
  }

  Result<void> MakeDir(const std::string& path, uint32_t permissions) override {
    if (::mkdir(path.c_str(), static_cast<mode_t>(permissions)) == 0) return {};
    const int os_error = errno;
    struct stat st;
    // Not only EEXIST: on a read-only mount mkdir of what is there says EROFS.
    if (::stat(path.c_str(), &st) == 0) return S_ISDIR(st.st_mode) ? Result<void>{} : FailWith(ENOTDIR, "mkdir", path);
    return FailWith(os_error, "mkdir", path);
  }

  Result<std::vector<std::string>> List(const std::string& path) override {
    const std::unique_ptr<DIR, int (*)(DIR*)> dir(::opendir(path.c_str()), ::closedir);
    if (!dir) return FailWith(errno, "list", path);
    std::vector<std::string> names;
    for (;;) {
      errno = 0;
      const dirent* entry = ::readdir(dir.get());
      if (!entry) break;
      if (std::strcmp(entry->d_name, ".") != 0 && std::strcmp(entry->d_name, "..") != 0)
        names.emplace_back(entry->d_name);
    }
    if (errno != 0) return FailWith(errno, "list", path);
    return names;
  }

  Result<Space> FreeSpace(const std::string& path) override {
    struct statvfs fs;
    if (::statvfs(path.c_str(), &fs) != 0) return FailWith(errno, "statvfs", path);
    return Space{.free_bytes = fs.f_bavail * fs.f_frsize, .total_bytes = fs.f_blocks * fs.f_frsize};
  }
};

}  // namespace

std::unique_ptr<FileIo> RealFileIo() { return std::make_unique<OsFileIo>(); }

}  // namespace terrace
