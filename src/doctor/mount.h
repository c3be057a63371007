// What lies under a directory: which file system, mounted how, and what of that hurts a tier.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "doctor/report.h"

namespace terrace::doctor {

enum class DirectoryUse : uint8_t { kDisk, kShared };
const char* SectionOf(DirectoryUse use);  // "disk", "shared".

struct Mount {
  std::string point;
  std::string type;                  // "nfs4", "ext4".
  std::string source;                // "server:/export".
  std::vector<std::string> options;  // Of the mount and of the file system.

  bool HasOption(std::string_view name) const;
  std::optional<std::string> Option(std::string_view name) const;  // Of NAME=VALUE.
};

// `mountinfo` is the text of /proc/self/mountinfo, `path` absolute, without links in it.
std::optional<Mount> FindMount(const std::string& mountinfo, const std::string& path);

// At least one finding, SECTION.mount; each option that hurts has one of its own.
std::vector<Finding> JudgeMount(const Mount& mount, DirectoryUse use);

}  // namespace terrace::doctor
