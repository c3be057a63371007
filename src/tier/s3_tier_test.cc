// What could go wrong beyond the contract: a frame that was damaged, cut or of another length delivered as a hit; a
// good frame removed because a network was bad; a miss remembered for ever, so that sharing dies; a lookup that costs a
// question a chunk; a start without rights or bucket that does not say so; a save that undoes another's, or an erase
// that undoes a save; an object or an answer that means harm: one that is taken for the server's word, that keeps a
// save for ever, or hides what is there.
#include "tier/s3_tier.h"

#include <gtest/gtest.h>

#include <future>

#include "base/hash.h"
#include "base/log.h"
#include "tests/support/s3_fault_server.h"
#include "tests/support/s3_objects.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using Answer = S3FaultServer::Answer;
using Request = S3FaultServer::Request;

TimePoint Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

// For "does not ask again": a count would take in what an earlier search gave up and the server saw late.
void RefuseHeads(const Request& request, Answer& answer) {
  if (request.method == "HEAD") answer = S3FaultServer::Error(403, "AccessDenied");
}

// A clock that a test moves; deadlines of calls go by the real one.
class ShiftedClock final : public Clock {
 public:
  TimePoint Now() const override { return std::chrono::steady_clock::now() + milliseconds(shift_ms.load()); }
  uint64_t WallNs() const override { return SystemClock().WallNs(); }
  std::atomic<int64_t> shift_ms{0};
};

class S3TierTest : public testing::Test {
 protected:
  S3TierTest() {
    client_.credentials.fixed = {"AK", "SK", ""};
    client_.backoff = milliseconds(1);
    client_.hedge = false;
    options_.list_interval = std::chrono::seconds(0);
  }

  Result<std::unique_ptr<Tier>> TryOpen() {
    client_.endpoint = *s3::ParseEndpoint({.endpoint = server_.url(), .bucket = "b", .prefix = "kv"});
    return OpenS3Tier(client_, options_, {.clock = clock_, .metrics = metrics_});
  }
  std::unique_ptr<Tier> MustOpen() {
    auto tier = TryOpen();
    EXPECT_TRUE(tier) << tier.error().what;
    server_.Forget();
    return *std::move(tier);
  }
  Tier& tier() {
    if (!tier_) tier_ = MustOpen();
    return *tier_;
  }

  struct Loaded {
    LoadResult result;
    Bytes bytes;
  };
  Loaded Load(Tier& tier, uint64_t n, uint64_t payload_bytes, TimePoint deadline = Soon()) {
    auto buffer = std::make_shared<Bytes>(payload_bytes);
    auto done = std::make_shared<LoadBatch>(1);
    tier.Load({{.key = Key(n), .space = kSpace, .into = *buffer, .owner = buffer}}, deadline, done);
    EXPECT_TRUE(done->WaitAll(Soon()));
    return {*done->Poll(0), *buffer};
  }
  Loaded Load(uint64_t n, uint64_t payload_bytes) { return Load(tier(), n, payload_bytes); }
  void ExpectHit(Tier& tier, uint64_t n, uint64_t payload_bytes) {
    const Loaded loaded = Load(tier, n, payload_bytes);
    ASSERT_EQ(loaded.result.outcome, Outcome::kHit)
        << ReasonName(loaded.result.reason) << (loaded.result.error ? loaded.result.error->what : "");
    EXPECT_TRUE(loaded.bytes == Payload(n, payload_bytes));
    EXPECT_EQ(*loaded.result.hashes, HashSegments(loaded.bytes));
  }
  SaveResult Save(Tier& tier, uint64_t n, uint64_t payload_bytes) {
    auto payload = std::make_shared<Bytes>(Payload(n, payload_bytes));
    auto done = std::make_shared<SaveBatch>(1);
    tier.Save({{.info = Info(n, payload_bytes), .payload = *payload, .owner = payload}}, done);
    EXPECT_TRUE(done->WaitAll(Soon()));
    return *done->Poll(0);
  }
  std::optional<Error> Probe(Tier& tier, uint64_t chunks, TimePoint deadline = Soon()) {
    std::vector<Digest> keys;
    for (uint64_t n = 0; n < chunks; ++n) keys.push_back(Key(n));
    std::promise<std::optional<Error>> end;
    tier.Probe(std::move(keys), deadline, [&end](const std::optional<Error>& trouble) { end.set_value(trouble); });
    return end.get_future().get();
  }
  size_t Known(Tier& tier, uint64_t chunks) {
    size_t known = 0;
    for (uint8_t present = 1; known < chunks; ++known) {
      const Digest key = Key(known);
      tier.Contains({&key, 1}, {&present, 1});
      if (!present) break;
    }
    return known;
  }

