// Frames to move in a benchmark of a tier: names, and memory with room for each payload as a slot of the ram tier has
// it (page aligned). Payloads are random, so that neither disk nor file system can squeeze them.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "terrace/tier.h"

namespace terrace::bench {

// Ends the program if a step of the benchmark did not work: there is no figure then.
void Check(bool ok, const std::string& what);

Digest KeyOf(uint64_t i);
FrameInfo InfoOf(uint64_t i, uint64_t bytes);  // Each a first chunk, of one space.

class Frames {
 public:
  Frames(uint64_t bytes, uint64_t count);
  uint64_t bytes() const { return bytes_; }
  uint64_t count() const { return count_; }
  double gigabytes() const { return static_cast<double>(bytes_ * count_) / 1e9; }
  std::span<std::byte> payload(uint64_t i) const { return {memory_.get() + i * bytes_, bytes_}; }
  const std::shared_ptr<const SegmentHashes>& hashes(uint64_t i) const { return hashes_[i]; }

  // The names that NewNames gave last.
  FrameInfo info(uint64_t i) const { return InfoOf(first_ + i, bytes_); }
  // From now on these are frames that no tier has seen.
  void NewNames();

  // Through the tier, with at most `in_flight` frames not yet settled; every one must be a hit. Loads go where the
  // payloads are.
  void Save(Tier& tier, size_t in_flight) const;
  void Load(Tier& tier, size_t in_flight) const;
  void Erase(Tier& tier) const;

 private:
  const uint64_t bytes_, count_;
  uint64_t first_ = 0;
  std::shared_ptr<std::byte> memory_;
  std::vector<std::shared_ptr<const SegmentHashes>> hashes_;
};

// The next read of the file comes from the disk.
void DropPages(const std::string& path);
// Empty, whatever was there.
void MakeFreshDirectory(const std::string& path);

}  // namespace terrace::bench
