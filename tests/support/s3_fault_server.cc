#include "tests/support/s3_fault_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <ctime>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "base/assert.h"
#include "base/hash.h"

namespace terrace {
namespace {

constexpr uint64_t kNoLength = ~uint64_t{0};

std::string Decode(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    int byte = 0;
    if (text[i] == '%' && i + 2 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 3, byte, 16).ec == std::errc()) {
      out += static_cast<char>(byte);
      i += 2;
    } else {
      out += text[i];
    }
  }
  return out;
}

std::optional<std::string> Parameter(const std::string& query, const std::string& name) {
  for (size_t at = 0; at < query.size();) {
    const size_t end = std::min(query.find('&', at), query.size());
    const std::string term = query.substr(at, end - at);
    const size_t equals = std::min(term.find('='), term.size());
    if (term.substr(0, equals) == name) return Decode(term.substr(std::min(equals + 1, term.size())));
    at = end + 1;
  }
  return std::nullopt;
}

uint64_t Number(const std::string& text) {
  uint64_t value = 0;
  std::from_chars(text.data(), text.data() + text.size(), value);
  return value;
}

std::string Date(const char* format, int64_t unix_seconds) {
  const time_t seconds = unix_seconds;
  tm utc{};
  gmtime_r(&seconds, &utc);
  char text[40];
  return {text, std::strftime(text, sizeof text, format, &utc)};
}
std::string HttpDate(int64_t unix_seconds) { return Date("%a, %d %b %Y %H:%M:%S GMT", unix_seconds); }
std::string IsoDate(int64_t unix_seconds) { return Date("%Y-%m-%dT%H:%M:%S.000Z", unix_seconds); }

std::string Etag(const std::string& bytes) {
  return "\"" + std::to_string(Xxh3_64(std::as_bytes(std::span(bytes)))) + "\"";
}

}  // namespace

struct S3FaultServer::State {
  struct Kept {
    std::string bytes;
    int64_t modified = 0;
  };
  struct Upload {
    std::string key;
    std::map<uint64_t, std::string> parts;
  };

  std::string bucket;
  int listener = -1;
  uint16_t port = 0;
  std::thread acceptor;

  mutable std::mutex mutex;
  std::condition_variable changed;
  bool stopping = false;  // Guarded by mutex, as all below.
  uint64_t released = 0;
  std::set<int> sockets;
  std::vector<std::thread> threads;
  Hook hook;
  std::map<std::string, std::string> keys;
  std::string refusal;
  std::map<std::string, Kept> objects;
  std::set<std::string> locked;
  int64_t now = 1769860800;  // Unix seconds.
  std::map<std::string, Upload> uploads;
  uint64_t next_upload = 1;
  std::vector<Request> requests;
  std::map<std::string, int> attempts;
  size_t at_once = 0, most_at_once = 0;

  void Accept() {
    for (;;) {
      const int socket = accept(listener, nullptr, nullptr);
      if (socket < 0) return;
      const int on = 1;
      setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
      std::lock_guard lock(mutex);
      if (stopping) {
        close(socket);
        return;
      }
      sockets.insert(socket);
      threads.emplace_back([this, socket] {
        Serve(socket);
        std::lock_guard done(mutex);
        sockets.erase(socket);
        close(socket);
      });
    }
  }

  static bool SendAll(int socket, std::string_view bytes) {
    while (!bytes.empty()) {
      const ssize_t n = send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (n <= 0) return false;
      bytes.remove_prefix(static_cast<size_t>(n));
    }
    return true;
  }

  // Silence. False when the server stops.
  bool Stall() {
    std::unique_lock lock(mutex);
    changed.wait(lock, [this, before = released] { return stopping || released != before; });
    return !stopping;
  }

  void Serve(int socket) {
    std::string buffer;
    while (std::optional<Request> request = Read(socket, buffer)) {
      Answer answer;
      Hook change;
      {
        std::lock_guard lock(mutex);
        most_at_once = std::max(most_at_once, ++at_once);
        request->number = requests.size() + 1;
        request->attempt =
            ++attempts[request->method + request->path + "?" + request->query + request->Header("range")];
        Request kept = *request;
        kept.body.clear();
        requests.push_back(std::move(kept));
        answer = Allowed(*request) ? Answer_(*request) : Error(403, refusal);
        answer.headers["date"] = HttpDate(now);
        change = hook;
      }
      if (change) change(*request, answer);
      const bool more = Send(socket, *request, answer);
      {
        std::lock_guard lock(mutex);
        --at_once;
      }
      if (!more) return;
    }
  }

