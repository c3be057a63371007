#include "doctor/directory.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "doctor/machine.h"
#include "io/file_io.h"

namespace terrace::doctor {
namespace {

using Seconds = std::chrono::duration<double>;
using std::chrono::steady_clock;

constexpr std::string_view kProbePrefix = "terrace-doctor-";
constexpr int64_t kProbeAgeS = 3600;
constexpr size_t kSmallBytes = 4096;
constexpr size_t kSmallMax = 200;
constexpr std::chrono::milliseconds kSmallTime{1000};
constexpr size_t kLanes = 4;                  // As the tier has threads.
constexpr uint64_t kWrittenMax = 2ull << 30;  // While bandwidth is measured, ...
constexpr uint64_t kWrittenPartOfFree = 10;   // ... and no more than a tenth of what is free.

double MsSince(steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
}

std::string RemedyOf(const Error& error) {
  switch (error.os_error) {
    case EACCES:
    case EPERM:
      return "give the user that runs terrace (uid " + std::to_string(geteuid()) +
             ") rights to read, write and search there; on NFS also look at root_squash and the export's ACL";
    case EROFS: return "mount it rw";
    case ENOSPC: return "make room, or lower the cap";
    case EDQUOT: return "raise the quota of uid " + std::to_string(geteuid());
    case ENOENT:
    case ENOTDIR: return "mount the storage, or make the directory: mkdir -p, and give it to terrace's user";
    case ESTALE: return "mount it anew: the server has another volume there";
    default: return "look at the kernel's log (dmesg) and at the storage";
  }
}

// The folder, and all in it, goes with this.
class ProbeFolder {
 public:
  explicit ProbeFolder(std::string path) : path_(std::move(path)) {}
  ~ProbeFolder() { [[maybe_unused]] const std::error_code ignored = Remove(); }
  ProbeFolder(const ProbeFolder&) = delete;
  ProbeFolder& operator=(const ProbeFolder&) = delete;

  std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  const std::string& path() const { return path_; }
  std::error_code Remove() {
    std::error_code error;
    std::filesystem::remove_all(path_, error);
    return error;
  }

 private:
  const std::string path_;
};

class Check {
 public:
  Check(const DirectoryCheck& check, const std::atomic<bool>& stop, Report& report)
      : check_(check), stop_(stop), report_(report), section_(SectionOf(check.use)) {}

  Bandwidth Run() {
    report_.Doing("--" + section_ + " " + check_.path + ": looking");
    if (!Reach() || !JudgeIt()) return bandwidth_;
    RemoveOldProbes();
    ProbeFolder folder(check_.path + "/" + ProbeName());
    if (!Rights(folder)) return bandwidth_;
    RightsBelow();
    Space();
    if (!stop_) Latency(folder);
    if (!stop_ && check_.measure.time.count() > 0) MeasureBandwidth(folder);
    if (const std::error_code error = folder.Remove()) {
      Problem("cleanup", "remove " + folder.path() + ": " + error.message(), "remove it by hand");
    }
    return bandwidth_;
  }

 private:
  void Add(const std::string& name, Severity severity, std::string what, std::string remedy = "",
           Figures figures = {}) {
    report_.Add({section_ + "." + name, severity, std::move(what), std::move(remedy), std::move(figures)});
  }
  void Problem(const std::string& name, std::string what, std::string remedy) {
    Add(name, Severity::kProblem, std::move(what), std::move(remedy));
  }
  void Problem(const std::string& name, const Error& error) { Problem(name, error.what, RemedyOf(error)); }

  bool Reach() {
    const Result<FileStat> stat = io_->Stat(check_.path);
    if (!stat) return Problem("reach", stat.error()), false;
    if (!stat->is_directory) return Problem("reach", check_.path + " is no directory", "name a directory"), false;
    return true;
  }

