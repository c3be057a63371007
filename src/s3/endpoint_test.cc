// What could go wrong: frames that go to another place than the operator wrote; a bucket that is asked for in a style
// that its server or its certificate can't take; a key whose bytes change on the way into a URL.
#include "s3/endpoint.h"

#include <gtest/gtest.h>

#include <charconv>

namespace terrace::s3 {
namespace {

Endpoint Parse(const EndpointOptions& options) {
  const Result<Endpoint> endpoint = ParseEndpoint(options);
  EXPECT_TRUE(endpoint) << options.endpoint << ": " << endpoint.error().what;
  return endpoint.value_or(Endpoint{});
}
Endpoint Is(const char* scheme, const char* host, uint16_t port, const char* bucket, const char* prefix, Style style) {
  return {scheme, host, port, bucket, prefix, style};
}

// D18.
TEST(Endpoint, TheTableOfD18) {
  EXPECT_EQ(Parse({.endpoint = "http://h:9000", .bucket = "b", .prefix = "p"}),
            Is("http", "h", 9000, "b", "p", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "https://s3.example", .bucket = "b"}),
            Is("https", "s3.example", 443, "b", "", Style::kVirtual));
  EXPECT_EQ(Parse({.endpoint = "s3://b.s3.example"}), Is("https", "s3.example", 443, "b", "", Style::kVirtual));
  EXPECT_EQ(Parse({.endpoint = "s3://b.s3.example", .disable_tls = true}),
            Is("http", "s3.example", 80, "b", "", Style::kVirtual));
  EXPECT_EQ(Parse({.endpoint = "s3://b.s3.example/"}), Is("https", "s3.example", 443, "b", "", Style::kVirtual));
  EXPECT_EQ(Parse({.endpoint = "http://h:9000/", .bucket = "b", .prefix = "/p/"}),
            Is("http", "h", 9000, "b", "p", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "http://[::1]:9000", .bucket = "b"}), Is("http", "::1", 9000, "b", "", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "https://s3.example", .bucket = "b.with.dots"}),
            Is("https", "s3.example", 443, "b.with.dots", "", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "s3://b.s3.example:9000/p"}),
            Is("https", "s3.example", 9000, "b", "p", Style::kVirtual));
}

// D18: other ways to write the same.
TEST(Endpoint, BlanksCaseAndSlashesChangeNothing) {
  const Endpoint path = Is("http", "h", 9000, "b", "p/q", Style::kPath);
  for (const char* endpoint :
       {"http://h:9000", "http://h:9000/", "http://h:9000//", " http://h:9000\n", "HTTP://H:9000", "Http://h:9000/ "}) {
    for (const char* prefix : {"p/q", "/p/q", "p/q/", "//p/q//"}) {
      EXPECT_EQ(Parse({.endpoint = endpoint, .bucket = " b ", .prefix = prefix}), path) << endpoint << prefix;
    }
  }
  EXPECT_EQ(Parse({.endpoint = "h:9000", .bucket = "b", .prefix = "p/q", .disable_tls = true}), path);
  const Endpoint virtual_hosted = Is("https", "s3.example", 443, "b", "p", Style::kVirtual);
  for (const char* endpoint :
       {"s3://b.s3.example/p", "s3://b.s3.example:443/p/", "S3://b.S3.EXAMPLE//p//", "\ts3://b.s3.example/p\r\n"}) {
    EXPECT_EQ(Parse({.endpoint = endpoint}), virtual_hosted) << endpoint;
    EXPECT_EQ(Parse({.endpoint = endpoint, .bucket = "b"}), virtual_hosted) << endpoint;
  }
  EXPECT_EQ(Parse({.endpoint = "https://s3.example:443/", .bucket = "b", .prefix = "p"}), virtual_hosted);
  EXPECT_EQ(Parse({.endpoint = "s3.example", .bucket = "b", .prefix = "p"}), virtual_hosted);
}

// D18.
TEST(Endpoint, AddressesHavePortsAndBracketsOfTheirOwn) {
  EXPECT_EQ(Parse({.endpoint = "https://[2001:db8::1]", .bucket = "b"}),
            Is("https", "2001:db8::1", 443, "b", "", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "[::1]:9000/", .bucket = "b", .disable_tls = true}),
            Is("http", "::1", 9000, "b", "", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "http://127.0.0.1", .bucket = "b"}), Is("http", "127.0.0.1", 80, "b", "", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "http://[::ffff:10.0.0.1]:1", .bucket = "b"}).HostHeader(), "[::ffff:10.0.0.1]:1");
}

// D18.
TEST(Endpoint, ABucketWithDotsIsAskedForByPathOverTls) {
  EXPECT_EQ(Parse({.endpoint = "s3://b.c.s3.example", .bucket = "b.c"}),
            Is("https", "s3.example", 443, "b.c", "", Style::kPath));
  EXPECT_EQ(Parse({.endpoint = "s3://b.c.s3.example", .bucket = "b.c", .disable_tls = true}),
            Is("http", "s3.example", 80, "b.c", "", Style::kVirtual));
  EXPECT_EQ(Parse({.bucket = "b.c", .region = "r"}).style, Style::kPath);
  EXPECT_EQ(Parse({.endpoint = "https://s3.example", .bucket = "b.c", .addressing = Addressing::kVirtual}).style,
            Style::kVirtual);
}

