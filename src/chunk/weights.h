// The content digest of weights: SHA-256 of all bytes of a file, computed in the background, kept in a cache folder by
// the file's identity (device, inode, size, mtime and ctime in nanoseconds), so that the next start knows it at once.
// No sampling: a fine-tune may change one layer.
#pragma once

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

  // Nothing while it is being computed, or if that failed.
  std::optional<Digest> Get() const;
  // Blocks until it is known.
  Result<Digest> Wait() const;

 private:
  WeightsDigest() = default;

  mutable std::mutex mutex_;
  mutable std::condition_variable known_;
  std::optional<Result<Digest>> result_;  // Guarded by mutex_.
  bool stop_ = false;                     // Guarded by mutex_.
  std::thread thread_;
};

// $XDG_CACHE_HOME/terrace/digests, or ~/.cache/terrace/digests; "" without a home.
std::string DefaultDigestCacheDir();

}  // namespace terrace
