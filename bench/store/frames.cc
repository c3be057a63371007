#include "bench/store/frames.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <random>

#include "base/hash.h"

namespace terrace::bench {
namespace {

const TimePoint kLater = std::chrono::steady_clock::now() + std::chrono::hours(1);

}  // namespace

void Check(bool ok, const std::string& what) {
  if (ok) return;
  std::fprintf(stderr, "bench: %s failed\n", what.c_str());
  std::exit(1);
}

Digest KeyOf(uint64_t i) { return Sha256Of("bench" + std::to_string(i)); }

FrameInfo InfoOf(uint64_t i, uint64_t bytes) {
  FrameInfo info;
  info.space = KeyOf(1ull << 60);
  info.key = KeyOf(i);
  info.parent = info.space;
  info.token_count = 256;
  info.payload_bytes = bytes;
  return info;
}

Frames::Frames(uint64_t bytes, uint64_t count) : bytes_(bytes), count_(count) {
  const size_t total = bytes * count;
  void* mapped = mmap(nullptr, total, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  Check(mapped != MAP_FAILED, "mmap");
  madvise(mapped, total, MADV_HUGEPAGE);  // As the ram tier's memory has it.
  memory_ = {static_cast<std::byte*>(mapped), [total](std::byte* p) { munmap(p, total); }};
  std::mt19937_64 random(bytes);
  for (size_t at = 0; at < total; at += 8) {
    const uint64_t word = random();
    std::memcpy(memory_.get() + at, &word, 8);
  }
  for (uint64_t i = 0; i < count; ++i) {
    hashes_.push_back(std::make_shared<const SegmentHashes>(HashSegments(payload(i))));
  }
  NewNames();
}

void Frames::NewNames() {
  static uint64_t next = 0;
  first_ = next;
  next += count_;
}

void Frames::Save(Tier& tier, size_t in_flight) const {
  std::deque<std::shared_ptr<SaveBatch>> waiting;
  for (uint64_t i = 0; i < count_ || !waiting.empty();) {
    if (i < count_ && waiting.size() < in_flight) {
      std::vector<SaveItem> items;
      items.push_back({.info = info(i), .payload = payload(i), .owner = memory_, .hashes = hashes_[i]});
      waiting.push_back(std::make_shared<SaveBatch>(1));
      tier.Save(std::move(items), waiting.back());
      ++i;
    } else {
      const SaveResult* result = waiting.front()->Wait(0, kLater);
      Check(result && result->outcome == Outcome::kHit && !result->existed, "save");
      waiting.pop_front();
    }
  }
}

void Frames::Load(Tier& tier, size_t in_flight) const {
  std::deque<std::shared_ptr<LoadBatch>> waiting;
  for (uint64_t i = 0; i < count_ || !waiting.empty();) {
    if (i < count_ && waiting.size() < in_flight) {
      std::vector<LoadItem> items;
      items.push_back({.key = info(i).key, .space = info(i).space, .into = payload(i), .owner = memory_});
      waiting.push_back(std::make_shared<LoadBatch>(1));
      tier.Load(std::move(items), kLater, waiting.back());
      ++i;
    } else {
      const LoadResult* result = waiting.front()->Wait(0, kLater);
      Check(result && result->outcome == Outcome::kHit, "load");
      waiting.pop_front();
    }
  }
}

void Frames::Erase(Tier& tier) const {
  std::vector<Digest> keys;
  for (uint64_t i = 0; i < count_; ++i) keys.push_back(info(i).key);
  tier.Erase(keys);
}

void DropPages(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  Check(fd >= 0 && fdatasync(fd) == 0 && posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED) == 0, "drop pages of " + path);
  close(fd);
}

void MakeFreshDirectory(const std::string& path) {
  std::filesystem::remove_all(path);
  std::filesystem::create_directories(path);
}

}  // namespace terrace::bench
