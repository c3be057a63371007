#include "tests/sim/sim_disk_io.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"

namespace terrace::sim {
namespace {

constexpr size_t kDepth = 8;
constexpr size_t kBlockBytes = 4096;
constexpr Scheduler::Duration kHalfOfAnOperation = std::chrono::microseconds(100);

class SimDiskFile final : public DiskFile {
 public:
  SimDiskFile(InodePtr i, std::string p, bool direct, const SimDisk& disk)
      : inode(std::move(i)), path(std::move(p)), direct_(direct), disk_(disk) {}
  bool direct() const override { return direct_; }
  Result<FileStat> Stat() override {
    return FileStat{.bytes = inode->content.size(),
                    .inode = inode->id,
                    .mtime_ns = inode->mtime_ns,
                    .links = inode->links,
                    .is_file = !inode->is_directory,
                    .is_directory = inode->is_directory};
  }
  void Touch() override { inode->mtime_ns = disk_.ServerNs(); }

  const InodePtr inode;
  const std::string path;

 private:
  const bool direct_;
  const SimDisk& disk_;
};

const SimDiskFile& FileOf(const DiskOp& op) { return static_cast<const SimDiskFile&>(*op.file); }

tl::unexpected<Error> Refuse(int os_error, const std::string& what, const std::string& path) {
  return Fail(os_error == ENOSPC ? Code::kFull : Code::kIo, what + " " + path + ": " + strerrorname_np(os_error),
              os_error);
}

// Below the root of the disk.
std::string Below(const std::string& path) {
  const std::string root = std::string(SimFileIo::kRoot) + "/";
  TERRACE_ASSERT(path + "/" == root || path.starts_with(root));
  return path.size() < root.size() ? "" : path.substr(root.size());
}

}  // namespace

SimDiskIo::SimDiskIo(LocalDisk& disk, SimFileIo& view, Scheduler& scheduler, SimLog& log, std::string life,
                     const FaultRates& rates, bool direct, Random random)
    : disk_(disk),
      view_(view),
      scheduler_(scheduler),
      log_(log),
      life_(std::move(life)),
      rates_(rates),
      direct_(direct),
      random_(random),
      device_(scheduler, life_ + "-device", kDepth) {}

SimDiskIo::~SimDiskIo() = default;

bool SimDiskIo::Hits(double rate, const char* fault, const std::string& path) {
  if (!random_.Chance(rate)) return false;
  log_.Fault(life_, std::string(fault) + " on " + path);
  return true;
}

Result<std::shared_ptr<DiskFile>> SimDiskIo::Open(const std::string& path, const OpenOptions& options) {
  if (auto begun = view_.Operate("open", path); !begun) return tl::unexpected(begun.error());
  const std::string below = Below(path);
  InodePtr inode = disk_.files.Find(below);
  if (options.mode == OpenOptions::Mode::kCreateNew) {
    if (inode) return Refuse(EEXIST, "open", path);
    const size_t slash = below.rfind('/');
    const std::string folder = slash == std::string::npos ? "" : below.substr(0, slash);
    const InodePtr directory = disk_.files.Find(folder);
    if (!directory) return Refuse(ENOENT, "open", path);
    if (disk_.files.full()) return Refuse(ENOSPC, "fallocate", path);
    inode = disk_.files.Create(false);
    inode->content.resize(options.preallocate_bytes);
    disk_.files.SetEntry(directory, folder, below.substr(slash + 1), inode, life_);
  }
  if (!inode) return Refuse(ENOENT, "open", path);
  return std::make_shared<SimDiskFile>(std::move(inode), path, options.direct && direct_, disk_.files);
}

void SimDiskIo::Submit(std::vector<DiskOp> ops) {
  for (DiskOp& op : ops) {
    auto shared = std::make_shared<DiskOp>(std::move(op));
    const bool posted = device_.Post([this, shared] {
      const Result<size_t> result =
          cancelled_ ? Result<size_t>(Fail(Code::kCancelled, "cancelled before it began")) : Do(*shared);
      shared->file = nullptr;
      shared->done(result);
    });
    TERRACE_ASSERT(posted);
  }
}

Result<size_t> SimDiskIo::Do(const DiskOp& op) {
  static constexpr const char* kNames[] = {"read", "write", "sync"};
  if (auto begun = view_.Operate(kNames[static_cast<size_t>(op.kind)], FileOf(op).path); !begun) {
    return tl::unexpected(begun.error());
  }
  switch (op.kind) {
    case DiskOp::Kind::kRead: return Read(op);
    case DiskOp::Kind::kWrite: return Write(op);
    default: return Sync(op);
  }
}

Result<size_t> SimDiskIo::Read(const DiskOp& op) {
  const std::vector<std::byte>& bytes = FileOf(op).inode->content;
  uint64_t at = op.offset;
  for (const std::span<std::byte> part : op.parts) {
    if (op.file->direct()) {
      TERRACE_ASSERT(part.size() % kDirectAlignment == 0);
      TERRACE_ASSERT(reinterpret_cast<uintptr_t>(part.data()) % kDirectAlignment == 0);
    }
    const size_t n = at < bytes.size() ? std::min<uint64_t>(part.size(), bytes.size() - at) : 0;
    std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(at, bytes.size())), n, part.begin());
    at += n;
    if (n < part.size()) break;
  }
  return static_cast<size_t>(at - op.offset);
}

