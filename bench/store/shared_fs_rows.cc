#include "bench/store/shared_fs_rows.h"

#include <fcntl.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "bench/store/frames.h"
#include "chunk/frame.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "tier/shared_fs_dir.h"
#include "tier/shared_fs_tier.h"

namespace terrace::bench {
namespace {

constexpr size_t kInFlight = 8;

// `work` of 0..count-1, by so many threads.
void Spread(size_t threads, uint64_t count, const std::function<void(uint64_t)>& work) {
  std::atomic<uint64_t> next{0};
  const auto run = [&] {
    for (uint64_t i; (i = next.fetch_add(1)) < count;) work(i);
  };
  std::vector<std::thread> running;
  for (size_t i = 1; i < threads; ++i) running.emplace_back(run);
  run();
  for (std::thread& thread : running) thread.join();
}

// What a save does, without the tier: a new file, durable, then its name.
void WritePlain(const std::string& directory, uint64_t n, std::span<const std::byte> payload) {
  static constexpr std::array<std::byte, kFrameHeaderBytes> kHeader{};
  const std::string name = directory + "/" + std::to_string(n), temp = name + ".tmp";
  const int fd = open(temp.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0640);
  Check(fd >= 0 && pwrite(fd, kHeader.data(), kHeader.size(), 0) == static_cast<ssize_t>(kHeader.size()), "pwrite");
  for (size_t at = 0; at < payload.size();) {
    const ssize_t written =
        pwrite(fd, payload.data() + at, payload.size() - at, static_cast<off_t>(kHeader.size() + at));
    Check(written > 0, "pwrite");
    at += static_cast<size_t>(written);
  }
  Check(fdatasync(fd) == 0 && close(fd) == 0, "fdatasync");
  Check(link(temp.c_str(), name.c_str()) == 0 && unlink(temp.c_str()) == 0, "link");
}

void ReadPlain(const std::string& path, std::span<std::byte> into) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  Check(fd >= 0, "open");
  for (size_t at = 0; at < into.size();) {
    const ssize_t read = pread(fd, into.data() + at, into.size() - at, static_cast<off_t>(kFrameHeaderBytes + at));
    Check(read > 0, "pread");
    at += static_cast<size_t>(read);
  }
  close(fd);
}

}  // namespace

void SharedFsRows(std::vector<Row>& rows, int rounds, const std::string& scratch, uint64_t bytes, uint64_t frames) {
  const std::string directory = scratch + "/shared", plain = scratch + "/plain";
  MakeFreshDirectory(directory);
  MakeFreshDirectory(plain);
  const auto io = RealFileIo();
  const SystemClock clock;
  Metrics metrics;
  // A share in use has them: a save makes one of them only 4096 times ever.
  for (size_t i = 0; i < kFanOut; ++i) {
    std::array<char, 4> name{};
    std::snprintf(name.data(), name.size(), "%03zx", i);
    std::filesystem::create_directories(directory + "/frames/" + name.data());
  }
  sync();
  const auto tier = OpenSharedFsTier({.directory = directory}, {.io = *io, .clock = clock, .metrics = metrics}).value();
  Frames batch(bytes, frames);

  uint64_t plain_files = 0;
  const auto save = [&] {
    batch.NewNames();
    return Seconds([&] { batch.Save(*tier, kInFlight); });
  };
  const auto write = [&] {
    const uint64_t first = plain_files;
    plain_files += frames;
    return Seconds(
        [&] { Spread(kInFlight, frames, [&](uint64_t i) { WritePlain(plain, first + i, batch.payload(i)); }); });
  };
  rows.push_back(
      Compare({.name = "shared_fs: save, 8 in flight, limit pwrite+fdatasync+link", .size = bytes, .unit = "GB/s"},
              rounds, batch.gigabytes(), save, write));
  std::filesystem::remove_all(plain);

  std::vector<std::string> files;
  for (uint64_t i = 0; i < frames; ++i) {  // docs/internals/shared_fs.md
    const std::string key = batch.info(i).key.Hex();
    files.push_back(directory + "/frames/" + key.substr(0, 3) + "/" + key + ".kvf");
  }
  for (const bool warm : {true, false}) {
    const auto timed = [&](const std::function<void()>& run) {
      if (!warm) {
        for (const std::string& file : files) DropPages(file);
      }
      return Seconds(run);
    };
    const auto load = [&] { return timed([&] { batch.Load(*tier, kInFlight); }); };
    for (const size_t threads : {kInFlight, size_t{1}}) {
      const auto read = [&] {
        return timed([&] { Spread(threads, frames, [&](uint64_t i) { ReadPlain(files[i], batch.payload(i)); }); });
      };
      const std::string limit = threads == 1 ? "one thread of pread" : "8 threads of pread";
      rows.push_back(Compare({.name = std::string("shared_fs: load, 8 in flight, pages ") +
                                      (warm ? "warm" : "dropped") + ", limit " + limit,
                              .size = bytes,
                              .unit = "GB/s"},
                             rounds, batch.gigabytes(), load, read));
    }
  }
  tier->Close(clock.Now());
  std::filesystem::remove_all(directory);
}

}  // namespace terrace::bench
