#include "s3/endpoint.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "base/text.h"

namespace terrace::s3 {
namespace {

bool IsAlphaNumeric(char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z'); }

bool IsHostName(std::string_view host) {
  return !host.empty() && host.front() != '.' && host.front() != '-' &&
         std::all_of(host.begin(), host.end(),
                     [](char c) { return IsAlphaNumeric(c) || c == '.' || c == '-' || c == '_'; });
}
bool IsIpv4(std::string_view host) {
  return std::count(host.begin(), host.end(), '.') == 3 &&
         std::all_of(host.begin(), host.end(), [](char c) { return (c >= '0' && c <= '9') || c == '.'; });
}
bool IsIpv6(std::string_view host) { return host.find(':') != std::string_view::npos; }
bool IsWellFormedIpv6(const std::string& host) {
  in6_addr address;
  return inet_pton(AF_INET6, host.c_str(), &address) == 1;
}

bool IsBucketName(std::string_view bucket) {
  return !bucket.empty() && bucket != "." && bucket != ".." && std::all_of(bucket.begin(), bucket.end(), [](char c) {
    return IsAlphaNumeric(c) || c == '.' || c == '-' || c == '_';
  });
}
// As the first label of a host.
bool IsLabel(std::string_view bucket) {
  return bucket.size() <= 63 && bucket.front() != '-' && bucket.back() != '-' &&
         std::all_of(bucket.begin(), bucket.end(),
                     [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || c == '-'; });
}

std::string_view TrimSlashes(std::string_view text) {
  while (text.starts_with('/')) text.remove_prefix(1);
  while (text.ends_with('/')) text.remove_suffix(1);
  return text;
}

std::string Join(std::string_view a, std::string_view b) {
  a = TrimSlashes(a);
  b = TrimSlashes(b);
  return std::string(a) + (a.empty() || b.empty() ? "" : "/") + std::string(b);
}

// Some servers take a/../b and a//b for other names than the listing then shows.
bool HasOddPart(std::string_view prefix) {
  while (!prefix.empty()) {
    const size_t end = std::min(prefix.find('/'), prefix.size());
    const std::string_view part = prefix.substr(0, end);
    if (part.empty() || part == "." || part == "..") return true;
    prefix.remove_prefix(std::min(end + 1, prefix.size()));
  }
  return false;
}

struct Authority {
  std::string host;
  std::optional<uint16_t> port;
};

std::optional<Authority> ParseAuthority(std::string_view text) {
  Authority authority;
  std::string_view port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return std::nullopt;
    authority.host = text.substr(1, end - 1);
    if (!IsWellFormedIpv6(authority.host)) return std::nullopt;
    port = text.substr(end + 1);
  } else {
    const size_t colon = text.find(':');
    authority.host = text.substr(0, colon);
    if (!IsHostName(authority.host)) return std::nullopt;
    port = colon == std::string_view::npos ? "" : text.substr(colon);
  }
  if (port.empty()) return authority;
  uint16_t number = 0;
  const auto [end, error] = std::from_chars(port.data() + 1, port.data() + port.size(), number);
  if (port[0] != ':' || error != std::errc() || end != port.data() + port.size() || number == 0) return std::nullopt;
  authority.port = number;
  return authority;
}

// "us-east-1", "us-gov-west-1": two letters, words of letters, a number. Not "website-us-east-1", which is a service.
bool IsAmazonRegion(std::string_view text) {
  const size_t first = text.find('-');
  const size_t last = text.rfind('-');
  const auto all = [](std::string_view part, char from, char to) {
    return !part.empty() && std::all_of(part.begin(), part.end(), [=](char c) { return c >= from && c <= to; });
  };
  if (first != 2 || last == first || last + 3 < text.size()) return false;
  if (!all(text.substr(0, 2), 'a', 'z') || !all(text.substr(last + 1), '0', '9')) return false;
  for (std::string_view words = text.substr(3, last - 3);;) {
    const size_t end = std::min(words.find('-'), words.size());
    if (!all(words.substr(0, end), 'a', 'z')) return false;
    if (end == words.size()) return true;
    words.remove_prefix(end + 1);
  }
}

}  // namespace

bool IsRegionName(std::string_view text) {
  return !text.empty() && text.size() <= 64 &&
         std::all_of(text.begin(), text.end(), [](char c) { return IsAlphaNumeric(c) || c == '-' || c == '_'; });
}

Endpoint InRegion(Endpoint endpoint, std::string_view region) {
  if (!IsAmazonRegion(region)) return endpoint;
  const std::string host = endpoint.host;
  for (const std::string_view domain : {".amazonaws.com", ".amazonaws.com.cn"}) {
    if (!host.ends_with(domain)) continue;
    const std::string_view name = std::string_view(host).substr(0, host.size() - domain.size());
    if (name == "s3") endpoint.host = "s3." + std::string(region) + std::string(domain);
    for (const std::string_view service : {"s3.", "s3-", "s3.dualstack.", "s3-fips.", "s3-fips.dualstack."}) {
      if (!name.starts_with(service) || !IsAmazonRegion(name.substr(service.size()))) continue;
      // s3-REGION is an old way to write s3.REGION, which newer regions do not have.
      endpoint.host = std::string(service == "s3-" ? "s3." : service) + std::string(region) + std::string(domain);
    }
  }
  return endpoint;
}

std::string UriEncode(std::string_view text, bool encode_slash) {
  static constexpr char kHex[] = "0123456789ABCDEF";
  std::string encoded;
  encoded.reserve(text.size() + text.size() / 8);
  for (const char c : text) {
    if (IsAlphaNumeric(c) || c == '-' || c == '.' || c == '_' || c == '~' || (c == '/' && !encode_slash)) {
      encoded += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      encoded += {'%', kHex[byte >> 4], kHex[byte & 15]};
    }
  }
  return encoded;
}

std::string Endpoint::HostHeader() const {
  std::string header = style == Style::kVirtual ? bucket + "." : "";
  header += IsIpv6(host) ? "[" + host + "]" : host;
  if (port != (scheme == "https" ? 443 : 80)) header += ":" + std::to_string(port);
  return header;
}

std::string Endpoint::Path(std::string_view key) const {
  std::string path = "/";
  if (style == Style::kPath) path += UriEncode(bucket, true) + (key.empty() ? "" : "/");
  return path + UriEncode(key, false);
}

std::string Endpoint::Describe() const {
  return scheme + "://" + (IsIpv6(host) ? "[" + host + "]" : host) + ":" + std::to_string(port) + ", bucket " + bucket +
         (prefix.empty() ? "" : ", prefix " + prefix) +
         (style == Style::kVirtual ? ", virtual-hosted" : ", path style");
}

Result<Endpoint> ParseEndpoint(const EndpointOptions& options) {
  const auto refuse = [&](const std::string& why) {
    return Fail(Code::kInvalid, "\"" + WithoutUserInfo(Trimmed(options.endpoint)) + "\" " + why);
  };
  std::string_view rest = Trimmed(options.endpoint);
  const size_t colon = rest.find("://");
  const bool has_scheme = colon != std::string_view::npos;
  const std::string scheme = has_scheme ? Lower(rest.substr(0, colon)) : "";
  if (has_scheme) rest.remove_prefix(colon + 3);
  if (has_scheme && scheme != "http" && scheme != "https" && scheme != "s3") {
    return refuse("is no endpoint: write http://host:port, https://host:port or s3://bucket.host:port");
  }
  const bool is_s3 = scheme == "s3";
  // A secret may have slashes in it. In the path of s3:// an @ may be meant.
  if (rest.substr(0, is_s3 ? rest.find('/') : rest.size()).find('@') != std::string_view::npos) {
    return Fail(Code::kInvalid, "the endpoint has credentials in it: give them by environment or profile");
  }
  const size_t slash = std::min(rest.find('/'), rest.size());
  const std::string_view path = TrimSlashes(rest.substr(slash));
  rest = rest.substr(0, slash);
  const std::string wanted_bucket(Trimmed(options.bucket));

  Endpoint endpoint{.scheme = scheme == "http" || (scheme != "https" && options.disable_tls) ? "http" : "https",
                    .bucket = wanted_bucket,
                    .prefix = Join(is_s3 ? path : "", options.prefix)};
  if (scheme == "https" && options.disable_tls) return refuse("says https, and TLS is disabled: choose one");
  if (!is_s3 && !path.empty()) {
    return refuse("has a path: the bucket and the prefix have options of their own");
  }
  if (HasOddPart(endpoint.prefix)) {
    return Fail(Code::kInvalid,
                "the prefix \"" + endpoint.prefix + "\" has an empty part, . or .. in it: leave it out");
  }

  const std::string amazon = "s3." + options.region + ".amazonaws.com";
  bool amazon_default = false;
  if (rest.empty() || (is_s3 && rest.find_first_of(".:[") == std::string_view::npos)) {
    if (!scheme.empty() && !is_s3) return refuse("has no host");
    if (endpoint.bucket.empty()) endpoint.bucket = rest;
    if (!rest.empty() && endpoint.bucket != rest) {
      return refuse("names another bucket than " + wanted_bucket);
    }
    endpoint.host = amazon;
    amazon_default = true;
  }
  std::optional<uint16_t> port;
  if (!amazon_default) {
    const std::optional<Authority> authority = ParseAuthority(rest);
    if (!authority) return refuse("has no host and port that can be read");
    endpoint.host = authority->host;  // Its case is kept until the bucket is out of it.
    port = authority->port;
  }
  if (is_s3 && !amazon_default) {
    // Everything after s3:// is the Host header.
    const size_t dot = wanted_bucket.empty() ? endpoint.host.find('.') : wanted_bucket.size();
    if (IsIpv6(endpoint.host) || IsIpv4(endpoint.host) || dot >= endpoint.host.size() || endpoint.host[dot] != '.') {
      return refuse(wanted_bucket.empty() ? "does not begin with the bucket: s3://bucket.host"
                                          : "does not begin with the bucket " + wanted_bucket);
    }
    const std::string bucket = endpoint.host.substr(0, dot);
    if (!wanted_bucket.empty() && bucket != wanted_bucket) {
      return refuse("does not begin with the bucket " + wanted_bucket);
    }
    endpoint.bucket = bucket;
    endpoint.host.erase(0, dot + 1);
    if (!IsHostName(endpoint.host)) return refuse("has no host after the bucket");
  }
  endpoint.host = Lower(endpoint.host);
  endpoint.port = port.value_or(endpoint.scheme == "https" ? 443 : 80);
  if (endpoint.bucket.empty()) {
    return options.endpoint.empty() ? Fail(Code::kInvalid, "no bucket is named") : refuse("comes without a bucket");
  }
  if (!IsBucketName(endpoint.bucket)) {
    return Fail(Code::kInvalid, "\"" + endpoint.bucket + "\" is no bucket's name: letters, digits, dots and hyphens");
  }

  const bool is_name = !IsIpv6(endpoint.host) && !IsIpv4(endpoint.host) && endpoint.host.find('.') != std::string::npos;
  switch (options.addressing) {
    case Addressing::kPath: endpoint.style = Style::kPath; break;
    case Addressing::kVirtual:
      if (IsIpv6(endpoint.host) || IsIpv4(endpoint.host)) {
        return refuse("is an address, and virtual-hosted style needs a name");
      }
      endpoint.style = Style::kVirtual;
      break;
    case Addressing::kAuto: {
      // No certificate's *.host matches a bucket with dots, whatever the URL looks like; and no b.10.0.0.1 has an
      // address.
      const bool can_match = endpoint.bucket.find('.') == std::string::npos || endpoint.scheme == "http";
      const bool is_virtual = is_s3 ? can_match && !IsIpv4(endpoint.host)
                                    : endpoint.scheme == "https" && is_name && IsLabel(endpoint.bucket);
      endpoint.style = is_virtual ? Style::kVirtual : Style::kPath;
    }
  }
  return endpoint;
}

}  // namespace terrace::s3