  size_t Count(const std::string& method, const std::string& key) {
    size_t count = 0;
    for (const Request& request : server_.requests()) count += request.method == method && request.key == key ? 1 : 0;
    return count;
  }

  S3FaultServer server_;
  ShiftedClock clock_;
  Metrics metrics_;
  s3::ClientOptions client_;
  S3TierOptions options_;
  std::unique_ptr<Tier> tier_;
};

TEST_F(S3TierTest, AnObjectIsTheFrameItselfUnderTheNameThatASharedDirectoryHas) {
  ASSERT_EQ(Save(tier(), 1, 5000).outcome, Outcome::kHit);
  const std::optional<std::string> object = server_.Object(Name(1));
  ASSERT_TRUE(object);
  ASSERT_EQ(object->size(), FrameBytes(5000));
  EXPECT_TRUE(object->substr(kFrameHeaderBytes) == ObjectBytes(1, 5000).substr(kFrameHeaderBytes));
  EXPECT_EQ(server_.Object("kv/terrace.format"), "terrace s3\nversion 1\n");
}

TEST_F(S3TierTest, ALargeFrameIsReadInRangesAtOnce) {
  constexpr uint64_t kBytes = (9 << 20) + 77;
  options_.range_bytes_min = 1 << 20;
  server_.PutObject(Name(1), ObjectBytes(1, kBytes));
  ExpectHit(tier(), 1, kBytes);
  EXPECT_EQ(Count("GET", Name(1)), 9u);
  EXPECT_GT(server_.most_at_once(), 1u);
}

TEST_F(S3TierTest, DamageAnywhereIsAMissAndTheFrameIsRemoved) {
  constexpr uint64_t kBytes = (3 << 20) + 5000;
  options_.range_bytes_min = 1 << 20;
  uint64_t n = 0;
  for (const size_t at : {0, 40, 4096, 2 << 20, 4096 + (3 << 20) + 4999, 4096 + (3 << 20) + 5000}) {
    const std::string good = ObjectBytes(++n, kBytes);
    std::string bad = good;
    bad[at] = static_cast<char>(bad[at] ^ 1);
    server_.PutObject(Name(n), bad);
    const Loaded loaded = Load(n, kBytes);
    EXPECT_EQ(loaded.result.outcome, Outcome::kMiss) << at;
    EXPECT_EQ(loaded.result.reason, Reason::kDamaged) << at << ": " << ReasonName(loaded.result.reason);
    EXPECT_EQ(tier().stats().quarantined, n);
    ASSERT_EQ(Save(tier(), n, kBytes).outcome, Outcome::kHit) << "written anew, behind the removal";
    EXPECT_TRUE(server_.Object(Name(n))->substr(4096) == good.substr(4096));
  }
}

TEST_F(S3TierTest, AnObjectThatLooksLikeAnErrorIsADamagedFrame) {
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.method == "GET" && request.key == Name(1)) answer.headers["content-type"] = "application/xml";
  });
  for (const char* code : {"SlowDown", "PermanentRedirect", "AccessDenied", "NoSuchKey"}) {
    server_.PutObject(Name(1), S3FaultServer::Error(200, code, "<Endpoint>evil.example</Endpoint>").body);
    const Loaded loaded = Load(1, 5000);
    EXPECT_EQ(loaded.result.outcome, Outcome::kMiss) << code;
    EXPECT_EQ(loaded.result.reason, Reason::kTruncated) << code << ": " << ReasonName(loaded.result.reason);
    ASSERT_EQ(Save(tier(), 1, 5000).outcome, Outcome::kHit) << "written anew, behind the removal";
    ExpectHit(tier(), 1, 5000);
  }
}

