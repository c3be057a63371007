#include "io/http_client.h"

#include <curl/curl.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <utility>

#include "base/assert.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;

constexpr size_t kHeaderBytesMax = 64 << 10;
// Pieces that fit into the second-level cache: they are copied and hashed from there.
constexpr long kReceiveBufferBytes = 256 << 10;
constexpr long kSendBufferBytes = 512 << 10;
// Deadlines and stalls are noticed so late at most.
constexpr milliseconds kSweepEvery{20};
constexpr milliseconds kIdlePoll{1000};

TimePoint Now() { return std::chrono::steady_clock::now(); }

std::string_view Trim(std::string_view text) {
  const size_t begin = text.find_first_not_of(" \t\r\n");
  if (begin == std::string_view::npos) return {};
  return text.substr(begin, text.find_last_not_of(" \t\r\n") - begin + 1);
}

HttpFailure FailureOf(CURLcode code, std::string_view why) {
  const auto says = [&](std::string_view text) { return why.find(text) != std::string_view::npos; };
  switch (code) {
    case CURLE_OK: return HttpFailure::kNone;
    case CURLE_COULDNT_RESOLVE_HOST:
    case CURLE_COULDNT_RESOLVE_PROXY: return HttpFailure::kResolve;
    case CURLE_COULDNT_CONNECT: return HttpFailure::kConnect;
    case CURLE_OPERATION_TIMEDOUT: return HttpFailure::kTimeout;
    case CURLE_PEER_FAILED_VERIFICATION: return HttpFailure::kCertificate;
    case CURLE_SSL_CACERT_BADFILE: return HttpFailure::kCaFile;
    // OpenSSL's words for an answer that is no TLS record.
    case CURLE_SSL_CONNECT_ERROR:
      return says("wrong version number") || says("unexpected eof") ? HttpFailure::kPlainServer : HttpFailure::kTls;
    case CURLE_SSL_CIPHER:
    case CURLE_SSL_ENGINE_INITFAILED: return HttpFailure::kTls;
    case CURLE_GOT_NOTHING: return HttpFailure::kEmpty;
    case CURLE_UNSUPPORTED_PROTOCOL:
    case CURLE_WEIRD_SERVER_REPLY: return HttpFailure::kNotHttp;
    default: return HttpFailure::kCut;
  }
}

struct Transfer {
  uint64_t id = 0;
  CURL* easy = nullptr;
  curl_slist* headers = nullptr;
  HttpRequest request;
  HttpClient::Done done;
  HttpResponse response;
  TimePoint begun, progress_at;
  bool answering = false;  // The first byte has come.
  size_t header_bytes = 0;
  size_t body_part = 0;                    // What is sent of the body: the parts before this one, ...
  size_t part_sent = 0;                    // ... and so much of it.
  HttpFailure ended = HttpFailure::kNone;  // By us, from within a callback.
  std::string ended_why;
  char error[CURL_ERROR_SIZE] = {};
};

size_t OnRead(char* to, size_t size, size_t count, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  size_t room = size * count;
  size_t given = 0;
  while (room > 0 && t.body_part < t.request.body.size()) {
    const std::span<const std::byte> rest = t.request.body[t.body_part].subspan(t.part_sent);
    const size_t n = std::min(room, rest.size());
    if (n > 0) std::memcpy(to + given, rest.data(), n);
    given += n;
    room -= n;
    t.part_sent += n;
    if (n == rest.size()) {
      ++t.body_part;
      t.part_sent = 0;
    }
  }
  t.progress_at = Now();
  return given;
}

// curl goes back to the beginning when a kept connection turns out to be closed.
int OnSeek(void* user, curl_off_t offset, int origin) {
  auto& t = *static_cast<Transfer*>(user);
  if (origin != SEEK_SET || offset != 0) return CURL_SEEKFUNC_CANTSEEK;
  t.body_part = t.part_sent = 0;
  return CURL_SEEKFUNC_OK;
}

