// HTTP/1.1 server for the engine and the metrics endpoint. Plain types only: no asio or Beast here.
//
// Reactor threads run connections; a handler runs on one of them and must not block: it answers through its Responder,
// at once or later from any thread.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "terrace/result.h"

namespace terrace::http {

class Reactor;

using Headers = std::vector<std::pair<std::string, std::string>>;

struct Request {
  std::string method;  // "POST".
  std::string path;    // Without the query.
  std::string query;   // After '?', raw.
  Headers headers;     // As received.
  std::string body;    // Whole.
  // First value of a header, any case; "" if absent.
  std::string_view Header(std::string_view name) const;
  // The Content-Encoding, if the body's bytes are not the text itself; else "".
  std::string_view BodyCoding() const;
};

// The answer to one request. Thread-safe; kept by whoever answers. Destroyed unanswered: a 500.
class Responder {
 public:
  virtual ~Responder() = default;
  // The whole answer, with Content-Length.
  virtual void Send(int status, Headers headers, std::string body) = 0;
  // A streamed answer: Begin once, Write any number of times (each piece goes out as soon as the socket takes it), End
  // once.
  virtual void Begin(int status, Headers headers) = 0;
  // False: the client is gone, or it is so slow that more than Options::unsent_bytes_max wait; stop producing.
  virtual bool Write(std::string piece) = 0;
  virtual void End() = 0;
  // The client left. `fn` runs once, on a reactor thread or, if it left before, at once; never after End or Send.
  virtual void OnGone(std::function<void()> fn) = 0;
  virtual bool gone() const = 0;
};

using Handler = std::function<void(Request, std::shared_ptr<Responder>)>;

struct Options {
  std::string host = "127.0.0.1";
  uint16_t port = 0;  // 0: any free one.
  size_t threads = 1;
  size_t header_bytes_max = 64 << 10;  // Above: 431.
  size_t body_bytes_max = 64 << 20;    // Above: 413.
  size_t bodies_bytes_max = 1 << 30;   // Of all that arrive or are being answered. Above: 503.
  size_t connections_max = 4096;       // Above: 503 and close.
  size_t unsent_bytes_max = 4 << 20;   // Per connection.
  std::chrono::milliseconds idle_timeout{75000};
  std::chrono::milliseconds read_timeout{60000};   // Progress while a request arrives.
  std::chrono::milliseconds write_timeout{60000};  // Progress while the client reads.
};

// For metrics and tests; all 0 once the server has stopped.
struct ServerStats {
  int64_t connections = 0;  // Of clients.
  int64_t watchers = 0;     // Answers being waited for, with an eye on the client.
  int64_t upstreams = 0;    // Connections to backends, idle ones included.
};

class Server {
 public:
  // Listens at once. Port taken: an error that says which.
  static Result<std::unique_ptr<Server>> Start(Options options, Handler handler);
  virtual ~Server() = default;  // Stop().
  virtual uint16_t port() const = 0;
  virtual ServerStats stats() const = 0;
  // Refuses new connections and requests, and waits for running answers until the deadline. What then still runs ends
  // within another second: with a 503 if no byte of it was sent; a forwarded event stream with an event that carries an
  // error. True: none was cut.
  virtual bool Drain(std::chrono::milliseconds deadline) = 0;
  virtual void Stop() = 0;
  // Runs `fn` on a reactor's thread, unless that stops before. From any thread; for this folder.
  virtual void Post(std::function<void(Reactor&)> fn) = 0;
};

}  // namespace terrace::http
