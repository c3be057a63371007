#include "tests/sim/sim_file_io.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "base/assert.h"

namespace terrace::sim {
namespace {

using std::chrono::microseconds;
using std::chrono::seconds;

constexpr size_t kPageBytes = 4096;
constexpr size_t kSectorBytes = 512;
constexpr uint64_t kShareDevice = 7;
constexpr uint64_t kLocalDevice = 1;
constexpr Scheduler::Duration kLatencyMax = microseconds(800);

// The server writes changes of names down this late; see SharedFsTier's promise about a crash of its host.
constexpr seconds kNamesDurableAfter{5};
constexpr seconds kWriteBackAfter{30};  // A kernel's habit.

constexpr const char* kServer = "server";

std::vector<size_t> PagesOf(size_t offset, size_t bytes) {
  std::vector<size_t> pages;
  for (size_t p = offset / kPageBytes; p * kPageBytes < offset + bytes; ++p) pages.push_back(p);
  return pages;
}

template <class T>
void Shuffle(std::vector<T>& items, Random& random) {
  for (size_t i = items.size(); i > 1; --i) std::swap(items[i - 1], items[random.Below(i)]);
}

// Puts page `page` of `from` into `to`, which grows if it must.
void CopyPage(const std::vector<std::byte>& from, std::vector<std::byte>& to, size_t page) {
  const size_t begin = std::min(page * kPageBytes, from.size());
  const size_t end = std::min(begin + kPageBytes, from.size());
  if (to.size() < end) to.resize(end);
  std::copy(from.begin() + static_cast<ptrdiff_t>(begin), from.begin() + static_cast<ptrdiff_t>(end),
            to.begin() + static_cast<ptrdiff_t>(begin));
}

}  // namespace

// --- The server

SimDisk::SimDisk(Scheduler& scheduler, SimLog& log, Random random, std::string name)
    : scheduler_(scheduler), log_(log), random_(random), name_(std::move(name)), root_(Create(true)) {
  root_->links = 1;
}

InodePtr SimDisk::Create(bool is_directory) {
  auto inode = std::make_shared<Inode>();
  inode->id = next_inode_++;
  inode->is_directory = is_directory;
  inode->mtime_ns = ServerNs();
  if (!is_directory) inodes_.push_back(inode);
  return inode;
}

InodePtr SimDisk::Find(std::string_view path) const {
  InodePtr inode = root_;
  while (!path.empty() && inode) {
    const std::string_view name = path.substr(0, path.find('/'));
    path.remove_prefix(std::min(path.size(), name.size() + 1));
    const auto it = inode->entries.find(std::string(name));
    inode = it == inode->entries.end() ? nullptr : it->second;
  }
  return inode;
}

void SimDisk::Walk(const std::function<void(const std::string&, const InodePtr&)>& visit) const {
  WalkFrom(root_, "", visit);
}

void SimDisk::WalkFrom(const InodePtr& directory, const std::string& path,
                       const std::function<void(const std::string&, const InodePtr&)>& visit) const {
  for (const auto& [name, inode] : directory->entries) {
    const std::string here = path.empty() ? name : path + "/" + name;
    if (inode->is_directory) {
      WalkFrom(inode, here, visit);
    } else {
      visit(here, inode);
    }
  }
}

void SimDisk::SetEntry(const InodePtr& directory, const std::string& directory_path, const std::string& name,
                       InodePtr inode, const std::string& who) {
  const auto it = directory->entries.find(name);
  const InodePtr before = it == directory->entries.end() ? nullptr : it->second;
  if (before == inode) return;
  if (who != kServer) {
    undo_.push_back({scheduler_.Now(), directory, directory_path, name, before});
    const TimePoint safe = scheduler_.Now() - kNamesDurableAfter;
    undo_.erase(undo_.begin(), std::find_if(undo_.begin(), undo_.end(), [&](const Undo& u) { return u.at >= safe; }));
  }
  if (before) --before->links;
  if (inode) {
    ++inode->links;
    directory->entries[name] = inode;
  } else {
    directory->entries.erase(it);
  }
  directory->mtime_ns = ServerNs();
  const std::string path = directory_path.empty() ? name : directory_path + "/" + name;
  if (on_name) on_name({path, before, inode, who});
}

void SimDisk::Plant(const std::string& path, std::vector<std::byte> bytes, const std::string& who,
                    const std::string& damage) {
  log_.Fault(who, "plants " + path + ", " + std::to_string(bytes.size()) + " bytes: " + damage);
  InodePtr directory = root_;
  std::string directory_path;
  std::string_view rest = path;
  for (size_t slash = rest.find('/'); slash != std::string_view::npos; slash = rest.find('/')) {
    const std::string name(rest.substr(0, slash));
    rest.remove_prefix(slash + 1);
    if (!directory->entries.contains(name)) SetEntry(directory, directory_path, name, Create(true), who);
    directory = directory->entries[name];
    directory_path += (directory_path.empty() ? "" : "/") + name;
  }
  InodePtr inode = Create(false);
  inode->content = inode->durable = std::move(bytes);
  inode->damage = damage;
  SetEntry(directory, directory_path, std::string(rest), std::move(inode), who);
}

void SimDisk::Rot(const std::string& path, const InodePtr& inode, size_t byte, uint8_t mask, const std::string& who) {
  log_.Fault(who, "flips byte " + std::to_string(byte) + " of " + path);
  for (auto* bytes : {&inode->content, &inode->durable}) {
    if (byte < bytes->size()) (*bytes)[byte] ^= static_cast<std::byte>(mask);
  }
  inode->damage = "rot";
}

void SimDisk::Crash(Scheduler::Duration outage) {
  log_.Fault(name_, "crashes, is back after " + std::to_string(outage.count() / 1'000'000) + " ms");
  ++epoch_;
  down_until_ = std::max(down_until_, scheduler_.Now() + outage);
  // A journal of names keeps their order: the newest ones go.
  const size_t keep = undo_.empty() ? 0 : random_.Below(undo_.size() + 1);
  std::vector<Undo> lost(undo_.begin() + static_cast<ptrdiff_t>(keep), undo_.end());
  undo_.clear();
  std::erase_if(inodes_, [](const std::weak_ptr<Inode>& inode) { return inode.expired(); });
  for (const auto& weak : inodes_) {
    const InodePtr inode = weak.lock();
    WriteBackSome(*inode);  // Without being asked to.
    inode->content = inode->durable;
  }
  for (auto undo = lost.rbegin(); undo != lost.rend(); ++undo) {
    log_.Fault(name_, "loses a change of " + undo->directory_path + "/" + undo->name);
    SetEntry(undo->directory, undo->directory_path, undo->name, undo->before, kServer);
  }
}

void SimDisk::WriteBackSome(Inode& inode) {
  for (size_t page = 0; page * kPageBytes < inode.content.size(); ++page) {
    if (!random_.OneIn(2)) continue;
    if (tears_sectors_ && random_.OneIn(4)) {
      const size_t end = std::min(page * kPageBytes + kSectorBytes * random_.Below(8), inode.content.size());
      if (inode.durable.size() < end) inode.durable.resize(end);
      for (size_t at = page * kPageBytes; at < end; ++at) inode.durable[at] = inode.content[at];
    } else {
      CopyPage(inode.content, inode.durable, page);
    }
  }
}

void SimDisk::WriteBackLater() {
  scheduler_.At(scheduler_.Now() + kWriteBackAfter, [this] {
    for (const auto& weak : inodes_) {
      if (const InodePtr inode = weak.lock()) inode->durable = inode->content;
    }
  });
}

void SimDisk::SyncNames(const InodePtr& directory) {
  std::erase_if(undo_, [&](const Undo& undo) { return undo.directory == directory; });
}

bool SimDisk::NameIsDurable(const std::string& path) const {
  return std::none_of(undo_.begin(), undo_.end(), [&](const Undo& undo) {
    return (undo.directory_path.empty() ? undo.name : undo.directory_path + "/" + undo.name) == path;
  });
}

void SimDisk::LoseUnsynced() {
  for (const auto& weak : inodes_) {
    if (const InodePtr inode = weak.lock()) inode->content = inode->durable;
  }
}

void SimDisk::Unreachable(Scheduler::Duration outage) {
  log_.Fault(name_, "can't be reached for " + std::to_string(outage.count() / 1'000'000) + " ms");
  down_until_ = std::max(down_until_, scheduler_.Now() + outage);
}

void SimDisk::SetFull(bool full) {
  if (full != full_) log_.Fault(name_, full ? "is full" : "has room again");
  full_ = full;
}

// --- A client's view

SimFileIo::SimFileIo(SimDisk& disk, Scheduler& scheduler, SimLog& log, std::string node, const FaultRates& rates,
                     Random random)
    : disk_(disk),
      scheduler_(scheduler),
      log_(log),
      node_(std::move(node)),
      rates_(rates),
      random_(random),
      local_root_(disk.Create(true)) {
  local_root_->links = 1;
}

SimFileIo::~SimFileIo() { TERRACE_ASSERT(writers_.empty()); }

class SimFile final : public File {
 public:
  SimFile(SimFileIo& view, std::string path, InodePtr inode, bool writes)
      : view_(view),
        path_(std::move(path)),
        inode_(std::move(inode)),
        writes_(writes),
        stat_(view.StatOf(*inode_)),
        epoch_(view.disk_.epoch()) {
    if (!writes_) return;
    mine_ = inode_->content;
    number_ = view_.next_writer_++;
    view_.writers_.emplace(number_, this);
  }
  ~SimFile() override {
    if (writes_ && !closed_) (void)Close();
    if (writes_) view_.writers_.erase(number_);
  }

  Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> into) override {
    if (auto begun = Begin("read"); !begun) return tl::unexpected(begun.error());
    if (inode_->is_directory) return view_.Refuse(EISDIR, "read", path_);
    const std::vector<std::byte>& bytes = inode_->content;
    // The client believes in the length it got at the opening.
    const uint64_t end = std::min<uint64_t>(stat_.bytes, bytes.size());
    const size_t n = offset >= end ? 0 : std::min<uint64_t>(into.size(), end - offset);
    std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(std::min<uint64_t>(offset, end)), n, into.begin());
    if (auto ended = view_.End("read", path_); !ended) return tl::unexpected(ended.error());
    return n;
  }

  Result<void> WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
    if (auto begun = Begin("write"); !begun) return begun;
    if (view_.disk_.full() && view_.random_.OneIn(4)) {
      view_.log_.Fault(view_.node_, "ENOSPC at once on write " + path_);
      return view_.Refuse(ENOSPC, "write", path_);
    }
    const bool torn = !bytes.empty() && view_.Hits(view_.rates_.torn_write, "torn", "write", path_);
    if (torn) bytes = bytes.first(view_.random_.Below(bytes.size()));
    if (mine_.size() < offset + bytes.size()) mine_.resize(offset + bytes.size());
    std::copy(bytes.begin(), bytes.end(), mine_.begin() + static_cast<ptrdiff_t>(offset));
    for (const size_t page : PagesOf(offset, bytes.size())) dirty_.insert(page);
    stat_.bytes = mine_.size();
    if (torn) return view_.Refuse(EIO, "write", path_);
    if (view_.random_.OneIn(8) && !view_.disk_.full() && !view_.disk_.down()) WriteBackSome();
    return {};
  }

  Result<void> Append(std::span<const std::byte> bytes) override { return WriteAt(mine_.size(), bytes); }

  Result<void> Sync() override {
    if (auto begun = Begin("sync"); !begun) return begun;
    if (auto flushed = Flush("sync"); !flushed) return flushed;
    if (view_.crashed_) return view_.Refuse(EIO, "sync", path_);
    inode_->durable = inode_->content;
    return view_.End("sync", path_);
  }

  Result<FileStat> Stat() override {
    if (view_.crashed_) return view_.Refuse(EIO, "fstat", path_);
    return stat_;
  }

  Result<void> Close() override {
    if (std::exchange(closed_, true)) return view_.Refuse(EBADF, "close", path_);
    if (!writes_) return {};
    if (auto begun = view_.Begin("close", path_); !begun) {
      dirty_.clear();
      return begun;
    }
    return Flush("close");
  }

  // The client's memory is gone. What was on its way may have got there.
  void LoseMemory() {
    for (const size_t page : dirty_) {
      if (view_.random_.OneIn(2) && !view_.disk_.down()) CopyPage(mine_, inode_->content, page);
    }
    if (!dirty_.empty()) view_.log_.Fault(view_.node_, "loses unsynced bytes of " + path_);
    dirty_.clear();
  }

 private:
  Result<void> Begin(const char* operation) {
    if (closed_) return view_.Refuse(EBADF, operation, path_);
    if (auto begun = view_.Begin(operation, path_); !begun) return begun;
    const bool orphan = inode_->links == 0 || epoch_ != view_.disk_.epoch();
    if (orphan && view_.Hits(view_.rates_.stale, "ESTALE", operation, path_)) {
      return view_.Refuse(ESTALE, operation, path_);
    }
    return {};
  }

  void WriteBackSome() {
    std::vector<size_t> pages(dirty_.begin(), dirty_.end());
    Shuffle(pages, view_.random_);
    pages.resize(view_.random_.Below(pages.size() + 1));
    for (const size_t page : pages) {
      CopyPage(mine_, inode_->content, page);
      dirty_.erase(page);
    }
    inode_->mtime_ns = view_.disk_.ServerNs();
  }

  // Brings what is dirty to the server. An error is said once: what could not be written is forgotten.
  Result<void> Flush(const char* operation) {
    // A server that restarted has lost what it had not made durable; its clients notice and send all again.
    if (epoch_ != view_.disk_.epoch()) {
      for (const size_t page : PagesOf(0, mine_.size())) dirty_.insert(page);
      epoch_ = view_.disk_.epoch();
    }
    if (dirty_.empty()) return {};
    std::vector<size_t> pages(dirty_.begin(), dirty_.end());
    Shuffle(pages, view_.random_);
    int os_error = 0;
    size_t part = pages.size();
    if (view_.disk_.full()) {
      view_.log_.Fault(view_.node_, std::string("ENOSPC late on ") + operation + " " + path_);
      os_error = ENOSPC;
    } else if (view_.Hits(view_.rates_.sync_error, "EIO late", operation, path_)) {
      os_error = EIO;
    }
    if (os_error) part = view_.random_.Below(pages.size());
    // In two parts: readers may see the one without the other.
    for (size_t i = 0; i < part; ++i) {
      if (i == part / 2 && i > 0) view_.Pause(kLatencyMax);
      if (view_.crashed_) return view_.Refuse(EIO, operation, path_);
      CopyPage(mine_, inode_->content, pages[i]);
      dirty_.erase(pages[i]);
    }
    inode_->mtime_ns = view_.disk_.ServerNs();
    if (!os_error && epoch_ != view_.disk_.epoch()) return Flush(operation);  // It crashed between the two parts.
    dirty_.clear();
    stat_ = view_.StatOf(*inode_);
    if (os_error) return view_.Refuse(os_error, operation, path_);
    return {};
  }

  SimFileIo& view_;
  const std::string path_;
  const InodePtr inode_;
  const bool writes_;
  FileStat stat_;
  uint64_t epoch_;               // Of the server, when its bytes were last all there.
  std::vector<std::byte> mine_;  // With writes_: the file as this client has it.
  std::set<size_t> dirty_;       // Pages of it that the server does not have.
  uint64_t number_ = 0;
  bool closed_ = false;
};

