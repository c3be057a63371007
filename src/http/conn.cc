#include "http/conn.h"

#include <netdb.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <boost/asio/as_tuple.hpp>
#include <boost/asio/co_spawn.hpp>
#include <boost/asio/post.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

namespace terrace::http {
namespace {

constexpr net::as_tuple_t<net::use_awaitable_t<LoopExecutor>> kToken{net::use_awaitable_t<LoopExecutor>{}};
constexpr size_t kReadBytes = 16 << 10;  // A burst of 64 events, or all of a usual prompt, in one read.

}  // namespace

void InBuffer::Use(size_t n) {
  begin_ += n;
  if (begin_ == end_) begin_ = end_ = 0;
}

bool InBuffer::MakeRoom(size_t bytes_max) {
  if (end_ < capacity_) return true;
  if (begin_ > 0) {
    std::memmove(data_.get(), data_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    return true;
  }
  if (capacity_ >= bytes_max) return false;
  const size_t capacity = std::max(kReadBytes, std::min(capacity_ * 2, bytes_max));
  std::unique_ptr<char[]> data(new char[capacity]);  // Not make_unique: it would write zeros.
  if (end_ > 0) std::memcpy(data.get(), data_.get(), end_);
  data_ = std::move(data);
  capacity_ = capacity;
  return true;
}

// These return the operation itself instead of being coroutines: no second frame.
Async<std::tuple<error_code>> Conn::Connect(net::ip::tcp::endpoint to) { return socket_.async_connect(to, kToken); }

Async<Io> Conn::Read(char* into, size_t size) {
  return socket_.async_read_some(net::mutable_buffer(into, size), kToken);
}

Async<Io> Conn::WriteSome(std::string_view a, std::string_view b) {
  const std::array<net::const_buffer, 2> buffers = {net::const_buffer(a.data(), a.size()),
                                                    net::const_buffer(b.data(), b.size())};
  return socket_.async_write_some(buffers, kToken);
}

Async<std::tuple<error_code>> Conn::WaitReadable() { return socket_.async_wait(Socket::wait_read, kToken); }

ssize_t Conn::TrySend(std::string_view a, std::string_view b) {
  std::array<iovec, 2> parts = {iovec{const_cast<char*>(a.data()), a.size()},
                                iovec{const_cast<char*>(b.data()), b.size()}};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t n;
  do {
    n = ::sendmsg(socket_.native_handle(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (n < 0 && errno == EINTR);
  return n >= 0 ? n : errno == EAGAIN || errno == EWOULDBLOCK ? 0 : -1;
}

bool Conn::Silent() {
  char c;
  return ::recv(socket_.native_handle(), &c, 1, MSG_PEEK | MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR);
}

bool Conn::PeerLeft() {
  char c;
  const ssize_t n = ::recv(socket_.native_handle(), &c, 1, MSG_PEEK | MSG_DONTWAIT);
  return n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR);
}

void Conn::Discard() {
  std::array<char, 4096> trash;
  for (int i = 0; i < 16 && ::recv(socket_.native_handle(), trash.data(), trash.size(), MSG_DONTWAIT) > 0; ++i) {
  }
}

void Conn::Close() {
  error_code ignored;
  socket_.close(ignored);
}

void Conn::CloseWithReset() {
  error_code ignored;
  socket_.set_option(net::socket_base::linger(true, 0), ignored);
  Close();
}

void Conn::CloseSending() {
  error_code ignored;
  socket_.shutdown(Socket::shutdown_send, ignored);
}

void Conn::Cancel() {
  error_code ignored;
  socket_.cancel(ignored);
}

void Conn::SetNoDelay() {
  error_code ignored;
  socket_.set_option(net::ip::tcp::no_delay(true), ignored);
}

void Event::Set() {
  set_ = true;
  timer_.cancel();
}

Async<void> Event::Wait() {
  while (!set_) {
    auto [error] = co_await timer_.async_wait(kToken);
    (void)error;  // Cancelled is what Set() does.
  }
  set_ = false;
}

Async<std::tuple<error_code, Socket>> Accept(Acceptor& acceptor, Loop& loop_of_socket) {
  const LoopExecutor executor = loop_of_socket.get_executor();
  return acceptor.async_accept(executor, kToken);
}

Async<void> SleepOn(Timer& timer, std::chrono::milliseconds time) {
  timer.expires_after(time);
  auto [error] = co_await timer.async_wait(kToken);
  (void)error;
}

void Spawn(Loop& loop, Async<void> coroutine) {
  net::co_spawn(loop.get_executor(), std::move(coroutine), [](std::exception_ptr exception) {
    if (!exception) return;
    try {
      std::rethrow_exception(exception);
    } catch (const std::exception& e) {
      std::fprintf(stderr, "http: exception left a coroutine: %s\n", e.what());
    }
    std::abort();
  });
}

void PostTo(Loop& loop, std::function<void()> fn) { net::post(loop, std::move(fn)); }

std::optional<net::ip::tcp::endpoint> ParseEndpoint(const std::string& address, uint16_t port) {
  error_code error;
  const net::ip::address parsed = net::ip::make_address(address, error);
  if (error) return std::nullopt;
  return net::ip::tcp::endpoint(parsed, port);
}

Result<std::unique_ptr<Acceptor>> Listen(Loop& loop, const std::string& host, uint16_t port) {
  const std::string shown =
      (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  const int rc = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (rc != 0) {
    return Fail(Code::kInvalid, "listen on " + shown + ": no address for this host: " + ::gai_strerror(rc));
  }
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> list(found, &::freeaddrinfo);
  // Of a name with both kinds of address, as localhost mostly is, the one of IPv4: clients are mostly told that.
  const addrinfo* chosen = list.get();
  while (chosen != nullptr && chosen->ai_family != AF_INET) chosen = chosen->ai_next;
  if (chosen == nullptr) chosen = list.get();
  net::ip::tcp::endpoint endpoint;
  endpoint.resize(chosen->ai_addrlen);
  std::memcpy(endpoint.data(), chosen->ai_addr, chosen->ai_addrlen);

  auto acceptor = std::make_unique<Acceptor>(loop.get_executor());
  error_code error;
  acceptor->open(endpoint.protocol(), error);
  // Not SO_REUSEPORT: it would let a second program share the port in silence.
  if (!error) acceptor->set_option(net::socket_base::reuse_address(true), error);
  if (!error) acceptor->bind(endpoint, error);
  if (!error) acceptor->listen(net::socket_base::max_listen_connections, error);
  if (error) {
    const bool taken = error == net::error::address_in_use;
    return Fail(taken ? Code::kInvalid : Code::kIo,
                "listen on " + shown + ": " +
                    (taken ? "the port is taken: stop the other program or choose another --port" : error.message()),
                error.value());
  }
  return acceptor;
}

}  // namespace terrace::http