// Block by block, the first half before the second: the process may die in between.
Result<size_t> SimDiskIo::Write(const DiskOp& op) {
  const SimDiskFile& file = FileOf(op);
  std::vector<std::byte> bytes;
  for (const std::span<std::byte> part : op.parts) bytes.insert(bytes.end(), part.begin(), part.end());
  const bool torn = Hits(rates_.torn_write, "torn write", file.path);
  const size_t until = torn ? random_.Below(bytes.size() / kBlockBytes + 1) * kBlockBytes : bytes.size();
  std::vector<std::byte>& content = file.inode->content;
  const auto copy = [&](size_t from, size_t to) {
    if (content.size() < op.offset + to) content.resize(op.offset + to);
    std::copy(bytes.begin() + static_cast<ptrdiff_t>(from), bytes.begin() + static_cast<ptrdiff_t>(to),
              content.begin() + static_cast<ptrdiff_t>(op.offset + from));
  };
  const size_t half = until / 2 / kBlockBytes * kBlockBytes;
  copy(0, half);
  scheduler_.Sleep(kHalfOfAnOperation);
  if (view_.crashed()) return Refuse(EIO, "write", file.path);
  copy(half, until);
  file.inode->mtime_ns = disk_.files.ServerNs();
  if (torn) return Refuse(EIO, "write", file.path);
  return bytes.size();
}

Result<size_t> SimDiskIo::Sync(const DiskOp& op) {
  const SimDiskFile& file = FileOf(op);
  Inode& inode = *file.inode;
  if (inode.is_directory) {
    if (Hits(rates_.sync_error, "EIO", file.path)) return Refuse(EIO, "sync", file.path);
    disk_.files.SyncNames(file.inode);
    return size_t{0};
  }
  if (Hits(rates_.sync_error, "EIO", file.path)) {
    disk_.files.WriteBackSome(inode);  // Some of it got there.
    return Refuse(EIO, "sync", file.path);
  }
  inode.durable = inode.content;
  return size_t{0};
}

Result<std::shared_ptr<void>> SimDiskIo::Lock(const std::string& path) {
  if (auto begun = view_.Operate("lock", path); !begun) return tl::unexpected(begun.error());
  if (!disk_.locked_by.empty()) {
    return Fail(Code::kUnavailable, path + " is held by " + disk_.locked_by, EWOULDBLOCK);
  }
  disk_.locked_by = life_;
  return std::shared_ptr<void>(nullptr, [&disk = disk_, life = life_](void*) {
    if (disk.locked_by == life) disk.locked_by.clear();
  });
}

}  // namespace terrace::sim
