#include "client/packet_socket.h"

#include <fcntl.h>
#include <grp.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <filesystem>
#include <optional>

#include "client/wire.h"
#include "io/directory_lock.h"

namespace terrace {
namespace {

constexpr int kBacklog = 1024;  // All engines of a host may start at once.

Result<Fd> NewSocket() {
  Fd fd(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd) return Fail(Code::kIo, std::string("socket: ") + std::strerror(errno), errno);
  return fd;
}

bool HasFile(const std::string& path) { return path.front() != '@'; }

struct Address {
  sockaddr_un at{};
  socklen_t length = sizeof(sockaddr_un);
  // The interface of sockets speaks of sockaddr.
  const sockaddr* any() const { return reinterpret_cast<const sockaddr*>(&at); }
};

Result<Address> AddressOf(const std::string& path) {
  Address address;
  address.at.sun_family = AF_UNIX;
  if (path.empty() || path.size() >= sizeof address.at.sun_path) {
    return Fail(Code::kInvalid, "socket " + path + ": a path has 1 to " +
                                    std::to_string(sizeof address.at.sun_path - 1) + " characters");
  }
  path.copy(address.at.sun_path, path.size());
  if (!HasFile(path)) {
    address.at.sun_path[0] = 0;
    address.length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  }
  return address;
}

std::string FolderOf(const std::string& path) { return std::filesystem::absolute(path).parent_path().string(); }

// One process at a time looks who listens at a path and puts its own socket there, by a lock of the folder. Others hold
// it for a millisecond; who holds it for ever is no node, and is not waited for.
constexpr std::chrono::seconds kLockMax{5};

// Leaves nothing at the path, or an error and what is there.
Result<void> ClearDeadSocket(const std::string& path) {
  const std::string attempt = "listen " + path + ": ";
  struct stat file{};
  if (HasFile(path)) {
    if (lstat(path.c_str(), &file) != 0) {
      if (errno == ENOENT) return {};
      return Fail(Code::kIo, attempt + std::strerror(errno), errno);
    }
    if (!S_ISSOCK(file.st_mode)) {
      return Fail(Code::kInvalid,
                  attempt + "what is there is no socket, and is left alone; remove it, or name another path");
    }
  }
  const Result<Fd> other = ConnectTo(path);
  if (other || other.error().os_error == EAGAIN) return Fail(Code::kInvalid, attempt + "another node is there");
  switch (other.error().os_error) {
    case ECONNREFUSED: break;
    case EPROTOTYPE: return Fail(Code::kInvalid, attempt + "another program listens there; name another path");
    default: return Fail(Code::kIo, attempt + "is a node there? " + other.error().what, other.error().os_error);
  }
  if (HasFile(path) && unlink(path.c_str()) != 0 && errno != ENOENT) {
    return Fail(Code::kIo, attempt + "remove the socket of a node that is gone: " + std::strerror(errno), errno);
  }
  return {};
}

}  // namespace

Fd& Fd::operator=(Fd&& other) noexcept {
  std::swap(fd_, other.fd_);
  return *this;
}

Fd::~Fd() {
  if (fd_ >= 0) close(fd_);
}

std::shared_ptr<Mapping> Mapping::Map(int fd, size_t bytes, bool writable) {
  void* at = mmap(nullptr, bytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (at == MAP_FAILED) return nullptr;
  madvise(at, bytes, MADV_DONTDUMP);  // Users' KV does not belong in core files.
  return std::shared_ptr<Mapping>(new Mapping({static_cast<std::byte*>(at), bytes}));
}

Mapping::~Mapping() { munmap(bytes_.data(), bytes_.size()); }

Result<Fd> NewSharedMemory(const char* name, size_t bytes) {
  Fd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd || ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 ||
      fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return Fail(Code::kIo, std::string("memfd ") + name + ": " + std::strerror(errno), errno);
  }
  return fd;
}

Result<Fd> ConnectTo(const std::string& path) {
  const Result<Address> address = AddressOf(path);
  if (!address) return tl::unexpected(address.error());
  Result<Fd> fd = NewSocket();
  if (!fd) return fd;
  // Room for the largest message, whatever the system's default is.
  const int room = 2 * wire::kMessageBytesMax;
  setsockopt(fd->get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
  if (connect(fd->get(), address->any(), address->length) != 0) {
    return Fail(Code::kUnavailable, "connect " + path + ": " + std::strerror(errno), errno);
  }
  return fd;
}

SocketFile::SocketFile(std::string path) {
  struct stat file{};
  if (!HasFile(path) || lstat(path.c_str(), &file) != 0) return;
  path_ = std::move(path);
  inode_ = {file.st_dev, file.st_ino};
}

void SocketFile::Remove() {
  const std::string path = std::exchange(path_, "");
  if (path.empty()) return;
  const DirectoryLock lock(FolderOf(path), kLockMax);
  struct stat file{};
  if (lstat(path.c_str(), &file) == 0 && inode_ == std::pair(file.st_dev, file.st_ino)) unlink(path.c_str());
}

Result<Listener> ListenAt(const std::string& path) {
  const Result<Address> address = AddressOf(path);
  if (!address) return tl::unexpected(address.error());
  Result<Fd> fd = NewSocket();
  if (!fd) return tl::unexpected(fd.error());
  std::optional<DirectoryLock> lock;
  if (HasFile(path)) lock.emplace(FolderOf(path), kLockMax);
  if (Result<void> cleared = ClearDeadSocket(path); !cleared) return tl::unexpected(cleared.error());
  // The file is made with these permissions: nobody slips in before they are set. Before threads start.
  const mode_t mask = umask(0117);
  const int bound = bind(fd->get(), address->any(), address->length);
  const int why = errno;
  umask(mask);
  if (bound != 0) {
    const std::string hint = why == ENOENT ? "; make the folder " + FolderOf(path) : "";
    return Fail(Code::kIo, "listen " + path + ": " + std::strerror(why) + hint, why);
  }
  if (listen(fd->get(), kBacklog) != 0) {
    const int refused = errno;
    if (HasFile(path)) unlink(path.c_str());
    return Fail(Code::kIo, "listen " + path + ": " + std::strerror(refused), refused);
  }
  return Listener{.fd = *std::move(fd), .file = SocketFile(path)};
}

bool MayBeAnybodys(const std::string& path) {
  if (!HasFile(path)) return true;
  struct stat folder{};
  return stat(std::filesystem::absolute(path).parent_path().c_str(), &folder) != 0 || (folder.st_mode & S_IWOTH) != 0;
}

bool IsOneOf(const Peer& peer, uid_t user, gid_t group) {
  return peer.uid == 0 || peer.uid == user || peer.gid == group ||
         std::ranges::find(peer.groups, group) != peer.groups.end();
}

bool PeerIsOurs(int fd) {
  ucred credentials{};
  socklen_t length = sizeof credentials;
  if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &length) != 0) return false;
  Peer peer{.uid = credentials.uid, .gid = credentials.gid, .groups = std::vector<gid_t>(64)};
  for (;;) {
    length = static_cast<socklen_t>(peer.groups.size() * sizeof(gid_t));
    const bool read = getsockopt(fd, SOL_SOCKET, SO_PEERGROUPS, peer.groups.data(), &length) == 0;
    const bool more = !read && errno == ERANGE && length > peer.groups.size() * sizeof(gid_t);
    peer.groups.resize(read || more ? length / sizeof(gid_t) : 0);
    if (!more) return IsOneOf(peer, geteuid(), getegid());
  }
}

