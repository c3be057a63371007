#include "doctor/bucket.h"

#include <algorithm>
#include <ctime>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "doctor/machine.h"
#include "s3/check.h"

namespace terrace::doctor {
namespace {

using s3::Failure;
using s3::ObjectInfo;
using s3::Trouble;
using std::chrono::steady_clock;

constexpr const char* kFormat = "terrace s3\nversion 1\n";
constexpr std::chrono::seconds kCallMax{20};
constexpr size_t kSmallBytes = 4096;
constexpr size_t kSmallMax = 50;
constexpr std::chrono::milliseconds kSmallTime{1000};
constexpr size_t kLanesMax = 16;
constexpr uint64_t kWrittenMax = 2ull << 30;

double MsSince(steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
}

class Check {
 public:
  Check(const s3::ClientOptions& options, const Measure& measure, const std::atomic<bool>& stop, Report& report)
      : options_(options),
        measure_(measure),
        stop_(stop),
        report_(report),
        probe_(s3::WithPrefix(options.endpoint, ProbeName())),
        store_(s3::OpenClient(options, clock_, metrics_)) {}

  Bandwidth Run() {
    report_.Doing("--s3-bucket: " + options_.endpoint.Describe());
    if (!Server() || !List() || !Format()) return bandwidth_;
    RemoveOldProbes();
    if (Rights()) {
      if (!stop_) Latency();
      if (!stop_ && measure_.time.count() > 0) MeasureBandwidth();
    }
    RemoveAll();
    return bandwidth_;
  }

 private:
  struct Answer {
    Failure failure;
    ObjectInfo info;
  };

  // Begins a call on the client's thread, and waits for its end.
  template <class Begin>
  Answer Await(Begin begin) {
    return Await(*store_, std::move(begin));
  }
  template <class Begin>
  static Answer Await(s3::ObjectStore& store, Begin begin) {
    auto end = std::make_shared<std::promise<Answer>>();
    std::future<Answer> answer = end->get_future();
    if (!store.executor().Post([begin = std::move(begin), end] {
          begin([end](const Failure& failure, const ObjectInfo& info) { end->set_value({failure, info}); });
        })) {
      return {{.trouble = Trouble::kCancelled}, {}};
    }
    return answer.get();
  }
  TimePoint Soon() const { return clock_.Now() + kCallMax; }

  Answer Put(const std::string& key, std::shared_ptr<const std::vector<std::byte>> bytes, bool only_if_absent = false) {
    {
      const std::lock_guard lock(mutex_);
      written_.insert(key);
    }
    return Await([this, key, bytes, only_if_absent](auto done) {
      store_->Put({.key = key, .body = {*bytes}, .owner = bytes, .only_if_absent = only_if_absent, .deadline = Soon()},
                  done);
    });
  }
  // The bytes that came are counted, and kept if `into` is there.
  Answer Get(const std::string& key, std::shared_ptr<std::string> into = nullptr) {
    return Await([this, key, into](auto done) {
      s3::GetRequest request{.key = key, .deadline = Soon()};
      request.sink = [into](const ObjectInfo&, uint64_t offset, std::span<const std::byte> piece) {
        if (into) {
          into->resize(offset);
          into->append(reinterpret_cast<const char*>(piece.data()), piece.size());
        }
        return true;
      };
      store_->Get(std::move(request), done);
    });
  }
  Answer Delete(const std::string& key) {
    return Await([this, key](auto done) { store_->Delete(key, Soon(), done); });
  }
  std::pair<Failure, std::vector<std::string>> Names(const std::string& prefix) {
    auto names = std::make_shared<std::vector<std::string>>();
    const Answer answer = Await([this, prefix, names](auto done) {
      store_->List({.prefix = prefix, .limit = 1000, .deadline = Soon()},
                   [names, done](const Failure& failure, const s3::ListPage& page) {
                     for (const auto& object : page.objects) names->push_back(object.key);
                     done(failure, {});
                   });
    });
    return {answer.failure, *names};
  }

