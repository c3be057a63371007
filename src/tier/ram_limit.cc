#include "tier/ram_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

#include "io/cgroup.h"

namespace terrace {
namespace {

constexpr uint64_t kUnlimited = std::numeric_limits<uint64_t>::max();

// First number in a file. "max" is none.
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// `name value` lines, with or without a colon after the name.
std::optional<uint64_t> ReadField(const std::string& path, std::string_view name) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    std::istringstream words(line);
    std::string word;
    uint64_t value = 0;
    if (words >> word >> value && word == name) return value;
  }
  return std::nullopt;
}

struct CgroupNames {
  const char* limit;
  const char* usage;
  const char* inactive_file;
  const char* active_file;
};
constexpr CgroupNames kV1 = {"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file",
                             "total_active_file"};
constexpr CgroupNames kV2 = {"memory.max", "memory.current", "inactive_file", "active_file"};

uint64_t LeftInCgroup(const std::string& folder, const CgroupNames& names) {
  const std::optional<uint64_t> limit = ReadNumber(folder + "/" + names.limit);
  const std::optional<uint64_t> usage = ReadNumber(folder + "/" + names.usage);
  if (!limit || !usage) return kUnlimited;
  const uint64_t cache = ReadField(folder + "/memory.stat", names.inactive_file).value_or(0) +
                         ReadField(folder + "/memory.stat", names.active_file).value_or(0);
  const uint64_t used = *usage - std::min(*usage, cache);
  return *limit - std::min(*limit, used);
}

}  // namespace

uint64_t AvailableMemoryBytes(const std::string& root) {
  uint64_t left = kUnlimited;
  if (const auto kib = ReadField(root + "/proc/meminfo", "MemAvailable:")) left = *kib * 1024;
  VisitCgroups(root, "memory", [&](const std::string& folder, bool is_v2) {
    left = std::min(left, LeftInCgroup(folder, is_v2 ? kV2 : kV1));
  });
  return left == kUnlimited ? kUnlimited : left - left / 8;
}

}  // namespace terrace