TEST_F(S3TierTest, ARangeThatDeliversMoreSpoilsNoFrame) {
  constexpr uint64_t kBytes = (3 << 20) + 5000;
  options_.range_bytes_min = 1 << 20;
  server_.PutObject(Name(1), ObjectBytes(1, kBytes));
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.key != Name(1) || request.Header("range").empty()) return;
    answer.body.append(2 << 20, 'x');
  });
  EXPECT_NE(Load(1, kBytes).result.outcome, Outcome::kHit);
  server_.SetHook({});
  ExpectHit(tier(), 1, kBytes);
}

TEST_F(S3TierTest, ASaveThatFindsOnlySilenceEnds) {
  options_.save_timeout = milliseconds(100);
  server_.SetHook([](const Request& request, Answer& answer) { answer.stall_first = request.key == Name(1); });
  const SaveResult result = Save(tier(), 1, 5000);
  EXPECT_EQ(result.outcome, Outcome::kFailed);
  EXPECT_EQ(result.error->code, Code::kTimeout) << result.error->what;
}

TEST_F(S3TierTest, AScanPassesOverWhatIsNoFrame) {
  for (int i = 0; i < 600; ++i) server_.PutObject("kv/frames/!" + std::to_string(1000 + i), "x");
  for (uint64_t n = 0; n < 3; ++n) server_.PutObject(Name(n), ObjectBytes(n, 1000));
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.key == Name(2)) answer = S3FaultServer::Error(403, "InvalidObjectState");
  });
  size_t found = 0;
  std::string cursor;
  do {
    const Result<ScanPage> page = tier().Scan(cursor, 2);
    ASSERT_TRUE(page) << page.error().what;
    found += page->frames.size();
    cursor = page->next;
  } while (!cursor.empty());
  EXPECT_EQ(found, 2u) << "one is in an archive";
}

// D7.
TEST_F(S3TierTest, AnObjectOfAnotherLengthIsAMissWithItsReason) {
  constexpr uint64_t kBytes = (3 << 20) + 5000;
  constexpr uint64_t kBads = 7;
  for (const uint64_t range : {uint64_t{1} << 20, uint64_t{1} << 30}) {
    options_.range_bytes_min = range;
    tier_.reset();
    for (uint64_t n = 0; n < kBads; ++n) {
      const std::string good = ObjectBytes(n, kBytes);
      const std::pair<std::string, Reason> bads[kBads] = {{"", Reason::kEmpty},
                                                          {good.substr(0, 100), Reason::kTruncated},
                                                          {good.substr(0, 4096), Reason::kTruncated},
                                                          {good.substr(0, good.size() - 1), Reason::kTruncated},
                                                          {good + std::string(4096, '\0'), Reason::kDamaged},
                                                          {std::string(good.size(), 'x'), Reason::kDamaged},
                                                          {ObjectBytes(99, kBytes), Reason::kForeign}};
      server_.PutObject(Name(n), bads[n].first);
      const Loaded loaded = Load(n, kBytes);
      EXPECT_EQ(loaded.result.outcome, Outcome::kMiss);
      EXPECT_EQ(loaded.result.reason, bads[n].second) << n << ": " << ReasonName(loaded.result.reason);
      EXPECT_EQ(tier().stats().quarantined, n + 1) << "counted once, and removed";
    }
    tier_->Close(Soon());
    for (uint64_t n = 0; n < kBads; ++n) EXPECT_FALSE(server_.Object(Name(n))) << n;
  }
}