void SimFileIo::Crash() {
  if (std::exchange(crashed_, true)) return;
  log_.Fault(node_, "dies");
  for (auto& [number, file] : writers_) file->LoseMemory();
  scheduler_.Wake(this);
}

void SimFileIo::CrashAfter(uint64_t operations, std::function<void()> died) {
  crash_at_ = operations_ + operations;
  died_ = std::move(died);
}

void SimFileIo::SetMounted(bool mounted) {
  if (mounted != mounted_) log_.Fault(node_, mounted ? "has the share mounted again" : "has the share unmounted");
  mounted_ = mounted;
  negative_.clear();
  attributes_.clear();
}

void SimFileIo::Heal() {
  const FaultRates was = rates_;
  rates_ = {};
  rates_.negative_max = was.negative_max;
  rates_.attributes_max = was.attributes_max;
  rates_.links_refused = was.links_refused;  // A property of the share.
  rates_.instant = was.instant;
  stalled_until_ = {};
  SetMounted(true);
}

void SimFileIo::Pause(Scheduler::Duration most) {
  const TimePoint until = scheduler_.Now() + Scheduler::Duration(random_.Below(static_cast<uint64_t>(most.count())));
  while (!crashed_ && scheduler_.Now() < until) scheduler_.Wait(this, until);
}

