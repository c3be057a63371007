// What the store's parts cost beside the physical limit of the same bytes, in one run. `make bench WHAT=store` writes
// out/bench-store.json. Usage: store_bench OUT.json SCRATCH_DIR
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>
#include <filesystem>
#include <random>
#include <thread>

#include "base/executor.h"
#include "base/hash.h"
#include "base/metrics.h"
#include "bench/harness.h"
#include "chunk/frame.h"
#include "io/file_io.h"
#include "tier/ram_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace::bench {
namespace {

constexpr int kRounds = 9;
const TimePoint kLater = std::chrono::steady_clock::now() + std::chrono::hours(1);

Digest KeyOf(uint64_t i) { return Sha256Of("bench" + std::to_string(i)); }

FrameInfo InfoOf(uint64_t i, uint64_t bytes) {
  FrameInfo info;
  info.space = KeyOf(1u << 30);
  info.key = KeyOf(i);
  info.parent = info.space;
  info.token_count = 256;
  info.payload_bytes = bytes;
  return info;
}

std::vector<std::byte> Random(size_t bytes) {
  std::mt19937_64 random(bytes);
  std::vector<std::byte> out(bytes);
  for (size_t i = 0; i + 8 <= bytes; i += 8) {
    const uint64_t v = random();
    std::memcpy(out.data() + i, &v, 8);
  }
  return out;
}

void Naming(std::vector<Row>& rows) {
  std::vector<int32_t> tokens(256);
  const Digest parent = KeyOf(1);
  std::string same_bytes(13 + 32 + 4 + 1024 + 4, 'x');
  constexpr int kChunks = 20000;
  uint8_t sink = 0;
  const auto ours = [&] {
    return Seconds([&] {
      for (int i = 0; i < kChunks; ++i) {
        tokens[0] = i;
        sink ^= ChunkKey(parent, tokens).bytes[0];
      }
    });
  };
  const auto limit = [&] {
    return Seconds([&] {
      for (int i = 0; i < kChunks; ++i) {
        std::memcpy(same_bytes.data(), &i, sizeof i);
        sink ^= Sha256Of(same_bytes).bytes[0];
      }
    });
  };
  rows.push_back(
      Compare({.name = "naming a 256-token chunk, limit SHA-256", .size = same_bytes.size(), .unit = "chunks/s"},
              kRounds, kChunks, ours, limit));
  if (sink == 1) std::printf("\n");  // Keeps the hashes from being optimised away.
}

void Index(std::vector<Row>& rows) {
  auto ram = RamTier::Open({.bytes_max = 512 << 20}).value();
  constexpr uint64_t kFrames = 100000;
  auto hashes = std::make_shared<const SegmentHashes>(SegmentHashes{1});
  std::vector<Digest> keys;
  for (uint64_t i = 0; i < kFrames; ++i) {
    auto slot = ram->Reserve(InfoOf(i, 64)).value();
    ram->Commit(std::move(slot), hashes);
    keys.push_back(KeyOf(i));
  }
  std::shuffle(keys.begin(), keys.end(), std::mt19937_64(1));
  std::vector<uint8_t> present(512);
  Row index{.name = "index: keys looked up, 512 a call, 1 core", .unit = "keys/s"};
  index.limit = 1e6;
  rows.push_back(Rate(index, kRounds, kFrames / 512 * 512, [&] {
    return Seconds([&] {
      for (uint64_t at = 0; at + 512 <= kFrames; at += 512) ram->Contains(std::span(keys).subspan(at, 512), present);
    });
  }));
  Row lease{.name = "ram: leases, 1 core", .unit = "leases/s"};
  lease.limit = 2e5;
  rows.push_back(Rate(lease, kRounds, kFrames, [&] {
    return Seconds([&] {
      for (const Digest& key : keys) (void)ram->Acquire(key);
    });
  }));
}

void RamCopy(std::vector<Row>& rows, uint64_t bytes) {
  const uint64_t frames = (512ull << 20) / bytes;
  auto ram = RamTier::Open({.bytes_max = 768ull << 20}).value();
  const auto payload = Random(bytes);
  std::vector<RamLease> leases;
  for (uint64_t i = 0; i < frames; ++i) {
    auto slot = ram->Reserve(InfoOf(i, bytes)).value();
    std::memcpy(slot.bytes().data(), payload.data(), bytes);
    auto hashes = std::make_shared<const SegmentHashes>(HashSegments(payload));
    leases.push_back(*ram->Commit(std::move(slot), hashes));
  }
  auto into = std::make_shared<std::vector<std::byte>>(bytes * 4);  // Larger than the last-level cache's share.
  const auto place = [&](uint64_t i) { return std::span(*into).subspan(i % 4 * bytes, bytes); };
  const auto ours = [&] {
    return Seconds([&] {
      for (uint64_t i = 0; i < frames; ++i) {
        auto done = std::make_shared<LoadBatch>(1);
        std::vector<LoadItem> items;
        items.push_back({.key = KeyOf(i), .space = InfoOf(i, bytes).space, .into = place(i), .owner = into});
        ram->Load(std::move(items), kLater, done);
        if (done->Wait(0, kLater)->outcome != Outcome::kHit) std::abort();
      }
    });
  };
  const auto limit = [&] {
    return Seconds([&] {
      for (uint64_t i = 0; i < frames; ++i) std::memcpy(place(i).data(), leases[i].bytes.data(), bytes);
    });
  };
  rows.push_back(Compare({.name = "ram: copy load, verified, limit memcpy", .size = bytes, .unit = "GB/s"}, kRounds,
                         static_cast<double>(frames * bytes) / 1e9, ours, limit));
}

struct SharedFs {
  explicit SharedFs(std::string path) : dir(std::move(path)) {
    std::filesystem::remove_all(dir);
    std::filesystem::create_directories(dir);
    tier = OpenSharedFsTier({.directory = dir}, {.io = *io, .clock = clock, .metrics = metrics}).value();
  }
  ~SharedFs() {
    tier.reset();
    std::filesystem::remove_all(dir);
  }
  std::string FramePath(const Digest& key) const {  // docs/internals/shared_fs.md
    return dir + "/frames/" + key.Hex().substr(0, 3) + "/" + key.Hex() + ".kvf";
  }
  std::string dir;
  std::unique_ptr<FileIo> io = RealFileIo();
  SystemClock clock;
  Metrics metrics;
  std::unique_ptr<Tier> tier;
};

void Check(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "store_bench: %s failed\n", what);
  std::exit(1);
}

