// Versions that other processes and later releases meet.
#pragma once

#include <cstdint>

namespace terrace {

inline constexpr const char* kVersion = "0.1.0";
inline constexpr uint32_t kKeyFormatVersion = 1;    // Encoding of spaces and keys (docs/internals/keys.md).
inline constexpr uint32_t kFrameFormatVersion = 1;  // Frame header (docs/internals/frame.md).

}  // namespace terrace