bool SimFileIo::Hits(double rate, const char* fault, const char* operation, const std::string& path) {
  if (!random_.Chance(rate)) return false;
  log_.Fault(node_, std::string(fault) + " on " + operation + " " + path);
  return true;
}

tl::unexpected<Error> SimFileIo::Refuse(int os_error, const char* operation, const std::string& path) const {
  Code code = Code::kIo;
  if (os_error == ENOSPC || os_error == EDQUOT) code = Code::kFull;
  if (os_error == EACCES || os_error == EPERM || os_error == EROFS) code = Code::kDenied;
  return Fail(code, std::string(operation) + " " + path + ": " + strerrorname_np(os_error), os_error);
}

Result<void> SimFileIo::Begin(const char* operation, const std::string& path) {
  if (crashed_) return Refuse(EIO, operation, path);
  ++operations_;
  const bool dies_here = operations_ == crash_at_;
  if (dies_here && random_.OneIn(2)) died_();
  if (!random_.Chance(rates_.instant)) Pause(kLatencyMax);
  if (Hits(rates_.slow, "slow", operation, path)) Pause(rates_.slow_max);
  while (!crashed_ && scheduler_.Now() < stalled_until_) scheduler_.Wait(this, stalled_until_);
  const TimePoint timeout = scheduler_.Now() + rates_.soft_timeout;
  while (!crashed_ && mounted_ && disk_.down()) {
    if (!rates_.hard_mount && scheduler_.Now() >= timeout) {
      log_.Fault(node_, std::string("timeout on ") + operation + " " + path);
      return Refuse(EIO, operation, path);
    }
    scheduler_.Wait(this, rates_.hard_mount ? disk_.down_until() : std::min(timeout, disk_.down_until()));
  }
  if (crashed_) return Refuse(EIO, operation, path);
  if (Hits(rates_.io_error, "EIO", operation, path)) return Refuse(EIO, operation, path);
  log_.Step(node_, std::string(operation) + " " + path);
  // Otherwise after it took effect: the next thing anybody does comes later.
  if (dies_here) scheduler_.At(scheduler_.Now(), died_);
  return {};
}

