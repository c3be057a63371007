#include "doctor/machine.h"

#include <sys/resource.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "io/disk_io.h"
#include "tier/ram_limit.h"

namespace terrace::doctor {
namespace {

// Sockets of clients, files being read and written, and what libraries open.
constexpr uint64_t kFilesMin = 4096;
// Kernels before 5.12 count rings against it; later ones nothing of ours.
constexpr uint64_t kLockedMin = 1 << 20;
constexpr double kClockNoteS = 2;
constexpr double kClockProblemS = 300;  // Signatures are refused from 900 s on.

uint64_t SoftLimit(int resource) {
  rlimit limit{};
  if (getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<uint64_t>::max();
  }
  return limit.rlim_cur;
}

std::string LimitText(uint64_t limit) {
  return limit == std::numeric_limits<uint64_t>::max() ? "unlimited" : std::to_string(limit);
}

std::string FirstLine(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

void CheckMemory(uint64_t ram_bytes, const std::string& root, Report& report) {
  const uint64_t available = AvailableMemoryBytes(root);
  const auto ram = static_cast<double>(ram_bytes);
  Finding finding{.id = "machine.memory", .figures = {{"ram_bytes", ram}}};
  if (available == std::numeric_limits<uint64_t>::max()) {
    finding.what = "--ram " + BytesText(ram) + "; the system does not say how much there is";
  } else {
    finding.figures.emplace_back("available_bytes", static_cast<double>(available));
    finding.what = "--ram " + BytesText(ram) + ", and a process may take " + BytesText(static_cast<double>(available)) +
                   " here (machine and cgroup, less what other processes have reserved and an eighth)";
    if (ram_bytes > available) {
      finding.severity = Severity::kNote;
      finding.what += ": an instance that starts now cuts its cap";
      finding.remedy = "lower --ram, stop what else takes memory, or raise the container's limit";
    }
  }
  report.Add(std::move(finding));
}

void CheckLimits(const MachineNeeds& needs, Report& report) {
  const uint64_t files = SoftLimit(RLIMIT_NOFILE);
  const uint64_t wanted = kFilesMin + needs.connections;
  Finding nofile{.id = "machine.nofile",
                 .what = "RLIMIT_NOFILE " + LimitText(files),
                 .figures = {{"limit", static_cast<double>(files)}, {"wanted", static_cast<double>(wanted)}}};
  if (files < wanted) {
    nofile.severity = Severity::kNote;
    nofile.what += ": every client and every call to storage takes one";
    nofile.remedy =
        "ulimit -n " + std::to_string(wanted) + ", LimitNOFILE= of the systemd unit, or --ulimit nofile of docker";
  }
  report.Add(std::move(nofile));

  const uint64_t locked = SoftLimit(RLIMIT_MEMLOCK);
  Finding memlock{.id = "machine.memlock",
                  .what = "RLIMIT_MEMLOCK " + LimitText(locked),
                  .figures = {{"limit_bytes", static_cast<double>(locked)}}};
  if (needs.has_disk && locked < kLockedMin) {
    memlock.severity = Severity::kNote;
    memlock.what += ": kernels before 5.12 count io_uring's rings against it";
    memlock.remedy = "ulimit -l 1024 or more (KiB), LimitMEMLOCK= of the systemd unit";
  }
  report.Add(std::move(memlock));
}

void CheckHugePages(const std::string& root, Report& report) {
  const std::string file = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
  const std::string line = FirstLine(root + file);
  Finding finding{.id = "machine.huge_pages",
                  .what = "huge pages for the RAM tier: " + (line.empty() ? "unknown" : line)};
  if (line.empty() || line.find("[never]") != std::string::npos || line.find("[deny]") != std::string::npos) {
    finding.severity = Severity::kNote;
    finding.what = "the kernel gives the RAM tier no huge pages: copies of large frames are somewhat slower";
    finding.remedy = "as root: echo advise > " + file;
  }
  report.Add(std::move(finding));
}

void CheckUring(const MachineNeeds& needs, const std::string& root, Report& report) {
  if (!needs.has_disk) return;
  const auto io = OpenDiskIo({.kind = DiskIoKind::kUring});
  Finding finding{.id = "machine.io_uring", .what = "io_uring can be used"};
  if (!io) {
    const std::string disabled = FirstLine(root + "/proc/sys/kernel/io_uring_disabled");
    finding.severity = Severity::kNote;
    finding.what = "io_uring can't be used (" + io.error().what + "): --disk works by threads, with more CPU";
    finding.remedy = !disabled.empty() && disabled != "0"
                         ? "sysctl kernel.io_uring_disabled=0"
                         : "allow io_uring_setup in the container's seccomp profile, or leave it so";
  }
  report.Add(std::move(finding));
}

}  // namespace

void CheckMachine(const MachineNeeds& needs, Report& report, const std::string& root) {
  report.Doing("looking at the machine");
  CheckMemory(needs.ram_bytes, root, report);
  CheckLimits(needs, report);
  CheckHugePages(root, report);
  CheckUring(needs, root, report);
}

void CheckClock(const std::string& id, const std::string& server, int64_t server_ns, int64_t resolution_ns,
                int64_t before_ns, int64_t after_ns, Report& report) {
  // The server's time is somewhere in its resolution, and was told between two readings of ours.
  int64_t off_ns = 0;
  if (server_ns > after_ns) off_ns = server_ns - after_ns;
  if (server_ns + resolution_ns < before_ns) off_ns = server_ns + resolution_ns - before_ns;
  const double off_s = static_cast<double>(off_ns) / 1e9;
  Finding finding{.id = id, .what = server + " has our time", .figures = {{"server_ahead_s", off_s}}};
  if (std::abs(off_s) >= kClockNoteS) {
    const bool refused = std::abs(off_s) >= kClockProblemS;
    finding.severity = refused ? Severity::kProblem : Severity::kNote;
    finding.what =
        server + " is " + MsText(std::abs(off_s) * 1000) + (off_s > 0 ? " ahead of" : " behind") + " this host's clock";
    finding.remedy = "synchronise both with one time server (chrony, ntp); S3 refuses signatures from 15 minutes on";
  }
  report.Add(std::move(finding));
}

}  // namespace terrace::doctor