  void Add(const std::string& name, Severity severity, std::string what, std::string remedy = "",
           Figures figures = {}) {
    report_.Add({"s3." + name, severity, std::move(what), std::move(remedy), std::move(figures)});
  }
  // False, and a finding with the trouble's name. `step`: "list".
  bool Problem(const std::string& step, const Failure& failure, Severity severity = Severity::kProblem) {
    std::string remedy = s3::Remedy(failure, options_.endpoint);
    if (remedy.empty()) remedy = "look at the server's log for this request";
    Add(step, severity, s3::ToError(failure, options_.endpoint.Describe() + ": " + step).what, std::move(remedy),
        {{"trouble", s3::TroubleName(failure.trouble)}, {"status", static_cast<double>(failure.status)}});
    return false;
  }

  // Does it answer at all, as what we take it for; and what time has it?
  bool Server() {
    HttpClient client(options_.http);
    HttpRequest request{.url = options_.endpoint.Url(""), .deadline = Soon()};
    std::promise<HttpResponse> end;
    const auto before = static_cast<int64_t>(clock_.WallNs());
    client.Start(std::move(request), [&end](HttpResponse& response) { end.set_value(std::move(response)); });
    const HttpResponse response = end.get_future().get();
    const auto after = static_cast<int64_t>(clock_.WallNs());
    // A refusal of an unsigned request is what was expected; the signed one comes next. Whatever else went wrong, the
    // client looks twice before it gives it a name.
    const bool answered = response.failure == HttpFailure::kNone;
    if (!answered || s3::FailureOf(response, options_.endpoint.scheme).trouble == Trouble::kTlsServer) {
      const Failure failure = Names(s3::WithPrefix(options_.endpoint, "terrace")).first;
      return !failure || Problem("server", failure);
    }
    Add("server", Severity::kOk,
        options_.endpoint.Describe() + " answers, HTTP/" + (response.http_version == 20 ? "2" : "1.1") +
            ", first byte after " + MsText(static_cast<double>(response.first_byte.count()) / 1000),
        "", {{"first_byte_ms", static_cast<double>(response.first_byte.count()) / 1000}});
    if (const auto date = ParseHttpDate(response.Header("date"))) {
      CheckClock("s3.clock", "the S3 server", *date * 1'000'000'000, 1'000'000'000, before, after, report_);
    }
    return true;
  }

  bool List() {
    const Failure failure = Names(s3::WithPrefix(options_.endpoint, "terrace")).first;
    if (failure) return Problem("list", failure);
    Add("list", Severity::kOk, "the credentials hold, and the bucket can be listed");
    if (metrics_.GetCounter("terrace_s3_retries_total", "", {{"reason", "other_region"}}).value() > 0) Region();
    return true;
  }

  // The client was sent to another region, and went. What was it told?
  void Region() {
    s3::ClientOptions options = options_;
    options.redirects_max = 0;
    const auto store = s3::OpenClient(options, clock_, metrics_);
    const Answer answer = Await(*store, [&](auto done) {
      store->List({.prefix = s3::WithPrefix(options.endpoint, "terrace"), .limit = 1, .deadline = Soon()},
                  [done](const Failure& failure, const s3::ListPage&) { done(failure, {}); });
    });
    if (answer.failure.trouble == Trouble::kOtherRegion) Problem("region", answer.failure, Severity::kNote);
  }

  bool Format() {
    auto format = std::make_shared<std::string>();
    const Failure failure = Get(s3::WithPrefix(options_.endpoint, "terrace.format"), format).failure;
    if (failure.trouble == Trouble::kNotFound) {
      Add("format", Severity::kOk, "nothing of Terrace is there yet");
    } else if (failure) {
      return Problem("read", failure);
    } else if (*format != kFormat) {
      Add("format", Severity::kProblem, s3::CheckError({.step = "read", .format = *format}, options_.endpoint).what,
          "use another --s3-prefix, or one release for all instances");
      return false;
    } else {
      Add("format", Severity::kOk, "instances of this release keep their frames there");
    }
    return true;
  }

