#include "tier/ram_limit.h"

#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <limits>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>
#include <vector>

#include "io/cgroup.h"
#include "io/directory_lock.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();
// Left alone when memory is taken. A thirty-second is 0.75 GiB of 24 GiB: several times what all our processes take
// between two looks. A large machine needs no more than that.
constexpr uint64_t kFloorShare = 32;
constexpr uint64_t kFloorMax = 1 << 30;
// Who comes when others have reserved everything gets so much of what they have not touched yet: enough to serve with.
constexpr uint64_t kLeastCap = 256 << 20;
constexpr const char* kReservation = "terrace-ram-reserved";
constexpr std::chrono::milliseconds kLockMax{1000};

// First number in a file. "max" is none.
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// `name value` lines, with or without a colon after the name.
std::optional<uint64_t> ReadField(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    uint64_t value = 0;
    if (words >> word >> value && word == name) return value;
  }
  return std::nullopt;
}

struct CgroupNames {
  const char* limit;
  const char* usage;
  const char* inactive_file;
  const char* active_file;
};
constexpr CgroupNames kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                             "total_active_file"};
constexpr CgroupNames kV2 = {"memory.max", "memory.current", "inactive_file", "active_file"};

// One thing that bounds what this process may hold.
struct Bound {
  std::string folder;  // Of a cgroup. "": the machine, which bounds all processes.
  uint64_t total = 0;
  uint64_t left = 0;

  uint64_t floor() const { return std::min(total / kFloorShare, kFloorMax); }
};

std::optional<Bound> BoundOfCgroup(const std::string& folder, const CgroupNames& names) {
  const std::optional<uint64_t> limit = ReadNumber(folder + "/" + names.limit);
  const std::optional<uint64_t> usage = ReadNumber(folder + "/" + names.usage);
  if (!limit || !usage) return std::nullopt;
  const uint64_t cache = ReadField(folder + "/memory.stat", names.inactive_file).value_or(0) +
                         ReadField(folder + "/memory.stat", names.active_file).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  return Bound{.folder = folder, .total = *limit, .left = *limit - std::min(*limit, used)};
}

std::vector<Bound> BoundsOfThisProcess(const std::string& root) {
  std::vector<Bound> bounds;
  const std::string meminfo = root + "/proc/meminfo";
  if (const auto left = ReadField(meminfo, "MemAvailable:")) {
    const uint64_t total = std::max(ReadField(meminfo, "MemTotal:").value_or(0), *left);
    bounds.push_back({.total = total * 1024, .left = *left * 1024});
  }
  VisitCgroups(root, "memory", [&](const std::string& folder, bool is_v2) {
    if (auto bound = BoundOfCgroup(folder, is_v2 ? kV2 : kV1)) bounds.push_back(*std::move(bound));
  });
  return bounds;
}

// What a process of ours has reserved and not touched.
struct Reservation {
  uint64_t bytes = 0;
  std::set<std::string> cgroups;
};

// Of all processes that this one can look into, but `own`. A child that was forked shows its parent's: each counts
// once.
std::vector<Reservation> OthersReservations(const std::string& root, ino_t own) {
  std::vector<Reservation> all;
  std::set<ino_t> seen = {own};
  const std::string wanted = std::string("/memfd:") + kReservation + " (deleted)";
  std::error_code error;
  for (fs::directory_iterator process(root + "/proc", error), end; !error && process != end; process.increment(error)) {
    const std::string pid = process->path().filename().string();
    if (pid.find_first_not_of("0123456789") != std::string::npos) continue;
    std::error_code gone;  // Processes end and others are not ours to look into.
    for (fs::directory_iterator fd(process->path() / "fd", gone); !gone && fd != end; fd.increment(gone)) {
      std::error_code closed;
      if (fs::read_symlink(fd->path(), closed).native() != wanted || closed) continue;
      struct stat status{};
      if (stat(fd->path().c_str(), &status) != 0 || !seen.insert(status.st_ino).second) continue;
      Reservation& found = all.emplace_back();
      found.bytes = static_cast<uint64_t>(status.st_size);
      VisitCgroups(root, "memory", [&](const std::string& folder, bool) { found.cgroups.insert(folder); }, pid);
    }
  }
  return all;
}

// The most that a process may hold that holds `held` now.
uint64_t MayHold(const std::vector<Bound>& bounds, const std::vector<Reservation>& others, uint64_t held) {
  uint64_t least = kUnlimited;
  for (const Bound& bound : bounds) {
    uint64_t reserved = 0;
    for (const Reservation& other : others) {
      if (bound.folder.empty() || other.cgroups.contains(bound.folder)) reserved += other.bytes;
    }
    const uint64_t free = bound.left - std::min(bound.left, reserved);
    // Of what would be ours and free: taking pages moves it from one to the other and changes nothing here.
    const uint64_t margin = std::max((held + free) / 8, bound.floor());
    const uint64_t by_reservations = held + free - std::min(held + free, margin);
    const uint64_t at_least = std::min(bound.left - std::min(bound.left, margin), kLeastCap);
    least = std::min(least, std::max(by_reservations, at_least));
  }
  return least;
}

class MachineRoom final : public RamRoom {
 public:
  explicit MachineRoom(std::string root)
      : root_(std::move(root)), reservation_(memfd_create(kReservation, MFD_CLOEXEC)) {
    struct stat status{};
    if (reservation_ >= 0 && fstat(reservation_, &status) == 0) inode_ = status.st_ino;
  }
  ~MachineRoom() override {
    if (reservation_ >= 0) close(reservation_);
  }

  uint64_t total() const override {
    uint64_t least = kUnlimited;
    for (const Bound& bound : BoundsOfThisProcess(root_)) least = std::min(least, bound.total);
    return least;
  }

  uint64_t Reserve(const Wish& wish) override {
    const std::vector<Bound> bounds = BoundsOfThisProcess(root_);
    // Looking at all processes takes milliseconds, and is for nothing if there is nothing to be had.
    if (std::min(wish.asked_bytes, MayHold(bounds, {}, wish.held_bytes)) <= wish.cap_bytes) return wish.cap_bytes;
    // Two that start at once would not see each other's reservations. /proc is one directory for exactly those
    // processes that see each other there. Who does without: memory is looked at again when it is taken.
    const DirectoryLock lock(root_ + "/proc", kLockMax);
    const uint64_t may_hold = MayHold(bounds, OthersReservations(root_, inode_), wish.held_bytes);
    const uint64_t cap = std::max(std::min(wish.asked_bytes, may_hold), wish.cap_bytes);
    SetUntouched(cap - std::min(cap, wish.held_bytes));
    return cap;
  }

  void SetUntouched(uint64_t bytes) override {
    // Without it others count less than is so. No page is ever there.
    if (reservation_ >= 0) (void)!ftruncate(reservation_, static_cast<off_t>(bytes));
  }

  int64_t Spare() override {
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const Bound& bound : BoundsOfThisProcess(root_)) {
      least = std::min(least, static_cast<int64_t>(bound.left) - static_cast<int64_t>(bound.floor()));
    }
    return least;
  }

 private:
  const std::string root_;
  const int reservation_;
  ino_t inode_ = 0;
};

}  // namespace

std::shared_ptr<RamRoom> RoomOfThisMachine(const std::string& root) { return std::make_shared<MachineRoom>(root); }

uint64_t AvailableMemoryBytes(const std::string& root) {
  return MayHold(BoundsOfThisProcess(root), OthersReservations(root, 0), 0);
}

}  // namespace terrace
