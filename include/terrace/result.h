// Errors as values. A function that can fail returns Result<T>; the compiler refuses to ignore it.
//
// A miss is not an error: a cache may forget. An Error means that somebody has to act, and its code says
// which action. Context is added outwards: `shared_fs: load 9f3a: pread /mnt/kv/frames/9f3/...: EIO`.
#pragma once

#include <cstdint>
#include <string>
#include <tl/expected.hpp>
#include <utility>

namespace terrace {

enum class Code : uint8_t {
  kInvalid,      // Caller bug or bad input: fix the call.
  kUnavailable,  // Retry later.
  kTimeout,      // The deadline passed.
  kFull,         // Make room.
  kCorrupt,      // The bytes are wrong: quarantine them.
  kDenied,       // Credentials or permissions.
  kCancelled,    // The caller went away.
  kIo,           // The operating system said no; os_error says why.
  kInternal,     // A bug of ours.
};

struct Error {
  Code code = Code::kInternal;
  std::string what;
  int os_error = 0;  // errno, or 0.
};

template <class T>
class [[nodiscard]] Result : public tl::expected<T, Error> {
 public:
  using tl::expected<T, Error>::expected;
};

// return Fail(Code::kInvalid, "chunk size 0: use a multiple of 64");
inline tl::unexpected<Error> Fail(Code code, std::string what, int os_error = 0) {
  return tl::unexpected<Error>(Error{code, std::move(what), os_error});
}

// return Fail(result.error(), "load model"): the same error with context in front.
inline tl::unexpected<Error> Fail(Error error, const std::string& context) {
  error.what = context + ": " + error.what;
  return tl::unexpected<Error>(std::move(error));
}

}  // namespace terrace
