// What could go wrong with a server on a bad day: wrong bytes taken for an object, a call that never ends or ends
// twice, a server in trouble that we press harder, a failed upload that is left behind, credentials that were replaced
// and are not looked for, memory kept after the call; KV or a session token sent where an object's writer wants them,
// or a server's answer that reaches farther than its own call.
#include "s3/client.h"

#include <gtest/gtest.h>

#include <atomic>
#include <condition_variable>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <random>

#include "s3/list_all.h"
#include "tests/support/s3_fault_server.h"

namespace terrace::s3 {
namespace {

using std::chrono::milliseconds;
using Answer = S3FaultServer::Answer;
using Request = S3FaultServer::Request;

TimePoint Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

struct Outcome {
  Failure failure;
  ObjectInfo info;
  std::string bytes;
  ListPage page;
};

// One call, whose end any thread may wait for.
class Waiter {
 public:
  void End(Outcome outcome) {
    {
      std::lock_guard lock(mutex_);
      EXPECT_FALSE(outcome_) << "a call ended twice";
      outcome_ = std::move(outcome);
    }
    ended_.notify_all();
  }
  Outcome Wait() {
    std::unique_lock lock(mutex_);
    if (!ended_.wait_until(lock, Soon(), [&] { return outcome_.has_value(); })) {
      ADD_FAILURE() << "a call never ended";
      return {};
    }
    return *outcome_;
  }
  std::string bytes;  // The sink's, on the client's thread.
  ObjectStore::CallId id = 0;

 private:
  std::mutex mutex_;
  std::condition_variable ended_;
  std::optional<Outcome> outcome_;
};
using WaiterPtr = std::shared_ptr<Waiter>;

class S3Client : public testing::Test {
 protected:
  S3Client() { options_.credentials.fixed = {"AK", "SK", ""}; }
  ~S3Client() override { client_.reset(); }

  ObjectStore& client() {
    if (!client_) {
      const auto endpoint = ParseEndpoint({.endpoint = server_.url(), .bucket = "b"});
      EXPECT_TRUE(endpoint);
      options_.endpoint = *endpoint;
      client_ = OpenClient(options_, clock_, metrics_);
    }
    return *client_;
  }

  WaiterPtr StartGet(const std::string& key, uint64_t begin = 0, uint64_t end = 0, TimePoint deadline = Soon()) {
    auto waiter = std::make_shared<Waiter>();
    GetRequest request{.key = key, .begin = begin, .end = end, .deadline = deadline};
    request.sink = [waiter, begin](const ObjectInfo&, uint64_t offset, std::span<const std::byte> piece) {
      waiter->bytes.resize(offset - begin);
      waiter->bytes.append(reinterpret_cast<const char*>(piece.data()), piece.size());
      return true;
    };
    Run([this, waiter, request = std::move(request)] {
      waiter->id = client().Get(request, [waiter](const Failure& failure, const ObjectInfo& info) {
        waiter->End({.failure = failure, .info = info, .bytes = waiter->bytes});
      });
    });
    return waiter;
  }
  Outcome Get(const std::string& key, uint64_t begin = 0, uint64_t end = 0) {
    return StartGet(key, begin, end)->Wait();
  }

  WaiterPtr StartPut(const std::string& key, const std::string& bytes, bool only_if_absent = false) {
    auto waiter = std::make_shared<Waiter>();
    auto owner = std::make_shared<std::string>(bytes);
    PutRequest request{.key = key, .owner = owner, .only_if_absent = only_if_absent, .deadline = Soon()};
    const auto whole = std::as_bytes(std::span(*owner));
    request.body = {whole.first(whole.size() / 3), whole.subspan(whole.size() / 3)};
    Run([this, waiter, request = std::move(request)] {
      waiter->id = client().Put(request, [waiter](const Failure& failure, const ObjectInfo& info) {
        waiter->End({.failure = failure, .info = info});
      });
    });
    return waiter;
  }
  Outcome Put(const std::string& key, const std::string& bytes, bool only_if_absent = false) {
    return StartPut(key, bytes, only_if_absent)->Wait();
  }
  Outcome Head(const std::string& key) {
    auto waiter = std::make_shared<Waiter>();
    Run([this, waiter, key] {
      client().Head(key, Soon(), [waiter](const Failure& failure, const ObjectInfo& info) {
        waiter->End({.failure = failure, .info = info});
      });
    });
    return waiter->Wait();
  }
  Outcome List(const ObjectStore::ListRequest& request) {
    auto waiter = std::make_shared<Waiter>();
    Run([this, waiter, request] {
      client().List(request, [waiter](const Failure& failure, const ListPage& page) {
        waiter->End({.failure = failure, .page = page});
      });
    });
    return waiter->Wait();
  }
  void Run(Task task) { ASSERT_TRUE(client().executor().Post(std::move(task))); }

