// What could go wrong: a bucket that grows without end, or is emptied; parents removed before their children; frames
// removed that some node uses, because no other heard of it; two collectors where one suffices, or none because the one
// that had the lease is dead; a bound that waits for a server that can't do conditional writes; objects made by
// somebody so that nothing can be collected.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "base/clock.h"
#include "tests/support/s3_fault_server.h"
#include "tests/support/s3_objects.h"
#include "tier/s3_tier.h"

namespace terrace {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using Answer = S3FaultServer::Answer;
using Request = S3FaultServer::Request;

constexpr uint64_t kPayload = 1000;
const uint64_t kFrame = FrameBytes(kPayload);
constexpr const char* kLease = "kv/collector.lease";

TimePoint Soon() { return std::chrono::steady_clock::now() + seconds(60); }

class S3BoundsTest : public testing::Test {
 protected:
  S3BoundsTest() {
    client_.endpoint = *s3::ParseEndpoint({.endpoint = server_.url(), .bucket = "b", .prefix = "kv"});
    client_.credentials.fixed = {"AK", "SK", ""};
    client_.backoff = milliseconds(1);
    client_.hedge = false;
    options_.list_interval = options_.list_pressed = milliseconds(30);
    options_.lease_life = seconds(3);  // Looked at each second; it ends by the server's clock, which stands still.
  }

  std::unique_ptr<Tier> Open() {
    auto tier = OpenS3Tier(client_, options_, {.clock = clock_, .metrics = metrics_});
    EXPECT_TRUE(tier) << tier.error().what;
    return *std::move(tier);
  }

  // Chain c has frames 100 c, 100 c + 1, ...: each the child of the one before.
  static FrameInfo InChain(uint64_t chain, uint64_t i) {
    FrameInfo info = Info(100 * chain + i, kPayload);
    if (i == 0) info.parent = kSpace;
    return info;
  }
  void PutChain(uint64_t chain, uint64_t frames) {
    for (uint64_t i = 0; i < frames; ++i) {
      const FrameInfo info = InChain(chain, i);
      server_.PutObject(Name(info.key), ObjectBytes(info, Payload(100 * chain + i, kPayload)));
    }
  }
  uint64_t Left(uint64_t chain) {
    uint64_t left = 0;
    for (uint64_t i = 0; i < 100; ++i) left += server_.Object(Name(InChain(chain, i).key)) ? 1 : 0;
    return left;
  }
  Outcome Load(Tier& tier, const FrameInfo& info) {
    auto buffer = std::make_shared<Bytes>(kPayload);
    auto done = std::make_shared<LoadBatch>(1);
    tier.Load({{.key = info.key, .space = kSpace, .into = *buffer, .owner = buffer}}, Soon(), done);
    EXPECT_TRUE(done->WaitAll(Soon()));
    return done->Poll(0)->outcome;
  }
  SaveResult Save(Tier& tier, const FrameInfo& info) {
    auto payload = std::make_shared<Bytes>(kPayload);
    auto done = std::make_shared<SaveBatch>(1);
    tier.Save({{.info = info, .payload = *payload, .owner = payload}}, done);
    EXPECT_TRUE(done->WaitAll(Soon()));
    return *done->Poll(0);
  }
  template <class Condition>
  static bool Await(const Condition& condition) {
    const TimePoint deadline = Soon();
    while (!condition()) {
      if (std::chrono::steady_clock::now() > deadline) return false;
      std::this_thread::yield();
    }
    return true;
  }
  bool AwaitListings(size_t more) {
    const auto listings = [this] {
      size_t n = 0;
      for (const Request& request : server_.requests()) n += request.query.find("frames%2F") != std::string::npos;
      return n;
    };
    const size_t before = listings();
    return Await([&] { return listings() >= before + more; });
  }
  uint64_t Evicted(const char* reason) {
    return metrics_.GetCounter("terrace_tier_evicted_total", "", {{"tier", "s3"}, {"reason", reason}}).value();
  }

