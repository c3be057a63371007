// The directory of a disk tier as files: its layout and names, and what to refuse. Synchronous, on the caller's thread.
//
//   ROOT/terrace.lock                   Held by the process that has the directory; its number, for people.
//   ROOT/terrace.format                 Kind and version; a directory without it is laid out anew.
//   ROOT/frames/<2 hex>/<64 hex>.kvf    A frame a file, by its key.
//   ROOT/tmp/<n>.tmp                    Frames being written.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "io/disk_io.h"
#include "io/file_io.h"
#include "terrace/key.h"
#include "terrace/result.h"

namespace terrace {

class DiskDir {
 public:
  struct Options {
    std::string root;
    uint32_t file_permissions = 0640;
    uint32_t directory_permissions = 0750;
  };
  DiskDir(Options options, FileIo& files, DiskIo& io) : options_(std::move(options)), files_(files), io_(io) {}

  // Checks and locks the directory, until this is destroyed, and makes what is missing in it, durably.
  Result<void> Join();
  Result<void> MakeLayout();
  // Does its file system read and write past the page cache? After Join.
  bool DirectIo() const;
  // Asks the disk, not the page cache, whether it answers.
  Result<void> Probe();
  // Would it take so many bytes more, if `own_bytes` of those there yield? Writes a file without content.
  Result<void> ProbeSave(uint64_t bytes, uint64_t own_bytes);

  const std::string& root() const { return options_.root; }
  std::string FanOutPath(size_t fan_out) const;
  std::string FramePath(const Digest& key) const;
  std::string TempPath(uint64_t n) const { return Path("tmp/") + std::to_string(n) + ".tmp"; }
  uint32_t file_permissions() const { return options_.file_permissions; }

  // A directory that has the name of a frame, with all in it: to ROOT/set-aside.<key>.<stamp>, for people.
  Result<void> MoveAway(const Digest& key, uint64_t stamp);

  // Removes what a process that was killed left in tmp/.
  Result<void> RemoveTemps();

  struct Listing {
    std::vector<std::pair<Digest, FileStat>> frames;
    std::vector<std::string> foreign;  // Names that this tier never gives.
  };
  Result<Listing> ListFrames(size_t fan_out);
  // Foreign names beside those in the fan-out directories.
  std::vector<std::string> ListForeign();

 private:
  std::string Path(const std::string& name) const { return options_.root + "/" + name; }
  tl::unexpected<Error> Refuse(Error error) const;
  Result<bool> ReadFormat();  // False: there is none.
  Result<void> WriteFormat();
  Result<void> Sync(const std::string& directory);
  Result<size_t> Do(DiskOp op);  // Waits.

  const Options options_;
  FileIo& files_;
  DiskIo& io_;
  std::shared_ptr<void> lock_;
};

}  // namespace terrace
