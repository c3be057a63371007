// Where the keys come from, found as the AWS tools find them:
//
//   1. those of the configuration;
//   2. a profile that the configuration names;
//   3. AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_SESSION_TOKEN;
//   4. AWS_WEB_IDENTITY_TOKEN_FILE with AWS_ROLE_ARN: a role, assumed with STS and renewed before it ends;
//   5. the profile AWS_PROFILE, or `default`, of AWS_SHARED_CREDENTIALS_FILE (~/.aws/credentials) and AWS_CONFIG_FILE
//      (~/.aws/config): keys, or a web identity.
//
// Files are read again when the server refuses what they gave. Nothing here writes a secret anywhere.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "io/http_client.h"
#include "s3/sigv4.h"
#include "terrace/metrics.h"
#include "terrace/result.h"

namespace terrace::s3 {

using Environment = std::function<std::optional<std::string>(const std::string& name)>;

struct CredentialsOptions {
  Credentials fixed;    // access_key_id "": none.
  std::string profile;  // "": not named.
  Environment environment;
  std::string region = "us-east-1";  // Of STS.
};

// The region that environment (AWS_REGION, AWS_DEFAULT_REGION) or profile name; "" if none does.
std::string ConfiguredRegion(const CredentialsOptions& options);

// On the thread of `http` alone.
class CredentialsChain {
 public:
  // All outlive it.
  CredentialsChain(CredentialsOptions options, HttpClient& http, const Clock& clock, Metrics& metrics);

  // At once, or when a role has been assumed. Errors say what to do, and are forgotten: the next call looks again.
  void Get(std::function<void(const Result<Credentials>&)> ready);

  // The server refused these. True if there are others now: whoever was refused tries again, once. The source is read
  // once for all that were refused with the same credentials.
  void Renew(const Credentials& refused, std::function<void(bool changed)> done);

  // "environment", "profile kv of /root/.aws/credentials": of the last Get, for people.
  const std::string& source() const { return source_; }

 private:
  struct WebIdentity {
    std::string token_file, role_arn, session_name;
  };
  // Looks through the chain. Keys, or the web identity that leads to them.
  struct Found {
    Credentials credentials;
    std::optional<WebIdentity> web_identity;
    std::string source;
    bool may_change = false;  // Reading it again makes sense.
  };
  Result<Found> Find() const;
  std::string Env(const char* name) const;
  Result<Found> FindInProfile(const std::string& profile, bool named) const;
  void Fetch();
  void Fetched(Result<Credentials> credentials);
  void AssumeRole(const WebIdentity& identity);
  int64_t NowSeconds() const;

  const CredentialsOptions options_;
  HttpClient& http_;
  const Clock& clock_;
  Counter& reloads_;

  std::optional<Credentials> current_;
  std::string source_;
  bool may_change_ = false;
  int64_t expires_ = 0;  // Unix seconds; 0: never.
  bool fetching_ = false;
  TimePoint unchanged_at_{};  // The last look that found nothing new.
  std::vector<std::function<void(const Result<Credentials>&)>> waiting_;
};

}  // namespace terrace::s3