TEST(Endpoint, ABucketBeforeAnAddressIsAskedForByPath) {
  EXPECT_EQ(Parse({.endpoint = "s3://b.10.0.0.1:9000/p", .disable_tls = true}),
            Is("http", "10.0.0.1", 9000, "b", "p", Style::kPath));
}

TEST(Endpoint, AmazonsOwnNeedsNoEndpoint) {
  const Endpoint amazon = Is("https", "s3.eu-west-1.amazonaws.com", 443, "b", "", Style::kVirtual);
  EXPECT_EQ(Parse({.bucket = "b", .region = "eu-west-1"}), amazon);
  EXPECT_EQ(Parse({.endpoint = "s3://b", .region = "eu-west-1"}), amazon);
  EXPECT_EQ(Parse({.endpoint = "s3://b/p/q/", .prefix = "r"}).prefix, "p/q/r");
}

TEST(Endpoint, WhatIsWrittenWinsOverWhatIsGuessed) {
  EXPECT_EQ(Parse({.endpoint = "https://s3.example", .bucket = "b", .addressing = Addressing::kPath}).style,
            Style::kPath);
  EXPECT_EQ(Parse({.endpoint = "http://s3.localhost:1", .bucket = "b", .addressing = Addressing::kVirtual}).style,
            Style::kVirtual);
  EXPECT_EQ(Parse({.endpoint = "s3://b.with.dots.s3.example", .bucket = "b.with.dots"}).host, "s3.example");
  EXPECT_EQ(Parse({.endpoint = "h:9000", .bucket = "b", .disable_tls = true}),
            Is("http", "h", 9000, "b", "", Style::kPath));
}

TEST(Endpoint, AddressesAndPlainNamesArePathStyle) {
  for (const char* endpoint : {"https://10.0.0.1", "https://minio", "https://[fe80::1]:9000", "http://s3.example"}) {
    EXPECT_EQ(Parse({.endpoint = endpoint, .bucket = "b"}).style, Style::kPath) << endpoint;
  }
}

TEST(Endpoint, WhatIsNoEndpointIsRefusedWithARemedy) {
  const EndpointOptions bad[] = {
      {.endpoint = "ftp://h", .bucket = "b"},
      {.endpoint = "https://", .bucket = "b"},
      {.endpoint = "https://h:port", .bucket = "b"},
      {.endpoint = "https://h:0", .bucket = "b"},
      {.endpoint = "https://h:70000", .bucket = "b"},
      {.endpoint = "https://h/b"},
      {.endpoint = "https://h"},
      {.endpoint = "https://[::1", .bucket = "b"},
      {.endpoint = "https://a b", .bucket = "b"},
      {.endpoint = "https://h", .bucket = "b/c"},
      {.endpoint = "https://h", .bucket = ".."},
      {.endpoint = "https://h", .bucket = "b", .disable_tls = true},
      {.endpoint = "s3://b.s3.example", .bucket = "c"},
      {.endpoint = "s3://localhost:9000"},
      {.endpoint = "s3://b."},
      {.endpoint = "s3://"},
      {.endpoint = "s3:///b"},
      {.endpoint = "s3://.s3.example"},
      {.endpoint = "s3://[::1]:9000"},
      {.endpoint = "s3:b.s3.example", .bucket = "b"},
      {.endpoint = "://h", .bucket = "b"},
      {.endpoint = "https:/h", .bucket = "b"},
      {.endpoint = "https://h:", .bucket = "b"},
      {.endpoint = "https://h:-1", .bucket = "b"},
      {.endpoint = "https://h:9000x", .bucket = "b"},
      {.endpoint = "https://h:9000:1", .bucket = "b"},
      {.endpoint = "https://::1", .bucket = "b"},
      {.endpoint = "https://[]", .bucket = "b"},
      {.endpoint = "https://[::1]9000", .bucket = "b"},
      {.endpoint = "https://[no:address]", .bucket = "b"},
      {.endpoint = "https://[::1%eth0]", .bucket = "b"},
      {.endpoint = "https://h?x=1", .bucket = "b"},
      {.endpoint = "https://h#f", .bucket = "b"},
      {.endpoint = "<endpoint>", .bucket = "b"},
      {.endpoint = "s3://<bucket>.<storagegrid_s3_endpoint_fqdn>"},
      {.endpoint = "https://h", .bucket = "b", .prefix = "../a"},
      {.endpoint = "https://h", .bucket = "b", .prefix = "a//b"},
      {.endpoint = "s3://b.s3.example/a/./b"},
      {.endpoint = "s3://10.0.0.1"},
      {.endpoint = "https://10.0.0.1", .bucket = "b", .addressing = Addressing::kVirtual},
      {},
  };
  for (const EndpointOptions& options : bad) {
    const Result<Endpoint> endpoint = ParseEndpoint(options);
    ASSERT_FALSE(endpoint) << options.endpoint << " + " << options.bucket;
    EXPECT_EQ(endpoint.error().code, Code::kInvalid);
  }
  for (const char* endpoint :
       {"https://AKIA:sesame@h", "https://AKIA:ses/ame@h", "s3://AKIA:sesame@b.h", "s3://AKIA:ses/ame@b.h",
        "ftp://AKIA:sesame@h", "AKIA:sesame@h", "https://b.h/?X-Amz-Signature=sesame"}) {
    const Result<Endpoint> secret = ParseEndpoint({.endpoint = endpoint, .bucket = "b"});
    ASSERT_FALSE(secret);
    EXPECT_EQ(secret.error().what.find("ses"), std::string::npos) << secret.error().what;
  }
}