  uint64_t Metric(const std::string& name, const Labels& labels = {}) {
    return metrics_.GetCounter(name, "", labels).value();
  }

  S3FaultServer server_;
  SystemClock clock_;
  Metrics metrics_;
  ClientOptions options_;
  std::unique_ptr<ObjectStore> client_;
};

std::string Bytes(size_t size, uint64_t seed = 1) {
  std::mt19937_64 random(seed);
  std::string bytes(size, '\0');
  for (char& c : bytes) c = static_cast<char>(random());
  return bytes;
}

TEST_F(S3Client, WhatIsPutIsGotWholeAndByRange) {
  const std::string bytes = Bytes(300'000);
  const Outcome put = Put("k", bytes);
  ASSERT_FALSE(put.failure) << put.failure.Describe();
  EXPECT_TRUE(Get("k").bytes == bytes);
  const Outcome range = Get("k", 1000, 2000);
  EXPECT_EQ(range.bytes, bytes.substr(1000, 1000));
  EXPECT_EQ(range.info.bytes, bytes.size());
  EXPECT_EQ(Get("k", 299'999, 400'000).bytes, bytes.substr(299'999)) << "as much as there is";
  EXPECT_EQ(Get("k", 300'000, 400'000).failure.trouble, Trouble::kNoRange);
  EXPECT_EQ(Head("k").info.bytes, bytes.size());
  EXPECT_EQ(Get("other").failure.trouble, Trouble::kNotFound);
  EXPECT_EQ(Head("other").failure.trouble, Trouble::kNotFound);
  EXPECT_FALSE(Put("empty", "").failure);
  EXPECT_FALSE(Get("empty").failure);
}

TEST_F(S3Client, RequestsAreSignedOverWhatIsSent) {
  options_.credentials.fixed.session_token = "tok";
  Put("m@rev/a=b+c d", "bytes");
  const Request request = server_.requests().at(0);
  EXPECT_EQ(request.key, "m@rev/a=b+c d");
  EXPECT_EQ(request.headers.at("x-amz-content-sha256"), "UNSIGNED-PAYLOAD");
  EXPECT_EQ(request.headers.at("x-amz-security-token"), "tok");
  EXPECT_NE(request.headers.at("authorization")
                .find("SignedHeaders=content-type;host;x-amz-content-sha256;x-amz-date;"
                      "x-amz-security-token"),
            std::string::npos);
  EXPECT_FALSE(request.headers.contains("expect"));
  EXPECT_FALSE(request.headers.contains("transfer-encoding"));
}

TEST_F(S3Client, ListsGoOnWhereThePageBeforeEnded) {
  for (int i = 0; i < 5; ++i) server_.PutObject("p/" + std::to_string(i), "x");
  server_.PutObject("q", "x");
  std::vector<std::string> keys;
  ObjectStore::ListRequest request{.prefix = "p/", .limit = 2, .deadline = Soon()};
  do {
    const Outcome page = List(request);
    ASSERT_FALSE(page.failure) << page.failure.Describe();
    for (const auto& object : page.page.objects) keys.push_back(object.key);
    request.token = page.page.next;
  } while (!request.token.empty());
  EXPECT_EQ(keys, (std::vector<std::string>{"p/0", "p/1", "p/2", "p/3", "p/4"}));
  EXPECT_EQ(List({.prefix = "p/", .start_after = "p/3", .deadline = Soon()}).page.objects.size(), 1u);
}

TEST_F(S3Client, AConditionalPutNeverReplaces) {
  EXPECT_FALSE(Put("k", "first", true).failure);
  EXPECT_EQ(Put("k", "second", true).failure.trouble, Trouble::kExists);
  EXPECT_EQ(server_.Object("k"), "first");
}

TEST_F(S3Client, AServerWithoutConditionsIsWrittenWithoutThem) {
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.headers.contains("if-none-match")) answer = S3FaultServer::Error(501, "NotImplemented");
  });
  for (const char* key : {"k", "l"}) {
    const Failure failure = Put(key, "first", true).failure;
    EXPECT_FALSE(failure) << failure.Describe();
  }
  EXPECT_EQ(server_.Count("PUT"), 3u) << "asked once, then never again";
}

// D20.
TEST_F(S3Client, AServerThatAsksForLessGetsLess) {
  std::mt19937_64 random(20);
  std::mutex mutex;
  server_.PutObject("k", Bytes(1000));
  server_.SetHook([&](const Request&, Answer& answer) {
    std::lock_guard lock(mutex);
    if (random() % 10 < 3) answer = S3FaultServer::Error(503, "SlowDown");
  });
  options_.hedge = false;
  options_.backoff = milliseconds(4);
  options_.attempts_max = 4;
  std::vector<WaiterPtr> calls;
  for (uint64_t i = 0; i < 200; ++i) calls.push_back(StartGet("k", i, i + 1));  // Each its own range: its own attempts.
  size_t failed = 0;
  for (const auto& call : calls) failed += call->Wait().failure ? 1 : 0;
  EXPECT_LT(failed, 20u) << "1 in 123 may fail four times";
  for (const Request& request : server_.requests()) EXPECT_LE(request.attempt, 4);
  EXPECT_LE(server_.most_at_once(), options_.parallel_max);
  EXPECT_GT(Metric("terrace_s3_retries_total", {{"reason", "slow_down"}}), 30u);
  EXPECT_LT(metrics_.GetGauge("terrace_s3_parallel_max", "").value(), static_cast<int64_t>(options_.parallel_max));
}

// D20.
TEST_F(S3Client, A200WithAnErrorDocumentIsAFailure) {
  options_.backoff = milliseconds(1);
  server_.PutObject("k", Bytes(1000));
  server_.SetHook([](const Request&, Answer& answer) { answer = S3FaultServer::Error(200, "InternalError"); });
  EXPECT_EQ(Get("k").failure.trouble, Trouble::kServer);
  EXPECT_EQ(Put("l", "bytes").failure.trouble, Trouble::kServer);
  EXPECT_EQ(List({.deadline = Soon()}).failure.trouble, Trouble::kServer);
  EXPECT_EQ(server_.Count("PUT"), 4u) << "tried again, four times in all";
  server_.SetHook([](const Request&, Answer& answer) { answer = S3FaultServer::Error(200, "Odd"); });
  EXPECT_TRUE(Put("l", "bytes").failure);
  EXPECT_TRUE(Get("k").failure);
}

TEST_F(S3Client, ABodyOfAnotherLengthThanSaidIsAFailure) {
  options_.backoff = milliseconds(1);
  server_.PutObject("k", Bytes(10'000));
  server_.SetHook([](const Request&, Answer& answer) { answer.send_bytes = 5000; });
  EXPECT_EQ(Get("k").failure.trouble, Trouble::kCut);
  EXPECT_EQ(Get("k", 100, 9000).failure.trouble, Trouble::kCut);
  server_.SetHook(
      [](const Request&, Answer& answer) { answer.said_length = 10'005; });  // The server waits, then closes.
  EXPECT_EQ(Get("k").failure.trouble, Trouble::kCut);
  server_.SetHook([](const Request&, Answer& answer) {
    answer.body += "more than the range";
    answer.said_length = answer.body.size();
  });
  EXPECT_EQ(Get("k", 100, 9000).failure.trouble, Trouble::kCut);
  server_.SetHook([](const Request&, Answer& answer) {  // Neither length nor chunks: nobody can tell the end.
    answer.said_length = ~uint64_t{0};
  });
  EXPECT_TRUE(Get("k").failure);
}

TEST_F(S3Client, AnotherRangeThanAskedForIsAFailure) {
  server_.PutObject("k", Bytes(10'000));
  server_.SetHook([](const Request&, Answer& answer) { answer.headers["content-range"] = "bytes 0-99/10000"; });
  EXPECT_EQ(Get("k", 100, 200).failure.trouble, Trouble::kNoS3);
  server_.SetHook([](const Request&, Answer& answer) { answer.status = 200; });
  EXPECT_EQ(Get("k", 100, 200).failure.trouble, Trouble::kNoS3);
}

TEST_F(S3Client, ABrokenReadBeginsAnew) {
  const std::string bytes = Bytes(1 << 20);
  server_.PutObject("k", bytes);
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.attempt < 3) answer.send_bytes = 300'000;
  });
  const Outcome got = Get("k");
  EXPECT_FALSE(got.failure) << got.failure.Describe();
  EXPECT_TRUE(got.bytes == bytes);
}

TEST_F(S3Client, SilenceEndsWithTheDeadlineOrTheTimeoutOfItsPhase) {
  server_.PutObject("k", Bytes(100'000));
  options_.http.first_byte_timeout = options_.http.idle_timeout = milliseconds(100);
  options_.attempts_max = 1;
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_first = true; });
  EXPECT_EQ(Get("k").failure.trouble, Trouble::kTimeout);
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_after = 1000; });
  const Outcome stalled = Get("k");
  EXPECT_EQ(stalled.failure.trouble, Trouble::kTimeout);
  EXPECT_NE(stalled.failure.message.find("silence"), std::string::npos) << stalled.failure.message;
  const auto late = StartGet("k", 0, 0, std::chrono::steady_clock::now() + milliseconds(30));
  EXPECT_EQ(late->Wait().failure.trouble, Trouble::kTimeout);
}

TEST_F(S3Client, WhatWaitsForItsTurnHasADeadlineToo) {
  options_.parallel_max = 1;
  server_.PutObject("k", "x");
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_first = true; });
  const auto first = StartGet("k");
  const auto second = StartGet("k", 0, 0, std::chrono::steady_clock::now() + milliseconds(50));
  EXPECT_EQ(second->Wait().failure.trouble, Trouble::kTimeout);
  server_.SetHook({});
  server_.Release();
  EXPECT_FALSE(first->Wait().failure);
}

TEST_F(S3Client, ALateReadIsAskedForTwiceAndTheFirstAnswerCounts) {
  const std::string bytes = Bytes(5000);
  server_.PutObject("k", bytes);
  for (int i = 0; i < 32; ++i) ASSERT_FALSE(Get("k").failure);  // How long an answer takes here.
  server_.Forget();
  server_.SetHook([](const Request& request, Answer& answer) { answer.stall_first = request.attempt == 1; });
  const Outcome got = Get("k");
  EXPECT_FALSE(got.failure) << got.failure.Describe();
  EXPECT_TRUE(got.bytes == bytes);
  EXPECT_EQ(Metric("terrace_s3_hedged_reads_total"), 1u);
  EXPECT_EQ(server_.Count("GET"), 2u);
}

TEST_F(S3Client, ACancelledCallEndsAndItsSinkIsLeftAlone) {
  server_.PutObject("k", Bytes(100'000));
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_after = 50'000; });
  const auto call = StartGet("k");
  Run([this, call] { client().Cancel(call->id); });
  EXPECT_EQ(call->Wait().failure.trouble, Trouble::kCancelled);
}

TEST_F(S3Client, StopEndsEverything) {
  options_.parallel_max = 2;
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_first = true; });
  std::vector<WaiterPtr> calls;
  for (int i = 0; i < 5; ++i) calls.push_back(StartGet("k"));
  calls.push_back(StartPut("l", "bytes"));
  client().Stop();
  for (const auto& call : calls) EXPECT_EQ(call->Wait().failure.trouble, Trouble::kCancelled);
}

TEST_F(S3Client, LargeBodiesGoInPartsAndAreWhole) {
  options_.single_put_bytes_max = 100'000;
  options_.part_bytes = 64'000;
  const std::string bytes = Bytes(300'001);
  const Outcome put = Put("k", bytes, true);
  ASSERT_FALSE(put.failure) << put.failure.Describe();
  EXPECT_TRUE(server_.Object("k") == bytes);
  EXPECT_EQ(server_.Count("PUT"), 5u);
  EXPECT_EQ(server_.uploads(), 0u);
  EXPECT_EQ(Put("k", bytes, true).failure.trouble, Trouble::kExists);
  EXPECT_EQ(server_.uploads(), 0u) << "aborted";
}

TEST_F(S3Client, AnUploadThatFailsIsAborted) {
  options_.single_put_bytes_max = 100'000;
  options_.part_bytes = 64'000;
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.query.find("partNumber=3") != std::string::npos) answer = S3FaultServer::Error(403, "AccessDenied");
  });
  EXPECT_EQ(Put("k", Bytes(300'000)).failure.trouble, Trouble::kDenied);
  EXPECT_EQ(server_.uploads(), 0u);
  EXPECT_FALSE(server_.Object("k"));
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.method == "POST" && request.query.find("uploadId") != std::string::npos) {
      answer = S3FaultServer::Error(200, "InternalError");
    }
  });
  options_.backoff = milliseconds(1);
  EXPECT_TRUE(Put("l", Bytes(300'000)).failure) << "completed with 200 and an error";
}

TEST_F(S3Client, AServerWithoutMultipartGetsOnePut) {
  options_.single_put_bytes_max = 100'000;
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.query.find("uploads") != std::string::npos) answer = S3FaultServer::Error(501, "NotImplemented");
  });
  const std::string bytes = Bytes(300'000);
  EXPECT_FALSE(Put("k", bytes).failure);
  EXPECT_TRUE(server_.Object("k") == bytes);
  EXPECT_FALSE(Put("l", bytes).failure);
  EXPECT_EQ(server_.Count("POST"), 1u) << "asked once, then never again";
}

