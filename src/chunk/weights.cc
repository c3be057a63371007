#include "chunk/weights.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <sstream>
#include <utility>
#include <vector>

#include "base/hash.h"
#include "base/log.h"

namespace terrace {
namespace {

struct FileId {
  uint64_t device, inode, bytes;
  int64_t mtime_ns, ctime_ns;
  bool operator==(const FileId&) const = default;
  std::string Name() const {
    std::ostringstream text;
    text << device << '-' << inode << '-' << bytes << '-' << mtime_ns << '-' << ctime_ns;
    return text.str();
  }
};

FileId IdOf(const struct stat& st) {
  const auto ns = [](const timespec& t) { return static_cast<int64_t>(t.tv_sec) * 1000000000 + t.tv_nsec; };
  return {st.st_dev, st.st_ino, static_cast<uint64_t>(st.st_size), ns(st.st_mtim), ns(st.st_ctim)};
}

std::optional<Digest> ReadCache(const std::string& path) {
  std::ifstream in(path);
  std::string hex;
  in >> hex;
  return Digest::FromHex(hex);
}

void WriteCache(const std::string& dir, const std::string& path, const Digest& digest) {
  std::error_code ec;
  std::filesystem::create_directories(dir, ec);
  const std::string temporary = path + "." + std::to_string(getpid());
  {
    std::ofstream out(temporary);
    out << digest.Hex() << '\n';
    if (!out.flush()) ec = std::make_error_code(std::errc::io_error);
  }
  if (!ec) std::filesystem::rename(temporary, path, ec);
  if (ec) {
    std::filesystem::remove(temporary, ec);
    log::Warn("digest_cache_not_written", {{"dir", dir}});  // Costs a second at each start, nothing else.
  }
}

std::string IdentityOf(const std::string& path) {
  struct stat st{};
  return stat(path.c_str(), &st) == 0 ? IdOf(st).Name() : "";
}

Result<Digest> HashFile(const std::string& path, const std::string& identity, const std::string& cache_dir,
                        const std::function<bool()>& stopped) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return Fail(Code::kIo, "weights " + path + ": " + std::strerror(errno), errno);
  struct Closer {
    int fd;
    ~Closer() { close(fd); }
  } closer{fd};
  struct stat before{};
  if (fstat(fd, &before) != 0) return Fail(Code::kIo, "weights " + path + ": " + std::strerror(errno), errno);
  if (IdOf(before).Name() != identity) {
    return Fail(Code::kUnavailable, "weights " + path + ": changed at the start; start again");
  }
  struct statfs filesystem{};
  const bool is_kept =
      !cache_dir.empty() && fstatfs(fd, &filesystem) == 0 && LastingIdentity(before, filesystem.f_type);
  const std::string cached_path = cache_dir + "/" + IdOf(before).Name();
  if (is_kept) {
    if (const auto cached = ReadCache(cached_path)) return *cached;
  }
  Sha256 hash;
  std::vector<std::byte> buffer(4 << 20);
  for (;;) {
    if (stopped()) return Fail(Code::kCancelled, "weights " + path + ": stopped");
    const ssize_t n = read(fd, buffer.data(), buffer.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return Fail(Code::kIo, "weights " + path + ": " + std::strerror(errno), errno);
    if (n == 0) break;
    hash.Update(std::span(buffer).first(static_cast<size_t>(n)));
  }
  const Digest digest = hash.Finish();
  struct stat after{};
  if (fstat(fd, &after) != 0 || !(IdOf(before) == IdOf(after))) {
    return Fail(Code::kUnavailable, "weights " + path + ": changed while being read; start again");
  }
  if (is_kept) WriteCache(cache_dir, cached_path, digest);
  return digest;
}

}  // namespace

std::shared_ptr<WeightsDigest> WeightsDigest::Start(std::string path, std::string cache_dir) {
  std::shared_ptr<WeightsDigest> self(new WeightsDigest);
  self->path_ = std::move(path);
  self->identity_ = IdentityOf(self->path_);
  self->thread_ = std::thread([raw = self.get(), cache_dir = std::move(cache_dir)] {
    Result<Digest> result = HashFile(raw->path_, raw->identity_, cache_dir, [raw] {
      std::lock_guard lock(raw->mutex_);
      return raw->stop_;
    });
    if (!result && result.error().code != Code::kCancelled)
      log::Error("weights_digest_failed", {{"why", result.error().what}});
    {
      std::lock_guard lock(raw->mutex_);
      raw->result_ = std::move(result);
    }
    raw->known_.notify_all();
  });
  return self;
}

WeightsDigest::~WeightsDigest() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  thread_.join();
}

std::optional<Digest> WeightsDigest::Get() const {
  {
    std::lock_guard lock(mutex_);
    if (!result_ || !*result_) return std::nullopt;
  }
  if (!Intact()) return std::nullopt;
  std::lock_guard lock(mutex_);
  return **result_;
}

bool WeightsDigest::Intact() const {
  const bool same = IdentityOf(path_) == identity_;
  std::lock_guard lock(mutex_);
  if (!same && !std::exchange(changed_, true)) {
    log::Error("weights_changed", {{"path", path_}, {"remedy", "start again: nothing is cached until then"}});
  }
  return !changed_;
}

Result<Digest> WeightsDigest::Wait() const {
  std::unique_lock lock(mutex_);
  known_.wait(lock, [&] { return result_.has_value(); });
  return *result_;
}

bool LastingIdentity(const struct stat& st, long filesystem_type) {
  constexpr long kFuse = 0x65735546;  // FUSE_SUPER_MAGIC of the kernel, which virtiofs has, too.
  return filesystem_type != kFuse && (st.st_mtim.tv_nsec != 0 || st.st_ctim.tv_nsec != 0);
}

std::string DefaultDigestCacheDir() {
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg != nullptr && *xdg == '/') {
    return std::string(xdg) + "/terrace/digests";
  }
  if (const char* home = std::getenv("HOME"); home != nullptr && *home == '/') {
    return std::string(home) + "/.cache/terrace/digests";
  }
  return "";
}

}  // namespace terrace
