// What servers answer, or who says to be one: no document may do more than be refused.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "s3/xml.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  static_cast<void>(terrace::s3::ParseErrorDocument(text));
  static_cast<void>(terrace::s3::ParseListPage(text).has_value());
  static_cast<void>(terrace::s3::IsListOfBuckets(text));
  static_cast<void>(terrace::s3::ParseUploadId(text).has_value());
  static_cast<void>(terrace::s3::ParseUploadPage(text).has_value());
  static_cast<void>(terrace::s3::ParseAssumedRole(text).has_value());
  return 0;
}
