// A streaming reverse proxy for handlers of a Server, and a client for small questions. Plain types only.
//
// The handler has the whole request in hand, decides where it may go, and calls Forward: the answer of a backend then
// flows to the client as it comes. A client that leaves closes the connection to the backend, at once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "http/server.h"

namespace terrace::http {

// A server that requests go to. Thread-safe; held by shared_ptr.
class Backend {
 public:
  // `host`: a name or an address, IPv6 without brackets.
  Backend(std::string host, uint16_t port);
  ~Backend();
  Backend(const Backend&) = delete;
  Backend& operator=(const Backend&) = delete;

  const std::string& authority() const { return authority_; }  // "vllm:8000", "[::1]:8000": what Host says.
  uint16_t port() const { return port_; }
  // Requests that are with this backend now.
  int64_t in_flight() const { return in_flight_.load(std::memory_order_relaxed); }

  // True: the addresses are known. False: they are being looked up, on a thread of its own; `done` is called from some
  // thread once that ended, well or not.
  bool Resolve(std::function<void()> done);
  std::vector<std::string> addresses() const;  // As far as known.
  void Forget();                               // None of them answered: the next Resolve asks again.

  // Counts a request for as long as it lives.
  class InFlight {
   public:
    explicit InFlight(Backend& backend) : backend_(backend) { backend_.in_flight_.fetch_add(1); }
    ~InFlight() { backend_.in_flight_.fetch_sub(1); }
    InFlight(const InFlight&) = delete;
    InFlight& operator=(const InFlight&) = delete;

   private:
    Backend& backend_;
  };

 private:
  void LookUp();

  const std::string host_;
  const uint16_t port_;
  const std::string authority_;
  std::atomic<int64_t> in_flight_{0};  // Relaxed reads: a figure for people and policies.

  mutable std::mutex mutex_;                    // Guards what follows.
  std::vector<std::string> addresses_;          // Numeric.
  bool stale_ = true;                           // Ask again before the next connection.
  bool looking_up_ = false;                     // A thread is at it.
  std::vector<std::function<void()>> waiting_;  // Called when it is through.

  std::mutex thread_mutex_;
  std::thread thread_;  // Guarded by thread_mutex_; looks the name up.
};

// How an attempt to have a request answered ended.
enum class Ended {
  kAnswered,     // The whole answer went to the client.
  kClientLeft,   // Before that.
  kUnreachable,  // No connection.
  kDied,         // The request was sent, and the connection ended before the first byte of an answer.
  kTimedOut,     // No answer began in time.
  kBadAnswer,    // It was no HTTP.
  kCut,          // The answer began and was not completed.
  kStopped,      // This server stops.
};

// Where one request may go. Called on the request's reactor thread, one call at a time.
class Route {
 public:
  virtual ~Route() = default;
  // The backend of the next attempt; null: there is none (left).
  virtual std::shared_ptr<Backend> Next() = 0;
  // After each attempt: mostly one per Next, two if a backend is asked anew. `status`: of the answer, 0 if none began.
  // `why`: for people, "" if answered.
  virtual void Report(Backend& backend, Ended ended, int status, const std::string& why) = 0;
};

struct ProxyOptions {
  std::chrono::milliseconds connect_timeout{5000};       // All addresses of a name together.
  std::chrono::milliseconds first_byte_timeout{300000};  // Until the head of the answer is whole.
  std::chrono::milliseconds idle_timeout{300000};        // Between two pieces of an answer.
  std::chrono::milliseconds send_timeout{60000};         // Progress while the backend takes the request.
  size_t attempts_max = 2;                               // Backends that are tried for a request.
};

struct ForwardRequest {
  Request request;
  Headers set_in_request;  // Take the place of the client's fields of the same names.
  Headers set_in_answer;   // Take the place of the backend's.
  // What an event stream ends with. One that only the end of the connection ends, and without this, broke off. "": any
  // end will do.
  std::string last_event;
};

// From a handler, on its thread. `responder` must be the one that handler was given; it is answered in any case. No
// attempt succeeded: an error of 502, 503 or 504 in OpenAI's shape. The answer breaks off: an event stream is ended
// with an event that carries an error; anything else is cut where it broke.
// The server stops and the answer is not whole at the end of its drain: the same, or a 503.
//
// A request goes to another backend if the first can't be reached, or dies before the first byte of an answer: nothing
// that backends compute has an effect but their answer. It is sent twice at most, the second time over a new
// connection; to the same backend only if that had closed a connection that was kept open, and no other could be
// reached.
void Forward(std::shared_ptr<Responder> responder, ForwardRequest request, std::unique_ptr<Route> route,
             const ProxyOptions& options);

struct FetchResult {
  int status = 0;  // 0: no whole answer in time; `body` says why.
  std::string content_type;
  std::string body;
};
struct FetchOptions {
  std::chrono::milliseconds timeout{5000};
  size_t body_bytes_max = 8 << 20;
};

// Sends `request` to all of `backends` at once; `done` runs on this thread, later, with an answer for each. Called from
// a handler with the responder it was given.
void Fetch(Responder& responder, const Request& request, const std::vector<std::shared_ptr<Backend>>& backends,
           const FetchOptions& options, std::function<void(std::vector<FetchResult>)> done);
// From any thread; `done` runs on a thread of the server, unless that stops before.
void Fetch(Server& server, const Request& request, std::shared_ptr<Backend> backend, const FetchOptions& options,
           std::function<void(FetchResult)> done);

}  // namespace terrace::http