  static std::optional<Request> Read(int socket, std::string& buffer) {
    const auto more = [&] {
      char bytes[65536];
      const ssize_t n = recv(socket, bytes, sizeof bytes, 0);
      if (n > 0) buffer.append(bytes, static_cast<size_t>(n));
      return n > 0;
    };
    size_t end = 0;
    while ((end = buffer.find("\r\n\r\n")) == std::string::npos) {
      if (!more()) return std::nullopt;
    }
    Request request;
    const std::string head = buffer.substr(0, end + 2);
    size_t at = head.find("\r\n");
    const std::string line = head.substr(0, at);
    const size_t blank = line.find(' ');
    request.method = line.substr(0, blank);
    const std::string target = line.substr(blank + 1, line.rfind(' ') - blank - 1);
    const size_t mark = std::min(target.find('?'), target.size());
    request.path = Decode(target.substr(0, mark));
    request.query = target.substr(std::min(mark + 1, target.size()));
    for (at += 2; at < head.size();) {
      const size_t stop = head.find("\r\n", at);
      const size_t colon = head.find(':', at);
      std::string name = head.substr(at, colon - at);
      std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
      const size_t value = head.find_first_not_of(' ', colon + 1);
      request.headers[name] = head.substr(value, stop - value);
      at = stop + 2;
    }
    const size_t length = Number(request.Header("content-length"));
    while (buffer.size() < end + 4 + length) {
      if (!more()) return std::nullopt;
    }
    request.body = buffer.substr(end + 4, length);
    buffer.erase(0, end + 4 + length);
    return request;
  }

  bool Send(int socket, const Request& request, const Answer& answer) {
    if (answer.stall_first && !Stall()) return false;
    std::string head = "HTTP/1.1 " + std::to_string(answer.status) + " X\r\n";
    for (const auto& [name, value] : answer.headers) head += name + ": " + value + "\r\n";
    const uint64_t said = answer.said_length.value_or(answer.body.size());
    if (said != kNoLength && !answer.headers.contains("content-length")) {
      head += "content-length: " + std::to_string(said) + "\r\n";
    }
    if (said == kNoLength) head += "connection: close\r\n";
    head += "\r\n";
    if (!SendAll(socket, head)) return false;
    if (request.method == "HEAD") return true;
    std::string_view body = answer.body;
    if (answer.send_bytes) body = body.substr(0, *answer.send_bytes);
    if (answer.stall_after) {
      if (!SendAll(socket, body.substr(0, *answer.stall_after)) || !Stall()) return false;
      body.remove_prefix(std::min<size_t>(body.size(), *answer.stall_after));
    }
    return SendAll(socket, body) && !answer.send_bytes && said == answer.body.size();
  }

  bool Allowed(const Request& request) {
    if (keys.empty()) return true;
    const std::string authorization = request.Header("authorization");
    return std::any_of(keys.begin(), keys.end(), [&](const auto& key) {
      return authorization.find("Credential=" + key.first + "/") != std::string::npos &&
             request.Header("x-amz-security-token") == key.second;
    });
  }

