// An S3 server that misbehaves on demand: what real ones do only on bad days. In the process of the test, on a port of
// its own, path style. It keeps objects, ranges, lists, conditions and multipart uploads as S3 does; a hook may change
// any answer before it goes out.
//
// It checks who asks (the access key, the session token) and not the signature: real servers do that (tests/s3).
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace terrace {

class S3FaultServer {
 public:
  struct Request {
    std::string method;
    std::string path;                            // Decoded: "/bucket/key".
    std::string query;                           // As sent.
    std::map<std::string, std::string> headers;  // Lower-case names.
    std::string body;
    std::string key;      // Below the bucket; "" for the bucket itself.
    uint64_t number = 0;  // From 1, in the order they came.
    int attempt = 0;      // From 1, of this method, path, query and range.
    std::string Header(const std::string& name) const {
      const auto it = headers.find(name);
      return it == headers.end() ? "" : it->second;
    }
  };
  struct Answer {
    int status = 200;
    std::map<std::string, std::string> headers;
    std::string body;
    std::optional<uint64_t> said_length;  // Instead of the body's, in Content-Length. ~0: none is said.
    std::optional<uint64_t> send_bytes;   // Of the body, then the connection closes.
    std::optional<uint64_t> stall_after;  // Bytes of the body, then silence until Release() or the end.
    bool stall_first = false;             // Silence before the head.
  };
  // On the connection's thread, after the server's own answer is made and before it is sent.
  using Hook = std::function<void(const Request& request, Answer& answer)>;

  explicit S3FaultServer(const std::string& bucket = "b");
  ~S3FaultServer();
  S3FaultServer(const S3FaultServer&) = delete;
  S3FaultServer& operator=(const S3FaultServer&) = delete;

  uint16_t port() const;
  std::string url() const { return "http://127.0.0.1:" + std::to_string(port()); }

  void SetHook(Hook hook);
  void Release();  // Ends the silences of now; later ones are silent again.
  // Access keys that are let in, with the session token that each needs ("": none); empty: anybody. Others get
  // `refusal` with status 403.
  void SetKeys(std::map<std::string, std::string> token_of_key, std::string refusal = "InvalidAccessKeyId");

  // Its clock stands still unless it is moved: Sat, 31 Jan 2026 12:00:00 GMT at first.
  void Advance(std::chrono::seconds by);

  void PutObject(const std::string& key, std::string bytes);
  void Lock(const std::string& key);  // It can't be removed from now on.
  std::optional<std::string> Object(const std::string& key) const;
  size_t objects() const;
  size_t uploads() const;  // Begun, neither completed nor aborted.

  std::vector<Request> requests() const;  // All so far, without bodies.
  size_t Count(const std::string& method) const;
  size_t most_at_once() const;  // Requests in the server's hands.
  void Forget();                // requests(), attempts and most_at_once() begin anew.

  static Answer Error(int status, const std::string& code, const std::string& more = "");

 private:
  struct State;
  const std::unique_ptr<State> state_;
};

}  // namespace terrace