Result<void> SimFileIo::End(const char* operation, const std::string& path, int repeated) {
  if (random_.OneIn(4) && !random_.Chance(rates_.instant)) Pause(kLatencyMax);
  if (crashed_) return Refuse(EIO, operation, path);
  if (!Hits(rates_.lost_reply, "lost reply", operation, path)) return {};
  return Refuse(repeated && random_.OneIn(2) ? repeated : EIO, operation, path);
}

FileStat SimFileIo::StatOf(const Inode& inode) const {
  return {.bytes = inode.content.size(),
          .device = mounted_ ? kShareDevice : kLocalDevice,
          .inode = inode.id,
          .mtime_ns = inode.mtime_ns,
          .links = inode.links,
          .is_file = !inode.is_directory,
          .is_directory = inode.is_directory};
}

Result<SimFileIo::Place> SimFileIo::Walk(const char* operation, const std::string& path) {
  std::string_view rest = path;
  TERRACE_ASSERT(rest.starts_with(kRoot));
  rest.remove_prefix(std::string_view(kRoot).size());
  Place place;
  place.inode = mounted_ ? disk_.root() : local_root_;
  while (!rest.empty()) {
    rest.remove_prefix(1);  // The slash.
    if (!place.inode) return Refuse(ENOENT, operation, path);
    if (!place.inode->is_directory) return Refuse(ENOTDIR, operation, path);
    if (place.directory) place.directory_path += (place.directory_path.empty() ? "" : "/") + place.name;
    place.directory = place.inode;
    place.name = rest.substr(0, rest.find('/'));
    rest.remove_prefix(place.name.size());
    const auto it = place.directory->entries.find(place.name);
    place.inode = it == place.directory->entries.end() ? nullptr : it->second;
    if (rates_.negative_max.count() == 0) continue;
    auto& missing = negative_[place.directory_path];
    const auto remembered = missing.find(place.name);
    if (remembered != missing.end() && scheduler_.Now() < remembered->second) {
      if (place.inode) log_.Fault(node_, "believes that there is no " + place.directory_path + "/" + place.name);
      place.inode = nullptr;
    } else if (!place.inode) {
      const auto most = static_cast<uint64_t>(rates_.negative_max.count());
      missing[place.name] = scheduler_.Now() + Scheduler::Duration(random_.Below(most));
    }
  }
  return place;
}