TEST_F(S3Client, UploadsOfDeadWritersAreAborted) {
  options_.single_put_bytes_max = 100'000;
  server_.SetHook([](const Request& request, Answer& answer) { answer.stall_first = request.method == "PUT"; });
  const auto left = StartPut("k", Bytes(300'000));
  const TimePoint deadline = Soon();
  while (server_.Count("PUT") < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  client_->Stop();
  client_.reset();
  left->Wait();
  ASSERT_EQ(server_.uploads(), 1u);
  server_.SetHook({});
  server_.Release();
  const auto collect = [this](std::chrono::seconds age) {
    auto waiter = std::make_shared<Waiter>();
    Run([this, waiter, age] {
      client().AbortOldUploads("", age, [waiter](const Failure& failure, size_t aborted) {
        waiter->End({.failure = failure, .info = {.bytes = aborted}});
      });
    });
    return waiter->Wait();
  };
  EXPECT_EQ(collect(std::chrono::hours(48)).info.bytes, 0u) << "may still be at work";
  EXPECT_EQ(collect(std::chrono::hours(12)).info.bytes, 1u);
  EXPECT_EQ(server_.uploads(), 0u);
}

TEST_F(S3Client, AnotherRegionIsFollowedOnce) {
  server_.PutObject("k", "bytes");
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.headers.at("authorization").find("/eu-west-1/s3/") == std::string::npos) {
      answer = S3FaultServer::Error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-1</Region>");
    }
  });
  EXPECT_EQ(Get("k").bytes, "bytes");
  EXPECT_EQ(Get("k").bytes, "bytes");
  EXPECT_EQ(server_.Count("GET"), 3u) << "learnt";
}