  // The mount, and whose directory it is.
  bool JudgeIt() {
    std::error_code error;
    const std::string real = std::filesystem::canonical(check_.path, error).string();
    std::ifstream file("/proc/self/mountinfo");
    const std::string mountinfo{std::istreambuf_iterator<char>(file), {}};
    if (const std::optional<Mount> mount = FindMount(mountinfo, error ? check_.path : real)) {
      is_memory_ = mount->type == "tmpfs" || mount->type == "ramfs";
      for (Finding& finding : JudgeMount(*mount, check_.use)) report_.Add(std::move(finding));
    }
    const std::string ours = check_.use == DirectoryUse::kDisk ? "terrace disk" : "terrace shared_fs";
    std::ifstream format(check_.path + "/terrace.format");
    std::string line;
    if (!std::getline(format, line)) {
      Add("format", Severity::kOk, check_.path + " is not in use yet");
    } else if (line == ours) {
      Add("format", Severity::kOk, check_.path + " is a " + section_ + " tier's");
    } else {
      Problem("format", check_.path + "/terrace.format is of another kind of tier: " + line.substr(0, 60),
              "give --disk and --shared each a directory of its own");
      return false;
    }
    return true;
  }

  void RemoveOldProbes() {
    const auto names = io_->List(check_.path);
    if (!names) return;
    for (const std::string& name : *names) {
      if (IsOldProbe(name)) const ProbeFolder goes(check_.path + "/" + name);
    }
  }

  // Makes, writes, links, renames, lists, reads and removes one file.
  bool Rights(const ProbeFolder& folder) {
    const auto fail = [&](const Error& error) { return Problem("rights", error), false; };
    if (const auto made = io_->MakeDir(folder.path()); !made) return fail(made.error());
    const std::string a = folder / "a", b = folder / "b", c = folder / "c";
    const auto before = static_cast<int64_t>(clock_.WallNs());
    if (const auto written = Write(a, kSmallBytes); !written) return fail(written.error());
    const Result<FileStat> stat = io_->Stat(a);
    const auto after = static_cast<int64_t>(clock_.WallNs());
    if (!stat) return fail(stat.error());
    const Result<void> linked = io_->Link(a, b);
    if (const auto renamed = io_->Rename(a, c); !renamed) return fail(renamed.error());
    const auto names = io_->List(folder.path());
    if (!names) return fail(names.error());
    if (const auto read = Read(c); !read) return fail(read.error());
    for (const std::string& name : *names) {
      if (const auto gone = io_->Unlink(folder / name); !gone) return fail(gone.error());
    }
    Add("rights", Severity::kOk, "files can be made, written, renamed, listed, read and removed");
    if (!linked && check_.use == DirectoryUse::kShared) {
      Add("link", Severity::kNote, "no hard links (" + linked.error().what + "): frames are published by rename",
          "nothing needs to be done; two instances may now and then write the same frame twice");
    }
    // Time stamps of files may be a timer tick old: 10 ms.
    if (check_.use == DirectoryUse::kShared) {
      CheckClock("shared.clock", "the file server", stat->mtime_ns, 10'000'000, before, after, report_);
    }
    return true;
  }

  // What another user's instance has made there.
  void RightsBelow() {
    for (const char* name : {"frames", "tmp", "nodes"}) {
      const std::string path = check_.path + "/" + name;
      if (access(path.c_str(), R_OK | W_OK | X_OK) == 0 || errno == ENOENT) continue;
      const Error error{Code::kDenied, "access " + path + ": " + std::strerror(errno), errno};
      return Problem("rights_below", error.what, RemedyOf(error) + ": all instances need one user or one group");
    }
  }