Sent SendMessage(int fd, std::span<const std::byte> message, int passed) {
  iovec part{.iov_base = const_cast<std::byte*>(message.data()), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  if (passed >= 0) {
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    cmsghdr* rights = CMSG_FIRSTHDR(&header);
    rights->cmsg_level = SOL_SOCKET;
    rights->cmsg_type = SCM_RIGHTS;
    rights->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(rights), &passed, sizeof passed);
  }
  ssize_t sent = 0;
  do {
    sent = sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent == static_cast<ssize_t>(message.size())) return Sent::kYes;
  return sent < 0 && (errno == EAGAIN || errno == ENOBUFS) ? Sent::kLater : Sent::kBroken;
}

Received ReceiveMessage(int fd, std::vector<std::byte>& message, Fd& passed) {
  message.resize(wire::kMessageBytesMax);
  iovec part{.iov_base = message.data(), .iov_len = message.size()};
  msghdr header{};
  header.msg_iov = &part;
  header.msg_iovlen = 1;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  header.msg_control = control;
  header.msg_controllen = sizeof control;
  ssize_t got = 0;
  do {
    got = recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  } while (got < 0 && errno == EINTR);
  if (got < 0) return errno == EAGAIN ? Received::kNothing : Received::kBroken;
  if (const cmsghdr* rights = CMSG_FIRSTHDR(&header);
      rights != nullptr && rights->cmsg_level == SOL_SOCKET && rights->cmsg_type == SCM_RIGHTS) {
    const size_t count = (rights->cmsg_len - CMSG_LEN(0)) / sizeof(int);  // Padding has room for a second one.
    for (size_t i = 0; i < count; ++i) {
      int one = -1;
      std::memcpy(&one, CMSG_DATA(rights) + i * sizeof one, sizeof one);
      Fd owned(one);
      if (i == 0) passed = std::move(owned);
    }
  }
  if (got == 0 || (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) != 0) return Received::kBroken;
  message.resize(static_cast<size_t>(got));
  return Received::kMessage;
}

}  // namespace terrace