TEST_F(S3TierTest, ANetworkThatDamagesOnceCostsATryAndNoFrame) {
  server_.PutObject(Name(1), ObjectBytes(1, 50'000));
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.method == "GET" && request.attempt == 1 && request.key == Name(1)) answer.body[10'000] ^= 1;
  });
  ExpectHit(tier(), 1, 50'000);
  EXPECT_EQ(tier().stats().quarantined, 0u);
  EXPECT_EQ(server_.Count("DELETE"), 0u);
}

TEST_F(S3TierTest, ARightFrameOfAnotherReleaseStaysAndASaveOfItIsDeclined) {
  // The version stands outside of what is hashed differently: flip it, and mend the checksum.
  std::string other = ObjectBytes(1, 5000);
  other[8] = 99;
  std::fill_n(other.begin() + 16, 16, '\0');
  const Hash128 sum = Xxh3_128(std::as_bytes(std::span(other)).first(4096));
  for (size_t i = 0; i < 8; ++i) {
    other[16 + i] = static_cast<char>(sum.low >> (8 * i));
    other[24 + i] = static_cast<char>(sum.high >> (8 * i));
  }
  server_.PutObject(Name(1), other);
  EXPECT_EQ(Load(1, 5000).result.reason, Reason::kVersion);
  const SaveResult save = Save(tier(), 1, 5000);
  EXPECT_EQ(save.outcome, Outcome::kDeclined);
  EXPECT_EQ(save.reason, Reason::kVersion);
  EXPECT_TRUE(server_.Object(Name(1)) == other);
}

TEST_F(S3TierTest, AFrameThatAnotherNodeWroteIsNotSentAgain) {
  server_.PutObject(Name(1), ObjectBytes(1, 5000));
  const SaveResult save = Save(tier(), 1, 5000);
  EXPECT_EQ(save.outcome, Outcome::kHit);
  EXPECT_TRUE(save.existed);
  EXPECT_EQ(server_.Count("PUT"), 0u);
}

TEST_F(S3TierTest, TheFirstOfTwoWritersWins) {
  // The other one comes between our look and our write.
  server_.SetHook([this](const Request& request, Answer& answer) {
    if (request.key != Name(1) || request.method != "PUT" || request.attempt > 1) return;
    server_.PutObject(Name(1), ObjectBytes(1, 5000));
    answer = S3FaultServer::Error(412, "PreconditionFailed");
  });
  const SaveResult save = Save(tier(), 1, 5000);
  EXPECT_EQ(save.outcome, Outcome::kHit);
  EXPECT_TRUE(save.existed);
}

TEST_F(S3TierTest, ASaveReplacesWhatIsNoFrame) {
  server_.PutObject(Name(1), "rubbish");
  const SaveResult save = Save(tier(), 1, 5000);
  EXPECT_EQ(save.outcome, Outcome::kHit);
  EXPECT_FALSE(save.existed);
  ExpectHit(tier(), 1, 5000);
}

TEST_F(S3TierTest, AFailedSaveLeavesNothingAndAFullBucketIsNamed) {
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.method == "PUT") answer = S3FaultServer::Error(507, "InsufficientStorage");
  });
  server_.PutObject("kv/terrace.format", "terrace s3\nversion 1\n");
  auto tier = TryOpen();
  ASSERT_FALSE(tier);
  EXPECT_NE(tier.error().what.find("free space"), std::string::npos) << tier.error().what;
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.method == "PUT" && request.key == Name(1)) answer = S3FaultServer::Error(507, "InsufficientStorage");
  });
  const SaveResult save = Save(this->tier(), 1, 5000);
  EXPECT_EQ(save.outcome, Outcome::kFailed);
  EXPECT_EQ(save.reason, Reason::kFull);
}