void SimFileIo::ForgetNegative(const std::string& directory_path) { negative_.erase(directory_path); }

Result<std::unique_ptr<File>> SimFileIo::Open(const std::string& path, OpenMode mode, uint32_t) {
  if (auto begun = Begin("open", path); !begun) return tl::unexpected(begun.error());
  auto place = Walk("open", path);
  if (!place) return tl::unexpected(place.error());
  int repeated = 0;
  if (mode == OpenMode::kRead) {
    if (!place->inode) return Refuse(ENOENT, "open", path);
  } else {
    // The server decides, whatever the client believes.
    ForgetNegative(place->directory_path);
    const auto it = place->directory->entries.find(place->name);
    place->inode = it == place->directory->entries.end() ? nullptr : it->second;
    if (place->inode && mode == OpenMode::kCreateNew) return Refuse(EEXIST, "open", path);
    if (place->inode && place->inode->is_directory) return Refuse(EISDIR, "open", path);
    if (!place->inode) {
      if (mounted_ && disk_.full() && random_.OneIn(4)) return Refuse(ENOSPC, "open", path);
      place->inode = disk_.Create(false);
      disk_.SetEntry(place->directory, place->directory_path, place->name, place->inode,
                     mounted_ ? node_ : node_ + " (local)");
      if (mode == OpenMode::kCreateNew) repeated = EEXIST;
    }
  }
  attributes_.erase(place->inode->id);
  auto file = std::make_unique<SimFile>(*this, path, place->inode, mode != OpenMode::kRead);
  if (auto ended = End("open", path, repeated); !ended) return tl::unexpected(ended.error());
  return file;
}

