#include "tier/ram_arena.h"

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>

#include "base/assert.h"

namespace terrace {
namespace {

constexpr uint64_t kPageBytes = 4096;
constexpr uint64_t kHugePageBytes = 2 << 20;
// Rounding to 2 MiB wastes at most a fifth of a payload above 8 MiB.
constexpr uint64_t kHugePlaceBytesMin = 16 << 20;
// With 30 size classes of twice this, the regions take 120 TiB of the 128 TiB that x86-64 and arm64 give a process.
constexpr uint64_t kBytesMax = 2ull << 40;
// What is taken before the system is asked again whether it has more: less than a tenth of a second of touching pages,
// and less than what is left alone even on small machines (see ram_limit.cc).
constexpr uint64_t kGrantBytes = 64 << 20;
constexpr std::chrono::milliseconds kGrantMax{1000};   // Others take memory, too.
constexpr std::chrono::milliseconds kRefusalMax{100};  // Asking costs 0.1 ms: no more than a thousandth of the time.
#ifndef MADV_POPULATE_WRITE
constexpr int MADV_POPULATE_WRITE = 23;  // Linux 5.14; NOLINT(readability-identifier-naming)
#endif

constexpr uint64_t RoundUp(uint64_t n, uint64_t unit) { return (n + unit - 1) / unit * unit; }

// 1 page is class 0, 2 pages class 1, 3 and 4 pages class 2.
uint32_t SizeClassOf(uint64_t rounded_bytes) {
  return static_cast<uint32_t>(std::countr_zero(std::bit_ceil(rounded_bytes / kPageBytes)));
}

std::string ErrnoText(int code) { return std::strerror(code); }

}  // namespace

RamArena::Slot& RamArena::Slot::operator=(Slot&& other) noexcept {
  if (this == &other) return *this;
  Drop();
  arena_ = std::move(other.arena_);
  bytes_ = std::exchange(other.bytes_, {});
  rounded_bytes_ = other.rounded_bytes_;
  resident_bytes_ = other.resident_bytes_;
  size_class_ = other.size_class_;
  place_ = other.place_;
  return *this;
}

void RamArena::Slot::Drop() {
  if (arena_) arena_->Free(*this);
  arena_.reset();
}

bool RamArena::HugePagesOffered() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  std::string line;
  if (!std::getline(file, line)) return false;
  return line.find("[never]") == std::string::npos && line.find("[deny]") == std::string::npos;
}