  void Space() {
    const auto space = io_->FreeSpace(check_.path);
    if (!space) return Problem("space", space.error());
    const auto free = static_cast<double>(space->free_bytes), total = static_cast<double>(space->total_bytes);
    free_bytes_ = space->free_bytes;
    Figures figures = {
        {"free_bytes", free}, {"total_bytes", total}, {"cap_bytes", static_cast<double>(check_.bytes_max)}};
    const std::string there = BytesText(free) + " free of " + BytesText(total);
    const std::string flag = "--" + section_ + "-size";
    if (space->free_bytes < 2 * check_.measure.frame_bytes) {
      Add("space", Severity::kProblem, there + ": no room for frames", "make room", figures);
    } else if (check_.bytes_max > space->total_bytes) {
      Add("space", Severity::kNote,
          there + ", and " + flag + " is " + BytesText(static_cast<double>(check_.bytes_max)) +
              ": it is full before that",
          "lower " + flag, figures);
    } else if (check_.free_bytes_min > space->free_bytes) {
      Add("space", Severity::kNote, there + ": less than --shared-free-min keeps free, so frames are removed now",
          "make room, or lower --shared-free-min", figures);
    } else if (check_.use == DirectoryUse::kShared && check_.bytes_max == 0 && check_.free_bytes_min == 0) {
      Add("space", Severity::kNote, there + ", and no bound: it fills up, then saves fail",
          "--shared-size, --shared-free-min or --shared-ttl bounds it", figures);
    } else {
      Add("space", Severity::kOk,
          there + (check_.bytes_max == 0 ? "" : ", cap " + BytesText(static_cast<double>(check_.bytes_max))), "",
          figures);
    }
  }

  // As a frame is published and found: temporary, sync, name; open, read.
  void Latency(const ProbeFolder& folder) {
    report_.Doing("--" + section_ + ": small files");
    std::vector<double> saves, loads;
    const auto begin = steady_clock::now();
    for (size_t i = 0; i < kSmallMax && !stop_ && (i == 0 || steady_clock::now() - begin < kSmallTime); ++i) {
      auto at = steady_clock::now();
      auto done = Write(folder / "small.tmp", kSmallBytes);
      if (done) done = io_->Rename(folder / "small.tmp", folder / "small");
      if (!done) return Problem("latency", done.error());
      saves.push_back(MsSince(at));
      at = steady_clock::now();
      if (const auto read = Read(folder / "small"); !read) return Problem("latency", read.error());
      loads.push_back(MsSince(at));
      if (const auto gone = io_->Unlink(folder / "small"); !gone) return Problem("latency", gone.error());
    }
    if (loads.empty()) return;
    Figures figures = {{"files", static_cast<double>(loads.size())}};
    const std::string save = Spread("save", saves, figures), load = Spread("load", loads, figures);
    bandwidth_.latency_s = std::get<double>(figures[3].second) / 1000;
    Add("latency", Severity::kOk, "4 KiB: written, synced and renamed in " + save + ", opened and read in " + load, "",
        figures);
  }

  void MeasureBandwidth(const ProbeFolder& folder) {
    const uint64_t bytes = check_.measure.frame_bytes;
    const uint64_t room = std::min(kWrittenMax, free_bytes_ / kWrittenPartOfFree);
    const size_t frames_max = room / bytes;
    if (frames_max == 0) return;
    report_.Doing("--" + section_ + ": bandwidth, frames of " + BytesText(static_cast<double>(bytes)));
    std::atomic<size_t> next{0};
    const auto write = InLanes([&](size_t) -> Result<size_t> {
      const size_t i = next++;
      if (i >= frames_max) return 0;
      if (const auto done = Write(folder / std::to_string(i), bytes); !done) return tl::unexpected(done.error());
      return bytes;
    });
    if (!write) return Problem("bandwidth", write.error());
    const size_t written = std::min(next.load(), frames_max);
    next = 0;
    const auto read = InLanes([&](size_t) -> Result<size_t> {
      const size_t i = next++;
      return i >= written ? Result<size_t>(0) : Read(folder / std::to_string(i));
    });
    if (!read) return Problem("bandwidth", read.error());
    bandwidth_.write = *write;
    bandwidth_.read = *read;
    Add("bandwidth", Severity::kOk,
        "read " + RateText(*read) + ", write " + RateText(*write) + " (frames of " +
            BytesText(static_cast<double>(bytes)) + ", " + std::to_string(kLanes) + " at once" +
            (is_memory_ ? ", from memory)" : ")"),
        "",
        {{"read_bytes_per_s", *read},
         {"write_bytes_per_s", *write},
         {"frame_bytes", static_cast<double>(bytes)},
         {"frames", static_cast<double>(written)}});
  }