TEST_F(S3Client, NoAnswerNamesTheHostThatIsAskedNext) {
  options_.credentials.fixed.session_token = "tok";
  S3FaultServer evil;
  const std::string host = "127.0.0.1:" + std::to_string(evil.port());
  server_.PutObject("k", "bytes");
  for (const int status : {200, 301, 302, 307, 308, 400, 403, 500}) {
    for (const char* code : {"PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed"}) {
      for (const std::string& endpoint : {host, "x@" + host, "127.0.0.1:x@" + host}) {
        server_.SetHook([&](const Request&, Answer& answer) {
          answer = S3FaultServer::Error(
              status, code, "<Endpoint>" + endpoint + "</Endpoint><Region>r" + std::to_string(status) + "</Region>");
          answer.headers["location"] = "http://" + endpoint + "/b/k";
          answer.headers["x-amz-bucket-region"] = "eu-west-1";
        });
        options_.backoff = milliseconds(1);
        EXPECT_TRUE(Get("k").failure);
        EXPECT_EQ(static_cast<bool>(Head("k").failure), status != 200);
        EXPECT_TRUE(Put("l", "bytes").failure);
        server_.SetHook({});
        EXPECT_EQ(Get("k").bytes, "bytes") << status << code << endpoint;
      }
    }
  }
  EXPECT_EQ(evil.requests().size(), 0u);
}

