// The content digest of weights: SHA-256 of all bytes of a file, computed in the background, kept in a cache folder by
// the file's identity (device, inode, size, mtime and ctime in nanoseconds), so that the next start knows it at once.
// An identity that may be another file's by then is not kept (LastingIdentity). No sampling: a fine-tune may change one
// layer.
#pragma once

#include <sys/stat.h>

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "terrace/key.h"
#include "terrace/result.h"

namespace terrace {

class WeightsDigest {
 public:
  // Starts at once. `cache_dir` is made if missing; "" or one that can't be written: the digest is computed each time.
  static std::shared_ptr<WeightsDigest> Start(std::string path, std::string cache_dir);
  ~WeightsDigest();  // Stops the hashing.
  WeightsDigest(const WeightsDigest&) = delete;
  WeightsDigest& operator=(const WeightsDigest&) = delete;

  // Nothing while it is being computed, if that failed, or once the file is not what it was at the start.
  std::optional<Digest> Get() const;
  // That the file is still what it was at the start, by its identity. Once it is not, it never is again: an engine that
  // maps the file may have computed with other bytes. Logs that once.
  bool Intact() const;
  // Blocks until it is known.
  Result<Digest> Wait() const;

 private:
  WeightsDigest() = default;

  mutable std::mutex mutex_;
  mutable std::condition_variable known_;
  std::string path_, identity_;           // Set by Start. identity_ "": there was no file.
  std::optional<Result<Digest>> result_;  // Guarded by mutex_.
  mutable bool changed_ = false;          // Guarded by mutex_.
  bool stop_ = false;                     // Guarded by mutex_.
  std::thread thread_;
};

// Whether a file's identity names its bytes at the next start, too. `filesystem_type` is the one of statfs(2). On FUSE
// inodes may be counted anew with each mount. And files of one size and inode are told apart by their times: where
// these are whole seconds, by nothing.
bool LastingIdentity(const struct stat& st, long filesystem_type);

// $XDG_CACHE_HOME/terrace/digests, or ~/.cache/terrace/digests; "" without a home.
std::string DefaultDigestCacheDir();

}  // namespace terrace
