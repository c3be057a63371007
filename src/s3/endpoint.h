// Where a bucket is: what the operator wrote, understood once, and from it the URL of every object.
//
// What may be written as the endpoint:
//   https://host[:port], http://host[:port]   with the bucket beside it
//   s3://bucket.host[:port][/prefix]          virtual-hosted style, as LMCache's remote_url; TLS unless disable_tls
//   host[:port]                               with the bucket beside it; TLS unless disable_tls
//   "" or s3://bucket[/prefix]                Amazon's, in the region
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "terrace/result.h"

namespace terrace::s3 {

enum class Style : uint8_t {
  kPath,     // https://host/bucket/key: works everywhere but on Amazon's newer buckets.
  kVirtual,  // https://bucket.host/key: needs a name server that knows bucket.host.
};
enum class Addressing : uint8_t { kAuto, kPath, kVirtual };

struct EndpointOptions {
  std::string endpoint;
  std::string bucket;
  std::string prefix;
  std::string region = "us-east-1";  // Only names Amazon's own endpoint here.
  bool disable_tls = false;          // Where the endpoint does not say http or https.
  Addressing addressing = Addressing::kAuto;
};

struct Endpoint {
  std::string scheme;  // "http" or "https".
  std::string host;    // Without the bucket; an IPv6 address without brackets.
  uint16_t port = 0;
  std::string bucket;
  std::string prefix;  // Without a slash at either end; "": the whole bucket.
  Style style = Style::kPath;

  bool operator==(const Endpoint&) const = default;

  // "b.s3.example:9000": the port only if it is not the scheme's own.
  std::string HostHeader() const;
  // Of an object, or of the bucket for "". Encoded; begins with a slash. `key` is the whole one, prefix included.
  std::string Path(std::string_view key) const;
  // "https://b.s3.example/kv/a%3Db"; without a query.
  std::string Url(std::string_view key) const { return scheme + "://" + HostHeader() + Path(key); }
  std::string Describe() const;  // "https://s3.example:443, bucket kv, prefix chunks, virtual-hosted".
};

// Kinds: style is virtual-hosted if the endpoint says so (s3://), or is a name over https; path otherwise, and over
// https if the bucket has dots, since no certificate matches it. Blanks around endpoint and bucket do not count, nor
// does the case of scheme and host. `addressing` decides where it is not kAuto. Errors say what to write instead.
Result<Endpoint> ParseEndpoint(const EndpointOptions& options);

// Whether `text` may be the name of a region: letters, digits, hyphens and underscores, 64 at most.
bool IsRegionName(std::string_view text);

// The endpoint of the same service in another region. Amazon's hosts have their region in the name, which changes;
// every other host stays as the operator wrote it, since what a server says of hosts is not to be trusted with KV.
Endpoint InRegion(Endpoint endpoint, std::string_view region);

// Every byte but A-Z a-z 0-9 - . _ ~ as %XX; slashes stay unless `encode_slash`.
std::string UriEncode(std::string_view text, bool encode_slash);

}  // namespace terrace::s3