TEST_F(S3Client, AnObjectsBytesAreNoAnswerOfTheServer) {
  options_.backoff = milliseconds(1);
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.key == "k") answer.headers["content-type"] = "application/xml";  // Whoever writes it chooses that.
  });
  server_.PutObject("l", "bytes");
  for (const char* code : {"PermanentRedirect", "SlowDown", "ExpiredToken", "RequestTimeTooSkewed", "NoSuchKey"}) {
    const std::string bytes = S3FaultServer::Error(200, code, "<Region>mars</Region>").body;
    server_.PutObject("k", bytes);
    const Outcome got = Get("k");
    EXPECT_FALSE(got.failure) << code << ": " << got.failure.Describe();
    EXPECT_EQ(got.bytes, bytes);
    EXPECT_EQ(Get("l").bytes, "bytes");
  }
  const Request last = server_.requests().back();
  EXPECT_NE(last.headers.at("authorization").find("/us-east-1/s3/"), std::string::npos) << "the region is ours";
  EXPECT_EQ(Metric("terrace_s3_retries_total", {{"reason", "slow_down"}}), 0u);
}

TEST_F(S3Client, ASuccessWithAnErrorInItSaysNothingOfTheClient) {
  options_.backoff = milliseconds(1);
  server_.PutObject("k", "bytes");
  for (const char* code : {"PermanentRedirect", "AuthorizationHeaderMalformed", "ExpiredToken", "AccessDenied",
                           "RequestTimeTooSkewed", "NotImplemented", "NoSuchBucket"}) {
    server_.SetHook([&](const Request&, Answer& answer) {
      answer = S3FaultServer::Error(200, code, "<Region>mars</Region>");
      answer.headers["date"] = "Sat, 31 Jan 2026 12:00:00 GMT";
    });
    EXPECT_EQ(Get("k").failure.trouble, Trouble::kServer) << code;
    EXPECT_EQ(Put("l", "bytes", true).failure.trouble, Trouble::kServer) << code;
  }
  server_.SetHook({});
  Put("l", "bytes", true);
  const Request last = server_.requests().back();
  EXPECT_EQ(last.headers.count("if-none-match"), 1u);
  EXPECT_NE(last.headers.at("authorization").find("/us-east-1/s3/"), std::string::npos);
  EXPECT_FALSE(last.headers.at("x-amz-date").starts_with("20260131")) << "the clock is ours";
}

