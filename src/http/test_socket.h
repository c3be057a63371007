// For tests: blocking sockets with a deadline, so that a broken server fails a test instead of hanging it.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/assert.h"

namespace terrace::http {

inline constexpr std::chrono::seconds kTestPatience{20};

// What one thread waits for and another says.
class TestFlag {
 public:
  void Set() {
    std::lock_guard lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  bool Wait(std::chrono::milliseconds patience = kTestPatience) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, patience, [&] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

// Waits until `condition` holds. For states that nobody announces, such as counters.
inline bool Eventually(const std::function<bool()>& condition) {
  const auto until = std::chrono::steady_clock::now() + kTestPatience;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > until) return false;
    std::this_thread::yield();
    ::usleep(1000);
  }
  return true;
}

struct TestAnswer {
  int status = 0;
  std::string head;    // With its empty line, lower case.
  std::string body;    // Without chunks.
  bool whole = false;  // It ended as its head said.
  bool Has(std::string_view lower_case_line) const {
    return head.find("\r\n" + std::string(lower_case_line) + "\r\n") != std::string::npos;
  }
};

class TestSocket {
 public:
  explicit TestSocket(int fd) : fd_(fd) {
    const timeval patience{kTestPatience.count(), 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    ::setsockopt(fd_, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    const int one = 1;
    ::setsockopt(fd_, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  }
  static TestSocket Dial(uint16_t port) {
    const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(port);
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    TestSocket socket(fd);
    socket.connected_ = ::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    return socket;
  }
  TestSocket(TestSocket&& other) noexcept
      : fd_(std::exchange(other.fd_, -1)), connected_(other.connected_), in_(std::move(other.in_)) {}
  TestSocket& operator=(TestSocket&&) = delete;
  ~TestSocket() { Close(); }

  bool connected() const { return connected_; }
  int fd() const { return fd_; }  // -1 once closed.
  bool SendAll(std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = ::send(fd_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }
  void Close() {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }
  void Reset() {
    const linger hard{1, 0};
    ::setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    Close();
  }
  void CloseSending() { ::shutdown(fd_, SHUT_WR); }
  // Appends what comes to the buffer. False: the peer closed, or patience is over.
  bool More() {
    char piece[16384];
    const ssize_t n = ::recv(fd_, piece, sizeof piece, 0);
    if (n <= 0) return false;
    in_.append(piece, static_cast<size_t>(n));
    return true;
  }
  // Bytes up to and with `end`; "" if they do not come.
  std::string Until(std::string_view end) {
    size_t at;
    while ((at = in_.find(end)) == std::string::npos) {
      if (!More()) return {};
    }
    return Take(at + end.size());
  }
  std::string Exactly(size_t n) {
    while (in_.size() < n) {
      if (!More()) return {};
    }
    return Take(n);
  }
  // All that comes until the peer closes.
  std::string Rest() {
    while (More()) {
    }
    return Take(in_.size());
  }
  // True once the peer closed; false if it does not.
  bool PeerCloses() {
    char c;
    for (;;) {
      const ssize_t n = ::recv(fd_, &c, 1, 0);
      if (n == 0 || (n < 0 && errno != EAGAIN)) return true;
      if (n < 0) return false;
    }
  }
  TestAnswer ReadAnswer(bool to_head = false) {
    TestAnswer answer;
    answer.head = Until("\r\n\r\n");
    std::transform(answer.head.begin(), answer.head.end(), answer.head.begin(),
                   [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
    if (answer.head.size() < 12) return answer;
    answer.status = static_cast<int>(std::strtol(answer.head.c_str() + 9, nullptr, 10));
    if (to_head || answer.status / 100 == 1) {
      answer.whole = true;
    } else if (answer.Has("transfer-encoding: chunked")) {
      ReadChunks(answer);
    } else if (const size_t at = answer.head.find("\r\ncontent-length: "); at != std::string::npos) {
      const size_t length = std::strtoull(answer.head.c_str() + at + 18, nullptr, 10);
      answer.body = Exactly(length);
      answer.whole = answer.body.size() == length;
    } else {
      answer.body = Rest();
      answer.whole = true;
    }
    return answer;
  }
  // The next chunk's bytes; "" at the end or if it does not come whole.
  std::string ReadChunk() {
    const std::string line = Until("\r\n");
    const size_t size = std::strtoull(line.c_str(), nullptr, 16);
    const std::string bytes = Exactly(size + 2);
    return bytes.size() < 2 ? std::string() : bytes.substr(0, size);
  }

 private:
  void ReadChunks(TestAnswer& answer) {
    for (;;) {
      const std::string line = Until("\r\n");
      if (line.empty()) return;
      const size_t size = std::strtoull(line.c_str(), nullptr, 16);
      const std::string bytes = Exactly(size + 2);
      if (bytes.size() != size + 2 || bytes.substr(size) != "\r\n") return;
      if (size == 0) {
        answer.whole = true;
        return;
      }
      answer.body.append(bytes, 0, size);
    }
  }
  std::string Take(size_t n) {
    std::string taken = in_.substr(0, n);
    in_.erase(0, n);
    return taken;
  }

  int fd_;
  bool connected_ = false;
  std::string in_;
};

// Listens on a free port and runs `serve` for each connection, on a thread of its own.
class TestBackend {
 public:
  explicit TestBackend(std::function<void(TestSocket&)> serve) : serve_(std::move(serve)) {
    listener_ = ::socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const bool listens =
        ::bind(listener_, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0 && ::listen(listener_, 256) == 0;
    TERRACE_ASSERT(listens);
    socklen_t size = sizeof address;
    ::getsockname(listener_, reinterpret_cast<sockaddr*>(&address), &size);
    port_ = ntohs(address.sin_port);
    thread_ = std::thread([this] { Accept(); });
  }
  ~TestBackend() { Stop(); }
  uint16_t port() const { return port_; }
  // Refuses from now on; the connections that are there end as `serve` does.
  void Stop() {
    if (!thread_.joinable()) return;
    ::shutdown(listener_, SHUT_RDWR);
    thread_.join();
    ::close(listener_);
    for (std::thread& t : serving_) t.join();
    serving_.clear();
  }

 private:
  void Accept() {
    for (int fd; (fd = ::accept(listener_, nullptr, nullptr)) >= 0;) {
      serving_.emplace_back([this, fd] {
        TestSocket socket(fd);
        serve_(socket);
      });
    }
  }

  std::function<void(TestSocket&)> serve_;
  int listener_ = -1;
  uint16_t port_ = 0;
  std::vector<std::thread> serving_;  // The accepting thread's; after it is joined, Stop's.
  std::thread thread_;
};

}  // namespace terrace::http
