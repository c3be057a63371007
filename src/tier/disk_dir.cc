#include "tier/disk_dir.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>

#include "tier/disk_index.h"
#include "tier/disk_pieces.h"

namespace terrace {
namespace {

constexpr std::string_view kLockName = "terrace.lock";
constexpr std::string_view kFormatName = "terrace.format";
constexpr std::string_view kFormatHead = "terrace disk\nversion ";
constexpr uint32_t kFormatVersion = 1;
constexpr std::string_view kFrameSuffix = ".kvf";
constexpr std::string_view kTempSuffix = ".tmp";

}  // namespace

tl::unexpected<Error> DiskDir::Refuse(Error error) const {
  const std::string dir = "disk directory " + options_.root;
  switch (error.os_error) {
    case ENOENT: return Fail(Code::kInvalid, dir + " does not exist: create it, or mount the disk there", ENOENT);
    case ENOTDIR:
      return Fail(Code::kInvalid, dir + " is not a directory (" + error.what + "): name the directory itself", ENOTDIR);
    case EROFS:
      return Fail(Code::kDenied, dir + " is mounted read-only (" + error.what + "): mount it read-write", EROFS);
    case EACCES:
    case EPERM:
      return Fail(Code::kDenied,
                  dir + " refuses this user (" + error.what + "): give it read, write and search permission there",
                  error.os_error);
    case EWOULDBLOCK:
      return Fail(Code::kUnavailable,
                  dir + " is in use (" + error.what + "): stop that process, or give this one a directory of its own",
                  EWOULDBLOCK);
    default: return Fail(std::move(error), dir);
  }
}

Result<void> DiskDir::Join() {
  const auto root = files_.Stat(options_.root);
  if (!root) return Refuse(root.error());
  if (!root->is_directory) return Refuse({Code::kInvalid, options_.root, ENOTDIR});
  // First: the lock is a file, and nothing is put into a directory of others.
  if (const auto format = ReadFormat(); !format) return Refuse(format.error());
  auto lock = io_.Lock(Path(std::string(kLockName)));
  if (!lock) return Refuse(lock.error());
  lock_ = *std::move(lock);
  if (Result<void> done = MakeLayout(); !done) return Refuse(done.error());
  return {};
}

Result<void> DiskDir::MakeLayout() {
  for (const char* name : {"frames", "tmp"}) {
    if (Result<void> made = files_.MakeDir(Path(name), options_.directory_permissions); !made) return made;
  }
  // All at once, so that no save has to make one, and to make it durable.
  for (size_t i = 0; i < kDiskFanOut; ++i) {
    if (Result<void> made = files_.MakeDir(FanOutPath(i), options_.directory_permissions); !made) return made;
  }
  if (Result<void> synced = Sync(Path("frames")); !synced) return synced;
  const auto format = ReadFormat();
  if (!format) return tl::unexpected(format.error());
  return *format ? Sync(options_.root) : WriteFormat();
}

bool DiskDir::DirectIo() const {
  const auto file = io_.Open(Path(std::string(kFormatName)), {.direct = true});
  return file && (*file)->direct();
}

Result<size_t> DiskDir::Do(DiskOp op) {
  struct Done {
    std::mutex mutex;
    std::condition_variable changed;
    std::optional<Result<size_t>> result;  // Guarded by mutex.
  };
  auto done = std::make_shared<Done>();
  op.done = [done](Result<size_t> result) {
    std::lock_guard lock(done->mutex);
    done->result = std::move(result);
    done->changed.notify_all();
  };
  std::vector<DiskOp> ops;
  ops.push_back(std::move(op));
  io_.Submit(std::move(ops));
  std::unique_lock lock(done->mutex);
  done->changed.wait(lock, [&] { return done->result.has_value(); });
  return *std::move(done->result);
}

Result<void> DiskDir::Sync(const std::string& directory) {
  auto file = io_.Open(directory, {.mode = DiskIo::OpenOptions::Mode::kDirectory});
  if (!file) return tl::unexpected(file.error());
  const Result<size_t> synced = Do({.kind = DiskOp::Kind::kSync, .file = *file});
  if (!synced) return tl::unexpected(synced.error());
  return {};
}

Result<void> DiskDir::Probe() {
  const auto open = [this] { return io_.Open(Path(std::string(kFormatName)), {.direct = true}); };
  auto file = open();
  if (!file && file.error().os_error == ENOENT) {
    // Somebody emptied the directory.
    if (Result<void> made = MakeLayout(); !made) return made;
    file = open();
  }
  if (!file) return tl::unexpected(file.error());
  const auto block = std::make_unique<DiskScratch>();
  DiskOp op{.kind = DiskOp::Kind::kRead, .file = *file};
  op.parts[0] = block->header;
  const Result<size_t> read = Do(std::move(op));
  if (!read) return tl::unexpected(read.error());
  return {};
}

Result<void> DiskDir::ProbeSave(uint64_t bytes, uint64_t own_bytes) {
  const auto space = files_.FreeSpace(options_.root);
  if (!space) return tl::unexpected(space.error());
  if (space->free_bytes + own_bytes < bytes) {
    return Fail(Code::kFull, options_.root + ": " + std::to_string(space->free_bytes) + " bytes free: ENOSPC", ENOSPC);
  }
  // No bytes, so that the cap holds; a name alone has to reach the disk, too.
  const std::string temp = Path("tmp/probe") + std::string(kTempSuffix);
  (void)files_.Unlink(temp);  // Of a process that was killed.
  auto file = files_.Open(temp, OpenMode::kCreateNew, options_.file_permissions);
  if (!file && file.error().os_error == ENOENT) return MakeLayout();  // Somebody emptied the directory.
  if (!file) return tl::unexpected(file.error());
  Result<void> done = (*file)->Sync();
  const Result<void> closed = (*file)->Close();
  if (done) done = closed;
  const Result<void> removed = files_.Unlink(temp);
  return done ? removed : done;
}

Result<bool> DiskDir::ReadFormat() {
  auto file = files_.Open(Path(std::string(kFormatName)), OpenMode::kRead);
  if (!file && file.error().os_error == ENOENT) return false;
  if (!file) return tl::unexpected(file.error());
  std::string text(256, '\0');
  const auto read = (*file)->ReadAt(0, std::as_writable_bytes(std::span(text)));
  if (!read) return tl::unexpected(read.error());
  text.resize(*read);
  uint32_t version = 0;
  if (text.starts_with(kFormatHead)) {
    std::from_chars(text.data() + kFormatHead.size(), text.data() + text.size(), version);
  }
  if (version == 0) {
    return Fail(Code::kInvalid, std::string(kFormatName) + " there is not one of a disk tier: use another directory");
  }
  if (version != kFormatVersion) {
    return Fail(Code::kInvalid, "it has format version " + std::to_string(version) + " and this release knows " +
                                    std::to_string(kFormatVersion) + ": upgrade terrace, or use another directory");
  }
  return true;
}

Result<void> DiskDir::WriteFormat() {
  const std::string text = std::string(kFormatHead) + std::to_string(kFormatVersion) + "\n";
  const std::string temp = Path("tmp/format") + std::string(kTempSuffix);
  (void)files_.Unlink(temp);
  auto file = files_.Open(temp, OpenMode::kCreateNew, options_.file_permissions);
  if (!file) return tl::unexpected(file.error());
  Result<void> done = (*file)->WriteAt(0, std::as_bytes(std::span(text)));
  if (done) done = (*file)->Sync();
  if (done) done = (*file)->Close();
  if (done) done = files_.Rename(temp, Path(std::string(kFormatName)));
  if (done) done = Sync(options_.root);
  return done;
}

std::string DiskDir::FanOutPath(size_t fan_out) const {
  char name[8];
  std::snprintf(name, sizeof name, "%02zx", fan_out);
  return Path("frames/") + name;
}

std::string DiskDir::FramePath(const Digest& key) const {
  return FanOutPath(key.bytes[0]) + "/" + key.Hex() + std::string(kFrameSuffix);
}

Result<void> DiskDir::MoveAway(const Digest& key, uint64_t stamp) {
  return files_.Rename(FramePath(key), Path("set-aside." + key.Hex() + "." + std::to_string(stamp)));
}

Result<void> DiskDir::RemoveTemps() {
  const auto names = files_.List(Path("tmp"));
  if (!names) return tl::unexpected(names.error());
  Result<void> result;
  for (const std::string& name : *names) {
    if (!name.ends_with(kTempSuffix)) continue;
    Result<void> removed = files_.Unlink(Path("tmp/") + name);
    if (!removed) result = std::move(removed);  // Others may go.
  }
  return result;
}

Result<DiskDir::Listing> DiskDir::ListFrames(size_t fan_out) {
  const std::string directory = FanOutPath(fan_out);
  const auto names = files_.List(directory);
  if (!names) return tl::unexpected(names.error());
  Listing listing;
  for (const std::string& name : *names) {
    const std::string path = directory + "/" + name;
    const bool suffix = name.ends_with(kFrameSuffix);
    const auto key =
        Digest::FromHex(std::string_view(name).substr(0, name.size() - (suffix ? kFrameSuffix.size() : 0)));
    const auto stat = suffix && key && key->bytes[0] == fan_out ? files_.StatName(path) : FileStat{};
    if (!stat) {
      if (stat.error().os_error == ENOENT) continue;
      return tl::unexpected(stat.error());
    }
    if (stat->is_file) {
      listing.frames.emplace_back(*key, *stat);
    } else {
      listing.foreign.push_back(path);
    }
  }
  return listing;
}

std::vector<std::string> DiskDir::ListForeign() {
  std::vector<std::string> foreign;
  const auto look = [&](const std::string& directory, const auto& is_ours) {
    const auto names = files_.List(directory);
    if (!names) return;
    for (const std::string& name : *names) {
      if (!is_ours(name)) foreign.push_back(directory + "/" + name);
    }
  };
  look(options_.root, [](std::string_view name) {
    return name == kLockName || name == kFormatName || name == "frames" || name == "tmp" || name == "lost+found";
  });
  look(Path("tmp"), [](std::string_view name) { return name.ends_with(kTempSuffix); });
  look(Path("frames"), [this](const std::string& name) {
    size_t n = kDiskFanOut;
    std::from_chars(name.data(), name.data() + name.size(), n, 16);
    return n < kDiskFanOut && FanOutPath(n) == Path("frames/") + name;
  });
  return foreign;
}

}  // namespace terrace
