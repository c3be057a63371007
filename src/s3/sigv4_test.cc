// What could go wrong: a signature that a strict server refuses, for some method, key, query or header. Checked against
// the values that Amazon publishes (the aws-sig-v4-test-suite, and the examples of S3's documentation).
#include "s3/sigv4.h"

#include <gtest/gtest.h>

#include "base/hash.h"
#include "s3/endpoint.h"

namespace terrace::s3 {
namespace {

const Credentials kSuite{"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", ""};
const std::string kEmptyHash = Hex(Sha256Of(""));
constexpr int64_t kSuiteTime = 1440938160;  // 2015-08-30 12:36:00.

std::string Signature(const std::string& authorization) {
  return authorization.substr(authorization.find("Signature=") + 10);
}

std::string SuiteSignature(SigningRequest request, const Credentials& credentials = kSuite) {
  if (request.payload_hash.empty()) request.payload_hash = kEmptyHash;
  request.headers.emplace_back("Host", "example.amazonaws.com");
  request.headers.emplace_back("X-Amz-Date", AmzDate(kSuiteTime));
  return Signature(
      Authorization(request, {.region = "us-east-1", .service = "service", .unix_seconds = kSuiteTime}, credentials));
}

TEST(SigV4, AgreesWithTheSuiteOnPlainRequests) {
  EXPECT_EQ(SuiteSignature({.method = "GET", .path = "/"}),
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31")
      << "get-vanilla";
  EXPECT_EQ(SuiteSignature({.method = "POST", .path = "/"}),
            "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b")
      << "post-vanilla";
}

TEST(SigV4, AgreesWithTheSuiteOnPaths) {
  const std::string unreserved = "/-._~0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
  EXPECT_EQ(SuiteSignature({.method = "GET", .path = UriEncode(unreserved, false)}),
            "07ef7494c76fa4850883e2b006601f940f8a34d404d0cfa977f52a65bbf5f24f")
      << "get-unreserved";
  EXPECT_EQ(SuiteSignature({.method = "GET", .path = UriEncode("/\xe1\x88\xb4", false)}),
            "8318018e0b0f223aa2bbf98705b62bb787dc9c0e678f255a891fd03141be5d85")
      << "get-utf8";
}

TEST(SigV4, AgreesWithTheSuiteOnQueries) {
  EXPECT_EQ(SuiteSignature({.method = "GET", .path = "/", .query = {{"Param2", "value2"}, {"Param1", "value1"}}}),
            "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500")
      << "get-vanilla-query-order-key-case";
  EXPECT_EQ(SuiteSignature({.method = "GET", .path = "/", .query = {{"Param1", "value1"}}}),
            "a67d582fa61cc504c4bae71f336f98b97f1ea3c7a6bfe1b6e45aec72011b9aeb")
      << "get-vanilla-empty-query-key";
  EXPECT_EQ(SuiteSignature({.method = "GET", .path = "/", .query = {{"\xe1\x88\xb4", "bar"}}}),
            "2cdec8eed098649ff3a119c94853b13c643bcf08f8b0a1d91e12c9027818dd04")
      << "get-vanilla-utf8-query";
}

TEST(SigV4, AgreesWithTheSuiteOnHeaders) {
  EXPECT_EQ(
      SuiteSignature(
          {.method = "GET", .path = "/", .headers = {{"My-Header1", " value1"}, {"My-Header2", " \"a   b   c\""}}}),
      "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736")
      << "get-header-value-trim";
  EXPECT_EQ(SuiteSignature({.method = "GET",
                            .path = "/",
                            .headers = {{"My-Header1", "value2"}, {"My-Header1", "value2"}, {"My-Header1", "value1"}}}),
            "c9d5ea9f3f72853aea855b47ea873832890dbdd183b4468f858259531a5138ea")
      << "get-header-key-duplicate";
}

TEST(SigV4, AgreesWithTheSuiteOnSessionTokens) {
  const std::string token =
      "AQoDYXdzEPT//////////"
      "wEXAMPLEtc764bNrC9SAPBSM22wDOk4x4HIZ8j4FZTwdQWLWsKWHGBuFqwAeMicRXmxfpSPfIeoIYRqTflfKD8YUuwth"
      "Ax7mSEI/qkPpKPi/"
      "kMcGdQrmGdeehM4IC1NtBmUpp2wUE8phUZampKsburEDy0KPkyQDYwT7WZ0wq5VSXDvp75YU9HFvlRd8Tx6q6fE8YQcHNVXAk"
      "iY9q6d+xo0rKwT38xVqr7ZD0u0iPPkUL64lIZbqBAz+scqKmlzm8FDrypNC9Yjc8fPOLn9FX9KSYvKTr4rvx3iSIlTJabIQwj2ICCR/oLxBA==";
  EXPECT_EQ(SuiteSignature({.method = "POST", .path = "/", .headers = {{"X-Amz-Security-Token", token}}}),
            "85d96828115b5dc0cfc3bd16ad9e210dd772bbebba041836c64533a82be05ead")
      << "post-sts-header-before";
}

// https://docs.aws.amazon.com/AmazonS3/latest/API/sig-v4-header-based-auth.html
TEST(SigV4, AgreesWithTheExamplesOfS3) {
  const Credentials credentials{"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""};
  const SigningScope scope{.region = "us-east-1", .unix_seconds = 1369353600};  // 2013-05-24.
  const auto sign = [&](SigningRequest request) {
    if (request.payload_hash.empty()) request.payload_hash = kEmptyHash;
    request.headers.emplace_back("Host", "examplebucket.s3.amazonaws.com");
    request.headers.emplace_back("x-amz-date", AmzDate(scope.unix_seconds));
    request.headers.emplace_back("x-amz-content-sha256", request.payload_hash);
    return Signature(Authorization(request, scope, credentials));
  };
  EXPECT_EQ(sign({.method = "GET", .path = "/test.txt", .headers = {{"Range", "bytes=0-9"}}}),
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
  EXPECT_EQ(sign({.method = "PUT",
                  .path = UriEncode("/test$file.text", false),
                  .headers = {{"Date", "Fri, 24 May 2013 00:00:00 GMT"}, {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                  .payload_hash = Hex(Sha256Of("Welcome to Amazon S3."))}),
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd");
  EXPECT_EQ(sign({.method = "GET", .path = "/", .query = {{"lifecycle", ""}}}),
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543");
  EXPECT_EQ(sign({.method = "GET", .path = "/", .query = {{"max-keys", "2"}, {"prefix", "J"}}}),
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7");
}

TEST(SigV4, QueriesAreSortedAfterTheyAreEncoded) {
  EXPECT_EQ(CanonicalQuery({{"uploads", ""}, {"b", "x y"}, {"a", "="}, {"a", "+"}}), "a=%2B&a=%3D&b=x%20y&uploads=");
}

}  // namespace
}  // namespace terrace::s3