size_t OnHeader(char* from, size_t size, size_t count, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  const std::string_view line(from, size * count);
  t.progress_at = Now();
  if (!t.answering) {
    t.answering = true;
    t.response.first_byte = std::chrono::duration_cast<std::chrono::microseconds>(t.progress_at - t.begun);
  }
  t.header_bytes += line.size();
  if (t.header_bytes > kHeaderBytesMax) {
    t.ended = HttpFailure::kTooLong;
    t.ended_why = "more than 64 KiB of headers";
    return 0;
  }
  if (line.starts_with("HTTP/")) {  // Of a 1xx, or the answer itself.
    t.response.headers.clear();
    const size_t blank = line.find(' ');
    int status = 0;
    if (blank != std::string_view::npos) std::from_chars(line.data() + blank + 1, line.data() + line.size(), status);
    t.response.status = status;
  } else if (const size_t colon = line.find(':'); colon != std::string_view::npos) {
    std::string name(Trim(line.substr(0, colon)));
    for (char& c : name) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    t.response.headers[std::move(name)] = Trim(line.substr(colon + 1));
  }
  return line.size();
}

size_t OnWrite(char* from, size_t size, size_t count, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  const size_t n = size * count;
  t.progress_at = Now();
  const bool good = t.response.status >= 200 && t.response.status < 300;
  if (good && t.request.sink) {
    if (!t.request.sink(t.response, std::as_bytes(std::span(from, n)))) {
      t.ended = HttpFailure::kStopped;
      return CURL_WRITEFUNC_ERROR;
    }
    t.response.sink_bytes += n;
    return n;
  }
  if (t.response.text.size() + n > t.request.text_bytes_max) {
    t.ended = HttpFailure::kTooLong;
    t.ended_why = "an answer of more than " + std::to_string(t.request.text_bytes_max) + " bytes";
    return CURL_WRITEFUNC_ERROR;
  }
  t.response.text.append(from, n);
  return n;
}

}  // namespace

const std::string& HttpResponse::Header(const std::string& lower_case_name) const {
  static const std::string absent;
  const auto it = headers.find(lower_case_name);
  return it == headers.end() ? absent : it->second;
}

