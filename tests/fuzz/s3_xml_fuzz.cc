// What servers answer, or who says to be one: no document may do more than be refused, and none says which host is
// asked next.
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/assert.h"
#include "s3/endpoint.h"
#include "s3/failure.h"
#include "s3/xml.h"

namespace {

using namespace terrace;
using namespace terrace::s3;

void Answer(int status, std::string_view text) {
  HttpResponse response{.status = status, .text = std::string(text)};
  response.headers["x-amz-bucket-region"] = std::string(text.substr(0, 40));
  const Failure failure = FailureOf(response, "https");
  if (failure.trouble != Trouble::kOtherRegion) return;
  TERRACE_ASSERT(status >= 300 && (failure.region.empty() || IsRegionName(failure.region)));
  const Endpoint amazon{.scheme = "https", .host = "s3.us-east-1.amazonaws.com", .port = 443, .bucket = "b"};
  const std::string host = InRegion(amazon, failure.region).host;
  TERRACE_ASSERT(host.starts_with("s3.") && host.ends_with(".amazonaws.com"));
  TERRACE_ASSERT(host.find_first_not_of("abcdefghijklmnopqrstuvwxyz0123456789-.") == std::string::npos);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  for (const int status : {200, 301, 307, 400, 403}) Answer(status, text);
  static_cast<void>(ParseListPage(text).has_value());
  static_cast<void>(IsListOfBuckets(text));
  static_cast<void>(ParseUploadId(text).has_value());
  static_cast<void>(ParseUploadPage(text).has_value());
  static_cast<void>(ParseAssumedRole(text).has_value());
  return 0;
}