TEST_F(S3Client, ARegionThatIsNoNameIsNotSaidAgain) {
  for (const char* region : {"eu-west-1&#13;&#10;x-evil: 1", "a/s3/aws4_request", "eu west", ""}) {
    server_.SetHook([&](const Request&, Answer& answer) {
      answer =
          S3FaultServer::Error(400, "AuthorizationHeaderMalformed", "<Region>" + std::string(region) + "</Region>");
    });
    const Failure failure = Get("k").failure;
    EXPECT_EQ(failure.trouble, Trouble::kOtherRegion);
    EXPECT_EQ(failure.region, "");
  }
  for (const Request& request : server_.requests()) EXPECT_FALSE(request.headers.contains("x-evil"));
  EXPECT_EQ(server_.Count("GET"), 4u) << "not tried again";
}

TEST_F(S3Client, NoMoreIsTakenThanWasAskedFor) {
  options_.attempts_max = 1;
  server_.PutObject("k", Bytes(10'000));
  server_.SetHook([](const Request&, Answer& answer) {
    answer.body.append(1 << 20, 'x');
    answer.said_length = answer.body.size();
  });
  const auto call = StartGet("k", 100, 200);
  EXPECT_EQ(call->Wait().failure.trouble, Trouble::kCut);
  EXPECT_LE(call->bytes.size(), 100u);
}

TEST_F(S3Client, ACallWithoutADeadlineGetsOne) {
  options_.put_timeout = milliseconds(50);
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_first = true; });
  EXPECT_EQ(StartGet("k", 0, 0, TimePoint::max())->Wait().failure.trouble, Trouble::kTimeout);
  auto waiter = std::make_shared<Waiter>();
  Run([this, waiter] {
    client().AbortOldUploads("", std::chrono::hours(1),
                             [waiter](const Failure& failure, size_t) { waiter->End({.failure = failure}); });
  });
  EXPECT_EQ(waiter->Wait().failure.trouble, Trouble::kTimeout);
}

TEST_F(S3Client, AListShowsOnlyWhatWasAskedFor) {
  server_.SetHook([](const Request&, Answer& answer) {
    answer.body =
        "<ListBucketResult>"
        "<Contents><Key>payroll</Key><Size>1</Size></Contents>"
        "<Contents><Key>p/1</Key><Size>18446744073709551615</Size>"
        "<LastModified>9999-01-01T00:00:00.000Z</LastModified></Contents></ListBucketResult>";
  });
  const Outcome got = List({.prefix = "p/", .deadline = Soon()});
  ASSERT_FALSE(got.failure) << got.failure.Describe();
  ASSERT_EQ(got.page.objects.size(), 1u);
  EXPECT_EQ(got.page.objects[0].key, "p/1");
  EXPECT_LE(got.page.objects[0].modified, got.page.now);
  EXPECT_LE(got.page.objects[0].bytes, uint64_t{1} << 60);
}

