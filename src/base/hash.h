// SHA-256 for names, XXH3 for damage. Pure; any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "terrace/key.h"
#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace {

class Sha256 {
 public:
  Sha256();
  ~Sha256();
  Sha256(const Sha256&) = delete;
  Sha256& operator=(const Sha256&) = delete;
  void Update(std::span<const std::byte> bytes);
  void Update(std::string_view bytes);
  Digest Finish();  // Once.

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

Digest Sha256Of(std::string_view bytes);
Digest HmacSha256(std::string_view key, std::string_view message);

uint64_t Xxh3_64(std::span<const std::byte> bytes);
// The same of bytes that come in pieces. Once Finish has answered, the next Update begins anew.
class Xxh3Stream {
 public:
  Xxh3Stream();
  ~Xxh3Stream();
  Xxh3Stream(const Xxh3Stream&) = delete;
  Xxh3Stream& operator=(const Xxh3Stream&) = delete;
  void Update(std::span<const std::byte> bytes);
  uint64_t Finish();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};
struct Hash128 {
  uint64_t low = 0, high = 0;
  bool operator==(const Hash128&) const = default;
};
Hash128 Xxh3_128(std::span<const std::byte> bytes);

// XXH3-64 of each kSegmentBytes of `bytes`.
SegmentHashes HashSegments(std::span<const std::byte> bytes);

// Copies `from` to `to` (same size) and returns the segment hashes of what was copied, reading memory once: each block
// is hashed while it is in the first-level cache.
SegmentHashes CopyAndHash(std::span<const std::byte> from, std::span<std::byte> to);
// The same to pieces, one after the other, as large as `from` in all. Segments are those of `from`.
SegmentHashes CopyAndHash(std::span<const std::byte> from, std::span<const std::span<std::byte>> to);

}  // namespace terrace