  bool Rights() {
    const std::string key = probe_ + "/a=b @+.kvf";  // A key that shows wrong encoding.
    const auto bytes = Noise(kSmallBytes);
    if (const Failure failure = Put(key, bytes).failure) return Problem("write", failure);
    Add("write", Severity::kOk, "objects can be written");
    auto read = std::make_shared<std::string>();
    if (const Failure failure = Get(key, read).failure) return Problem("read", failure);
    if (!std::ranges::equal(std::as_bytes(std::span(*read)), *bytes)) {
      Add("read", Severity::kProblem, "an object read is not the object written",
          "look for a proxy or a gateway that changes bodies");
      return false;
    }
    Add("read", Severity::kOk, "objects can be read, and are what was written");
    const Failure again = Put(key, bytes, true).failure;
    if (again.trouble == Trouble::kExists) {
      Add("conditional", Severity::kOk, "conditional writes are honoured");
    } else if (again && again.trouble != Trouble::kNotImplemented) {
      Problem("conditional", again, Severity::kNote);
    } else {
      Add("conditional", Severity::kNote,
          "conditional writes are not honoured: two instances may write one frame twice", "nothing needs to be done");
    }
    const auto uploads = Await([this](auto done) {
      store_->AbortOldUploads(probe_, std::chrono::hours(24),
                              [done](const Failure& failure, size_t) { done(failure, {}); });
    });
    if (uploads.failure.trouble == Trouble::kDenied) {
      Add("multipart", Severity::kNote, "multipart uploads can't be listed: what a writer that died has left stays",
          "add s3:ListBucketMultipartUploads and s3:AbortMultipartUpload, or a lifecycle rule that aborts them");
    }
    if (const Failure failure = Delete(key).failure) return Problem("delete", failure);
    if (Get(key).failure.trouble != Trouble::kNotFound) {
      Add("delete", Severity::kNote, "an object that was deleted can still be read",
          "turn versioning and object lock off, and look for a cache in between");
    } else {
      Add("delete", Severity::kOk, "objects can be deleted");
    }
    return true;
  }

  void Latency() {
    report_.Doing("--s3-bucket: small objects");
    std::vector<double> saves, loads;
    const auto bytes = Noise(kSmallBytes);
    const auto begin = steady_clock::now();
    for (size_t i = 0; i < kSmallMax && !stop_ && (i == 0 || steady_clock::now() - begin < kSmallTime); ++i) {
      const std::string key = probe_ + "/small";
      auto at = steady_clock::now();
      if (const Failure failure = Put(key, bytes).failure) return void(Problem("latency", failure));
      saves.push_back(MsSince(at));
      at = steady_clock::now();
      if (const Failure failure = Get(key).failure) return void(Problem("latency", failure));
      loads.push_back(MsSince(at));
    }
    if (loads.empty()) return;
    Figures figures = {{"objects", static_cast<double>(loads.size())}};
    const std::string save = Spread("put", saves, figures), load = Spread("get", loads, figures);
    bandwidth_.latency_s = std::get<double>(figures[3].second) / 1000;
    Add("latency", Severity::kOk, "4 KiB: PUT " + save + ", GET " + load, "", figures);
  }

  void MeasureBandwidth() {
    const size_t lanes = std::min(kLanesMax, options_.parallel_max);
    const std::string size = BytesText(static_cast<double>(measure_.frame_bytes));
    report_.Doing("--s3-bucket: bandwidth, frames of " + size + ", " + std::to_string(lanes) + " at once");
    const auto bytes = Noise(measure_.frame_bytes);
    const auto name = [this](size_t i) { return probe_ + "/frame-" + std::to_string(i); };
    const size_t frames_max = std::max<uint64_t>(kWrittenMax / measure_.frame_bytes, 1);
    std::atomic<size_t> put{0}, got{0};
    const auto write = InLanes(lanes, [&]() -> Failure { return Put(name(put++ % frames_max), bytes).failure; });
    if (write.second) return void(Problem("bandwidth", write.second));
    const size_t there = std::min(put.load(), frames_max);
    const auto read = InLanes(lanes, [&]() -> Failure { return Get(name(got++ % there)).failure; });
    if (read.second) return void(Problem("bandwidth", read.second));
    bandwidth_.write = write.first;
    bandwidth_.read = read.first;
    Add("bandwidth", Severity::kOk,
        "read " + RateText(read.first) + ", write " + RateText(write.first) + " (objects of " + size + ", " +
            std::to_string(lanes) + " at once)",
        "",
        {{"read_bytes_per_s", read.first},
         {"write_bytes_per_s", write.first},
         {"frame_bytes", static_cast<double>(measure_.frame_bytes)},
         {"parallel", static_cast<double>(lanes)}});
  }