TEST_F(S3Client, AListThatGoesInCirclesEnds) {
  for (const size_t circle : {1, 3}) {
    std::atomic<size_t> pages{0};
    server_.SetHook([&](const Request&, Answer& answer) {
      answer.body = "<ListBucketResult><IsTruncated>true</IsTruncated><NextContinuationToken>" +
                    std::to_string(pages++ % circle) + "</NextContinuationToken></ListBucketResult>";
    });
    auto waiter = std::make_shared<Waiter>();
    Run([this, waiter] {
      ListAll(
          client(), "p/", [](const ListPage&) {},
          [waiter](const Failure& failure, int64_t) { waiter->End({.failure = failure}); });
    });
    EXPECT_EQ(waiter->Wait().failure.trouble, Trouble::kNoS3);
    EXPECT_EQ(pages.load(), circle + 1);
    server_.SetHook({});
  }
}

TEST_F(S3Client, UploadsOfOthersAreLeftAlone) {
  options_.single_put_bytes_max = 100'000;
  std::atomic<size_t> aborts{0};
  server_.SetHook([&](const Request& request, Answer& answer) {
    if (request.method == "DELETE") ++aborts;
    if (request.method != "GET") return;
    const std::string old = "<Initiated>2020-01-01T00:00:00.000Z</Initiated></Upload>";
    answer.body = "<ListMultipartUploadsResult><Upload><Key>theirs</Key><UploadId>u1</UploadId>" + old +
                  "<Upload><Key>ours/k</Key><UploadId></UploadId>" + old +
                  "<Upload><Key></Key><UploadId>u3</UploadId>" + old + "</ListMultipartUploadsResult>";
  });
  auto waiter = std::make_shared<Waiter>();
  Run([this, waiter] {
    client().AbortOldUploads("ours/", std::chrono::hours(1), [waiter](const Failure& failure, size_t aborted) {
      waiter->End({.failure = failure, .info = {.bytes = aborted}});
    });
  });
  const Outcome outcome = waiter->Wait();
  EXPECT_FALSE(outcome.failure) << outcome.failure.Describe();
  EXPECT_EQ(outcome.info.bytes, 0u);
  EXPECT_EQ(aborts.load(), 0u);
}

TEST_F(S3Client, AClockThatIsOffIsCorrectedByTheServers) {
  server_.PutObject("k", "bytes");
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.headers.at("x-amz-date").starts_with("20260131T12")) return;
    answer = S3FaultServer::Error(403, "RequestTimeTooSkewed");
    answer.headers["date"] = "Sat, 31 Jan 2026 12:00:00 GMT";
  });
  EXPECT_EQ(Get("k").bytes, "bytes");
  EXPECT_EQ(server_.Count("GET"), 2u);
}

TEST_F(S3Client, RightsThatEndAtAPrefixAreNamed) {
  server_.SetHook([](const Request& request, Answer& answer) {
    if (!request.key.starts_with("ours/")) answer = S3FaultServer::Error(403, "AccessDenied");
  });
  EXPECT_FALSE(Put("ours/k", "x").failure);
  const Failure denied = Put("k", "x").failure;
  EXPECT_EQ(denied.trouble, Trouble::kDenied);
  EXPECT_NE(Remedy(denied, client().endpoint()).find("s3:PutObject"), std::string::npos);
  EXPECT_EQ(server_.Count("PUT"), 2u) << "not tried again";
}

// D21.
TEST_F(S3Client, ReplacedCredentialsAreReadOnceForAllThatWereRefused) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("terrace-s3-" + std::to_string(getpid()))).string();
  const auto write = [&](const std::string& key, const std::string& token) {
    std::ofstream(file) << "[default]\naws_access_key_id = x\n[kv]\naws_access_key_id = " << key
                        << "\naws_secret_access_key = s\naws_session_token = " << token << "\n";
  };
  write("OLD", "t1");
  options_.credentials.fixed = {};
  options_.credentials.profile = "kv";
  options_.credentials.environment = [&](const std::string& name) -> std::optional<std::string> {
    if (name == "AWS_SHARED_CREDENTIALS_FILE") return file;
    return std::nullopt;
  };
  server_.PutObject("k", "bytes");
  server_.SetKeys({{"OLD", "t1"}}, "ExpiredToken");
  ASSERT_EQ(Get("k").bytes, "bytes");

  write("NEW", "t2");
  server_.SetKeys({{"NEW", "t2"}}, "ExpiredToken");
  std::vector<WaiterPtr> calls;
  for (int i = 0; i < 8; ++i) calls.push_back(StartGet("k"));
  for (const auto& call : calls) EXPECT_EQ(call->Wait().bytes, "bytes");
  EXPECT_EQ(Metric("terrace_s3_credential_reloads_total"), 1u);

  // Refused, and nothing new to be had: a failure, and no storm of reloads.
  server_.SetKeys({{"NEWER", "t3"}}, "ExpiredToken");
  calls.clear();
  for (int i = 0; i < 8; ++i) calls.push_back(StartGet("k"));
  for (const auto& call : calls) EXPECT_EQ(call->Wait().failure.trouble, Trouble::kExpired);
  EXPECT_EQ(Metric("terrace_s3_credential_reloads_total"), 2u);
  std::filesystem::remove(file);
}