Result<FileStat> SimFileIo::Stat(const std::string& path) {
  if (auto begun = Begin("stat", path); !begun) return tl::unexpected(begun.error());
  const auto place = Walk("stat", path);
  if (!place) return tl::unexpected(place.error());
  if (!place->inode) return Refuse(ENOENT, "stat", path);
  Attributes& cached = attributes_[place->inode->id];
  if (scheduler_.Now() >= cached.until) {
    const auto most = static_cast<uint64_t>(rates_.attributes_max.count());
    cached = {StatOf(*place->inode), scheduler_.Now() + Scheduler::Duration(most ? random_.Below(most) : 0)};
  }
  const FileStat stat = cached.stat;
  if (auto ended = End("stat", path); !ended) return tl::unexpected(ended.error());
  return stat;
}

Result<void> SimFileIo::Link(const std::string& from, const std::string& to) {
  if (auto begun = Begin("link", to); !begun) return begun;
  const auto source = Walk("link", from);
  if (!source) return tl::unexpected(source.error());
  const auto target = Walk("link", to);
  if (!target) return tl::unexpected(target.error());
  ForgetNegative(target->directory_path);
  if (!source->inode) return Refuse(ENOENT, "link", to);
  if (rates_.links_refused) return Refuse(EPERM, "link", to);
  if (target->directory->entries.contains(target->name)) return Refuse(EEXIST, "link", to);
  disk_.SetEntry(target->directory, target->directory_path, target->name, source->inode, node_);
  return End("link", to, EEXIST);
}

