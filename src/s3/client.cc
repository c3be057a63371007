#include "s3/client.h"

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <ctime>
#include <deque>
#include <mutex>
#include <random>
#include <unordered_map>
#include <utility>

#include "base/hash.h"
#include "base/log.h"
#include "s3/call.h"
#include "s3/multipart.h"
#include "s3/pacer.h"

namespace terrace::s3 {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kQueueSweep{50};
constexpr size_t kDocumentBytesMax = 64 << 10;
constexpr std::chrono::seconds kTlsWait{3};

template <class T>
bool ParseNumber(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && !text.empty();
}

// "bytes 0-4095/8192". The total may be "*".
struct ContentRange {
  uint64_t first = 0, last = 0, total = 0;
};
bool ParseContentRange(std::string_view text, ContentRange& range) {
  if (!text.starts_with("bytes ")) return false;
  text.remove_prefix(6);
  const size_t dash = text.find('-');
  const size_t slash = text.find('/');
  return dash != std::string_view::npos && slash != std::string_view::npos && dash < slash &&
         ParseNumber(text.substr(0, dash), range.first) &&
         ParseNumber(text.substr(dash + 1, slash - dash - 1), range.last) &&
         ParseNumber(text.substr(slash + 1), range.total) && range.first <= range.last && range.last < range.total;
}

// "Sun, 29 Nov 2026 18:00:00 GMT".
std::optional<int64_t> ParseHttpDate(const std::string& text) {
  tm utc{};
  const char* end = strptime(text.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &utc);
  if (end == nullptr || *end != '\0') return std::nullopt;
  return timegm(&utc);
}

class Client final : public ObjectStore, private MultipartHost {
 public:
  Client(const ClientOptions& options, const Clock& clock, Metrics& metrics)
      : options_(options),
        clock_(clock),
        metrics_(metrics),
        region_(options.region),
        host_(options.endpoint.HostHeader()),
        pacer_({.parallel_max = options.parallel_max, .backoff = options.backoff, .backoff_max = options.backoff_max},
               std::random_device{}()),
        parallel_(metrics.GetGauge("terrace_s3_parallel_max", "Calls to the bucket that may go on at once now.")),
        http_(options.http),
        credentials_(options.credentials, http_, clock, metrics) {
    parallel_.Set(static_cast<int64_t>(options.parallel_max));
  }
  ~Client() override { Stop(); }

  Executor& executor() override { return http_; }
  const Endpoint& endpoint() const override { return options_.endpoint; }
  size_t parallel() const override { return options_.parallel_max; }

  CallId Get(GetRequest request, Done done) override {
    auto call = std::make_shared<Call>();
    call->operation = "get";
    call->key = std::move(request.key);
    call->begin = request.begin;
    call->end = request.end;
    if (request.end > 0) {
      call->headers.emplace_back("range",
                                 "bytes=" + std::to_string(request.begin) + "-" + std::to_string(request.end - 1));
    }
    call->sink = std::move(request.sink);
    call->deadline = request.deadline;
    call->done = [c = call.get(), done = std::move(done)](const Failure& failure, const HttpResponse&) {
      done(failure, c->info);
    };
    return Submit(call);
  }

  CallId Head(const std::string& key, TimePoint deadline, Done done) override {
    auto call = std::make_shared<Call>();
    call->operation = "head";
    call->kind = CallClass::kProbe;
    call->method = "HEAD";
    call->key = key;
    call->deadline = deadline;
    call->done = [done = std::move(done)](const Failure& failure, const HttpResponse& response) {
      ObjectInfo info{.etag = response.Header("etag")};
      Failure result = failure;
      if (!failure && !ParseNumber(std::string_view(response.Header("content-length")), info.bytes)) {
        result = {.trouble = Trouble::kNoS3, .status = response.status, .message = "an object without a length"};
      }
      done(result, info);
    };
    return Submit(call);
  }

  CallId Put(PutRequest request, Done done) override {
    request.deadline = std::min(request.deadline, clock_.Now() + options_.put_timeout);
    uint64_t bytes = 0;
    for (const auto& part : request.body) bytes += part.size();
    if (bytes > options_.single_put_bytes_max && !no_multipart_) {
      return multiparts_.Put(std::move(request),
                             {.part_bytes = options_.part_bytes,
                              .parallel_max = options_.parts_parallel_max,
                              .conditional = !no_conditions_},
                             std::move(done));
    }
    return PutWhole(std::move(request), std::move(done));
  }

