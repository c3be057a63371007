#include "tier/ram_limit.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>

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

// The group itself and all above it: each may have a limit of its own. In a container the path may be the host's, of
// which only the mount point is visible; that is then the container's own group.
uint64_t LeftInHierarchy(const std::string& mount, std::string path, const CgroupNames& names) {
  uint64_t left = LeftInCgroup(mount, names);
  while (path.size() > 1 && path.front() == '/') {
    left = std::min(left, LeftInCgroup(mount + path, names));
    path.resize(path.find_last_of('/'));
  }
  return left;
}

}  // namespace

uint64_t AvailableMemoryBytes(const std::string& root) {
  uint64_t left = kUnlimited;
  if (const auto kib = ReadField(root + "/proc/meminfo", "MemAvailable:")) left = *kib * 1024;
  std::ifstream groups(root + "/proc/self/cgroup");
  std::string line;  // "4:memory:/path" (v1) or "0::/path" (v2).
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (controllers == ",,") {
      left = std::min(left, LeftInHierarchy(root + "/sys/fs/cgroup", path, kV2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      left = std::min(left, LeftInHierarchy(root + "/sys/fs/cgroup/memory", path, kV1));
    }
  }
  return left == kUnlimited ? kUnlimited : left - left / 8;
}

}  // namespace terrace
