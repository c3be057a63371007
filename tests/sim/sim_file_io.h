// One file server, simulated, and a client's view of it for each node: the twin of RealFileIo in which everything that
// a shared mount may do happens on purpose.
//
//   server  Files have bytes that clients see and bytes that a crash leaves; names made lately may be lost in one. It
//           can be full, down, or restarted.
//   view    Writes stay in the client until write-back, Sync or Close. A name that was not there is remembered as not
//           there (unless the directory is listed, or this client makes a name in it), attributes by path may be old,
//           those of an open file are of its opening (and its own writes). Listings are up to date, in any order.
//
// Every operation takes virtual time, so operations of different fibers interleave, and a node can die between any two
// and within one. Faults come at the rates of FaultRates, each one logged; nothing else about a run is random but the
// order of fibers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "io/file_io.h"
#include "tests/sim/random.h"
#include "tests/sim/scheduler.h"
#include "tests/sim/sim_log.h"

namespace terrace::sim {

// Chances, each of one operation that it can hit.
struct FaultRates {
  double io_error = 0;    // EIO instead of the operation.
  double lost_reply = 0;  // The operation, and an error: EIO, or what its repetition would say (EEXIST, ENOENT).
  double stale = 0;       // ESTALE from an open file that has lost its name or outlived a restart of the server.
  double slow = 0;        // Takes up to slow_max.
  double torn_write = 0;  // Part of a write, and EIO.
  double instant = 0;     // Takes no time: a local disk's names are in memory.
  double sync_error = 0;  // Part of what was written gets there, Sync says EIO once.
  Scheduler::Duration slow_max = std::chrono::seconds(8);
  Scheduler::Duration negative_max{0};    // How long "not there" is remembered.
  Scheduler::Duration attributes_max{0};  // How old attributes by path may be.
  bool hard_mount = false;                // While the server is down: waits, instead of EIO after soft_timeout.
  Scheduler::Duration soft_timeout = std::chrono::seconds(5);
  bool links_refused = false;
};

struct Inode {
  uint64_t id = 0;
  bool is_directory = false;
  std::vector<std::byte> content;  // What clients see that open it now.
  std::vector<std::byte> durable;  // What a crash of the server leaves.
  int64_t mtime_ns = 0;
  uint32_t links = 0;
  std::map<std::string, std::shared_ptr<Inode>> entries;
  std::string damage;  // What of ours made it wrong; empty: whatever is wrong with it is the product's doing.
};
using InodePtr = std::shared_ptr<Inode>;

class SimDisk {
 public:
  // `name` is for the log.
  SimDisk(Scheduler& scheduler, SimLog& log, Random random, std::string name = "server");

  // Who gave a name another meaning: a node's name, "server" (lost or resurrected in a crash) or a saboteur's.
  struct NameChange {
    std::string path;  // Below the root: "frames/0ab/....kvf".
    InodePtr before, after;
    std::string who;
  };
  std::function<void(const NameChange&)> on_name;

  const InodePtr& root() const { return root_; }
  InodePtr Find(std::string_view path) const;  // Null: not there.
  // Calls visit(path, inode) for every file.
  void Walk(const std::function<void(const std::string&, const InodePtr&)>& visit) const;

  // For saboteurs; takes no time and is durable at once. Directories that are missing are made.
  void Plant(const std::string& path, std::vector<std::byte> bytes, const std::string& who, const std::string& damage);
  void Rot(const std::string& path, const InodePtr& inode, size_t byte, uint8_t mask, const std::string& who);

  // The server stops now, loses what it had not written down, and is back after `outage`.
  void Crash(Scheduler::Duration outage);
  // Network trouble: as long as it lasts no operation gets there; nothing is lost.
  void Unreachable(Scheduler::Duration outage);
  void SetFull(bool full);
  // What is not durable is lost (names are: they have had time). The end of a run uses it.
  void LoseUnsynced();

  // For a local disk: pages that a crash leaves in part are torn at sectors.
  void TearSectors() { tears_sectors_ = true; }
  // The names in this directory are as they are, also after a crash.
  void SyncNames(const InodePtr& directory);
  bool NameIsDurable(const std::string& path) const;
  // Some pages of the file get to where a crash leaves them. All pages of all files, in a while.
  void WriteBackSome(Inode& inode);
  void WriteBackLater();

  bool down() const { return scheduler_.Now() < down_until_; }
  TimePoint down_until() const { return down_until_; }
  bool full() const { return full_; }
  uint64_t epoch() const { return epoch_; }  // Counts crashes.

