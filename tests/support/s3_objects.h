// Frames to put into a bucket without a tier, below prefix "kv". Number n is the child of n - 1; 0 is a first chunk.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"
#include "chunk/frame.h"
#include "terrace/tier.h"

namespace terrace {

using Bytes = std::vector<std::byte>;

inline const Digest kSpace = Sha256Of("space");
inline Digest Key(uint64_t n) { return Sha256Of("key " + std::to_string(n)); }
inline FrameInfo Info(uint64_t n, uint64_t payload_bytes) {
  return {.space = kSpace, .key = Key(n), .parent = n == 0 ? kSpace : Key(n - 1), .payload_bytes = payload_bytes};
}
inline Bytes Payload(uint64_t n, uint64_t payload_bytes) {
  std::mt19937_64 random(n);
  Bytes payload(payload_bytes);
  for (size_t at = 0; at < payload.size(); at += 8) {
    const uint64_t word = random();
    std::memcpy(payload.data() + at, &word, std::min<size_t>(8, payload.size() - at));
  }
  return payload;
}
inline std::string ObjectBytes(const FrameInfo& info, const Bytes& payload) {
  const FrameHeader header = EncodeFrameHeader(info, 1, HashSegments(payload));
  std::string bytes(reinterpret_cast<const char*>(header.data()), header.size());
  bytes.append(reinterpret_cast<const char*>(payload.data()), payload.size());
  bytes.resize(FrameBytes(payload.size()), '\0');
  return bytes;
}
inline std::string ObjectBytes(uint64_t n, uint64_t payload_bytes) {
  return ObjectBytes(Info(n, payload_bytes), Payload(n, payload_bytes));
}
inline std::string Name(const Digest& key) { return "kv/frames/" + key.Hex().substr(0, 3) + "/" + key.Hex() + ".kvf"; }
inline std::string Name(uint64_t n) { return Name(Key(n)); }

}  // namespace terrace
