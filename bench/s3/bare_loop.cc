#include "bench/s3/bare_loop.h"

#include <algorithm>
#include <cstring>
#include <ctime>

#include "bench/store/frames.h"
#include "s3/sigv4.h"

namespace terrace::bench {
namespace {

// As our client has them: larger ones were no faster.
constexpr long kReceiveBufferBytes = 256 << 10;
constexpr long kSendBufferBytes = 512 << 10;

struct Transfer {
  const BareLoop::Object* object = nullptr;
  size_t at = 0;
  curl_slist* headers = nullptr;
  std::string url;

  // What lies at `at`, at most `bytes`.
  std::span<std::byte> Next(size_t bytes) const {
    const auto& [key, head, body] = *object;
    const std::span<std::byte> rest =
        at < head.size() ? head.subspan(at) : body.subspan(std::min(at - head.size(), body.size()));
    return rest.first(std::min(bytes, rest.size()));
  }
};

size_t OnWrite(char* from, size_t size, size_t count, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  for (size_t done = 0; done < size * count;) {
    const std::span<std::byte> to = t.Next(size * count - done);
    if (to.empty()) return 0;
    std::memcpy(to.data(), from + done, to.size());
    done += to.size();
    t.at += to.size();
  }
  return size * count;
}

size_t OnRead(char* to, size_t size, size_t count, void* user) {
  auto& t = *static_cast<Transfer*>(user);
  const std::span<std::byte> from = t.Next(size * count);
  if (!from.empty()) std::memcpy(to, from.data(), from.size());
  t.at += from.size();
  return from.size();
}

}  // namespace

BareLoop::BareLoop(const s3::ClientOptions& client) : client_(client), multi_(curl_multi_init()) {}

BareLoop::~BareLoop() {
  for (CURL* easy : idle_) curl_easy_cleanup(easy);
  curl_multi_cleanup(multi_);
}

void BareLoop::Move(const std::vector<Object>& objects, size_t in_flight, bool put) {
  std::vector<Transfer> transfers(objects.size());
  const auto begin = [&](size_t i) {
    Transfer& t = transfers[i];
    t.object = &objects[i];
    const std::string path = client_.endpoint.Path(objects[i].key);
    t.url = client_.endpoint.scheme + "://" + client_.endpoint.HostHeader() + path;
    const int64_t now = time(nullptr);
    s3::SigningRequest request{.method = put ? "PUT" : "GET",
                               .path = path,
                               .headers = {{"x-amz-content-sha256", s3::kUnsignedPayload},
                                           {"x-amz-date", s3::AmzDate(now)},
                                           {"host", client_.endpoint.HostHeader()}},
                               .payload_hash = s3::kUnsignedPayload};
    const std::string signature =
        s3::Authorization(request, {.region = client_.region, .unix_seconds = now}, client_.credentials.fixed);
    request.headers.back() = {"authorization", signature};
    for (const auto& [name, value] : request.headers) {
      t.headers = curl_slist_append(t.headers, (name + ": " + value).c_str());
    }
    t.headers = curl_slist_append(t.headers, "Expect:");
    CURL* easy = idle_.empty() ? curl_easy_init() : idle_.back();
    if (!idle_.empty()) idle_.pop_back();
    curl_easy_reset(easy);
    curl_easy_setopt(easy, CURLOPT_PRIVATE, &t);
    curl_easy_setopt(easy, CURLOPT_URL, t.url.c_str());
    curl_easy_setopt(easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(easy, CURLOPT_HTTP_VERSION, static_cast<long>(CURL_HTTP_VERSION_1_1));
    curl_easy_setopt(easy, CURLOPT_HTTPHEADER, t.headers);
    if (!client_.http.ca_file.empty()) curl_easy_setopt(easy, CURLOPT_CAINFO, client_.http.ca_file.c_str());
    curl_easy_setopt(easy, CURLOPT_BUFFERSIZE, kReceiveBufferBytes);
    curl_easy_setopt(easy, CURLOPT_UPLOAD_BUFFERSIZE, kSendBufferBytes);
    curl_easy_setopt(easy, CURLOPT_WRITEFUNCTION, OnWrite);
    curl_easy_setopt(easy, CURLOPT_WRITEDATA, &t);
    if (put) {
      curl_easy_setopt(easy, CURLOPT_UPLOAD, 1L);
      curl_easy_setopt(easy, CURLOPT_READFUNCTION, OnRead);
      curl_easy_setopt(easy, CURLOPT_READDATA, &t);
      curl_easy_setopt(easy, CURLOPT_INFILESIZE_LARGE,
                       static_cast<curl_off_t>(objects[i].head.size() + objects[i].body.size()));
    }
    curl_multi_add_handle(multi_, easy);
  };
  size_t begun = 0, ended = 0;
  while (ended < objects.size()) {
    while (begun < objects.size() && begun - ended < in_flight) begin(begun++);
    int running = 0;
    curl_multi_perform(multi_, &running);
    int left = 0;
    while (const CURLMsg* message = curl_multi_info_read(multi_, &left)) {
      Transfer* t = nullptr;
      CURL* easy = message->easy_handle;
      curl_easy_getinfo(easy, CURLINFO_PRIVATE, &t);
      long status = 0;
      curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
      const bool whole = t->at == t->object->head.size() + t->object->body.size();
      Check(message->data.result == CURLE_OK && status == 200 && whole, "a bare request for " + t->url);
      curl_multi_remove_handle(multi_, easy);
      curl_slist_free_all(t->headers);
      idle_.push_back(easy);
      ++ended;
    }
    if (ended < objects.size()) curl_multi_poll(multi_, nullptr, 0, 1000, nullptr);
  }
}

}  // namespace terrace::bench