  CallId Delete(const std::string& key, TimePoint deadline, Done done) override {
    auto call = std::make_shared<Call>();
    call->operation = "delete";
    call->kind = CallClass::kWrite;
    call->method = "DELETE";
    call->key = key;
    call->deadline = std::min(deadline, clock_.Now() + options_.put_timeout);
    call->done = [done = std::move(done)](const Failure& failure, const HttpResponse&) {
      done(failure.trouble == Trouble::kNotFound ? Failure{} : failure, {});
    };
    return Submit(call);
  }

  CallId List(const ListRequest& request, std::function<void(const Failure&, const ListPage&)> done) override {
    auto call = std::make_shared<Call>();
    call->operation = "list";
    call->deadline = std::min(request.deadline, clock_.Now() + options_.put_timeout);
    call->query = {{"list-type", "2"}, {"prefix", request.prefix}, {"max-keys", std::to_string(request.limit)}};
    if (!request.token.empty()) {
      call->query.emplace_back("continuation-token", request.token);
    } else if (!request.start_after.empty()) {
      call->query.emplace_back("start-after", request.start_after);
    }
    const bool is_virtual = options_.endpoint.style == Style::kVirtual;
    call->done = [is_virtual, prefix = request.prefix, done = std::move(done)](const Failure& failure,
                                                                               const HttpResponse& response) {
      if (failure) {
        Failure named = failure;
        if (failure.trouble == Trouble::kNotFound) named.trouble = Trouble::kNoBucket;
        return done(named, {});
      }
      Result<ListPage> page = ParseListPage(response.text);
      if (page) {
        page->now = ParseHttpDate(response.Header("date")).value_or(0);
        // What was not asked for is nobody's business here: callers remove what a list shows.
        std::erase_if(page->objects, [&](const ListPage::Object& object) { return !object.key.starts_with(prefix); });
        for (ListPage::Object& object : page->objects) {
          if (page->now != 0)
            object.modified = std::min(object.modified, page->now);  // No object is of a time to come.
        }
        return done({}, *page);
      }
      const bool lists_buckets = is_virtual && IsListOfBuckets(response.text);
      done({.trouble = lists_buckets ? Trouble::kNeedsPathStyle : Trouble::kNoS3,
            .status = response.status,
            .message = lists_buckets ? "the server listed buckets instead of objects" : page.error().what},
           {});
    };
    return Submit(call);
  }

  void Cancel(CallId id) override {
    if (multiparts_.Cancel(id)) return;
    const auto it = calls_.find(id);
    if (it == calls_.end()) return;
    http_.Post([this, call = it->second] { Finish(call, {.trouble = Trouble::kCancelled}, {}); });
  }

  void AbortOldUploads(const std::string& prefix, std::chrono::seconds age,
                       std::function<void(const Failure&, size_t)> done) override {
    multiparts_.AbortOld(prefix, age, std::move(done));
  }

  void Stop() override {
    http_.Post([this] {
      stopping_ = true;
      while (!calls_.empty()) Finish(calls_.begin()->second, {.trouble = Trouble::kCancelled}, {});
    });
    http_.Stop();
  }

 private:
  // ---- For multipart.h

  CallId Submit(const CallPtr& call) override {
    call->id = NextId();
    if (call->deadline == TimePoint::max()) call->deadline = clock_.Now() + options_.put_timeout;
    calls_.emplace(call->id, call);
    if (stopping_) {
      http_.Post([this, call] { Finish(call, {.trouble = Trouble::kCancelled}, {}); });
      return call->id;
    }
    Enqueue(call, /*front=*/false);
    // Later, so that whoever calls knows the call's name first.
    http_.Post([this] { Pump(); });
    return call->id;
  }
  CallId NextId() override { return next_id_++; }
  void CancelCall(CallId id) override {
    if (const auto it = calls_.find(id); it != calls_.end()) Finish(it->second, {.trouble = Trouble::kCancelled}, {});
  }
  void NoMultipart() override {
    if (std::exchange(no_multipart_, true)) return;
    log::Warn("s3_no_multipart", {{"endpoint", options_.endpoint.Describe()}});
  }

