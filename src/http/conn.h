// The only header that names asio: an asynchronous result, a connection, an event, a loop. All asio templates are
// instantiated in conn.cc, which is why the other units compile in seconds.
//
// Rules for every coroutine of this folder (docs/internals/http.md says why):
//   - one that is spawned takes shared_ptr by value; one that is only awaited by its owner may take references;
//   - errors are values: nothing throws across co_await;
//   - one co_await per statement, its arguments already in locals;
//   - it is stopped by closing or cancelling the socket it waits on, from the thread of its loop.
#pragma once

#include <sys/types.h>

#include <array>
#include <boost/asio/awaitable.hpp>
#include <boost/asio/basic_waitable_timer.hpp>
#include <boost/asio/io_context.hpp>
#include <boost/asio/ip/tcp.hpp>
#include <boost/system/error_code.hpp>
#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>

#include "terrace/result.h"

namespace terrace::http {

namespace net = boost::asio;
using boost::system::error_code;
using Loop = net::io_context;
using LoopExecutor = Loop::executor_type;  // The concrete type: any_io_executor costs a fifth more compile time.
template <class T>
using Async = net::awaitable<T, LoopExecutor>;
using Socket = net::basic_stream_socket<net::ip::tcp, LoopExecutor>;
using Acceptor = net::basic_socket_acceptor<net::ip::tcp, LoopExecutor>;
using Timer =
    net::basic_waitable_timer<std::chrono::steady_clock, net::wait_traits<std::chrono::steady_clock>, LoopExecutor>;
using Io = std::tuple<error_code, size_t>;

// Bytes that arrived and were not taken yet. Grows when a head does not fit.
class InBuffer {
 public:
  std::string_view bytes() const { return {data_.get() + begin_, end_ - begin_}; }
  bool empty() const { return begin_ == end_; }
  void Use(size_t n);
  // Room for at least one more byte, or false: `bytes_max` wait already.
  bool MakeRoom(size_t bytes_max);
  char* room() { return data_.get() + end_; }
  size_t room_size() const { return capacity_ - end_; }
  void Add(size_t n) { end_ += n; }

 private:
  std::unique_ptr<char[]> data_;
  size_t capacity_ = 0, begin_ = 0, end_ = 0;
};

// A TCP connection of one loop.
class Conn {
 public:
  explicit Conn(Loop& loop) : socket_(loop.get_executor()) {}
  explicit Conn(Socket socket) : socket_(std::move(socket)) {}

  Async<std::tuple<error_code>> Connect(net::ip::tcp::endpoint to);
  Async<Io> Read(char* into, size_t size);
  Async<Io> WriteSome(std::string_view a, std::string_view b);
  Async<std::tuple<error_code>> WaitReadable();

  // At once, what the socket takes of a and then b: bytes, 0 if it takes none now, -1 if the connection is broken.
  ssize_t TrySend(std::string_view a, std::string_view b);
  bool Silent();    // Open, and nothing to read.
  bool PeerLeft();  // The peer closed, half-closed or reset.
  void Discard();   // What has arrived and was not read.
  void Close();
  void CloseWithReset();  // The peer sees an error, not an end.
  void CloseSending();    // The peer sees the end; reading goes on.
  void Cancel();          // Wakes whoever waits on this connection.
  void SetNoDelay();

 private:
  Socket socket_;
};

// Wakes one coroutine of its loop. Set on the loop's thread.
class Event {
 public:
  explicit Event(Loop& loop) : timer_(loop.get_executor(), Timer::time_point::max()) {}
  void Set();
  // Returns once set since the last return. The caller looks for itself at what happened.
  Async<void> Wait();

 private:
  Timer timer_;
  bool set_ = false;
};

Async<std::tuple<error_code, Socket>> Accept(Acceptor& acceptor, Loop& loop_of_socket);
Async<void> SleepOn(Timer& timer, std::chrono::milliseconds time);  // Ends early when the timer is cancelled.
void Spawn(Loop& loop, Async<void> coroutine);                      // Aborts on an exception: a bug of ours.
void PostTo(Loop& loop, std::function<void()> fn);

// Listens; a taken port is an error that names it. `port` 0: any free one.
Result<std::unique_ptr<Acceptor>> Listen(Loop& loop, const std::string& host, uint16_t port);

std::optional<net::ip::tcp::endpoint> ParseEndpoint(const std::string& address, uint16_t port);

}  // namespace terrace::http