TEST_F(S3TierTest, AnEraseDoesNotUndoALaterSave) {
  ASSERT_EQ(Save(tier(), 1, 5000).outcome, Outcome::kHit);
  std::atomic<bool> deleting{false};
  server_.SetHook([&](const Request& request, Answer& answer) {
    if (request.method != "DELETE") return;
    deleting = true;
    answer.stall_first = true;  // Carried out, and not yet answered.
  });
  tier().Erase({{Key(1)}});
  const TimePoint deadline = Soon();
  while (!deleting && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  EXPECT_EQ(Load(1, 5000).result.reason, Reason::kNotFound);
  auto payload = std::make_shared<Bytes>(Payload(1, 5000));
  auto done = std::make_shared<SaveBatch>(1);
  tier().Save({{.info = Info(1, 5000), .payload = *payload, .owner = payload}}, done);
  server_.SetHook({});
  server_.Release();
  ASSERT_TRUE(done->WaitAll(Soon()));
  EXPECT_EQ(done->Poll(0)->outcome, Outcome::kHit);
  ExpectHit(tier(), 1, 5000);
}

// Peers remember a miss for ever.
TEST_F(S3TierTest, AFrameOfAnotherNodeIsSeenWithinTwoSecondsOfItsSave) {
  const std::unique_ptr<Tier> other = MustOpen();
  EXPECT_FALSE(Probe(tier(), 3));
  EXPECT_EQ(Known(tier(), 3), 0u);
  for (uint64_t n = 0; n < 3; ++n) ASSERT_EQ(Save(*other, n, 5000).outcome, Outcome::kHit);
  server_.SetHook(RefuseHeads);
  EXPECT_FALSE(Probe(tier(), 3)) << "a fresh verdict is not asked for again";
  server_.SetHook({});
  clock_.shift_ms = 2'001;
  EXPECT_FALSE(Probe(tier(), 3));
  EXPECT_EQ(Known(tier(), 3), 3u);
  ExpectHit(tier(), 2, 5000);
}

TEST_F(S3TierTest, ALongPrefixIsFoundInFewQuestions) {
  options_.negative_ttl = std::chrono::hours(1);  // However slow the machine is.
  for (uint64_t n = 0; n < 300; ++n) server_.PutObject(Name(n), ObjectBytes(n, 64));
  EXPECT_FALSE(Probe(tier(), 512));
  EXPECT_EQ(Known(tier(), 512), 300u);
  EXPECT_LE(server_.Count("HEAD"), 40u);
  server_.SetHook(RefuseHeads);
  EXPECT_FALSE(Probe(tier(), 512)) << "known now";
}

TEST_F(S3TierTest, AHoleIsAMissWhenItIsLoadedAndForgotten) {
  for (uint64_t n = 0; n < 64; ++n) {
    if (n != 1) server_.PutObject(Name(n), ObjectBytes(n, 64));
  }
  EXPECT_FALSE(Probe(tier(), 64));
  ASSERT_GT(Known(tier(), 64), 1u) << "proposed";
  EXPECT_EQ(Load(1, 64).result.reason, Reason::kMissing);
  EXPECT_EQ(Known(tier(), 64), 1u);
  const SaveResult save = Save(tier(), 1, 64);
  EXPECT_FALSE(save.existed) << "the hole is mended";
}

TEST_F(S3TierTest, AProbeEndsByItsDeadlineAndSaysWhatWasWrong) {
  tier();
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_first = true; });
  const std::optional<Error> late = Probe(tier(), 10, std::chrono::steady_clock::now() + milliseconds(50));
  ASSERT_TRUE(late);
  EXPECT_EQ(late->code, Code::kTimeout);
  server_.SetHook([](const Request&, Answer& answer) { answer = S3FaultServer::Error(403, "AccessDenied"); });
  const std::optional<Error> denied = Probe(tier(), 10);
  ASSERT_TRUE(denied);
  EXPECT_EQ(denied->code, Code::kDenied);
}

