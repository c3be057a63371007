// AWS Signature Version 4: pure functions of a request, credentials and a time.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "terrace/key.h"

namespace terrace::s3 {

struct Credentials {
  std::string access_key_id;
  std::string secret_access_key;
  std::string session_token;  // "": none.
  bool operator==(const Credentials&) const = default;
};

using Parameters = std::vector<std::pair<std::string, std::string>>;

// "a=1&b=x%20y&uploads=": encoded and sorted as both the URL and the signature need it.
std::string CanonicalQuery(const Parameters& query);

std::string Hex(const Digest& digest);

inline constexpr const char* kUnsignedPayload = "UNSIGNED-PAYLOAD";

struct SigningRequest {
  std::string method;
  std::string path;  // Encoded, exactly as it is sent.
  Parameters query;
  Parameters headers;        // All that are signed, "host" among them; any case, any order.
  std::string payload_hash;  // Hex SHA-256 of the body, or kUnsignedPayload.
};
struct SigningScope {
  std::string region;
  std::string service = "s3";
  int64_t unix_seconds = 0;
};

// 20150830T123600Z.
std::string AmzDate(int64_t unix_seconds);

// The value of the Authorization header. `request.headers` has x-amz-date, and x-amz-security-token if there is a
// token.
std::string Authorization(const SigningRequest& request, const SigningScope& scope, const Credentials& credentials);

}  // namespace terrace::s3
