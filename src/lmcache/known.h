// Every key of LMCache's configuration, and what becomes of it here.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

namespace terrace::lmcache {

inline constexpr std::string_view kVersion = "0.5.6";  // Whose keys these are.

enum class Kind : uint8_t {
  kBool,
  kInt,
  kNumber,
  kText,
  kList,  // YAML list, or text by commas.
  kMap,
};

enum class Fate : uint8_t {
  kMapped,   // Becomes an option of ours; translate.cc says which.
  kNoted,    // Accepted; `text` says what it means here.
  kRefused,  // An error unless it is off (false, null, "", 0, an empty list); `text` says what to do.
};

struct Key {
  std::string_view name;
  Kind kind;
  Fate fate;
  std::string_view text;
};

// Top level.
std::span<const Key> Keys();
// Under extra_config. A name that ends with '*' stands for all that begin so.
std::span<const Key> ExtraKeys();
// Variables LMCACHE_<name in capitals> that are no keys. '*' as above.
std::span<const Key> OtherVariables();
// Old names that LMCache still takes: {old, new}.
struct Alias {
  std::string_view old_name, name;
};
std::span<const Alias> Aliases();

}  // namespace terrace::lmcache