  // What S3 would answer. With the lock.
  Answer Answer_(Request& request) {
    const std::string root = "/" + bucket;
    if (request.path != root && !request.path.starts_with(root + "/")) return Error(404, "NoSuchBucket");
    request.key = request.path.substr(std::min(root.size() + 1, request.path.size()));
    requests.back().key = request.key;
    if (Parameter(request.query, "uploads") || Parameter(request.query, "uploadId")) return Multipart(request);
    if (request.key.empty()) return request.method == "GET" ? List(request) : Error(405, "MethodNotAllowed");
    const auto it = objects.find(request.key);
    if (request.method == "PUT") {
      const std::string match = request.Header("if-match");
      if (!match.empty() && it == objects.end()) return Error(404, "NoSuchKey");
      if ((request.Header("if-none-match") == "*" && it != objects.end()) ||
          (!match.empty() && match != Etag(it->second.bytes))) {
        return Error(412, "PreconditionFailed");
      }
      objects[request.key] = {request.body, now};
      return {.headers = {{"etag", Etag(request.body)}}};
    }
    if (request.method == "DELETE") {
      if (locked.contains(request.key)) return Error(403, "AccessDenied");
      objects.erase(request.key);
      return {.status = 204};
    }
    if (it == objects.end()) return Error(404, "NoSuchKey");
    const std::string& bytes = it->second.bytes;
    Answer answer{.headers = {{"etag", Etag(bytes)},
                              {"content-type", "application/octet-stream"},
                              {"last-modified", HttpDate(it->second.modified)}},
                  .body = bytes};
    const std::string range = request.Header("range");
    if (request.method == "HEAD") {
      answer.said_length = bytes.size();
      answer.body.clear();
    } else if (range.starts_with("bytes=")) {
      const size_t dash = range.find('-');
      const uint64_t first = Number(range.substr(6, dash - 6));
      const uint64_t last = std::min<uint64_t>(Number(range.substr(dash + 1)), bytes.size() - 1);
      if (first >= bytes.size()) return Error(416, "InvalidRange");
      answer.status = 206;
      answer.headers["content-range"] =
          "bytes " + std::to_string(first) + "-" + std::to_string(last) + "/" + std::to_string(bytes.size());
      answer.body = bytes.substr(first, last - first + 1);
    }
    return answer;
  }

  Answer List(const Request& request) {
    const std::string prefix = Parameter(request.query, "prefix").value_or("");
    const std::string after =
        Parameter(request.query, "continuation-token").value_or(Parameter(request.query, "start-after").value_or(""));
    const uint64_t limit = Number(Parameter(request.query, "max-keys").value_or("1000"));
    std::string entries;
    std::string last;
    uint64_t count = 0;
    bool truncated = false;
    for (auto it = objects.upper_bound(after); it != objects.end(); ++it) {
      if (!it->first.starts_with(prefix)) continue;
      truncated = count == limit;
      if (truncated) break;
      ++count;
      last = it->first;
      entries += "<Contents><Key>" + it->first + "</Key><Size>" + std::to_string(it->second.bytes.size()) +
                 "</Size><LastModified>" + IsoDate(it->second.modified) + "</LastModified></Contents>";
    }
    return {.headers = {{"content-type", "application/xml"}},
            .body = "<ListBucketResult><IsTruncated>" + std::string(truncated ? "true" : "false") + "</IsTruncated>" +
                    (truncated ? "<NextContinuationToken>" + last + "</NextContinuationToken>" : "") + entries +
                    "</ListBucketResult>"};
  }

  Answer Multipart(const Request& request) {
    const std::map<std::string, std::string> xml = {{"content-type", "application/xml"}};
    const auto id = Parameter(request.query, "uploadId");
    if (!id && request.method == "GET") {
      std::string entries;
      for (const auto& [upload_id, upload] : uploads) {
        entries += "<Upload><Key>" + upload.key + "</Key><UploadId>" + upload_id +
                   "</UploadId><Initiated>2026-01-30T12:00:00.000Z</Initiated></Upload>";
      }
      return {.headers = xml, .body = "<ListMultipartUploadsResult>" + entries + "</ListMultipartUploadsResult>"};
    }
    if (!id) {
      const std::string fresh = "u" + std::to_string(next_upload++);
      uploads[fresh].key = request.key;
      return {
          .headers = xml,
          .body = "<InitiateMultipartUploadResult><UploadId>" + fresh + "</UploadId></InitiateMultipartUploadResult>"};
    }
    const auto it = uploads.find(*id);
    if (it == uploads.end()) return Error(404, "NoSuchUpload");
    if (request.method == "PUT") {
      it->second.parts[Number(Parameter(request.query, "partNumber").value_or("0"))] = request.body;
      return {.headers = {{"etag", Etag(request.body)}}};
    }
    if (request.method == "POST") {
      if (!request.Header("if-none-match").empty() && objects.contains(request.key))
        return Error(412, "PreconditionFailed");
      std::string whole;
      for (const auto& [number, part] : it->second.parts) {
        if (request.body.find(Etag(part)) == std::string::npos) return Error(400, "InvalidPart");
        whole += part;
      }
      objects[request.key] = {whole, now};
    }
    uploads.erase(it);
    if (request.method == "DELETE") return {.status = 204};
    return {.headers = xml, .body = "<CompleteMultipartUploadResult/>"};
  }
};

