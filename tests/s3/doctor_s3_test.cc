// What could go wrong: an operator's slip gets another name than its own, or a remedy that is none; a good bucket is
// scolded; something of ours stays in it; a secret is told.
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <map>
#include <string>

#include "doctor/bucket.h"
#include "tests/support/s3_fault_server.h"
#include "tests/support/s3_servers.h"

namespace terrace::doctor {
namespace {

using s3::Style;
using Kind = S3Server::Kind;

constexpr Measure kSmall{.frame_bytes = 1 << 20, .time = std::chrono::milliseconds(20)};

struct Found {
  std::map<std::string, Finding> by_id;
  std::string text;  // All that was told.

  std::string Trouble(const std::string& id) const {
    const auto found = by_id.find(id);
    if (found == by_id.end() || found->second.figures.empty()) return "";
    const auto& value = found->second.figures[0].second;
    return std::holds_alternative<std::string>(value) ? std::get<std::string>(value) : "";
  }
  std::string Remedy(const std::string& id) const {
    const auto found = by_id.find(id);
    return found == by_id.end() ? "" : found->second.remedy;
  }
  size_t Problems() const {
    return static_cast<size_t>(std::ranges::count_if(
        by_id, [](const auto& finding) { return finding.second.severity == Severity::kProblem; }));
  }
};

Found Judge(const s3::ClientOptions& options) {
  const std::atomic<bool> stop{false};
  Report report(nullptr, nullptr, false);
  CheckS3(options, kSmall, stop, report);
  Found found{.text = report.Json()};
  for (Finding& finding : report.findings()) found.by_id[finding.id] = std::move(finding);
  EXPECT_EQ(found.text.find(S3Server::kSecretKey), std::string::npos) << found.text;
  return found;
}

s3::ClientOptions OptionsOf(const S3FaultServer& server) {
  s3::ClientOptions options;
  options.endpoint = *s3::ParseEndpoint({.endpoint = server.url(), .bucket = "b", .prefix = "kv"});
  options.credentials.fixed = {"KEY", "SECRET", ""};
  return options;
}

struct Place {
  Kind kind;
  bool tls;
  Style style;
};
class GoodBucket : public testing::TestWithParam<Place> {};

TEST_P(GoodBucket, HasNoProblemAndIsLeftAsItWas) {
  const Place place = GetParam();
  const s3::ClientOptions options = S3Server::Get(place.kind, place.tls).Client("doctor", place.style);
  const Found found = Judge(options);
  EXPECT_EQ(found.Problems(), 0u) << found.text;
  for (const char* id : {"s3.server", "s3.clock", "s3.list", "s3.write", "s3.read", "s3.conditional", "s3.delete",
                         "s3.latency", "s3.bandwidth"}) {
    ASSERT_TRUE(found.by_id.contains(id)) << id << found.text;
    EXPECT_EQ(found.by_id.at(id).severity, Severity::kOk) << id << found.text;
  }
}

INSTANTIATE_TEST_SUITE_P(Places, GoodBucket,
                         testing::Values(Place{Kind::kVersitygw, false, Style::kPath},
                                         Place{Kind::kVersitygw, true, Style::kVirtual},
                                         Place{Kind::kSeaweedfs, true, Style::kPath}));

TEST(Bucket, NothingOfOursStays) {
  S3FaultServer server;
  server.PutObject("kv/frames/x", "theirs");
  server.PutObject("kv/terrace-doctor-1000000000-00000001/a", "of one that was killed");
  const Found found = Judge(OptionsOf(server));
  EXPECT_TRUE(found.by_id.contains("s3.bandwidth")) << found.text;
  EXPECT_EQ(server.objects(), 1u);
  EXPECT_EQ(server.Object("kv/frames/x"), "theirs");
}

TEST(Bucket, SlipsOfTheOperatorAreNamed) {
  const S3Server& plain = S3Server::Get(Kind::kVersitygw, false);
  const S3Server& tls = S3Server::Get(Kind::kVersitygw, true);

  s3::ClientOptions options = tls.Client("doctor", Style::kPath);
  options.http.ca_file = "";  // The system's, which has not signed it.
  Found found = Judge(options);
  EXPECT_EQ(found.Trouble("s3.server"), "wrong_ca") << found.text;
  EXPECT_NE(found.Remedy("s3.server").find("--s3-ca-file"), std::string::npos);

  options = tls.Client("doctor", Style::kPath);
  options.http.ca_file = "/no/such/file.pem";
  EXPECT_EQ(Judge(options).Trouble("s3.server"), "ca_file");

  options = tls.Client("doctor", Style::kPath);
  options.endpoint.scheme = "http";
  found = Judge(options);
  EXPECT_EQ(found.Trouble("s3.server"), "tls_server") << found.text;
  EXPECT_NE(found.Remedy("s3.server").find("https://"), std::string::npos);

  options = plain.Client("doctor", Style::kPath);
  options.endpoint.scheme = "https";
  EXPECT_EQ(Judge(options).Trouble("s3.server"), "plain_server");

  options = plain.Client("doctor", Style::kPath);
  options.endpoint.host = "no-such-host.invalid";
  EXPECT_EQ(Judge(options).Trouble("s3.server"), "unresolved");

  options = plain.Client("doctor", Style::kPath);
  options.credentials.fixed.secret_access_key = "wrong";
  found = Judge(options);
  EXPECT_EQ(found.Trouble("s3.list"), "wrong_key") << found.text;
  options.credentials.fixed.access_key_id = "NOBODY";
  EXPECT_EQ(Judge(options).Trouble("s3.list"), "wrong_key");

  options = plain.Client("doctor", Style::kPath);
  options.endpoint.bucket = "no-such-bucket";
  EXPECT_EQ(Judge(options).Trouble("s3.list"), "no_bucket");

  options = plain.Client("doctor", Style::kVirtual);
  options.endpoint.host = "elsewhere.localhost";  // Not the domain that it was told.
  found = Judge(options);
  EXPECT_EQ(found.Trouble("s3.list"), "needs_path_style") << found.text;
  EXPECT_NE(found.Remedy("s3.list").find("--s3-addressing path"), std::string::npos);
}

TEST(Bucket, WhatServersRefuseIsNamed) {
  S3FaultServer server;
  const auto run = [&](const std::string& method, int status, const std::string& code, const std::string& more = "") {
    server.SetHook([=](const S3FaultServer::Request& request, S3FaultServer::Answer& answer) {
      if (request.method == method && request.headers.contains("authorization")) {
        answer = S3FaultServer::Error(status, code, more);
      }
    });
    return Judge(OptionsOf(server));
  };
  EXPECT_EQ(run("GET", 403, "ExpiredToken").Trouble("s3.list"), "expired");
  Found found = run("GET", 400, "AuthorizationHeaderMalformed", "<Region>eu-west-9</Region>");
  EXPECT_EQ(found.Trouble("s3.list"), "other_region") << found.text;
  EXPECT_NE(found.Remedy("s3.list").find("eu-west-9"), std::string::npos);
  server.SetHook([](const S3FaultServer::Request& request, S3FaultServer::Answer& answer) {
    const auto authorization = request.headers.find("authorization");
    if (authorization != request.headers.end() && authorization->second.find("/eu-west-9/") == std::string::npos) {
      answer = S3FaultServer::Error(400, "AuthorizationHeaderMalformed", "<Region>eu-west-9</Region>");
    }
  });
  found = Judge(OptionsOf(server));
  ASSERT_TRUE(found.by_id.contains("s3.delete")) << "it was followed there: " << found.text;
  EXPECT_EQ(found.by_id.at("s3.region").severity, Severity::kNote);
  EXPECT_EQ(found.Trouble("s3.region"), "other_region") << found.text;
  EXPECT_NE(found.Remedy("s3.region").find("--s3-region eu-west-9"), std::string::npos);
  found = run("PUT", 403, "AccessDenied");
  EXPECT_EQ(found.by_id.at("s3.list").severity, Severity::kOk);
  EXPECT_EQ(found.Trouble("s3.write"), "denied");
  EXPECT_NE(found.Remedy("s3.write").find("s3:PutObject"), std::string::npos);
  found = run("DELETE", 403, "AccessDenied");
  EXPECT_EQ(found.Trouble("s3.delete"), "denied");
  EXPECT_EQ(found.Trouble("s3.cleanup"), "denied");  // It says what stays.
}

TEST(Bucket, OfAnotherReleaseIsNotWrittenTo) {
  S3FaultServer server;
  server.PutObject("kv/terrace.format", "terrace s3\nversion 7\n");
  const Found found = Judge(OptionsOf(server));
  EXPECT_EQ(found.by_id.at("s3.format").severity, Severity::kProblem);
  EXPECT_EQ(server.Count("PUT"), 0u);
}

TEST(Bucket, FramesThatAppearedAreCounted) {
  S3FaultServer server;
  const s3::ClientOptions options = OptionsOf(server);
  for (int i = 0; i < 3; ++i) server.PutObject("kv/frames/000/" + std::to_string(i), "old");
  server.Advance(std::chrono::hours(1));
  const int64_t now = FramesWrittenSince(options, 0, 1)->now;
  for (int i = 3; i < 5; ++i) server.PutObject("kv/frames/000/" + std::to_string(i), "new");
  server.PutObject("kv/uses/x", "no frame");
  const auto fresh = FramesWrittenSince(options, now, 1000);
  ASSERT_TRUE(fresh) << fresh.error().what;
  EXPECT_EQ(fresh->frames, 2u);
  EXPECT_TRUE(fresh->complete);
  const auto all = FramesWrittenSince(options, 0, 2);
  EXPECT_EQ(all->frames, 2u) << "one page";
  EXPECT_FALSE(all->complete);
}

TEST(Bucket, DatesOfServersAreRead) {
  EXPECT_EQ(ParseHttpDate("Sun, 06 Nov 1994 08:49:37 GMT"), 784111777);
  EXPECT_FALSE(ParseHttpDate(""));
  EXPECT_FALSE(ParseHttpDate("Sun, 06 Nov 1994 08:49:37 GMT and more"));
}

}  // namespace
}  // namespace terrace::doctor
