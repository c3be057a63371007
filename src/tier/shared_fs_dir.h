// The shared directory as files: its layout, and how one frame is written, published, proven, read and set aside.
// Synchronous, on the caller's thread; knows no index, no batch and no other node. docs/internals/shared_fs.md tells
// the why of each step.
//
//   ROOT/terrace.format                 Version and volume id; a directory without it is none of ours.
//   ROOT/frames/<3 hex>/<64 hex>.kvf    A frame a file, by its key.
//   ROOT/tmp/<node>-<n>.<32 hex>.tmp    Frames being written, with the first half of their key; others without.
//   ROOT/nodes/<node>-<n>.log           Journals (shared_fs_journal.h).
//   ROOT/collector.lease                Held by the node that keeps the bounds (shared_fs_collector.h).
//   ROOT/quarantine/                    A few damaged frames, for people to look at.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <limits>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/clock.h"
#include "chunk/frame.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace {

// The directory of a key under frames/: its first 12 bits, so 4,096 directories, and 16 M frames before one holds 4,096
// names.
inline constexpr size_t kFanOut = 4096;
inline size_t FanOutOf(const Digest& key) { return static_cast<size_t>(key.bytes[0]) << 4 | key.bytes[1] >> 4; }

// What a file under a frame's name turned out to be.
struct FrameProof {
  Reason reason = Reason::kNone;  // kNone: the frame. kMissing, kEmpty, kTruncated, kDamaged, kForeign, kVersion;
                                  // kUnavailable, kCancelled: not known, `error` says why.
  bool set_aside = false;         // It disagrees with its own name or checksums: it can serve nobody.
  bool unreadable = false;        // With kUnavailable: it is there, and the error may be its own, not the server's.
  Frame frame;                    // With kNone.
  FileStat stat;                  // Of the file looked at, if there was one.
  std::optional<Error> error;
};

// Errors of one name that can't be removed, while others can: a directory in the place of a file, rules of its own.
bool IsTheNamesOwn(int os_error);

// A time stamp may be of the clock of whoever wrote the file, so it does not tell who lives: that it changes does. Of a
// file seen for the first time, nothing else is known; where it is further from now than clocks are from each other,
// it was left behind by a dead node or a wrong clock.
inline bool LeftBehind(int64_t stamp_ns, int64_t now_ns) {
  constexpr int64_t kClocksApartNs = 3600ll * 1'000'000'000;
  return std::abs(now_ns - stamp_ns) >= kClocksApartNs;
}

class SharedFsDir {
 public:
  struct Options {
    std::string root;
    std::string node;  // Unique among all processes, ever; a plain file name.
    uint32_t file_permissions = 0640;
    uint32_t directory_permissions = 0750;
    uint64_t quarantine_files_max = 64;
    uint64_t quarantine_bytes_max = 1ull << 30;
    // Frames whose bytes are being handed to the kernel; others may wait for their sync meanwhile.
    size_t copies_max = std::numeric_limits<size_t>::max();
  };
  SharedFsDir(Options options, FileIo& io, const Clock& clock, Metrics& metrics);

  // Checks that the directory can be read and written, makes what is missing below it (never itself), and returns the
  // volume id: made once, it tells one volume from another that is mounted in its place. Errors say the remedy.
  Result<std::string> Join();
  // Is it still there? The id of the volume that is there now. What was emptied is laid out anew; what was unmounted is
  // not.
  Result<std::string> Revisit();

  // Would it take so many bytes more? Writes one, durably, and removes it.
  Result<void> ProbeSave(uint64_t bytes);

  // Writes a whole frame to a new file in tmp/, durable when it returns its path. On failure nothing is left, or `left`
  // is set: the file could not be removed now. `stop` is asked between pieces. `hashes`: of the payload at
  // kSegmentBytes, or null.
  Result<std::string> WriteTemp(const FrameInfo& info, std::span<const std::byte> payload, const SegmentHashes* hashes,
                                const std::function<bool()>& stop, bool& left);
  enum class Published { kNew, kExisted, kOtherVersion };
  // Gives the frame at `temp` its name, unless a right frame has it; a file there that is none is set aside first.
  // `temp` is gone afterwards, whatever the answer, or `left` is set. After an error the frame may still have got its
  // name: an answer may be lost on its way.
  Result<Published> Publish(const std::string& temp, const FrameInfo& info, bool& left);
  // Tries once more to remove what was left. Bytes of the frames that are gone now.
  uint64_t RemoveLeft();

  // Opens the file under the key's name and checks its header against name and length. Payload and padding are not
  // read.
  FrameProof Prove(const Digest& key);
  // Whether the server has nothing under the key's name. An open asks it, where a stat may be answered from memory.
  bool IsGone(const Digest& key);
  // Offered work: other threads may call `work` to take part, any number of them, at any time, also when all is done.
  // `parts`: more threads than that have nothing to do.
  using Help = std::function<void(size_t parts, const std::function<void()>& work)>;
  // Prove, then reads and verifies the payload. kForeign, without set_aside, for a right frame of another space or
  // payload size. `into` is not touched once it has returned. `help` may be null.
  FrameProof Read(const Digest& key, const Digest& space, std::span<std::byte> into, const std::function<bool()>& stop,
                  const Help& help);