TEST_F(S3Client, ARoleIsAssumedByWebIdentityAndRenewed) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("terrace-token-" + std::to_string(getpid()))).string();
  std::ofstream(file) << "the.web.token\n";
  S3FaultServer sts;
  std::atomic<int> assumed{0};
  const auto expires = [](int seconds) {
    std::string text = AmzDate(std::time(nullptr) + seconds);  // 20150830T123600Z.
    return text.substr(0, 4) + "-" + text.substr(4, 2) + "-" + text.substr(6, 5) + ":" + text.substr(11, 2) + ":" +
           text.substr(13);
  };
  sts.SetHook([&](const Request& request, Answer& answer) {
    const int n = ++assumed;
    EXPECT_NE(request.body.find("Action=AssumeRoleWithWebIdentity"), std::string::npos);
    EXPECT_NE(request.body.find("WebIdentityToken=the.web.token"), std::string::npos);
    EXPECT_NE(request.body.find("RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fkv"), std::string::npos);
    // The first is near its end: it serves while it is renewed.
    answer = {.body =
                  "<AssumeRoleWithWebIdentityResponse><AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>A" +
                  std::to_string(n) + "</AccessKeyId><SecretAccessKey>s</SecretAccessKey><SessionToken>t" +
                  std::to_string(n) + "</SessionToken><Expiration>" + expires(n == 1 ? 200 : 3600) +
                  "</Expiration></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>"};
  });
  options_.credentials.fixed = {};
  options_.credentials.environment = [&](const std::string& name) -> std::optional<std::string> {
    if (name == "AWS_WEB_IDENTITY_TOKEN_FILE") return file;
    if (name == "AWS_ROLE_ARN") return "arn:aws:iam::1:role/kv";
    if (name == "AWS_ENDPOINT_URL_STS") return sts.url();
    return std::nullopt;
  };
  server_.PutObject("k", "bytes");
  server_.SetKeys({{"A1", "t1"}, {"A2", "t2"}});
  EXPECT_EQ(Get("k").bytes, "bytes");
  EXPECT_EQ(Get("k").bytes, "bytes") << "served by the old one, renewed behind it";
  const TimePoint deadline = Soon();
  while (assumed.load() < 2 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  server_.SetKeys({{"A2", "t2"}}, "ExpiredToken");
  EXPECT_EQ(Get("k").bytes, "bytes");
  EXPECT_EQ(assumed.load(), 2);
  std::filesystem::remove(file);
}

TEST_F(S3Client, WithoutCredentialsTheFailureSaysWhatToSet) {
  options_.credentials.fixed = {};
  options_.credentials.environment = [](const std::string&) { return std::nullopt; };
  const Failure failure = Get("k").failure;
  EXPECT_EQ(failure.trouble, Trouble::kNoCredentials);
  EXPECT_NE(Remedy(failure, client().endpoint()).find("AWS_ACCESS_KEY_ID"), std::string::npos);
  EXPECT_EQ(server_.requests().size(), 0u);
}

TEST_F(S3Client, NobodyThereIsNamed) {
  options_.attempts_max = 1;
  uint16_t port = 0;
  {
    const S3FaultServer gone;
    port = gone.port();
  }
  const auto endpoint = ParseEndpoint({.endpoint = "http://127.0.0.1:" + std::to_string(port), .bucket = "b"});
  options_.endpoint = *endpoint;
  client_ = OpenClient(options_, clock_, metrics_);
  EXPECT_EQ(Get("k").failure.trouble, Trouble::kUnreachable);
  options_.endpoint.host = "no-such-host.invalid";
  client_ = OpenClient(options_, clock_, metrics_);
  EXPECT_EQ(Get("k").failure.trouble, Trouble::kUnresolved);
}

}  // namespace
}  // namespace terrace::s3