Result<std::shared_ptr<RamArena>> RamArena::Open(const RamArenaOptions& options) {
  std::shared_ptr<RamArena> arena(new RamArena);
  arena->bytes_max_ = options.bytes_max / kPageBytes * kPageBytes;
  arena->cap_ = arena->bytes_max_;
  arena->huge_pages_ = options.huge_pages;
  arena->spare_bytes_ = options.spare_bytes;
  arena->populate_ = options.populate;
  if (arena->bytes_max_ == 0 || arena->bytes_max_ > kBytesMax) {
    return Fail(Code::kInvalid, "ram: a cap of " + std::to_string(options.bytes_max) + " bytes: give from 4096 to " +
                                    std::to_string(kBytesMax));
  }
  const uint64_t largest_place = std::bit_ceil(arena->bytes_max_);
  const size_t classes = std::countr_zero(largest_place / kPageBytes) + 1;
  arena->classes_.resize(classes);
  arena->region_bytes_ = 2 * largest_place;
  arena->mapped_bytes_ = classes * arena->region_bytes_;

  const std::string attempt = "ram: map a sparse memfd for " + std::to_string(arena->bytes_max_) + " bytes: ";
  arena->fd_ = memfd_create("terrace-ram", MFD_CLOEXEC);
  // A memfd begins with mode 0777: whoever is lent a read-only descriptor could open it anew for writing.
  if (arena->fd_ < 0 || fchmod(arena->fd_, 0400) != 0 ||
      ftruncate(arena->fd_, static_cast<off_t>(arena->mapped_bytes_)) != 0) {
    const int code = errno;
    return Fail(Code::kIo, attempt + ErrnoText(code) + "; ulimit -f must be unlimited", code);
  }
  if (fallocate(arena->fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kPageBytes) != 0) {
    const int code = errno;
    return Fail(Code::kIo, attempt + "punch a hole: " + ErrnoText(code), code);
  }
  void* base = mmap(nullptr, arena->mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, arena->fd_, 0);
  if (base == MAP_FAILED) {
    const int code = errno;
    return Fail(Code::kFull, attempt + ErrnoText(code) + "; ulimit -v must be unlimited, or the cap smaller", code);
  }
  arena->base_ = static_cast<std::byte*>(base);
  // Advice; a refusal changes nothing. Users' KV does not belong in core files. Small places must not get huge pages,
  // or one of them would make more resident than it is accounted for.
  madvise(arena->base_, arena->mapped_bytes_, MADV_DONTDUMP);
  for (uint32_t c = 0; c < classes; ++c) {
    const bool huge = arena->huge_pages_ && kPageBytes << c >= kHugePlaceBytesMin;
    madvise(arena->base_ + arena->PlaceOffset(c, 0), arena->region_bytes_, huge ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  }
  return arena;
}

RamArena::~RamArena() {
  if (base_) munmap(base_, mapped_bytes_);
  if (fd_ >= 0) close(fd_);
}

uint64_t RamArena::PlaceOffset(uint32_t size_class, uint32_t place) const {
  return size_class * region_bytes_ + place * (kPageBytes << size_class);
}

uint64_t RamArena::RoundedBytes(uint64_t payload_bytes) const {
  const bool huge = huge_pages_ && std::bit_ceil(payload_bytes) >= kHugePlaceBytesMin;
  return RoundUp(payload_bytes, huge ? kHugePageBytes : kPageBytes);
}

// What may be resident now, if `more_bytes` are to be.
uint64_t RamArena::CapNowLocked(uint64_t more_bytes) {
  if (!spare_bytes_ || more_bytes == 0) return cap_;
  const auto now = std::chrono::steady_clock::now();
  if (now >= granted_until_ || (!refused_ && resident_bytes_ + more_bytes > granted_bytes_)) {
    const int64_t spare = spare_bytes_();
    refused_ = spare < 0 || static_cast<uint64_t>(spare) < more_bytes;
    granted_bytes_ = resident_bytes_;
    if (!refused_)
      granted_bytes_ += std::clamp(static_cast<uint64_t>(spare), more_bytes, std::max(more_bytes, kGrantBytes));
    granted_until_ = now + (refused_ ? kRefusalMax : kGrantMax);
  }
  return std::min(cap_, granted_bytes_);
}

std::optional<RamArena::Slot> RamArena::Claim(uint64_t payload_bytes) {
  TERRACE_ASSERT(payload_bytes > 0);
  if (payload_bytes > bytes_max_) return std::nullopt;
  const uint64_t needed = RoundedBytes(payload_bytes);
  const uint32_t size_class = SizeClassOf(needed);
  std::unique_lock lock(mutex_);
  std::vector<Place>& warm = classes_[size_class].warm;
  const uint64_t there = warm.empty() ? 0 : std::min(warm.back().resident_bytes, needed);
  const uint64_t cap = CapNowLocked(needed - there);
  if (live_bytes_ + needed > cap) return std::nullopt;
  live_bytes_ += needed;

  Place place;
  if (warm.empty()) {
    place.index = TakeColdLocked(size_class);
  } else {
    place = warm.back();
    warm.pop_back();
    if (place.resident_bytes > needed) {
      PunchLocked(PlaceOffset(size_class, place.index) + needed, place.resident_bytes - needed);
      place.resident_bytes = needed;
    }
  }
  // Live bytes fit, so whatever is too much is warm, or will be. Unless others were given more while this thread
  // waited: they were compared with what is live, this claim included, so that theirs is the cap that holds by then.
  while (resident_bytes_ + needed - place.resident_bytes > cap) {
    if (PunchOneWarmLocked()) continue;
    if (touching_ahead_ == 0) break;
    touched_ahead_.wait(lock);
  }
  resident_bytes_ += needed - place.resident_bytes;
  TERRACE_ASSERT(resident_bytes_ <= bytes_max_);

  Slot slot;
  slot.arena_ = shared_from_this();
  slot.bytes_ = {base_ + PlaceOffset(size_class, place.index), payload_bytes};
  slot.rounded_bytes_ = needed;
  slot.resident_bytes_ = place.resident_bytes;
  slot.size_class_ = size_class;
  slot.place_ = place.index;
  return slot;
}

uint32_t RamArena::TakeColdLocked(uint32_t size_class) {
  SizeClass& c = classes_[size_class];
  if (!c.cold.empty()) {
    const uint32_t index = c.cold.back();
    c.cold.pop_back();
    return index;
  }
  // None of the class is free: each of its places holds more than half of its bytes, and all together stay below the
  // cap.
  TERRACE_ASSERT((c.unused + uint64_t{1}) * (kPageBytes << size_class) <= region_bytes_);
  return c.unused++;
}

Result<void> RamArena::Touch(Slot& slot) {
  if (slot.resident_bytes_ == slot.rounded_bytes_) return {};
  const uint64_t offset = PlaceOffset(slot.size_class_, slot.place_) + slot.resident_bytes_;
  if (Result<void> given = Populate(offset, slot.rounded_bytes_ - slot.resident_bytes_); !given) return given;
  slot.resident_bytes_ = slot.rounded_bytes_;
  return {};
}

bool RamArena::TouchAhead(uint64_t payload_bytes, uint64_t bytes_max) {
  if (payload_bytes == 0 || payload_bytes > bytes_max_) return false;
  const uint64_t bytes = RoundedBytes(payload_bytes);
  const uint32_t size_class = SizeClassOf(bytes);
  SizeClass& c = classes_[size_class];
  std::unique_lock lock(mutex_);
  if ((c.warm.size() + 1) * bytes > bytes_max || resident_bytes_ + bytes > CapNowLocked(bytes)) return false;
  Place place{.index = TakeColdLocked(size_class), .resident_bytes = bytes};
  resident_bytes_ += bytes;
  ++touching_ahead_;
  lock.unlock();
  const bool given = Populate(PlaceOffset(size_class, place.index), bytes).has_value();
  lock.lock();
  --touching_ahead_;
  if (!given) {
    PunchLocked(PlaceOffset(size_class, place.index), bytes);
    place.resident_bytes = 0;
  }
  GiveBackLocked(size_class, place);
  touched_ahead_.notify_all();
  return given;
}

Result<void> RamArena::Populate(uint64_t offset, uint64_t bytes) {
  int code = 0;
  if (populate_) {
    code = populate_({base_ + offset, bytes});
  } else if (madvise(base_ + offset, bytes, MADV_POPULATE_WRITE) != 0) {
    code = errno;
  }
  // Kernels before 5.14 don't know the advice: allocate in the file; the mapping follows with the first write.
  if (code == EINVAL) {
    do {
      const auto at = static_cast<off_t>(offset);
      code = fallocate(fd_, FALLOC_FL_KEEP_SIZE, at, static_cast<off_t>(bytes)) == 0 ? 0 : errno;
    } while (code == EINTR);
  }
  if (code == 0) return {};
  return Fail(Code::kFull, "ram: give pages to " + std::to_string(bytes) + " bytes: " + ErrnoText(code), code);
}

void RamArena::Free(const Slot& slot) {
  std::lock_guard lock(mutex_);
  live_bytes_ -= slot.rounded_bytes_;
  // Touch was not called or failed half-way: nobody knows which of these pages are there.
  const uint64_t unknown = slot.rounded_bytes_ - slot.resident_bytes_;
  if (unknown > 0) PunchLocked(PlaceOffset(slot.size_class_, slot.place_) + slot.resident_bytes_, unknown);
  GiveBackLocked(slot.size_class_, {slot.place_, slot.resident_bytes_});
}

// The cap may have been lowered while the place was in use.
void RamArena::GiveBackLocked(uint32_t size_class, const Place& place) {
  SizeClass& c = classes_[size_class];
  if (place.resident_bytes > 0 && resident_bytes_ > cap_) {
    PunchLocked(PlaceOffset(size_class, place.index), place.resident_bytes);
    c.cold.push_back(place.index);
  } else if (place.resident_bytes > 0) {
    c.warm.push_back(place);
  } else {
    c.cold.push_back(place.index);
  }
}

void RamArena::SetCap(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  cap_ = std::min(bytes / kPageBytes * kPageBytes, bytes_max_);
  while (resident_bytes_ > cap_ && PunchOneWarmLocked()) continue;
}

uint64_t RamArena::cap() const {
  std::lock_guard lock(mutex_);
  return cap_;
}

// The hole must be there before its bytes are promised to somebody else, hence under the lock. It happens only when the
// mix of sizes changes, and costs about 0.1 ms a MiB.
void RamArena::PunchLocked(uint64_t offset, uint64_t bytes) {
  // Open has tried it. It needs no memory and no device.
  TERRACE_ASSERT(fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
                           static_cast<off_t>(bytes)) == 0);
  resident_bytes_ -= bytes;
}

bool RamArena::PunchOneWarmLocked() {
  // The largest first: fewest calls.
  for (auto size_class = static_cast<uint32_t>(classes_.size()); size_class-- > 0;) {
    SizeClass& c = classes_[size_class];
    if (c.warm.empty()) continue;
    const Place place = c.warm.back();
    c.warm.pop_back();
    PunchLocked(PlaceOffset(size_class, place.index), place.resident_bytes);
    c.cold.push_back(place.index);
    return true;
  }
  return false;
}

uint64_t RamArena::live_bytes() const {
  std::lock_guard lock(mutex_);
  return live_bytes_;
}

uint64_t RamArena::resident_bytes() const {
  std::lock_guard lock(mutex_);
  return resident_bytes_;
}

}  // namespace terrace