Result<void> SimFileIo::Rename(const std::string& from, const std::string& to) {
  if (auto begun = Begin("rename", to); !begun) return begun;
  const auto source = Walk("rename", from);
  if (!source) return tl::unexpected(source.error());
  const auto target = Walk("rename", to);
  if (!target) return tl::unexpected(target.error());
  ForgetNegative(source->directory_path);
  ForgetNegative(target->directory_path);
  if (!source->inode) return Refuse(ENOENT, "rename", to);
  disk_.SetEntry(target->directory, target->directory_path, target->name, source->inode, node_);
  disk_.SetEntry(source->directory, source->directory_path, source->name, nullptr, node_);
  return End("rename", to, ENOENT);
}

Result<void> SimFileIo::Unlink(const std::string& path) {
  if (auto begun = Begin("unlink", path); !begun) return begun;
  const auto place = Walk("unlink", path);
  if (!place) return tl::unexpected(place.error());
  if (!place->inode) return Refuse(ENOENT, "unlink", path);
  if (place->inode->is_directory) return Refuse(EISDIR, "unlink", path);
  ForgetNegative(place->directory_path);
  disk_.SetEntry(place->directory, place->directory_path, place->name, nullptr, node_);
  return End("unlink", path, ENOENT);
}

Result<void> SimFileIo::MakeDir(const std::string& path, uint32_t) {
  if (auto begun = Begin("mkdir", path); !begun) return begun;
  const auto place = Walk("mkdir", path);
  if (!place) return tl::unexpected(place.error());
  ForgetNegative(place->directory_path);
  if (place->directory->entries.contains(place->name)) return {};
  if (mounted_ && disk_.full() && random_.OneIn(4)) return Refuse(ENOSPC, "mkdir", path);
  disk_.SetEntry(place->directory, place->directory_path, place->name, disk_.Create(true),
                 mounted_ ? node_ : node_ + " (local)");
  return End("mkdir", path);
}

Result<std::vector<std::string>> SimFileIo::List(const std::string& path) {
  if (auto begun = Begin("list", path); !begun) return tl::unexpected(begun.error());
  const auto place = Walk("list", path);
  if (!place) return tl::unexpected(place.error());
  if (!place->inode) return Refuse(ENOENT, "list", path);
  if (!place->inode->is_directory) return Refuse(ENOTDIR, "list", path);
  std::vector<std::string> names;
  for (const auto& [name, inode] : place->inode->entries) names.push_back(name);
  Shuffle(names, random_);
  ForgetNegative(!place->directory               ? ""
                 : place->directory_path.empty() ? place->name
                                                 : place->directory_path + "/" + place->name);
  if (auto ended = End("list", path); !ended) return tl::unexpected(ended.error());
  return names;
}

Result<FileIo::Space> SimFileIo::FreeSpace(const std::string& path) {
  if (auto begun = Begin("statfs", path); !begun) return tl::unexpected(begun.error());
  constexpr uint64_t kTotal = 1ull << 40;
  return Space{.free_bytes = disk_.full() ? 0 : kTotal / 2, .total_bytes = kTotal};
}

}  // namespace terrace::sim
