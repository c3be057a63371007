// Unix sockets that keep the bounds of messages (SOCK_SEQPACKET), never block, and carry a descriptor with a message.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terrace/result.h"

namespace terrace {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept;
  ~Fd();
  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }

 private:
  int fd_ = -1;
};

// Shared memory of another process, or for one. Unmapped at the end.
class Mapping {
 public:
  static std::shared_ptr<Mapping> Map(int fd, size_t bytes, bool writable);  // Null if the system refuses.
  ~Mapping();
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  std::span<std::byte> bytes() const { return bytes_; }

 private:
  explicit Mapping(std::span<std::byte> bytes) : bytes_(bytes) {}
  const std::span<std::byte> bytes_;
};

// A memfd of `bytes`, without pages yet, that nobody can make shorter or longer.
Result<Fd> NewSharedMemory(const char* name, size_t bytes);

// The file by which clients find a listener. Removed with this, if it is still that listener's, which must be open yet:
// the number of its file is nobody else's until then.
class SocketFile {
 public:
  SocketFile() = default;  // None.
  explicit SocketFile(std::string path);
  SocketFile(SocketFile&& other) noexcept { std::swap(path_, other.path_), std::swap(inode_, other.inode_); }
  SocketFile& operator=(SocketFile&&) = delete;
  ~SocketFile() { Remove(); }
  void Remove();

 private:
  std::string path_;  // "": none, or removed.
  std::pair<dev_t, ino_t> inode_;
};
struct Listener {
  Fd fd;
  SocketFile file;  // After fd: it goes first.
};

// Creates the socket file, for owner and group. A socket that nobody listens on is replaced; one that somebody does,
// and any other kind of file, is an error and stays as it is. Of two that come at once one is told that the other is
// there.
// `@name` has no file: it is a name of this host's (of its network namespace), gone with who listens.
Result<Listener> ListenAt(const std::string& path);
Result<Fd> ConnectTo(const std::string& path);
// Anybody on this host could have been there first: it has no file, or one where all may make files.
bool MayBeAnybodys(const std::string& path);
// Who is on the other side is one of us: our user, root, or a member of our group.
bool PeerIsOurs(int fd);
struct Peer {
  uid_t uid = 0;
  gid_t gid = 0;
  std::vector<gid_t> groups;  // The others.
};
bool IsOneOf(const Peer& peer, uid_t user, gid_t group);

enum class Sent { kYes, kLater, kBroken };
Sent SendMessage(int fd, std::span<const std::byte> message, int passed = -1);

enum class Received { kMessage, kNothing, kBroken };  // kBroken: the peer is gone, or sends what is no message.
Received ReceiveMessage(int fd, std::vector<std::byte>& message, Fd& passed);

}  // namespace terrace