TEST_F(S3TierTest, TheListingTellsWhatIsThereAndWhatIsGone) {
  for (uint64_t n = 0; n < 1500; ++n) server_.PutObject(Name(n), "x");
  server_.PutObject("kv/frames/zzz/foreign.kvf", "x");
  options_.list_interval = std::chrono::seconds(1);
  const auto wait = [&](uint64_t frames) {
    const TimePoint deadline = Soon();
    while (tier().stats().frames != frames && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return tier().stats().frames;
  };
  EXPECT_EQ(wait(1500), 1500u);
  EXPECT_EQ(Known(tier(), 1500), 1500u);
  const std::unique_ptr<Tier> other = MustOpen();
  other->Erase({{Key(7)}});
  EXPECT_EQ(wait(1499), 1499u);
}

TEST_F(S3TierTest, AnOutageIsAFailureAndItsEndNeedsNoRestart) {
  server_.PutObject(Name(1), ObjectBytes(1, 5000));
  tier();
  server_.SetHook([](const Request&, Answer& answer) { answer = S3FaultServer::Error(500, "InternalError"); });
  const LoadResult load = Load(1, 5000).result;
  EXPECT_EQ(load.outcome, Outcome::kFailed);
  EXPECT_EQ(load.reason, Reason::kUnavailable);
  ASSERT_TRUE(load.error);
  EXPECT_NE(load.error->what.find("500 InternalError"), std::string::npos) << load.error->what;
  EXPECT_FALSE(tier().Scan("", 1)) << "what a guard probes with";
  EXPECT_EQ(Save(tier(), 2, 5000).outcome, Outcome::kFailed);
  server_.SetHook({});
  ExpectHit(tier(), 1, 5000);
  EXPECT_EQ(Save(tier(), 2, 5000).outcome, Outcome::kHit);
}

TEST_F(S3TierTest, AServerThatNeverAnswersCostsTheDeadlineAndLeavesTheBuffer) {
  server_.PutObject(Name(1), ObjectBytes(1, 500'000));
  tier();
  server_.SetHook([](const Request&, Answer& answer) { answer.stall_after = 100'000; });
  const LoadResult load = Load(tier(), 1, 500'000, std::chrono::steady_clock::now() + milliseconds(60)).result;
  EXPECT_EQ(load.outcome, Outcome::kMiss);
  EXPECT_EQ(load.reason, Reason::kTimeout);
  EXPECT_TRUE(tier().Close(Soon()).clean);
}

struct BadStart {
  const char* code;
  int status;
  const char* step;  // "GET", "PUT": which method is refused.
  const char* says;
};

TEST_F(S3TierTest, AStartThatCanNotWorkSaysWhatToDoInOneLine) {
  const BadStart bads[] = {
      {"NoSuchBucket", 404, "GET", "create bucket b"},
      {"AccessDenied", 403, "GET", "s3:ListBucket"},
      {"AccessDenied", 403, "PUT", "s3:PutObject"},
      {"InvalidAccessKeyId", 403, "GET", "correct the access key"},
      {"SignatureDoesNotMatch", 403, "GET", "correct the access key"},
      {"ExpiredToken", 400, "GET", "get new credentials"},
      {"AuthorizationHeaderMalformed", 400, "GET", "another region"},
  };
  for (const BadStart& bad : bads) {
    server_.SetHook([&](const Request& request, Answer& answer) {
      if (request.method == bad.step) answer = S3FaultServer::Error(bad.status, bad.code);
    });
    const auto opened = TryOpen();
    ASSERT_FALSE(opened) << bad.code;
    const std::string& what = opened.error().what;
    EXPECT_NE(what.find(bad.says), std::string::npos) << what;
    EXPECT_NE(what.find(bad.code), std::string::npos) << what;
    EXPECT_EQ(what.find('\n'), std::string::npos);
    EXPECT_EQ(what.find("SK"), std::string::npos) << "a secret";
  }
  server_.SetHook({});
  server_.PutObject("kv/terrace.format", "terrace s3\nversion 7\n");
  const auto newer = TryOpen();
  ASSERT_FALSE(newer);
  EXPECT_NE(newer.error().what.find("--s3-prefix"), std::string::npos) << newer.error().what;
}

TEST_F(S3TierTest, SecretsAreInNoLineOfTheLogAndInNoMetric) {
  std::mutex mutex;
  std::string lines;
  log::SetSink(
      [&](log::Level, std::string_view line) {
        std::lock_guard lock(mutex);
        lines += line;
        lines += '\n';
      },
      log::Level::kDebug);
  client_.credentials.fixed = {"AKIDPUBLIC", "sesame-secret", "sesame-token"};
  server_.SetHook([](const Request& request, Answer& answer) {
    if (request.key == Name(1)) answer = S3FaultServer::Error(503, "SlowDown");
    if (request.key == Name(2)) answer = S3FaultServer::Error(403, "SignatureDoesNotMatch");
  });
  Load(1, 100);
  const LoadResult refused = Load(2, 100).result;
  Save(tier(), 1, 100);
  tier_.reset();
  log::SetSink({});
  EXPECT_NE(lines.find("s3_slow_down"), std::string::npos) << lines;
  const std::string all = lines + metrics_.Text() + refused.error->what;
  EXPECT_EQ(all.find("sesame"), std::string::npos) << all;
}

}  // namespace
}  // namespace terrace
