#include "bench/store/disk_rows.h"

#include <algorithm>
#include <filesystem>
#include <thread>

#include "base/clock.h"
#include "bench/store/fio.h"
#include "bench/store/frames.h"
#include "io/file_io.h"
#include "terrace/metrics.h"
#include "tier/disk_tier.h"

namespace terrace::bench {

void DiskRows(std::vector<Row>& rows, int rounds, const std::string& scratch, uint64_t bytes, uint64_t frames) {
  const std::string directory = scratch + "/disk";
  MakeFreshDirectory(directory);
  const auto io = RealFileIo();
  const SystemClock clock;
  Metrics metrics;
  auto tier = OpenDiskTier({.directory = directory, .bytes_max = 64ull << 30},
                           {.files = *io, .clock = clock, .metrics = metrics})
                  .value();
  Frames batch(bytes, frames);

  // How many frames a commit has is up to the disk: fio gets what the run before had on the average.
  const Counter& commits = metrics.GetCounter("terrace_disk_commits_total", "");
  uint64_t group_bytes = bytes;
  const auto save = [&] {
    batch.Erase(*tier);
    while (tier->stats().bytes > 0) std::this_thread::yield();
    batch.NewNames();
    const uint64_t before = commits.value();
    const double seconds = Seconds([&] { batch.Save(*tier, frames); });
    group_bytes = frames * bytes / std::max<uint64_t>(1, commits.value() - before);
    return seconds;
  };
  const auto fio_write = [&] { return FioWrite(scratch + "/fio", frames * bytes, group_bytes); };
  rows.push_back(Compare({.name = "disk: durable save, limit fio with fdatasync", .size = bytes, .unit = "GB/s"},
                         rounds, batch.gigabytes(), save, fio_write));

  const std::string links = scratch + "/frames";  // The frames by names that fio is fine with.
  MakeFreshDirectory(links);
  for (uint64_t i = 0; i < frames; ++i) {  // docs/internals/disk.md
    const std::string key = batch.info(i).key.Hex();
    std::filesystem::create_hard_link(directory + "/frames/" + key.substr(0, 2) + "/" + key + ".kvf",
                                      links + "/" + std::to_string(i));
  }
  rows.push_back(Compare(
      {.name = "disk: load, verified, limit fio", .size = bytes, .unit = "GB/s"}, rounds, batch.gigabytes(),
      [&] { return Seconds([&] { batch.Load(*tier, frames); }); }, [&] { return FioRead(links, frames, bytes); }));
  tier.reset();
  std::filesystem::remove_all(links);
  std::filesystem::remove_all(directory);
}

}  // namespace terrace::bench
