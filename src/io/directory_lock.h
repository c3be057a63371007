// One process at a time, by a lock of a directory that is there anyway: no file is made or left behind for it.
#pragma once

#include <chrono>
#include <string>

namespace terrace {

class DirectoryLock {
 public:
  // Waits for `wait` at most. Who does not get it by then, or may not open the directory, goes on without.
  DirectoryLock(const std::string& directory, std::chrono::milliseconds wait);
  ~DirectoryLock();
  DirectoryLock(const DirectoryLock&) = delete;
  DirectoryLock& operator=(const DirectoryLock&) = delete;

 private:
  const int fd_;
};

}  // namespace terrace
