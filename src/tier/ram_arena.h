// The memory of the ram tier: one sparse memfd, mapped once, handed out as slots of any size under a hard cap.
//
// Address space is plenty and pages are scarce, so the two are managed apart. Each power of two has a region of address
// space large enough for the whole cap (twice, since a slot may use just over half of its place); a slot owns a place
// in the region of its size and only the pages that its payload needs. A freed slot keeps its pages, warm for the next
// one of that size; pages leave a warm place (hole punch) only when another size needs the bytes. So there is no
// fragmentation: a claim succeeds exactly when live bytes plus the claim fit under the cap. Nothing is touched at the
// start.
//
// The cap may be lowered and raised. Besides, pages that are not there yet are taken only while the system has some to
// spare: until then the cap is what is resident.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "terrace/result.h"

namespace terrace {

struct RamArenaOptions {
  uint64_t bytes_max = 0;   // Hard cap of resident bytes; at least 4 KiB, rounded down to it.
  bool huge_pages = false;  // Slots above 8 MiB use 2 MiB pages, and are accounted in them.
  // How many more bytes the system can give now. Asked under the lock, seldom: each time 64 MiB were taken, and then
  // again within a second. Null: any number.
  std::function<int64_t()> spare_bytes;
  // Gives pages to this part of the arena: 0 or an errno. Null: asks the system. For tests of a system that refuses.
  std::function<int(std::span<std::byte>)> populate;
};

// All methods may be called from any thread.
class RamArena : public std::enable_shared_from_this<RamArena> {
 public:
  static Result<std::shared_ptr<RamArena>> Open(const RamArenaOptions& options);
  // True if the system gives 2 MiB pages to a memfd that asks for them.
  static bool HugePagesOffered();

  ~RamArena();
  RamArena(const RamArena&) = delete;
  RamArena& operator=(const RamArena&) = delete;

  // Memory of one frame. Dropped: its pages are free again. Keeps the arena alive.
  class Slot {
   public:
    Slot() = default;
    Slot(Slot&& other) noexcept { *this = std::move(other); }
    Slot& operator=(Slot&& other) noexcept;
    ~Slot() { Drop(); }

    // The size claimed. What it holds is what the last frame here left, or zeros: write before reading.
    std::span<std::byte> bytes() const { return bytes_; }
    uint64_t rounded_bytes() const { return rounded_bytes_; }  // Counted against the cap.

   private:
    friend class RamArena;
    void Drop();

    std::shared_ptr<RamArena> arena_;
    std::span<std::byte> bytes_;
    uint64_t rounded_bytes_ = 0;
    uint64_t resident_bytes_ = 0;  // Of rounded_bytes_, those that had pages when claimed.
    uint32_t size_class_ = 0;
    uint32_t place_ = 0;
  };

  // Room for `payload_bytes` (more than 0), or nothing if live bytes leave none. Memory work only; its pages may not be
  // there yet: call Touch, without any lock, before use.
  std::optional<Slot> Claim(uint64_t payload_bytes);

  // Gives the slot its pages now, so that a shortage is an error here (kFull) and no signal later.
  Result<void> Touch(Slot& slot);

  // Gives pages to one free place, so that a later slot of this size has them already: Touch takes about 0.5 ms a MiB.
  // False, and nothing done, if `bytes_max` are ready for this size or all pages under the cap are given. For a thread
  // in the background; Claim waits for it only if it needs the very last bytes.
  bool TouchAhead(uint64_t payload_bytes, uint64_t bytes_max);

  // Moves the cap, to bytes_max() at most. Pages of free places go at once; what is live above it goes when its slots
  // do, and nothing can be claimed before.
  void SetCap(uint64_t bytes);
  uint64_t cap() const;

  uint64_t RoundedBytes(uint64_t payload_bytes) const;  // What a slot of this size counts against the cap.
  uint64_t bytes_max() const { return bytes_max_; }
  uint64_t live_bytes() const;      // Sum of rounded_bytes of all slots.
  uint64_t resident_bytes() const;  // Live, warm and being touched ahead; never above bytes_max(), nor above the cap
                                    // but for what was live when that was lowered.
  int fd() const { return fd_; }
  std::span<const std::byte> mapped() const { return {base_, mapped_bytes_}; }

 private:
  struct Place {
    uint32_t index = 0;
    uint64_t resident_bytes = 0;
  };
  struct SizeClass {
    std::vector<Place> warm;     // Free, with at least one page. Last freed last, and first reused.
    std::vector<uint32_t> cold;  // Free, without pages.
    uint32_t unused = 0;         // Places from here on were never used.
  };

  RamArena() = default;
  uint64_t CapNowLocked(uint64_t more_bytes);
  uint32_t TakeColdLocked(uint32_t size_class);
  void GiveBackLocked(uint32_t size_class, const Place& place);
  Result<void> Populate(uint64_t offset, uint64_t bytes);
  uint64_t PlaceOffset(uint32_t size_class, uint32_t place) const;
  void PunchLocked(uint64_t offset, uint64_t bytes);
  bool PunchOneWarmLocked();
  void Free(const Slot& slot);

  uint64_t bytes_max_ = 0;
  uint64_t region_bytes_ = 0;  // Address space of one size class.
  uint64_t mapped_bytes_ = 0;
  bool huge_pages_ = false;
  std::function<int64_t()> spare_bytes_;
  std::function<int(std::span<std::byte>)> populate_;
  int fd_ = -1;
  std::byte* base_ = nullptr;

  mutable std::mutex mutex_;
  std::condition_variable touched_ahead_;
  std::vector<SizeClass> classes_;  // Guarded by mutex_. Class i has places of 4 KiB << i.
  uint64_t cap_ = 0;                // Guarded by mutex_.
  // What may be resident without asking the system again, and until when; both guarded by mutex_.
  uint64_t granted_bytes_ = 0;
  bool refused_ = false;
  std::chrono::steady_clock::time_point granted_until_;
  uint64_t live_bytes_ = 0;      // Guarded by mutex_.
  uint64_t resident_bytes_ = 0;  // Guarded by mutex_.
  size_t touching_ahead_ = 0;    // Guarded by mutex_. Places that are on no list meanwhile.
};

}  // namespace terrace