class HttpClient::Loop {
 public:
  explicit Loop(const Options& options) : options_(options) {
    static const CURLcode ready = curl_global_init(CURL_GLOBAL_DEFAULT);
    TERRACE_ASSERT(ready == CURLE_OK);
    multi_ = curl_multi_init();
    TERRACE_ASSERT(multi_ != nullptr);
    curl_multi_setopt(multi_, CURLMOPT_MAXCONNECTS, static_cast<long>(options.idle_connections_max));
    curl_multi_setopt(multi_, CURLMOPT_PIPELINING, static_cast<long>(CURLPIPE_MULTIPLEX));
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), options.thread_name.substr(0, 15).c_str());
  }
  ~Loop() {
    Stop();
    for (CURL* easy : idle_) curl_easy_cleanup(easy);
    curl_multi_cleanup(multi_);
  }

  uint64_t Start(HttpRequest request, Done done) {
    const uint64_t id = next_id_.fetch_add(1, std::memory_order_relaxed);
    auto transfer = std::make_shared<Transfer>();  // Shared, because a Task can be copied.
    transfer->id = id;
    transfer->request = std::move(request);
    transfer->done = std::move(done);
    if (std::this_thread::get_id() == thread_id_.load()) {
      Begin(transfer);
    } else if (!Post([this, transfer] { Begin(transfer); })) {
      End(*transfer, HttpFailure::kCancelled, "the client is stopped");
    }
    return id;
  }

  void Cancel(uint64_t id) {
    Post([this, id] {
      if (const auto it = active_.find(id); it != active_.end()) {
        Remove(it->second, HttpFailure::kCancelled, "cancelled");
      }
    });
  }

  bool Post(Task task) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return false;
      tasks_.push_back(std::move(task));
    }
    curl_multi_wakeup(multi_);
    return true;
  }

  bool PostAfter(milliseconds delay, Task task) {
    {
      std::lock_guard lock(mutex_);
      if (stopped_) return false;
      timers_.emplace(Now() + delay, std::move(task));
    }
    curl_multi_wakeup(multi_);
    return true;
  }

  void Stop() {
    stopping_.store(true);
    curl_multi_wakeup(multi_);
    if (thread_.joinable()) thread_.join();
  }

 private:
  void Run() {
    thread_id_.store(std::this_thread::get_id());
    while (!stopping_.load()) {
      RunTasks();
      int running = 0;
      curl_multi_perform(multi_, &running);
      Harvest();
      Sweep();
      curl_multi_poll(multi_, nullptr, 0, static_cast<int>(UntilNextTimer().count()), nullptr);
    }
    // A task may start a transfer, and the end of one may post a task.
    for (bool more = true; more;) {
      RunTasks();
      while (!active_.empty()) Remove(active_.begin()->second, HttpFailure::kCancelled, "the client is stopped");
      std::lock_guard lock(mutex_);
      more = !tasks_.empty();
      stopped_ = !more;
    }
  }

  void RunTasks() {
    std::deque<Task> due;
    {
      std::lock_guard lock(mutex_);
      due.swap(tasks_);
      const TimePoint now = Now();
      while (!stopping_.load() && !timers_.empty() && timers_.begin()->first <= now) {
        due.push_back(std::move(timers_.begin()->second));
        timers_.erase(timers_.begin());
      }
    }
    for (Task& task : due) task();
  }

  milliseconds UntilNextTimer() {
    std::lock_guard lock(mutex_);
    if (!tasks_.empty()) return milliseconds(0);
    milliseconds wait = active_.empty() ? kIdlePoll : kSweepEvery;
    if (!timers_.empty()) {
      const auto left = std::chrono::ceil<milliseconds>(timers_.begin()->first - Now());
      wait = std::clamp(left, milliseconds(0), wait);
    }
    return wait;
  }

  void Begin(const std::shared_ptr<Transfer>& transfer) {
    Transfer& t = *transfer;
    t.begun = t.progress_at = Now();
    if (t.begun >= t.request.deadline) {  // Later, so that whoever starts a transfer knows its name when it ends.
      Post([transfer] { End(*transfer, HttpFailure::kTimeout, "the deadline has passed"); });
      return;
    }
    if (idle_.empty()) {
      t.easy = curl_easy_init();
    } else {
      t.easy = idle_.back();
      idle_.pop_back();
    }
    TERRACE_ASSERT(t.easy != nullptr);
    SetUp(t);
    active_.emplace(t.id, transfer);
    TERRACE_ASSERT(curl_multi_add_handle(multi_, t.easy) == CURLM_OK);
  }

  void SetUp(Transfer& t) {
    CURL* e = t.easy;
    const HttpRequest& r = t.request;
    curl_easy_setopt(e, CURLOPT_PRIVATE, &t);
    curl_easy_setopt(e, CURLOPT_ERRORBUFFER, t.error);
    curl_easy_setopt(e, CURLOPT_URL, r.url.c_str());
    curl_easy_setopt(e, CURLOPT_PATH_AS_IS, 1L);
    curl_easy_setopt(e, CURLOPT_PROTOCOLS_STR, "http,https");
    curl_easy_setopt(e, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(e, CURLOPT_QUICK_EXIT, 1L);  // Never wait for a name server on the way out.
    curl_easy_setopt(e, CURLOPT_BUFFERSIZE, kReceiveBufferBytes);
    curl_easy_setopt(e, CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(options_.connect_timeout.count()));
    curl_easy_setopt(e, CURLOPT_HTTP_VERSION,
                     static_cast<long>(options_.http2 ? CURL_HTTP_VERSION_2TLS : CURL_HTTP_VERSION_1_1));
    curl_easy_setopt(e, CURLOPT_TCP_KEEPALIVE, 1L);
    if (!options_.ca_file.empty()) {
      curl_easy_setopt(e, CURLOPT_CAINFO, options_.ca_file.c_str());
      curl_easy_setopt(e, CURLOPT_CAPATH, nullptr);  // This file alone.
    }
    curl_easy_setopt(e, CURLOPT_HEADERFUNCTION, OnHeader);
    curl_easy_setopt(e, CURLOPT_HEADERDATA, &t);
    curl_easy_setopt(e, CURLOPT_WRITEFUNCTION, OnWrite);
    curl_easy_setopt(e, CURLOPT_WRITEDATA, &t);
    if (r.method == "HEAD") {
      curl_easy_setopt(e, CURLOPT_NOBODY, 1L);
    } else if (r.method == "PUT" || r.method == "POST") {
      curl_off_t bytes = 0;
      for (const auto& part : r.body) bytes += static_cast<curl_off_t>(part.size());
      curl_easy_setopt(e, CURLOPT_UPLOAD, 1L);
      curl_easy_setopt(e, CURLOPT_INFILESIZE_LARGE, bytes);
      curl_easy_setopt(e, CURLOPT_UPLOAD_BUFFERSIZE, kSendBufferBytes);
      curl_easy_setopt(e, CURLOPT_READFUNCTION, OnRead);
      curl_easy_setopt(e, CURLOPT_READDATA, &t);
      curl_easy_setopt(e, CURLOPT_SEEKFUNCTION, OnSeek);
      curl_easy_setopt(e, CURLOPT_SEEKDATA, &t);
      if (r.method == "POST") curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, "POST");
    } else if (r.method != "GET") {
      curl_easy_setopt(e, CURLOPT_CUSTOMREQUEST, r.method.c_str());
    }
    for (const std::string& header : r.headers) t.headers = curl_slist_append(t.headers, header.c_str());
    t.headers = curl_slist_append(t.headers, "Expect:");  // No round trip to ask whether the body may come.
    curl_easy_setopt(e, CURLOPT_HTTPHEADER, t.headers);
  }

  void Harvest() {
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      if (message->msg != CURLMSG_DONE) continue;
      Transfer* t = nullptr;
      curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &t);
      const CURLcode code = message->data.result;
      long version = 0;
      curl_easy_getinfo(message->easy_handle, CURLINFO_HTTP_VERSION, &version);
      t->response.http_version = version == CURL_HTTP_VERSION_2_0 ? 20 : version == CURL_HTTP_VERSION_1_0 ? 10 : 11;
      const std::string why = t->error[0] != '\0' ? t->error : curl_easy_strerror(code);
      const std::shared_ptr<Transfer> transfer = active_.at(t->id);
      if (t->ended != HttpFailure::kNone) {
        Remove(transfer, t->ended, t->ended_why);
      } else if (code == CURLE_OK) {
        Remove(transfer, HttpFailure::kNone, "");
      } else {
        Remove(transfer, FailureOf(code, why), why);
      }
    }
  }

  // Deadlines and stalls.
  void Sweep() {
    const TimePoint now = Now();
    if (now < sweep_at_) return;
    sweep_at_ = now + kSweepEvery;
    std::vector<std::pair<std::shared_ptr<Transfer>, std::string>> late;
    for (const auto& [id, transfer] : active_) {
      const Transfer& t = *transfer;
      const milliseconds silence = t.answering ? options_.idle_timeout : options_.first_byte_timeout;
      if (now >= t.request.deadline) {
        late.emplace_back(transfer, "the deadline has passed");
      } else if (now - t.progress_at >= silence) {
        late.emplace_back(transfer, (t.answering ? "silence in the answer for " : "no answer within ") +
                                        std::to_string(silence.count()) + " ms");
      }
    }
    for (const auto& [transfer, why] : late) Remove(transfer, HttpFailure::kTimeout, why);
  }

  void Remove(std::shared_ptr<Transfer> transfer, HttpFailure failure, const std::string& why) {
    Transfer& t = *transfer;
    curl_multi_remove_handle(multi_, t.easy);
    curl_easy_reset(t.easy);
    idle_.push_back(t.easy);
    curl_slist_free_all(t.headers);
    active_.erase(t.id);
    End(t, failure, why);
  }

  static void End(Transfer& t, HttpFailure failure, const std::string& why) {
    t.response.failure = failure;
    t.response.why = why;
    const Done done = std::move(t.done);
    done(t.response);
  }

  const Options options_;
  CURLM* multi_ = nullptr;  // The loop's thread alone, but for curl_multi_wakeup.
  std::atomic<uint64_t> next_id_{1};
  std::atomic<bool> stopping_{false};
  std::atomic<std::thread::id> thread_id_{};  // Set once, by the thread itself.

  std::mutex mutex_;
  std::deque<Task> tasks_;                 // Guarded by mutex_.
  std::multimap<TimePoint, Task> timers_;  // Guarded by mutex_.
  bool stopped_ = false;                   // Guarded by mutex_.

  // The loop's thread alone.
  std::unordered_map<uint64_t, std::shared_ptr<Transfer>> active_;
  std::vector<CURL*> idle_;
  TimePoint sweep_at_;

  std::thread thread_;
};

HttpClient::HttpClient(const Options& options) : loop_(std::make_unique<Loop>(options)) {}
HttpClient::~HttpClient() = default;
uint64_t HttpClient::Start(HttpRequest request, Done done) { return loop_->Start(std::move(request), std::move(done)); }
void HttpClient::Cancel(uint64_t transfer) { loop_->Cancel(transfer); }
bool HttpClient::Post(Task task) { return loop_->Post(std::move(task)); }
bool HttpClient::PostAfter(milliseconds delay, Task task) { return loop_->PostAfter(delay, std::move(task)); }
void HttpClient::Stop() { loop_->Stop(); }

}  // namespace terrace