  // Each lane moves a frame after the other until the time is over. Bytes a second.
  std::pair<double, Failure> InLanes(size_t lanes, const std::function<Failure()>& move) {
    const auto begin = steady_clock::now();
    std::atomic<uint64_t> moved{0};
    std::mutex mutex;
    Failure trouble;
    std::vector<std::thread> threads;
    for (size_t lane = 0; lane < lanes; ++lane) {
      threads.emplace_back([&] {
        do {
          if (const Failure failure = move()) {
            const std::lock_guard lock(mutex);
            trouble = failure;
            return;
          }
          moved += measure_.frame_bytes;
        } while (!stop_ && steady_clock::now() - begin < measure_.time);
      });
    }
    for (std::thread& thread : threads) thread.join();
    return {static_cast<double>(moved) / std::chrono::duration<double>(steady_clock::now() - begin).count(), trouble};
  }

  void RemoveOldProbes() {
    const std::string prefix = s3::WithPrefix(options_.endpoint, "");
    for (const std::string& key : Names(prefix + "terrace-doctor-").second) {
      const std::string name = key.substr(prefix.size());
      if (IsOldProbe(name.substr(0, name.find('/')))) Delete(key);
    }
  }

  void RemoveAll() {
    for (const std::string& key : written_) {
      const Failure failure = Delete(key).failure;
      if (!failure || failure.trouble == Trouble::kNotFound) continue;
      Problem("cleanup", failure);
      break;
    }
  }

  static std::shared_ptr<const std::vector<std::byte>> Noise(size_t bytes) {
    auto noise = std::make_shared<std::vector<std::byte>>(bytes);
    std::mt19937_64 random(1);
    std::ranges::generate(*noise, [&] { return static_cast<std::byte>(random()); });
    return noise;
  }

  const s3::ClientOptions& options_;
  const Measure& measure_;
  const std::atomic<bool>& stop_;
  Report& report_;
  const std::string probe_;
  const SystemClock clock_;
  Metrics metrics_;
  std::mutex mutex_;
  std::set<std::string> written_;  // Under mutex_ while lanes run.
  Bandwidth bandwidth_;
  const std::unique_ptr<s3::ObjectStore> store_;  // Last: its callbacks use the others.
};

}  // namespace

Bandwidth CheckS3(const s3::ClientOptions& options, const Measure& measure, const std::atomic<bool>& stop,
                  Report& report) {
  return Check(options, measure, stop, report).Run();
}

Result<WrittenFrames> FramesWrittenSince(const s3::ClientOptions& options, int64_t since, size_t names_max) {
  const SystemClock clock;
  Metrics metrics;
  const auto store = s3::OpenClient(options, clock, metrics);
  const std::string prefix = s3::WithPrefix(options.endpoint, "frames/");
  WrittenFrames written;
  std::string token;
  for (size_t names = 0; names == 0 || (!token.empty() && names < names_max);) {
    std::promise<std::pair<Failure, s3::ListPage>> end;
    store->executor().Post([&] {
      store->List({.prefix = prefix,
                   .token = token,
                   .limit = std::min<size_t>(names_max, 1000),
                   .deadline = clock.Now() + kCallMax},
                  [&end](const Failure& failure, const s3::ListPage& page) { end.set_value({failure, page}); });
    });
    const auto [failure, page] = end.get_future().get();
    if (failure) return tl::unexpected(s3::ToError(failure, options.endpoint.Describe() + ": list"));
    written.frames += static_cast<uint64_t>(
        std::ranges::count_if(page.objects, [since](const auto& object) { return object.modified >= since; }));
    written.now = page.now;
    names += std::max<size_t>(page.objects.size(), 1);
    token = page.next;
  }
  written.complete = token.empty();
  return written;
}

std::optional<int64_t> ParseHttpDate(const std::string& text) {
  std::tm time{};
  const char* end = strptime(text.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &time);
  if (end == nullptr || *end != '\0') return std::nullopt;
  return timegm(&time);
}

}  // namespace terrace::doctor