  // For views: at the server, now.
  InodePtr Create(bool is_directory);
  void SetEntry(const InodePtr& directory, const std::string& directory_path, const std::string& name, InodePtr inode,
                const std::string& who);
  int64_t ServerNs() const { return static_cast<int64_t>(scheduler_.WallNs()) + kClockSkewNs; }

 private:
  static constexpr int64_t kClockSkewNs = 3600ll * 1'000'000'000 * 5;  // Its clock is not the nodes'.
  struct Undo {
    TimePoint at;
    InodePtr directory;
    std::string directory_path, name;
    InodePtr before;
  };
  void WalkFrom(const InodePtr& directory, const std::string& path,
                const std::function<void(const std::string&, const InodePtr&)>& visit) const;

  Scheduler& scheduler_;
  SimLog& log_;
  Random random_;
  const std::string name_;
  bool tears_sectors_ = false;
  const InodePtr root_;
  std::vector<std::weak_ptr<Inode>> inodes_;  // All files, also those without a name.
  std::vector<Undo> undo_;                    // Changes of names that a crash may still take back, oldest first.
  TimePoint down_until_;
  bool full_ = false;
  uint64_t epoch_ = 0;
  uint64_t next_inode_ = 1;
};

class SimFile;

class SimFileIo final : public FileIo {
 public:
  static constexpr const char* kRoot = "/share";  // The mount point.

  SimFileIo(SimDisk& disk, Scheduler& scheduler, SimLog& log, std::string node, const FaultRates& rates, Random random);
  ~SimFileIo() override;

  // The node died: nothing it does from here on gets to the server, and of what it had not synced a part is lost.
  // Operations under way return at once.
  void Crash();
  bool crashed() const { return crashed_; }
  // Dies within the nth operation from now (before or after it takes effect), and calls `died` then.
  void CrashAfter(uint64_t operations, std::function<void()> died);

  // As if the share were unmounted: an empty local directory is seen in its place.
  void SetMounted(bool mounted);
  // All operations wait until then: a client that is stopped, or a network that stalls.
  void StallUntil(TimePoint until) { stalled_until_ = until; }
  // No more faults of its own making.
  void Heal();

  // For SimDiskIo: an operation of this process, as any other up to where it takes effect.
  Result<void> Operate(const char* operation, const std::string& path) { return Begin(operation, path); }

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode, uint32_t permissions = 0640) override;
  Result<FileStat> Stat(const std::string& path) override;
  Result<void> Link(const std::string& from, const std::string& to) override;
  Result<void> Rename(const std::string& from, const std::string& to) override;
  Result<void> Unlink(const std::string& path) override;
  Result<void> MakeDir(const std::string& path, uint32_t permissions = 0750) override;
  Result<std::vector<std::string>> List(const std::string& path) override;
  Result<Space> FreeSpace(const std::string& path) override;

 private:
  friend class SimFile;
  struct Place {
    InodePtr directory;
    std::string directory_path;  // Below the root.
    std::string name;
    InodePtr inode;  // Null: not there, as far as this client believes.
  };
  struct Attributes {
    FileStat stat;
    TimePoint until;
  };

  // Before an operation takes effect: time passes, and it may fail.
  Result<void> Begin(const char* operation, const std::string& path);
  // After it: time may pass, and the answer may be lost. `repeated`: errno that a repetition would get.
  Result<void> End(const char* operation, const std::string& path, int repeated = 0);
  void Pause(Scheduler::Duration most);  // Ends early if the node dies.
  bool Hits(double rate, const char* fault, const char* operation, const std::string& path);
  // Follows a path as this client sees it. ENOENT, ENOTDIR for what comes before the last name.
  Result<Place> Walk(const char* operation, const std::string& path);
  void ForgetNegative(const std::string& directory_path);
  FileStat StatOf(const Inode& inode) const;
  tl::unexpected<Error> Refuse(int os_error, const char* operation, const std::string& path) const;

  SimDisk& disk_;
  Scheduler& scheduler_;
  SimLog& log_;
  const std::string node_;
  FaultRates rates_;
  Random random_;
  bool crashed_ = false;
  bool mounted_ = true;
  InodePtr local_root_;  // What is seen while it is not mounted.
  TimePoint stalled_until_;
  uint64_t operations_ = 0;
  uint64_t crash_at_ = 0;  // Operation; 0: never.
  std::function<void()> died_;
  std::map<std::string, std::map<std::string, TimePoint>> negative_;  // By directory: names not there, until when.
  std::map<uint64_t, Attributes> attributes_;                         // By inode.
  std::map<uint64_t, SimFile*> writers_;                              // Open for writing, by number.
  uint64_t next_writer_ = 1;
};

}  // namespace terrace::sim
