#include "doctor/mount.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <sstream>

namespace terrace::doctor {
namespace {

constexpr int64_t kTransferMin = 262'144;
constexpr int64_t kAttributeAgeMax = 60;  // Linux's own default for directories.

// The kernel writes blanks, tabs, line ends and backslashes as \040.
std::string Unescaped(const std::string& text) {
  std::string out;
  for (size_t i = 0; i < text.size(); ++i) {
    unsigned byte = 0;
    if (text[i] == '\\' && i + 3 < text.size() &&
        std::from_chars(text.data() + i + 1, text.data() + i + 4, byte, 8).ptr == text.data() + i + 4) {
      out += static_cast<char>(byte);
      i += 3;
    } else {
      out += text[i];
    }
  }
  return out;
}

void AddOptions(const std::string& list, std::vector<std::string>& options) {
  std::istringstream in(list);
  for (std::string option; std::getline(in, option, ',');) {
    if (std::ranges::find(options, option) == options.end()) options.push_back(option);
  }
}

bool IsBelow(const std::string& path, const std::string& point) {
  return point == "/" || path == point || (path.starts_with(point) && path[point.size()] == '/');
}

template <size_t N>
bool IsOneOf(const std::string& type, const std::array<const char*, N>& types) {
  return std::ranges::any_of(types, [&](const char* t) { return type == t; });
}

bool IsNfs(const std::string& type) { return type == "nfs" || type == "nfs4"; }

bool IsOnlyHere(const std::string& type) {
  constexpr std::array kTypes = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat"};
  return IsOneOf(type, kTypes);
}

bool IsMemory(const std::string& type) { return type == "tmpfs" || type == "ramfs"; }

int64_t NumberOf(const Mount& mount, std::string_view option, int64_t otherwise) {
  const std::optional<std::string> text = mount.Option(option);
  int64_t value = otherwise;
  if (text) std::from_chars(text->data(), text->data() + text->size(), value);
  return value;
}

void JudgeNfs(const Mount& mount, const auto& add) {
  const std::string version = mount.Option("vers").value_or("");
  if (version.starts_with("2") || version.starts_with("3")) {
    add("version", Severity::kNote, "NFS version " + version + ": no state on the server, slower recovery",
        "mount with vers=4.2, or 4.1 for pNFS");
  }
  if (mount.Option("proto").value_or("").starts_with("udp")) {
    add("proto", Severity::kProblem, "NFS over UDP damages data at gigabit speed",
        "mount with proto=tcp or proto=rdma");
  }
  if (!mount.HasOption("soft") && !mount.HasOption("softerr") && !mount.HasOption("softreval")) {
    add("hard", Severity::kNote, "mounted hard: when the server is gone, threads hang until it is back",
        "mount with soft,timeo=50,retrans=2: every answer is checked here, so soft does no harm");
  } else if (NumberOf(mount, "timeo", 600) < 10) {
    add("timeo", Severity::kNote, "soft with timeo=" + *mount.Option("timeo") + ": a short hiccup becomes an error",
        "mount with timeo=50");
  }
  if (mount.HasOption("noac") || NumberOf(mount, "acdirmax", 60) == 0 || NumberOf(mount, "actimeo", 60) == 0) {
    add("noac", Severity::kNote, "attributes are not cached (noac): every look asks the server",
        "remove noac or actimeo=0: nothing here needs it");
  }
  for (const char* option : {"acregmax", "acdirmax", "actimeo"}) {
    if (NumberOf(mount, option, 0) <= kAttributeAgeMax) continue;
    add(option, Severity::kNote,
        std::string(option) + "=" + *mount.Option(option) + ": another instance's frames may be seen that late",
        "remove it: the default is 60 s, and journals are seen at once");
  }
  if (mount.Option("lookupcache") == "none") {
    add("lookupcache", Severity::kNote, "lookupcache=none: every name in a path asks the server",
        "mount with lookupcache=positive");
  }
  if (mount.HasOption("nosharecache")) {
    add("nosharecache", Severity::kNote,
        "nosharecache: two mounts of one export on this host do not see each other's records in time",
        "remove it, or mount the export once a host");
  }
  if (mount.HasOption("sync")) {
    add("sync", Severity::kNote, "mounted sync: each write waits for the server",
        "remove sync: frames are synced whole");
  }
  for (const char* option : {"rsize", "wsize"}) {
    if (NumberOf(mount, option, kTransferMin) >= kTransferMin) continue;
    add(option, Severity::kNote, std::string(option) + "=" + *mount.Option(option) + ": many small calls for a frame",
        std::string("mount with ") + option + "=1048576, and raise the server's limit if it says less");
  }
}

}  // namespace

const char* SectionOf(DirectoryUse use) { return use == DirectoryUse::kDisk ? "disk" : "shared"; }

bool Mount::HasOption(std::string_view name) const { return std::ranges::find(options, name) != options.end(); }

std::optional<std::string> Mount::Option(std::string_view name) const {
  for (const std::string& option : options) {
    if (option.size() > name.size() && option.starts_with(name) && option[name.size()] == '=') {
      return option.substr(name.size() + 1);
    }
  }
  return std::nullopt;
}

std::optional<Mount> FindMount(const std::string& mountinfo, const std::string& path) {
  std::optional<Mount> found;
  std::istringstream lines(mountinfo);
  for (std::string line; std::getline(lines, line);) {
    // 36 35 98:0 /root /point options [tags] - type source options
    std::istringstream words(line);
    std::string id, parent, device, root, word;
    Mount mount;
    std::string of_mount, of_file_system;
    if (!(words >> id >> parent >> device >> root >> mount.point >> of_mount)) continue;
    while (words >> word && word != "-") {
    }
    if (!(words >> mount.type >> mount.source)) continue;
    words >> of_file_system;
    mount.point = Unescaped(mount.point);
    mount.source = Unescaped(mount.source);
    // Of equal points the last one covers the others.
    if (!IsBelow(path, mount.point) || (found && found->point.size() > mount.point.size())) continue;
    AddOptions(of_mount, mount.options);
    AddOptions(of_file_system, mount.options);
    found = std::move(mount);
  }
  return found;
}

std::vector<Finding> JudgeMount(const Mount& mount, DirectoryUse use) {
  std::vector<Finding> findings;
  const std::string section = SectionOf(use);
  const auto add = [&](const std::string& name, Severity severity, std::string what, std::string remedy) {
    findings.push_back(
        {.id = section + "." + name, .severity = severity, .what = std::move(what), .remedy = std::move(remedy)});
  };
  std::string options;
  for (const std::string& option : mount.options) options += (options.empty() ? "" : ",") + option;
  const std::string version = mount.Option("vers").value_or("");
  add("mount", Severity::kOk,
      mount.type + (version.empty() ? "" : " " + version) + ", " + mount.source + " on " + mount.point, "");
  findings.back().figures = {
      {"type", mount.type}, {"source", mount.source}, {"point", mount.point}, {"options", options}};
  if (mount.HasOption("ro")) {
    add("read_only", Severity::kProblem, mount.point + " is mounted read-only", "mount it rw");
  }
  if (mount.type == "overlay") {
    add("overlay", Severity::kNote, "this is a container's own layer: slow, and gone with the container",
        "mount a volume there");
  }
  if (IsNfs(mount.type)) JudgeNfs(mount, add);
  if (use == DirectoryUse::kDisk) {
    if (IsMemory(mount.type)) {
      add("memory", Severity::kProblem,
          mount.type + " keeps files in memory: --disk there takes it twice, beside --ram",
          "name a directory on a disk, or leave --disk out and raise --ram");
    } else if (IsNfs(mount.type)) {
      add("network", Severity::kNote, "--disk is on a network mount, which is not faster than --shared there",
          "name a directory on a local disk, or leave --disk out");
    }
  } else if (IsMemory(mount.type) || IsOnlyHere(mount.type)) {
    add("local", Severity::kNote, mount.type + " is a file system of this host: instances on other hosts don't see it",
        "right for instances on one host; for more, name a directory on NFS, or use --s3-bucket");
  }
  return findings;
}

}  // namespace terrace::doctor