  CallId PutWhole(PutRequest request, Done done) override {
    auto call = std::make_shared<Call>();
    call->operation = "put";
    call->kind = CallClass::kWrite;
    call->method = "PUT";
    call->key = std::move(request.key);
    call->headers = {{"content-type", "application/octet-stream"}};
    const bool conditional = (request.only_if_absent || !request.if_match.empty()) && !no_conditions_;
    if (conditional && request.only_if_absent) call->headers.emplace_back("if-none-match", "*");
    if (conditional && !request.if_match.empty()) call->headers.emplace_back("if-match", request.if_match);
    call->body = std::move(request.body);
    call->owner = std::move(request.owner);
    call->deadline = request.deadline;
    call->done = [this, conditional, c = call.get(), done = std::move(done)](const Failure& failure,
                                                                             const HttpResponse& response) {
      if (conditional && failure.trouble == Trouble::kNotImplemented) {
        // A server that knows no conditions: then the last writer wins, and all write the same.
        if (!std::exchange(no_conditions_, true)) {
          log::Info("s3_no_conditions", {{"endpoint", options_.endpoint.Describe()}});
        }
        PutWhole({.key = c->key, .body = c->body, .owner = c->owner, .deadline = c->deadline}, done);
        return;
      }
      done(failure, {.etag = response.Header("etag")});
    };
    return Submit(call);
  }

  // ---- The queue

  void Enqueue(const CallPtr& call, bool front) {
    call->queued = true;
    auto& queue = queues_[static_cast<size_t>(call->kind)];
    if (front) {
      queue.push_front(call);
    } else {
      queue.push_back(call);
    }
    ArmQueueSweep();
  }

  // Probes first, then reads; but a quarter of the calls may be writes whatever waits.
  CallPtr NextQueued() {
    const bool write_first = writes_in_flight_ < std::max<size_t>(1, pacer_.limit() / 4);
    for (const CallClass kind :
         {CallClass::kProbe, write_first ? CallClass::kWrite : CallClass::kRead, CallClass::kRead, CallClass::kWrite}) {
      auto& queue = queues_[static_cast<size_t>(kind)];
      while (!queue.empty()) {
        CallPtr call = std::move(queue.front());
        queue.pop_front();
        if (call->ended) continue;
        call->queued = false;
        return call;
      }
    }
    return nullptr;
  }

  void Pump() {
    parallel_.Set(static_cast<int64_t>(pacer_.limit()));
    while (in_flight_ < pacer_.limit()) {
      const CallPtr call = NextQueued();
      if (!call) return;
      Attempt(call);
    }
  }

  // What waits for its turn has a deadline, too.
  void ArmQueueSweep() {
    if (std::exchange(queue_sweep_armed_, true)) return;
    http_.PostAfter(kQueueSweep, [this] {
      queue_sweep_armed_ = false;
      std::vector<CallPtr> late;
      bool waiting = false;
      for (auto& queue : queues_) {
        std::erase_if(queue, [](const CallPtr& call) { return call->ended; });
        for (const CallPtr& call : queue) {
          waiting = true;
          if (clock_.Now() >= call->deadline) late.push_back(call);
        }
      }
      for (const CallPtr& call : late) Finish(call, TooLate(), {});
      if (waiting) ArmQueueSweep();
    });
  }

  static Failure TooLate() { return {.trouble = Trouble::kTimeout, .message = "the deadline has passed"}; }

  // ---- One attempt

  void Attempt(const CallPtr& call) {
    if (clock_.Now() >= call->deadline) return Finish(call, TooLate(), {});
    ++call->attempts;
    ++in_flight_;  // Also while a role is assumed.
    if (call->kind == CallClass::kWrite) ++writes_in_flight_;
    credentials_.Get([this, call](const Result<Credentials>& credentials) {
      if (call->ended) return Left(call);
      if (!credentials) {
        Left(call);
        return Finish(call, {.trouble = Trouble::kNoCredentials, .message = credentials.error().what}, {});
      }
      call->used = *credentials;
      call->winner = -1;
      Send(call, 0);
      ArmHedge(call);
    });
  }

  void Left(const CallPtr& call) {
    --in_flight_;
    if (call->kind == CallClass::kWrite) --writes_in_flight_;
  }