  // Moves the file to quarantine/, or removes it if that is full (a directory goes there all the same), and counts it.
  // False, and nothing done, if it is not the file `seen` any more.
  bool SetAside(const Digest& key, Reason reason, const FileStat& seen);
  uint64_t quarantined() const { return quarantined_.load(std::memory_order_relaxed); }
  // Fine if it is not there.
  Result<void> Remove(const Digest& key);
  // When the file was written; nothing if there is none.
  Result<std::optional<int64_t>> WrittenNs(const Digest& key);

  // The directories of frames/ that exist, and the keys in one, both sorted.
  Result<std::vector<size_t>> ListFanOut();
  // To `left_open`, if given, come the paths of what file system clients have kept under names of their own: a file
  // that was removed while it was open, and stays when its client dies.
  Result<std::vector<Digest>> ListFrames(size_t fan_out, std::vector<std::string>* left_open = nullptr);
  // Bytes of such a file, 0 if it is gone. Removes it if told to.
  Result<uint64_t> LeftOpenBytes(const std::string& path, bool remove);

  // The file server's clock, which stamps all files: the time of a file just made. Ours may differ by any amount.
  Result<int64_t> ServerNow();
  // Removes temporaries and journals, and what was left open of them, that nobody wrote to for `age`, by the file
  // server's clock: what dead nodes left.
  Result<void> RemoveStale(std::chrono::seconds age);
  // Another node is writing the frame of this key, or died at it. One listing.
  bool OthersWrite(const Digest& key);
  // Of the temporaries in tmp/ whose node says so.
  Result<uint64_t> TempBytes(const std::function<bool(std::string_view node)>& counts);
  Result<FileIo::Space> FreeSpace() { return io_.FreeSpace(options_.root); }

  // Takes the lease if there is none, or if it has stayed as it is for `life` of our clock since we saw it first, or
  // the first that we see was left behind; renews it if it is ours. `now_ns`: the file server's time. False: another
  // node has it. Two may hold it for a moment; the later one has it at the next call.
  Result<bool> HoldLease(int64_t now_ns, std::chrono::milliseconds life);
  void LeaveLease();

  const std::string& root() const { return options_.root; }
  std::string JournalDirectory() const { return Path("nodes"); }

 private:
  struct OpenFrame {
    FrameProof proof;
    std::unique_ptr<File> file;  // With kNone.
  };
  std::string Path(const std::string& name) const { return options_.root + "/" + name; }
  std::string FanOutPath(size_t fan_out) const;
  std::string FramePath(const Digest& key) const;
  std::string NewTempPath(const Digest* key);
  tl::unexpected<Error> Refuse(Error error) const;
  Result<void> MakeLayout();
  Result<std::string> ReadVolumeId();
  Result<std::string> MakeVolumeId();
  Result<void> WriteAny();
  // A new file with these bytes, durable, or none.
  Result<std::string> WriteWhole(const std::function<Result<void>(File&)>& write, const FrameInfo* info = nullptr,
                                 bool* left = nullptr);
  // False: not now, RemoveLeft does it.
  bool DropTemp(const std::string& path, uint64_t bytes = 0);
  Result<std::optional<FileStat>> LookAtLease();
  // EEXIST if the name is taken. `temp` may or may not be there afterwards.
  Result<void> GiveName(const std::string& temp, const std::string& name);
  OpenFrame OpenAndProve(const Digest& key);
  FrameProof ReadOnce(const Digest& key, const Digest& space, std::span<std::byte> into,
                      const std::function<bool()>& stop, const Help& help);
  Result<void> RemoveOlder(const std::string& directory, std::string_view suffix, int64_t mtime_ns);

  const Options options_;
  FileIo& io_;
  const Clock& clock_;
  Metrics& metrics_;
  std::atomic<uint64_t> temp_count_{0};   // Relaxed: only makes names unique.
  std::atomic<uint64_t> quarantined_{0};  // Relaxed: a count.
  // Waits for a turn to copy a frame; false: `stop` said so. EndCopy for each true.
  bool BeginCopy(const std::function<bool()>& stop);
  void EndCopy();

  std::mutex copies_mutex_;
  std::condition_variable copies_changed_;
  size_t copies_ = 0;  // Guarded by copies_mutex_.

  std::mutex left_mutex_;
  std::map<std::string, uint64_t> left_;    // Guarded by left_mutex_. Temporaries to be removed, and their bytes.
  std::atomic<bool> links_refused_{false};  // Relaxed: a hint, learnt anew by whoever misses it.
  std::optional<uint64_t> joined_device_;   // Join and Revisit are called by one thread at a time.
  // Of the lease, by one thread at a time: the file that we made it; another node's, and since when we know it.
  std::optional<FileStat> lease_, others_lease_;
  TimePoint others_since_;
  std::mutex quarantine_mutex_;  // Held over the rare I/O that sets a frame aside: its bound is counted, and one file
                                 // moved, once.
};

}  // namespace terrace
