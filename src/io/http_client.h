// HTTP requests, many at once, by libcurl on one thread: connections are kept and used again, bodies go from and to the
// caller's memory, every phase has its timeout.
//
// The client is an executor, too: tasks run on its thread, where all callbacks run. Who keeps state that only tasks and
// callbacks touch needs no lock.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/executor.h"
#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace {

// Why there is no whole answer.
enum class HttpFailure : uint8_t {
  kNone,
  kResolve,      // The host's name has no address.
  kConnect,      // Nobody listens, or no route.
  kCertificate,  // The server's certificate is not signed by a CA we trust, has expired, or is of another name.
  kCaFile,       // The CA file can't be read.
  kPlainServer,  // We speak TLS, the server does not.
  kTls,          // Any other trouble of TLS.
  kNotHttp,      // What came is no HTTP: a TLS port that got plain HTTP, another service.
  kTimeout,      // Connecting, waiting for the first byte or for the next one, or the deadline.
  kEmpty,        // The connection was closed without a byte of an answer.
  kCut,          // The connection broke, or the body is shorter than said.
  kTooLong,      // More headers, or more text, than we take.
  kStopped,      // The sink wanted no more.
  kCancelled,
};

struct HttpResponse {
  int status = 0;                              // 0: none came.
  std::map<std::string, std::string> headers;  // Lower-case names.
  std::string text;                            // The body, unless it went to the sink.
  uint64_t sink_bytes = 0;                     // What went to the sink.
  int http_version = 0;                        // 10, 11, 20.
  std::chrono::microseconds first_byte{0};     // From the start of the transfer.
  HttpFailure failure = HttpFailure::kNone;
  std::string why;  // With a failure: for people.

  const std::string& Header(const std::string& lower_case_name) const;  // "" if absent.
};

struct HttpRequest {
  std::string method = "GET";
  std::string url;                               // Sent as it stands: encoded by the caller.
  std::vector<std::string> headers;              // "name: value".
  std::vector<std::span<const std::byte>> body;  // One after the other.
  std::shared_ptr<const void> owner;             // Keeps what `body` and `sink` use, until `done` has run.
  // Takes the body of a 2xx answer as it comes. False: the transfer ends with kStopped.
  std::function<bool(const HttpResponse& so_far, std::span<const std::byte> piece)> sink;
  size_t text_bytes_max = 1 << 20;
  TimePoint deadline = TimePoint::max();
};

class HttpClient final : public Executor {
 public:
  struct Options {
    std::string thread_name = "terrace-http";  // 15 characters at most.
    std::string ca_file;                       // PEM; "": the system's.
    bool http2 = true;                         // If the server offers it over TLS.
    std::chrono::milliseconds connect_timeout{3000};
    std::chrono::milliseconds first_byte_timeout{15000};  // From the last byte sent.
    std::chrono::milliseconds idle_timeout{10000};        // Between two bytes of an answer.
    size_t idle_connections_max = 64;
  };
  using Done = std::function<void(HttpResponse& response)>;

  explicit HttpClient(const Options& options);
  ~HttpClient() override;  // Stop().

  // From any thread. `done` runs once, on the client's thread, whatever happens. The answer names the transfer.
  uint64_t Start(HttpRequest request, Done done);
  // Ends it with kCancelled, soon. No-op if it has ended.
  void Cancel(uint64_t transfer);

  bool Post(Task task) override;
  bool PostAfter(std::chrono::milliseconds delay, Task task) override;

  // Runs what is posted, drops what is delayed, cancels all transfers, joins. Not from a task or callback.
  void Stop();

 private:
  class Loop;
  const std::unique_ptr<Loop> loop_;
};

}  // namespace terrace