  // Each lane moves one frame after the other until the time is over, or there is none left (0). Bytes a second.
  Result<double> InLanes(const std::function<Result<size_t>(size_t lane)>& move) {
    const auto begin = steady_clock::now();
    std::atomic<uint64_t> moved{0};
    std::mutex mutex;
    std::optional<Error> trouble;
    std::vector<std::thread> lanes;
    for (size_t lane = 0; lane < kLanes; ++lane) {
      lanes.emplace_back([&, lane] {
        do {
          const Result<size_t> n = move(lane);
          if (!n) {
            const std::lock_guard lock(mutex);
            trouble = n.error();
            return;
          }
          if (*n == 0) return;
          moved += *n;
        } while (!stop_ && steady_clock::now() - begin < check_.measure.time);
      });
    }
    for (std::thread& lane : lanes) lane.join();
    if (trouble) return Fail(*trouble, "measure");
    return static_cast<double>(moved) / Seconds(steady_clock::now() - begin).count();
  }

  Result<void> Write(const std::string& path, size_t bytes) {
    Result<std::unique_ptr<File>> file = io_->Open(path, OpenMode::kCreateNew);
    if (!file) return tl::unexpected(file.error());
    for (size_t at = 0; at < bytes; at += noise_.size()) {
      const auto part = std::as_bytes(std::span(noise_)).first(std::min(noise_.size(), bytes - at));
      if (const auto done = (*file)->WriteAt(at, part); !done) return done;
    }
    if (const auto synced = (*file)->Sync(); !synced) return synced;
    return (*file)->Close();
  }

  // From the storage, not from this host's memory, as far as the system lets us.
  static Result<size_t> Read(const std::string& path) {
    const auto fail = [&](const char* operation) {
      const int os_error = errno;
      return Fail(Code::kIo, std::string(operation) + " " + path + ": " + std::strerror(os_error), os_error);
    };
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) return fail("open");
    posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
    std::vector<std::byte> into(1 << 20);
    size_t total = 0;
    ssize_t n = 0;
    while ((n = read(fd, into.data(), into.size())) > 0) total += static_cast<size_t>(n);
    const Result<size_t> result = n < 0 ? Result<size_t>(fail("read")) : Result<size_t>(total);
    close(fd);
    return result;
  }

  const DirectoryCheck& check_;
  const std::atomic<bool>& stop_;
  Report& report_;
  const std::string section_;
  const std::unique_ptr<FileIo> io_ = RealFileIo();
  const SystemClock clock_;
  // A server that compresses or drops zeros would flatter itself.
  const std::vector<uint64_t> noise_ = [] {
    std::vector<uint64_t> words((1 << 20) / sizeof(uint64_t));
    std::mt19937_64 random(1);
    std::ranges::generate(words, random);
    return words;
  }();
  uint64_t free_bytes_ = 0;
  bool is_memory_ = false;
  Bandwidth bandwidth_;
};

}  // namespace

Bandwidth CheckDirectory(const DirectoryCheck& check, const std::atomic<bool>& stop, Report& report) {
  return Check(check, stop, report).Run();
}

std::string ProbeName() {
  std::random_device random;
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%s%llu-%08x", kProbePrefix.data(),
                static_cast<unsigned long long>(SystemClock().WallNs() / 1'000'000'000), random());
  return text.data();
}

bool IsOldProbe(const std::string& name) {
  if (!name.starts_with(kProbePrefix)) return false;
  int64_t made = 0;
  const char* begin = name.data() + kProbePrefix.size();
  if (std::from_chars(begin, name.data() + name.size(), made).ptr == begin) return false;
  return made + kProbeAgeS < static_cast<int64_t>(SystemClock().WallNs() / 1'000'000'000);
}

}  // namespace terrace::doctor