S3FaultServer::S3FaultServer(const std::string& bucket) : state_(std::make_unique<State>()) {
  State& s = *state_;
  s.bucket = bucket;
  s.listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof address;
  TERRACE_ASSERT(bind(s.listener, reinterpret_cast<sockaddr*>(&address), size) == 0 && listen(s.listener, 128) == 0);
  TERRACE_ASSERT(getsockname(s.listener, reinterpret_cast<sockaddr*>(&address), &size) == 0);
  s.port = ntohs(address.sin_port);
  s.acceptor = std::thread([&s] { s.Accept(); });
}

S3FaultServer::~S3FaultServer() {
  State& s = *state_;
  {
    std::lock_guard lock(s.mutex);
    s.stopping = true;
    for (const int socket : s.sockets) shutdown(socket, SHUT_RDWR);
  }
  s.changed.notify_all();
  shutdown(s.listener, SHUT_RDWR);
  s.acceptor.join();
  close(s.listener);
  for (std::thread& thread : s.threads) thread.join();
}

uint16_t S3FaultServer::port() const { return state_->port; }

void S3FaultServer::SetHook(Hook hook) {
  std::lock_guard lock(state_->mutex);
  state_->hook = std::move(hook);
}
void S3FaultServer::Release() {
  {
    std::lock_guard lock(state_->mutex);
    ++state_->released;
  }
  state_->changed.notify_all();
}
void S3FaultServer::SetKeys(std::map<std::string, std::string> token_of_key, std::string refusal) {
  std::lock_guard lock(state_->mutex);
  state_->keys = std::move(token_of_key);
  state_->refusal = std::move(refusal);
}
void S3FaultServer::PutObject(const std::string& key, std::string bytes) {
  std::lock_guard lock(state_->mutex);
  state_->objects[key] = {std::move(bytes), state_->now};
}
void S3FaultServer::Lock(const std::string& key) {
  std::lock_guard lock(state_->mutex);
  state_->locked.insert(key);
}
void S3FaultServer::Advance(std::chrono::seconds by) {
  std::lock_guard lock(state_->mutex);
  state_->now += by.count();
}
std::optional<std::string> S3FaultServer::Object(const std::string& key) const {
  std::lock_guard lock(state_->mutex);
  const auto it = state_->objects.find(key);
  return it == state_->objects.end() ? std::nullopt : std::optional(it->second.bytes);
}
size_t S3FaultServer::objects() const {
  std::lock_guard lock(state_->mutex);
  return state_->objects.size();
}
size_t S3FaultServer::uploads() const {
  std::lock_guard lock(state_->mutex);
  return state_->uploads.size();
}
std::vector<S3FaultServer::Request> S3FaultServer::requests() const {
  std::lock_guard lock(state_->mutex);
  return state_->requests;
}
size_t S3FaultServer::Count(const std::string& method) const {
  std::lock_guard lock(state_->mutex);
  return static_cast<size_t>(std::count_if(state_->requests.begin(), state_->requests.end(),
                                           [&](const Request& request) { return request.method == method; }));
}
size_t S3FaultServer::most_at_once() const {
  std::lock_guard lock(state_->mutex);
  return state_->most_at_once;
}
void S3FaultServer::Forget() {
  std::lock_guard lock(state_->mutex);
  state_->requests.clear();
  state_->attempts.clear();
  state_->most_at_once = state_->at_once;
}

S3FaultServer::Answer S3FaultServer::Error(int status, const std::string& code, const std::string& more) {
  return {.status = status,
          .headers = {{"content-type", "application/xml"}},
          .body = "<Error><Code>" + code + "</Code><Message>" + code + " for a test</Message>" + more + "</Error>"};
}

}  // namespace terrace
