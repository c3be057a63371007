// The documents that an S3 or STS server answers with. Strict about what is used, blind to the rest; foreign bytes
// never do more harm than an error (tests/fuzz/s3_xml_fuzz.cc).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "s3/sigv4.h"
#include "terrace/result.h"

namespace terrace::s3 {

// <Error>, of S3 (the root) or STS (<ErrorResponse><Error>).
struct ErrorDocument {
  std::string code;     // "SlowDown".
  std::string message;  // For people.
  std::string region;   // With AuthorizationHeaderMalformed and redirects.
};
// Nothing if it is none: then an answer was no error.
std::optional<ErrorDocument> ParseErrorDocument(std::string_view text);

struct ListPage {
  struct Object {
    std::string key;
    uint64_t bytes = 0;
    int64_t modified = 0;  // Unix seconds by the server's clock; 0: it did not say.
  };
  std::vector<Object> objects;
  std::string next;  // Continuation token; "" at the end.
  int64_t now = 0;   // The server's time, from the answer's head: Unix seconds; 0: it did not say.
};
// kUnavailable if it is no list of objects. A list of buckets is named: the server does not know virtual-hosted style.
Result<ListPage> ParseListPage(std::string_view text);
bool IsListOfBuckets(std::string_view text);

Result<std::string> ParseUploadId(std::string_view text);

struct UploadPage {
  struct Upload {
    std::string key, id;
    int64_t initiated = 0;  // Unix seconds.
  };
  std::vector<Upload> uploads;
};
Result<UploadPage> ParseUploadPage(std::string_view text);

struct SessionCredentials {
  Credentials credentials;
  int64_t expires = 0;  // Unix seconds.
};
Result<SessionCredentials> ParseAssumedRole(std::string_view text);

// Body of CompleteMultipartUpload; part i has number i + 1.
std::string CompleteUploadBody(const std::vector<std::string>& etags);

// "2026-01-31T12:00:00.000Z".
std::optional<int64_t> ParseIsoTime(std::string_view text);

}  // namespace terrace::s3
