// Is a bucket fit for the s3 tier? Every trouble has the name that s3/failure.h gives it. What is written there is
// below PREFIX/terrace-doctor-..., and is removed.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "doctor/directory.h"
#include "doctor/report.h"
#include "s3/client.h"
#include "terrace/result.h"

namespace terrace::doctor {

// Blocks, a minute or two at most. `stop`: come to an end.
Bandwidth CheckS3(const s3::ClientOptions& options, const Measure& measure, const std::atomic<bool>& stop,
                  Report& report);

struct WrittenFrames {
  uint64_t frames = 0;
  bool complete = true;  // All names were looked at.
  int64_t now = 0;       // The server's time, Unix seconds.
};
// Frames below the prefix that were written at `since` or later by the server's clock, among the first `names_max`.
Result<WrittenFrames> FramesWrittenSince(const s3::ClientOptions& options, int64_t since, size_t names_max);

// "Sun, 06 Nov 1994 08:49:37 GMT" as Unix seconds; nothing if it is none.
std::optional<int64_t> ParseHttpDate(const std::string& text);

}  // namespace terrace::doctor