  S3FaultServer server_;
  SystemClock clock_;
  Metrics metrics_;
  s3::ClientOptions client_;
  S3TierOptions options_;
};

TEST_F(S3BoundsTest, AboveItsSizeTheBucketLosesWhatIsUnusedLongestAndChildrenFirst) {
  for (uint64_t chain = 1; chain <= 4; ++chain) {
    PutChain(chain, 10);
    server_.Advance(minutes(10));
  }
  options_.bounds.bytes_max = 32 * kFrame;  // A collection goes down to 30.
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(Await([&] { return Evicted("size") == 10; }));
  EXPECT_EQ(Left(1), 0u) << "the oldest";
  for (uint64_t chain = 2; chain <= 4; ++chain) EXPECT_EQ(Left(chain), 10u) << chain;

  options_.bounds.bytes_max = 16 * kFrame;
  tier->Close(Soon());
  const std::unique_ptr<Tier> narrower = Open();
  ASSERT_TRUE(Await([&] { return Evicted("size") == 25; }));
  EXPECT_EQ(Left(2), 0u);
  EXPECT_EQ(Left(3), 5u) << "its head";
  for (uint64_t i = 0; i < 5; ++i) EXPECT_TRUE(server_.Object(Name(InChain(3, i).key))) << i;
  EXPECT_EQ(Left(4), 10u);
}

TEST_F(S3BoundsTest, WhatNobodyUsedForTheTtlGoesAndWhatAnyNodeUsedStays) {
  PutChain(1, 5);
  PutChain(2, 5);
  options_.bounds.ttl = hours(1);
  server_.Advance(minutes(40));
  {
    const std::unique_ptr<Tier> other = Open();
    EXPECT_EQ(Load(*other, InChain(2, 3)), Outcome::kHit);
    other->Close(Soon());  // It tells.
  }
  PutChain(3, 5);
  server_.Advance(minutes(40));
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(Await([&] { return Evicted("ttl") == 6; }));
  EXPECT_EQ(Left(1), 0u);
  EXPECT_EQ(Left(2), 4u) << "a use of a chunk is a use of those before it";
  EXPECT_EQ(Left(3), 5u);
  server_.Advance(hours(2));
  ASSERT_TRUE(Await([&] { return Evicted("ttl") == 15; }));
  EXPECT_TRUE(Await([&] { return server_.objects() == 2u; })) << "format and lease: the tell has gone, too";
}

TEST_F(S3BoundsTest, WhoHasTheLeaseCollectsAndWhenItIsDeadAnotherOne) {
  PutChain(1, 20);
  server_.PutObject(kLease, "another node 7\n");
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(AwaitListings(5));
  EXPECT_EQ(server_.Count("DELETE"), 0u);
  server_.Advance(seconds(4));
  EXPECT_TRUE(Await([&] { return Evicted("size") == 5; }));
  EXPECT_EQ(Left(1), 15u);
  const std::string lease = server_.Object(kLease).value_or("");
  EXPECT_EQ(lease.find("another"), std::string::npos);
  tier->Close(Soon());
  EXPECT_FALSE(server_.Object(kLease)) << "the next one need not wait";
}

TEST_F(S3BoundsTest, ANodeThatLosesItsLeaseStops) {
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(Await([&] { return server_.Object(kLease).has_value(); }));
  server_.PutObject(kLease, "another node 7\n");
  ASSERT_TRUE(Await([&] {  // Looked at.
    size_t looks = 0;
    for (const Request& request : server_.requests()) looks += request.method == "GET" && request.key == kLease;
    return looks >= 3;
  }));
  ASSERT_TRUE(AwaitListings(2));
  PutChain(1, 20);
  ASSERT_TRUE(AwaitListings(5));
  EXPECT_EQ(server_.Count("DELETE"), 0u);
  EXPECT_EQ(server_.Object(kLease), "another node 7\n");
}

TEST_F(S3BoundsTest, AServerWithoutConditionsIsKeptWithinTheBoundByAnyNumberOfNodes) {
  server_.SetHook([](const Request& request, Answer& answer) {
    if (!request.Header("if-none-match").empty() || !request.Header("if-match").empty()) {
      answer = S3FaultServer::Error(501, "NotImplemented");
    }
  });
  PutChain(1, 20);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> one = Open();
  const std::unique_ptr<Tier> other = Open();
  EXPECT_TRUE(Await([&] { return Left(1) <= 15; }));
  EXPECT_GE(Left(1), 10u) << "not emptied: two that decide from the same list choose the same frames";
  EXPECT_EQ(Load(*one, InChain(1, 0)), Outcome::kHit);
}

TEST_F(S3BoundsTest, ASaveBeyondTheBoundIsDeclinedUntilThereIsRoom) {
  options_.bounds.bytes_max = 16 * kFrame;
  server_.PutObject(kLease, "another node 7\n");  // Which does nothing.
  PutChain(1, 15);
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(Await([&] { return tier->stats().frames == 15; }));
  EXPECT_EQ(tier->stats().bytes_max, 16 * kFrame);
  EXPECT_EQ(Save(*tier, InChain(2, 0)).outcome, Outcome::kHit);
  const SaveResult beyond = Save(*tier, InChain(2, 1));
  EXPECT_EQ(beyond.outcome, Outcome::kDeclined);
  EXPECT_EQ(beyond.reason, Reason::kFull);
  server_.Advance(seconds(4));
  ASSERT_TRUE(Await([&] { return Evicted("size") > 0; }));
  EXPECT_TRUE(Await([&] { return Save(*tier, InChain(2, 1)).outcome == Outcome::kHit; }));
}

TEST_F(S3BoundsTest, RoomIsMadeAlsoWhereAFrameIsMoreThanWhatACollectionLeaves) {
  options_.bounds.bytes_max = 10 * kFrame + kFrame / 2;  // A sixteenth of it is less than a frame.
  PutChain(1, 10);
  const std::unique_ptr<Tier> tier = Open();
  EXPECT_TRUE(Await([&] { return Save(*tier, InChain(2, 0)).outcome == Outcome::kHit; }));
  EXPECT_GE(Left(1), 8u);
}

TEST_F(S3BoundsTest, RoomIsMadeForALargerFrameThanTheCollectorKnows) {
  options_.bounds.bytes_max = 6 * kFrame;
  PutChain(1, 5);  // Not nearly full, as far as such frames go.
  const std::unique_ptr<Tier> collector = Open();
  ASSERT_TRUE(Await([&] { return server_.Object(kLease).has_value(); }));
  const std::unique_ptr<Tier> other = Open();
  const auto save = [&] {
    constexpr uint64_t kLarge = 5000;
    auto payload = std::make_shared<Bytes>(Payload(500, kLarge));
    auto done = std::make_shared<SaveBatch>(1);
    other->Save({{.info = Info(500, kLarge), .payload = *payload, .owner = payload}}, done);
    EXPECT_TRUE(done->WaitAll(Soon()));
    return done->Poll(0)->outcome == Outcome::kHit;
  };
  EXPECT_TRUE(Await(save));
  EXPECT_GE(Left(1), 3u);
  EXPECT_TRUE(Await([&] { return server_.objects() == Left(1) + 3; }))
      << "format, lease, the large one: no want is left";
}

TEST_F(S3BoundsTest, ABucketThatFillsBeforeItsNextListingIsListedThen) {
  options_.list_interval = hours(1);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(Await([&] { return server_.Object(kLease).has_value(); }));
  for (uint64_t i = 0; i < 20; ++i) {
    ASSERT_TRUE(Await([&] { return Save(*tier, InChain(1, i)).outcome == Outcome::kHit; })) << i;
  }
  EXPECT_GE(Evicted("size"), 4u);
}

TEST_F(S3BoundsTest, WhatIsNoFrameCountsAndGoesInItsTurn) {
  server_.PutObject(Name(1), std::string(kFrame, 'x'));
  server_.PutObject(Name(2), "");
  server_.Advance(hours(1));
  PutChain(3, 16);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  EXPECT_TRUE(Await([&] { return Evicted("size") == 3; }));
  EXPECT_EQ(Left(3), 15u);
  EXPECT_FALSE(server_.Object(Name(1)));
  EXPECT_FALSE(server_.Object(Name(2)));
}

TEST_F(S3BoundsTest, WhatCanNotBeReadNowIsTriedAgain) {
  std::atomic<bool> broken{true};
  server_.SetHook([&](const Request& request, Answer& answer) {
    const bool header = request.method == "GET" && request.key.starts_with("kv/frames/");
    if (broken && header) answer = S3FaultServer::Error(500, "InternalError");
  });
  PutChain(1, 20);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(AwaitListings(5));
  EXPECT_EQ(Evicted("size"), 0u) << "whose child it is, nobody knows";
  broken = false;
  EXPECT_TRUE(Await([&] { return Left(1) == 15; }));
}

TEST_F(S3BoundsTest, ParentsInACircleGoLikeOthers) {
  for (uint64_t n = 1000; n < 1010; ++n) {
    FrameInfo info = Info(n, kPayload);
    info.parent = Key(n ^ 1);
    server_.PutObject(Name(n), ObjectBytes(info, Payload(n, kPayload)));
  }
  server_.Advance(hours(1));
  PutChain(3, 16);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  EXPECT_TRUE(Await([&] { return Evicted("size") == 11; }));
  EXPECT_EQ(Left(3), 15u);
  for (uint64_t n = 1000; n < 1010; ++n) EXPECT_FALSE(server_.Object(Name(n))) << n;
}

TEST_F(S3BoundsTest, WhatTheServerWillNotGiveGoesInItsTurn) {
  server_.SetHook([](const Request& request, Answer& answer) {  // As of an archive.
    if (request.method == "GET" && request.key == Name(1)) answer = S3FaultServer::Error(403, "InvalidObjectState");
  });
  server_.PutObject(Name(1), ObjectBytes(1, kPayload));
  server_.Advance(hours(1));
  PutChain(3, 16);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  EXPECT_TRUE(Await([&] { return !server_.Object(Name(1)); }));
  EXPECT_TRUE(Await([&] { return Left(3) == 15; }));
}

TEST_F(S3BoundsTest, WhatCanNotBeRemovedStopsNoCollection) {
  server_.PutObject(Name(1), ObjectBytes(1, kPayload));
  server_.Lock(Name(1));
  server_.Advance(hours(1));
  PutChain(3, 16);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  EXPECT_TRUE(Await([&] { return Left(3) <= 14; }));
}

TEST_F(S3BoundsTest, WantsAndTellsOfStrangersAreBounded) {
  server_.PutObject("kv/frames/wanted-99999999999999", "\n");  // More than the bound: no reason to make room.
  for (int i = 0; i < 20; ++i) server_.PutObject("kv/uses/stranger-" + std::to_string(i), std::string(1000, 'x'));
  PutChain(1, 14);
  options_.bounds.bytes_max = 16 * kFrame;
  const std::unique_ptr<Tier> tier = Open();
  ASSERT_TRUE(Await([&] { return !server_.Object("kv/frames/wanted-99999999999999"); }));
  PutChain(2, 10);
  EXPECT_TRUE(Await([&] { return Evicted("size") > 0; }));
  EXPECT_EQ(Left(1) + Left(2), 15u) << "down to a frame below the bound";
}

}  // namespace
}  // namespace terrace