// Evicts a file's pages: what is read next comes from the disk.
void DropPages(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY);
  Check(fd >= 0 && fdatasync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "posix_fadvise");
  close(fd);
}

void SharedFsRows(std::vector<Row>& rows, const std::string& scratch, uint64_t bytes, uint64_t frames) {
  const double gigabytes = static_cast<double>(frames * bytes) / 1e9;
  auto payload = std::make_shared<std::vector<std::byte>>(Random(bytes));
  auto hashes = std::make_shared<const SegmentHashes>(HashSegments(*payload));
  uint64_t next = 0;
  SharedFs fs(scratch + "/shared");

  const auto save = [&](uint64_t first) {
    for (uint64_t i = first; i < first + frames; ++i) {
      auto done = std::make_shared<SaveBatch>(1);
      std::vector<SaveItem> items;
      items.push_back({.info = InfoOf(i, bytes), .payload = *payload, .owner = payload, .hashes = hashes});
      fs.tier->Save(std::move(items), done);
      Check(done->Wait(0, kLater)->outcome == Outcome::kHit, "save");
    }
  };
  std::vector<std::string> plain;
  const auto write_plain = [&](uint64_t first) {
    std::filesystem::create_directories(scratch + "/plain");
    for (uint64_t i = first; i < first + frames; ++i) {
      const std::string path = scratch + "/plain/" + std::to_string(i);
      const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL, 0640);
      Check(fd >= 0 && pwrite(fd, payload->data(), bytes, 0) == static_cast<ssize_t>(bytes) && fsync(fd) == 0 &&
                close(fd) == 0,
            "plain write");
      plain.push_back(path);
    }
  };
  uint64_t plain_next = 0;
  rows.push_back(Compare(
      {.name = "shared_fs: save, limit pwrite + fsync", .size = bytes, .unit = "GB/s"}, kRounds, gigabytes,
      [&] {
        const uint64_t first = std::exchange(next, next + frames);
        return Seconds([&] { save(first); });
      },
      [&] {
        const uint64_t first = std::exchange(plain_next, plain_next + frames);
        return Seconds([&] { write_plain(first); });
      }));

  std::vector<std::string> files;
  for (uint64_t i = 0; i < frames; ++i) files.push_back(fs.FramePath(KeyOf(i)));
  auto into = std::make_shared<std::vector<std::byte>>(bytes * 4);
  const auto place = [&](uint64_t i) { return std::span(*into).subspan(i % 4 * bytes, bytes); };
  const auto load = [&] {
    return Seconds([&] {
      for (uint64_t i = 0; i < frames; ++i) {
        auto done = std::make_shared<LoadBatch>(1);
        std::vector<LoadItem> items;
        items.push_back({.key = KeyOf(i), .space = InfoOf(i, bytes).space, .into = place(i), .owner = into});
        fs.tier->Load(std::move(items), kLater, done);
        Check(done->Wait(0, kLater)->outcome == Outcome::kHit, "load");
      }
    });
  };
  const auto read_plain = [&] {
    return Seconds([&] {
      for (uint64_t i = 0; i < frames; ++i) {
        const int fd = open(files[i].c_str(), O_RDONLY);
        size_t at = 0;
        while (at < bytes) {
          const ssize_t n = pread(fd, place(i).data() + at, bytes - at, static_cast<off_t>(kFrameHeaderBytes + at));
          Check(n > 0, "plain read");
          at += static_cast<size_t>(n);
        }
        close(fd);
      }
    });
  };
  rows.push_back(Compare({.name = "shared_fs: load, pages warm, limit pread", .size = bytes, .unit = "GB/s"}, kRounds,
                         gigabytes, load, read_plain));
  const auto dropped = [&](const std::function<double()>& run) {
    for (const std::string& file : files) DropPages(file);
    return run();
  };
  rows.push_back(Compare(
      {.name = "shared_fs: load, pages dropped, limit pread", .size = bytes, .unit = "GB/s"}, kRounds, gigabytes,
      [&] { return dropped(load); }, [&] { return dropped(read_plain); }));
  std::filesystem::remove_all(scratch + "/plain");
}

int Main(const std::string& out, const std::string& scratch) {
  std::vector<Row> rows;
  const auto run = [&](const std::function<void()>& part) {
    const size_t before = rows.size();
    part();
    for (size_t i = before; i < rows.size(); ++i) Print(rows[i]);
  };
  run([&] { Naming(rows); });
  run([&] { Index(rows); });
  for (const uint64_t mib : {2, 6, 36}) run([&] { RamCopy(rows, mib << 20); });
  run([&] { SharedFsRows(rows, scratch, 6 << 20, 16); });
  run([&] { SharedFsRows(rows, scratch, 36 << 20, 4); });
  std::ofstream(out) << nlohmann::json{{"rows", ToJson(rows)},
                                       {"rounds", kRounds},
                                       {"cores", std::thread::hardware_concurrency()}}
                            .dump(2)
                     << '\n';
  return 0;
}

}  // namespace
}  // namespace terrace::bench

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: store_bench OUT.json SCRATCH_DIR\n");
    return 2;
  }
  return terrace::bench::Main(argv[1], argv[2]);
}
