#include "s3/sigv4.h"

#include <algorithm>
#include <cstdio>
#include <ctime>
#include <map>
#include <string_view>

#include "base/hash.h"
#include "s3/endpoint.h"

namespace terrace::s3 {
namespace {

std::string Bytes(const Digest& digest) {
  return {reinterpret_cast<const char*>(digest.bytes.data()), digest.bytes.size()};
}

std::string LowerCase(std::string text) {
  for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return text;
}

// Without blanks at the ends, and one blank for several.
std::string TrimAll(std::string_view text) {
  std::string trimmed;
  for (const char c : text) {
    if (c != ' ' && c != '\t') {
      trimmed += c;
    } else if (!trimmed.empty() && trimmed.back() != ' ') {
      trimmed += ' ';
    }
  }
  if (trimmed.ends_with(' ')) trimmed.pop_back();
  return trimmed;
}

}  // namespace

std::string Hex(const Digest& digest) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string hex;
  for (const uint8_t byte : digest.bytes) hex += {kHex[byte >> 4], kHex[byte & 15]};
  return hex;
}

std::string CanonicalQuery(const Parameters& query) {
  Parameters encoded;
  for (const auto& [name, value] : query) encoded.emplace_back(UriEncode(name, true), UriEncode(value, true));
  std::sort(encoded.begin(), encoded.end());
  std::string text;
  for (const auto& [name, value] : encoded) text += (text.empty() ? "" : "&") + name + "=" + value;
  return text;
}

std::string AmzDate(int64_t unix_seconds) {
  const auto time = static_cast<time_t>(unix_seconds);
  tm utc{};
  gmtime_r(&time, &utc);
  char text[32];
  std::strftime(text, sizeof text, "%Y%m%dT%H%M%SZ", &utc);
  return text;
}

std::string Authorization(const SigningRequest& request, const SigningScope& scope, const Credentials& credentials) {
  // By name; values of one name stay in the order they are sent, joined by commas.
  std::map<std::string, std::string> headers;
  for (const auto& [name, value] : request.headers) {
    const auto [header, first] = headers.try_emplace(LowerCase(name), TrimAll(value));
    if (!first) header->second += "," + TrimAll(value);
  }
  std::string canonical_headers;
  std::string names;
  for (const auto& [name, value] : headers) {
    canonical_headers += name + ":" + value + "\n";
    names += (names.empty() ? "" : ";") + name;
  }
  const std::string canonical = request.method + "\n" + request.path + "\n" + CanonicalQuery(request.query) + "\n" +
                                canonical_headers + "\n" + names + "\n" + request.payload_hash;

  const std::string time = AmzDate(scope.unix_seconds);
  const std::string date = time.substr(0, 8);
  const std::string credential_scope = date + "/" + scope.region + "/" + scope.service + "/aws4_request";
  const std::string to_sign = "AWS4-HMAC-SHA256\n" + time + "\n" + credential_scope + "\n" + Hex(Sha256Of(canonical));

  std::string key = Bytes(HmacSha256("AWS4" + credentials.secret_access_key, date));
  for (const std::string& step : {scope.region, scope.service, std::string("aws4_request")}) {
    key = Bytes(HmacSha256(key, step));
  }
  return "AWS4-HMAC-SHA256 Credential=" + credentials.access_key_id + "/" + credential_scope +
         ", SignedHeaders=" + names + ", Signature=" + Hex(HmacSha256(key, to_sign));
}

}  // namespace terrace::s3