  void Send(const CallPtr& call, int slot) {
    HttpRequest request{.method = call->method,
                        .body = call->body,
                        .owner = call->owner,
                        .text_bytes_max = 8 << 20,
                        .deadline = call->deadline};
    const std::string path = options_.endpoint.Path(call->key);
    const std::string query = CanonicalQuery(call->query);
    request.url = options_.endpoint.scheme + "://" + host_ + path + (query.empty() ? "" : "?" + query);
    Sign(*call, path, request.headers);
    if (call->sink) {
      request.sink = [this, call, slot](const HttpResponse& so_far, std::span<const std::byte> piece) {
        return Take(call, slot, so_far, piece);
      };
    }
    call->transfers[static_cast<size_t>(slot)].begun = clock_.Now();
    call->transfers[static_cast<size_t>(slot)].id =
        http_.Start(std::move(request), [this, call, slot](const HttpResponse& response) {
          call->transfers[static_cast<size_t>(slot)].id = 0;
          Left(call);
          Answered(call, slot, response);
          Pump();
        });
  }

  void Sign(const Call& call, const std::string& path, std::vector<std::string>& headers) const {
    SigningRequest signing{.method = call.method, .path = path, .query = call.query, .headers = call.headers};
    const int64_t now = static_cast<int64_t>(clock_.WallNs() / 1'000'000'000) + clock_offset_;
    signing.payload_hash = kUnsignedPayload;
    if (options_.sign_payload || call.body.empty()) {
      Sha256 hash;
      for (const auto& part : call.body) hash.Update(part);
      signing.payload_hash = Hex(hash.Finish());
    }
    signing.headers.emplace_back("x-amz-content-sha256", signing.payload_hash);
    signing.headers.emplace_back("x-amz-date", AmzDate(now));
    if (!call.used.session_token.empty()) {
      signing.headers.emplace_back("x-amz-security-token", call.used.session_token);
    }
    for (const auto& [name, value] : signing.headers) headers.push_back(name + ": " + value);
    signing.headers.emplace_back("host", host_);  // curl sends it.
    headers.push_back("authorization: " + Authorization(signing, {.region = region_, .unix_seconds = now}, call.used));
  }

  // A late first byte: ask once more, and take whoever comes first.
  void ArmHedge(const CallPtr& call) {
    const milliseconds after = pacer_.hedge_after();
    if (!options_.hedge || !call->sink || after.count() == 0) return;
    http_.PostAfter(after, [this, call, attempt = call->attempts] {
      const bool late = !call->ended && call->attempts == attempt && call->transfers[0].id != 0 && call->winner < 0;
      const size_t room = std::max<size_t>(1, pacer_.limit() / 8);
      if (!late || call->transfers[1].id != 0 || hedges_ >= room || in_flight_ >= pacer_.limit()) return;
      metrics_.GetCounter("terrace_s3_hedged_reads_total", "Reads that were asked for twice.").Add();
      ++hedges_;
      ++in_flight_;
      Send(call, 1);
    });
  }

  // A piece of a 2xx answer to a call that has a sink. False ends the transfer.
  bool Take(const CallPtr& call, int slot, const HttpResponse& so_far, std::span<const std::byte> piece) {
    if (call->ended) return false;
    if (call->winner < 0) {
      call->winner = slot;
      call->received = 0;
      call->document.clear();
      if (const uint64_t other = call->transfers[static_cast<size_t>(1 - slot)].id) http_.Cancel(other);
      if (!Begin(*call, so_far)) return false;
    }
    if (call->winner != slot) return false;
    if (call->is_document) {
      if (call->document.size() + piece.size() > kDocumentBytesMax) return false;
      call->document.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      return true;
    }
    const uint64_t offset = call->begin + call->received;
    call->received += piece.size();
    return call->received <= Expected(*call) && call->sink(call->info, offset, piece);
  }

  // Bytes of the body, by the head of the answer.
  static uint64_t Expected(const Call& call) {
    return call.end == 0 ? call.info.bytes : std::min(call.end, call.info.bytes) - call.begin;
  }

  // The head of an answer with a body. False: it is not the answer to this request.
  static bool Begin(Call& call, const HttpResponse& head) {
    call.info = {.etag = head.Header("etag"),
                 .modified = ParseHttpDate(head.Header("last-modified")).value_or(0),
                 .now = ParseHttpDate(head.Header("date")).value_or(0)};
    // XML without an ETag is an error that came with 200. With one it is an object, whatever type its writer gave it.
    call.is_document = call.info.etag.empty() && head.Header("content-type").find("xml") != std::string::npos;
    if (call.is_document) return true;
    if (head.status == 206) {
      ContentRange range;
      if (!ParseContentRange(head.Header("content-range"), range) || range.first != call.begin) return false;
      call.info.bytes = range.total;
      return call.end > 0;
    }
    return call.end == 0 && ParseNumber(std::string_view(head.Header("content-length")), call.info.bytes);
  }

  // What a whole answer with a sink turned out to be.
  static Failure Judge(const Call& call, const HttpResponse& response) {
    if (call.is_document) {
      HttpResponse as_text = response;
      as_text.text = call.document;
      Failure failure = FailureOf(as_text, "");
      if (!failure)
        failure = {.trouble = Trouble::kNoS3, .status = response.status, .message = "XML instead of the object"};
      return failure;
    }
    if (call.winner < 0) {  // Not a byte. An object of none, or an answer without its body.
      uint64_t said = 0;
      if (call.end == 0 && ParseNumber(std::string_view(response.Header("content-length")), said) && said == 0)
        return {};
      return {.trouble = Trouble::kCut, .status = response.status, .message = "an answer without its body"};
    }
    if (call.received == Expected(call)) return {};
    return {.trouble = Trouble::kCut,
            .status = response.status,
            .message = "a body of " + std::to_string(call.received) + " bytes, not " + std::to_string(Expected(call))};
  }

  // Why the client or the sink wanted no more of an answer.
  static Failure WhyStopped(const Call& call, const HttpResponse& response, const Failure& failure) {
    if (call.is_document) {
      return {.trouble = Trouble::kNoS3, .status = response.status, .message = "XML instead of the object"};
    }
    if (call.received == 0) {
      return {
          .trouble = Trouble::kNoS3, .status = response.status, .message = "another range or length than asked for"};
    }
    return call.received > Expected(call) ? Judge(call, response) : failure;
  }

  void Answered(const CallPtr& call, int slot, const HttpResponse& response) {
    if (slot == 1) --hedges_;
    // Only we cancel: what lost, or what has ended.
    if (call->ended || response.failure == HttpFailure::kCancelled) return;
    if (call->winner >= 0 && call->winner != slot) return;
    const uint64_t other = call->transfers[static_cast<size_t>(1 - slot)].id;
    if (other != 0) {
      // The other may still succeed, if this one only broke.
      if (call->winner < 0 && (response.failure != HttpFailure::kNone || response.status >= 500)) return;
      call->winner = slot;
      http_.Cancel(other);
    }
    answered_ = answered_ || response.status != 0;
    Failure failure = FailureOf(response, options_.endpoint.scheme);
    if (failure.trouble == Trouble::kStopped && call->sink) {
      failure = WhyStopped(*call, response, failure);
    } else if (!failure && call->sink) {
      failure = Judge(*call, response);
    }
    const TimePoint begun = call->transfers[static_cast<size_t>(slot)].begun;
    if (call->sink && !failure) pacer_.ObserveFirstByte(response.first_byte);
    if (failure.trouble == Trouble::kSlowDown) {
      pacer_.AskedForLess(begun, clock_.Now());
      log::Warn("s3_slow_down",
                {{"operation", call->operation}, {"parallel", pacer_.limit()}, {"why", failure.Describe()}});
    } else if (!failure || failure.trouble == Trouble::kNotFound) {
      pacer_.Succeeded();
    }
    Decide(call, failure, response);
  }

  void Decide(const CallPtr& call, const Failure& failure, const HttpResponse& response) {
    if (!failure) return Finish(call, failure, response);
    if (IsRefusal(failure) && !std::exchange(call->renewed, true)) {
      credentials_.Renew(call->used, [this, call, failure, response](bool changed) {
        if (call->ended) return;
        if (!changed) return Finish(call, failure, response);
        --call->attempts;  // Nothing was wrong with the request.
        Again(call, milliseconds(0), "credentials");
      });
      return;
    }
    if (failure.trouble == Trouble::kClockSkew && SetClock(failure) && !std::exchange(call->clock_set, true)) {
      return Again(call, milliseconds(0), "clock_skew");
    }
    if (failure.trouble == Trouble::kOtherRegion && call->redirects < options_.redirects_max && Follow(failure)) {
      ++call->redirects;
      return Again(call, milliseconds(0), "other_region");
    }
    if (IsTransient(failure.trouble) && call->attempts < options_.attempts_max) {
      const milliseconds wait = pacer_.Backoff(call->attempts);
      if (clock_.Now() + wait < call->deadline) return Again(call, wait, TroubleName(failure.trouble));
    }
    if (response.failure == HttpFailure::kEmpty && !answered_ && options_.endpoint.scheme == "http") {
      return AskForTls(call, failure);
    }
    Finish(call, failure, response);
  }

  // A server that never said a byte: some close the connection when plain HTTP comes to a port for TLS.
  void AskForTls(const CallPtr& call, const Failure& failure) {
    HttpRequest request{.url = "https://" + host_ + "/", .deadline = std::min(call->deadline, clock_.Now() + kTlsWait)};
    http_.Start(std::move(request), [this, call, failure](const HttpResponse& response) {
      const bool speaks_tls = response.failure == HttpFailure::kNone || response.failure == HttpFailure::kCertificate;
      Failure named = failure;
      if (speaks_tls) named.trouble = Trouble::kTlsServer;
      Finish(call, named, {});
    });
  }

  void Again(const CallPtr& call, milliseconds wait, const char* reason) {
    metrics_
        .GetCounter("terrace_s3_retries_total", "Calls to the bucket that were tried again, by why.",
                    {{"reason", reason}})
        .Add();
    http_.PostAfter(wait, [this, call] {
      if (call->ended) return;
      Enqueue(call, /*front=*/true);
      Pump();
    });
  }

  // Signatures hold for minutes; a clock that is off is corrected by the server's.
  bool SetClock(const Failure& failure) {
    const std::optional<int64_t> theirs = ParseHttpDate(failure.date);
    if (!theirs) return false;
    clock_offset_ = *theirs - static_cast<int64_t>(clock_.WallNs() / 1'000'000'000);
    log::Warn("s3_clock_skew", {{"seconds", clock_offset_}});
    return true;
  }

  // True if there is another place to ask. The server says a region; which host that is we know ourselves, so that no
  // answer sends KV and session tokens to a host of its choice.
  bool Follow(const Failure& failure) {
    if (failure.region.empty() || failure.region == region_) return false;
    region_ = failure.region;
    host_ = InRegion(options_.endpoint, region_).HostHeader();
    log::Warn("s3_other_region", {{"region", region_}, {"host", host_}});
    return true;
  }

  void Finish(CallPtr call, const Failure& failure, const HttpResponse& response) {
    if (std::exchange(call->ended, true)) return;
    for (const Call::Transfer& transfer : call->transfers) {
      if (transfer.id != 0) http_.Cancel(transfer.id);
    }
    calls_.erase(call->id);
    metrics_
        .GetCounter("terrace_s3_calls_total", "Calls to the bucket, by operation and end.",
                    {{"operation", call->operation}, {"outcome", failure ? TroubleName(failure.trouble) : "ok"}})
        .Add();
    const auto done = std::move(call->done);
    done(failure, response);
    call->sink = nullptr;  // A timer may keep the call a little longer, and must not keep the caller's memory.
    call->owner.reset();
  }

  const ClientOptions options_;
  const Clock& clock_;
  Metrics& metrics_;

  // The thread of http_ alone.
  std::string region_;
  std::string host_;
  int64_t clock_offset_ = 0;  // Seconds that our clock is behind the server's.
  bool answered_ = false;     // The server has said something, ever.
  bool no_multipart_ = false;
  bool no_conditions_ = false;
  Pacer pacer_;
  std::array<std::deque<CallPtr>, 3> queues_;  // By CallClass.
  std::unordered_map<CallId, CallPtr> calls_;  // All that have not ended.
  CallId next_id_ = 1;
  size_t in_flight_ = 0;  // Transfers, hedges included.
  size_t writes_in_flight_ = 0;
  size_t hedges_ = 0;
  bool queue_sweep_armed_ = false;
  bool stopping_ = false;
  Gauge& parallel_;
  Multiparts multiparts_{*this};

  HttpClient http_;  // After what its callbacks use.
  CredentialsChain credentials_;
};

}  // namespace

std::unique_ptr<ObjectStore> OpenClient(const ClientOptions& options, const Clock& clock, Metrics& metrics) {
  return std::make_unique<Client>(options, clock, metrics);
}

}  // namespace terrace::s3
