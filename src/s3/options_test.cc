// What could go wrong: a bucket that the environment names without being asked, keys of one source with another's, an
// option that is read and has no effect.
#include "s3/options.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <map>

namespace terrace::s3 {
namespace {

using Texts = std::map<std::string, std::string>;

Environment From(Texts texts) {
  return [texts = std::move(texts)](const std::string& name) -> std::optional<std::string> {
    const auto it = texts.find(name);
    return it == texts.end() ? std::nullopt : std::optional(it->second);
  };
}

Result<std::optional<ClientOptions>> Read(const std::vector<std::string>& args, const Texts& environment = {}) {
  const config::Schema schema{.program = "test", .summary = "test", .options = Options()};
  const auto parsed = config::Load(schema, args, From(environment));
  EXPECT_TRUE(parsed) << parsed.error().what;
  return ReadOptions(parsed->values, From(environment));
}

TEST(S3Options, NoBucketNoTier) {
  EXPECT_EQ(*Read({}), std::nullopt);
  EXPECT_EQ(*Read({}, {{"AWS_ENDPOINT_URL_S3", "http://h:1"}, {"AWS_ACCESS_KEY_ID", "AK"}}), std::nullopt);
}

TEST(S3Options, WhatIsSaidOfABucketThatNobodyNamesIsAMistake) {
  for (const config::Option& option : Options()) {
    if (option.name == "s3-bucket") continue;
    const bool is_number = option.type == config::Type::kInt || option.type == config::Type::kBytes;
    const std::string value = is_number ? "3" : option.choices.empty() ? "true" : "path";
    const auto read = Read({"--" + option.name + "=" + value});
    ASSERT_FALSE(read) << option.name;
    EXPECT_EQ(read.error().what, "--" + option.name + " is for a bucket, and none is named: add --s3-bucket");
  }
  const auto read = Read({}, {{"TERRACE_S3_PREFIX", "p"}});
  ASSERT_FALSE(read);
  EXPECT_TRUE(read.error().what.starts_with("TERRACE_S3_PREFIX is for a bucket")) << read.error().what;
  EXPECT_TRUE(Read({"--s3-endpoint", " S3://b.s3.example:9000", "--s3-prefix", "p"}));
}

TEST(S3Options, WhatIsGivenWinsOverTheEnvironment) {
  const Texts environment = {{"AWS_ENDPOINT_URL_S3", "http://e:1"},
                             {"AWS_ENDPOINT_URL", "http://f:1"},
                             {"AWS_REGION", "eu-west-1"},
                             {"AWS_DEFAULT_REGION", "eu-west-2"},
                             {"AWS_CA_BUNDLE", "/ca"}};
  const ClientOptions given =
      **Read({"--s3-bucket", "b", "--s3-endpoint", "http://h:2", "--s3-region", "r", "--s3-ca-file", "/mine",
              "--s3-prefix", "p", "--s3-connections", "7", "--s3-single-put-max=8MiB", "--s3-http2=off",
              "--s3-sign-payload", "--s3-addressing", "virtual"},
             environment);
  EXPECT_EQ(given.endpoint, (Endpoint{"http", "h", 2, "b", "p", Style::kVirtual}));
  EXPECT_EQ(given.region, "r");
  EXPECT_EQ(given.http.ca_file, "/mine");
  EXPECT_EQ(given.parallel_max, 7u);
  EXPECT_EQ(given.single_put_bytes_max, 8u << 20);
  EXPECT_FALSE(given.http.http2);
  EXPECT_TRUE(given.sign_payload);
  const ClientOptions taken = **Read({"--s3-bucket", "b"}, environment);
  EXPECT_EQ(taken.single_put_bytes_max, ClientOptions().single_put_bytes_max);
  EXPECT_EQ(taken.endpoint.host, "e");
  EXPECT_EQ(taken.region, "eu-west-1");
  EXPECT_EQ(taken.http.ca_file, "/ca");
}

TEST(S3Options, AnLMCacheUrlNamesItsBucket) {
  const ClientOptions options = **Read({"--s3-endpoint", "s3://b.s3.example:9000", "--s3-disable-tls"});
  EXPECT_EQ(options.endpoint, (Endpoint{"http", "s3.example", 9000, "b", "", Style::kVirtual}));
}

TEST(S3Options, BlanksAroundWhatTheEnvironmentSaysDoNotCount) {
  const ClientOptions options =
      **Read({"--s3-bucket", "b", "--s3-access-key-id", " AK ", "--s3-secret-access-key", " SK "},
             {{"AWS_ENDPOINT_URL_S3", "http://e:1\n"}, {"AWS_REGION", " eu-west-1\n"}, {"AWS_CA_BUNDLE", "/ca\n"}});
  EXPECT_EQ(options.endpoint, (Endpoint{"http", "e", 1, "b", "", Style::kPath}));
  EXPECT_EQ(options.region, "eu-west-1");
  EXPECT_EQ(options.http.ca_file, "/ca");
  EXPECT_EQ(options.credentials.fixed.access_key_id, "AK");
  EXPECT_EQ(options.credentials.fixed.secret_access_key, "SK");
}

TEST(S3Options, WhatIsWrongInTheEnvironmentIsNamedThere) {
  const auto what = [](const Texts& environment) { return Read({"--s3-bucket", "b"}, environment).error().what; };
  EXPECT_EQ(what({{"AWS_ENDPOINT_URL", "https://h/p"}}).substr(0, 33), "AWS_ENDPOINT_URL: \"https://h/p\" h");
  EXPECT_EQ(what({{"AWS_ENDPOINT_URL_S3", "ftp://h"}}).substr(0, 20), "AWS_ENDPOINT_URL_S3:");
  EXPECT_EQ(what({{"AWS_REGION", "a b"}}).substr(0, 10), "AWS_REGION");
}

TEST(S3Options, ARegionIsAWord) {
  EXPECT_FALSE(Read({"--s3-bucket", "b", "--s3-region", "us east"}));
  EXPECT_FALSE(Read({"--s3-bucket", "b"}, {{"AWS_REGION", "us\nX-Header: 1"}}));
  EXPECT_TRUE(Read({"--s3-bucket", "b", "--s3-region", "RegionOne"}));
}

TEST(S3Options, HalfAPairOfKeysIsAMistake) {
  EXPECT_FALSE(Read({"--s3-bucket", "b", "--s3-access-key-id", "AK"}));
  EXPECT_FALSE(Read({"--s3-bucket", "b", "--s3-secret-access-key", "SK"}));
  const auto token = Read({"--s3-bucket", "b"}, {{"TERRACE_S3_SESSION_TOKEN", "T"}, {"AWS_ACCESS_KEY_ID", "AK"}});
  ASSERT_FALSE(token);
  EXPECT_EQ(token.error().what,
            "TERRACE_S3_SESSION_TOKEN is given without --s3-secret-access-key: give both, or neither");
  EXPECT_FALSE(Read({"--s3-bucket", "b", "--s3-connections", "0"}));
}

TEST(S3Options, TheRegionOfAProfileCounts) {
  const std::string file =
      (std::filesystem::temp_directory_path() / ("terrace-profile-" + std::to_string(getpid()))).string();
  std::ofstream(file) << "[default]\nregion = a-1\n[profile kv]\nregion=b-2 \n# region = c-3\n";
  EXPECT_EQ((**Read({"--s3-bucket", "b"}, {{"AWS_CONFIG_FILE", file}})).region, "a-1");
  EXPECT_EQ((**Read({"--s3-bucket", "b"}, {{"AWS_CONFIG_FILE", file}, {"AWS_PROFILE", "kv"}})).region, "b-2");
  EXPECT_EQ((**Read({"--s3-bucket", "b", "--s3-profile", "kv"}, {{"AWS_CONFIG_FILE", file}})).region, "b-2");
  EXPECT_EQ((**Read({"--s3-bucket", "b", "--s3-profile", "none"}, {{"AWS_CONFIG_FILE", file}})).region, "us-east-1");
  std::filesystem::remove(file);
}

}  // namespace
}  // namespace terrace::s3
