// What could go wrong: an error document taken for success, a list that ends too early or has wrong keys, foreign bytes
// that crash the reader.
#include "s3/xml.h"

#include <gtest/gtest.h>

namespace terrace::s3 {
namespace {

TEST(S3Xml, ErrorsOfS3AndStsAreRead) {
  const auto s3 = ParseErrorDocument(
      R"(<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>AuthorizationHeaderMalformed</Code>
<Message>the region 'us-east-1' is wrong; expecting &apos;eu-west-1&apos;</Message>
<Region>eu-west-1</Region></Error>)");
  ASSERT_TRUE(s3);
  EXPECT_EQ(s3->code, "AuthorizationHeaderMalformed");
  EXPECT_EQ(s3->message, "the region 'us-east-1' is wrong; expecting 'eu-west-1'");
  EXPECT_EQ(s3->region, "eu-west-1");
  const auto sts = ParseErrorDocument(
      R"(<ErrorResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<Error><Type>Sender</Type><Code>ExpiredTokenException</Code><Message>m</Message></Error></ErrorResponse>)");
  ASSERT_TRUE(sts);
  EXPECT_EQ(sts->code, "ExpiredTokenException");
}

TEST(S3Xml, WhatIsNoErrorIsNone) {
  for (const char* text :
       {"", "   ", "plain", "<Other/>", "<html><body>502</body></html>", "<Error", "<Error><Code>x"}) {
    EXPECT_FALSE(ParseErrorDocument(text)) << text;
  }
}

TEST(S3Xml, AListHasItsKeysSizesAndContinuation) {
  const auto page = ParseListPage(
      R"(<ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><Name>b</Name><IsTruncated>true</IsTruncated>
<NextContinuationToken>t/1=</NextContinuationToken>
<Contents><Key>kv/a&amp;b c</Key><Size>4096</Size><ETag>"x"</ETag></Contents>
<Contents><Key>kv/&#xfc;</Key><Size>0</Size></Contents></ListBucketResult>)");
  ASSERT_TRUE(page) << page.error().what;
  ASSERT_EQ(page->objects.size(), 2u);
  EXPECT_EQ(page->objects[0].key, "kv/a&b c");
  EXPECT_EQ(page->objects[0].bytes, 4096u);
  EXPECT_EQ(page->objects[1].key, "kv/\xc3\xbc");
  EXPECT_EQ(page->next, "t/1=");
}

TEST(S3Xml, WhatIsNoListIsAnError) {
  for (const char* text :
       {"", "x", "<Error/>", "<ListBucketResult><Contents><Key>a</Key></Contents></ListBucketResult>",
        "<ListBucketResult><Contents><Key>a</Key><Size>-1</Size></Contents></ListBucketResult>",
        "<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>"}) {
    EXPECT_FALSE(ParseListPage(text)) << text;
  }
  EXPECT_TRUE(IsListOfBuckets("<ListAllMyBucketsResult><Buckets/></ListAllMyBucketsResult>"));
  EXPECT_FALSE(IsListOfBuckets("<ListBucketResult/>"));
}

TEST(S3Xml, MultipartAnswersAreRead) {
  EXPECT_EQ(*ParseUploadId("<InitiateMultipartUploadResult><UploadId>u-1</UploadId></InitiateMultipartUploadResult>"),
            "u-1");
  EXPECT_FALSE(ParseUploadId("<InitiateMultipartUploadResult/>"));
  const auto page = ParseUploadPage(
      "<ListMultipartUploadsResult><Upload><Key>k</Key><UploadId>u</UploadId><Initiated>2026-01-31T12:00:00.000Z"
      "</Initiated></Upload><Upload><Key>young</Key></Upload></ListMultipartUploadsResult>");
  ASSERT_TRUE(page);
  ASSERT_EQ(page->uploads.size(), 1u);
  EXPECT_EQ(page->uploads[0].initiated, 1769860800);
  EXPECT_EQ(CompleteUploadBody({"\"a\"", "\"b\""}),
            "<CompleteMultipartUpload xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">"
            "<Part><PartNumber>1</PartNumber><ETag>\"a\"</ETag></Part>"
            "<Part><PartNumber>2</PartNumber><ETag>\"b\"</ETag></Part></CompleteMultipartUpload>");
}

TEST(S3Xml, ARolesCredentialsHaveAnEnd) {
  const auto session = ParseAssumedRole(
      R"(<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult>
<Credentials><SessionToken>tok</SessionToken><SecretAccessKey>sec</SecretAccessKey>
<Expiration>2026-01-31T12:00:00Z</Expiration>
<AccessKeyId>ASIA</AccessKeyId></Credentials></AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>)");
  ASSERT_TRUE(session) << session.error().what;
  EXPECT_EQ(session->credentials, (Credentials{"ASIA", "sec", "tok"}));
  EXPECT_EQ(session->expires, 1769860800);
  EXPECT_FALSE(ParseAssumedRole("<AssumeRoleWithWebIdentityResponse/>"));
}

}  // namespace
}  // namespace terrace::s3