TEST(Endpoint, UrlsNameTheBucketOnce) {
  const Endpoint path = Parse({.endpoint = "http://[::1]:9000", .bucket = "b"});
  EXPECT_EQ(path.Url("kv/x.kvf"), "http://[::1]:9000/b/kv/x.kvf");
  EXPECT_EQ(path.Url(""), "http://[::1]:9000/b");
  const Endpoint virtually = Parse({.endpoint = "https://s3.example", .bucket = "b"});
  EXPECT_EQ(virtually.Url("kv/x.kvf"), "https://b.s3.example/kv/x.kvf");
  EXPECT_EQ(virtually.Url(""), "https://b.s3.example/");
  EXPECT_EQ(virtually.HostHeader(), "b.s3.example");
}

// D19.
TEST(Endpoint, KeysOfAnyByteAreEncodedOnce) {
  EXPECT_EQ(UriEncode("m@rev/a=b+c d~\xc3\xbc%", false), "m%40rev/a%3Db%2Bc%20d~%C3%BC%25");
  EXPECT_EQ(UriEncode("a/b", true), "a%2Fb");
  std::string all;
  for (int c = 1; c < 256; ++c) all += static_cast<char>(c);
  std::string back;
  const std::string encoded = UriEncode(all, true);
  for (size_t i = 0; i < encoded.size(); ++i) {
    if (encoded[i] != '%') {
      back += encoded[i];
      continue;
    }
    int byte = 0;
    std::from_chars(encoded.data() + i + 1, encoded.data() + i + 3, byte, 16);
    back += static_cast<char>(byte);
    i += 2;
  }
  EXPECT_EQ(back, all);
}

TEST(Endpoint, AmazonsHostsFollowTheRegion) {
  const auto in = [](const std::string& host, const std::string& region) {
    return InRegion(Parse({.endpoint = "https://" + host, .bucket = "b"}), region).host;
  };
  EXPECT_EQ(in("s3.us-east-1.amazonaws.com", "eu-west-1"), "s3.eu-west-1.amazonaws.com");
  EXPECT_EQ(in("s3.amazonaws.com", "us-gov-west-1"), "s3.us-gov-west-1.amazonaws.com");
  EXPECT_EQ(in("s3-us-west-2.amazonaws.com", "ap-southeast-5"), "s3.ap-southeast-5.amazonaws.com");
  EXPECT_EQ(in("s3.dualstack.us-east-1.amazonaws.com", "eu-west-1"), "s3.dualstack.eu-west-1.amazonaws.com");
  EXPECT_EQ(in("s3-fips.us-east-1.amazonaws.com", "us-west-2"), "s3-fips.us-west-2.amazonaws.com");
  EXPECT_EQ(in("s3.cn-north-1.amazonaws.com.cn", "cn-northwest-1"), "s3.cn-northwest-1.amazonaws.com.cn");
}

TEST(Endpoint, EveryOtherHostStaysAsItWasWritten) {
  for (const char* host : {"h", "127.0.0.1", "s3.example", "s3.us-east-1.wasabisys.com", "evil.amazonaws.com",
                           "compute.amazonaws.com", "s3-website-us-east-1.amazonaws.com",
                           "b.vpce-1.s3.us-east-1.vpce.amazonaws.com", "s3.amazonaws.com.evil.com"}) {
    const Endpoint endpoint = Parse({.endpoint = "https://" + std::string(host) + ":9000", .bucket = "b"});
    EXPECT_EQ(InRegion(endpoint, "eu-west-1"), endpoint) << host;
  }
  const Endpoint amazon = Parse({.endpoint = "https://s3.us-east-1.amazonaws.com", .bucket = "b"});
  for (const char* region : {"", "mars", "website-us-east-1", "us-east-1.evil.com/", "us-east-1@evil", "us--1", "us-1",
                             "US-EAST-1", "us-east-100", "x.us-east-1", "us-east-1:80", "vpce"}) {
    EXPECT_EQ(InRegion(amazon, region), amazon) << region;
  }
}

}  // namespace
}  // namespace terrace::s3
