// The frames of the NFS tests: numbered, each with bytes that follow from its number, so that any process knows what
// any other has saved.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/hash.h"
#include "terrace/key.h"
#include "terrace/tier.h"

namespace terrace {

inline FrameInfo InfoOf(uint64_t n, uint64_t payload_bytes) {
  return {.space = Sha256Of("space"),
          .key = Sha256Of("frame " + std::to_string(n)),
          .parent = Sha256Of("space"),
          .token_count = 256,
          .payload_bytes = payload_bytes};
}

inline std::vector<std::byte> PayloadOf(uint64_t n, uint64_t payload_bytes) {
  std::mt19937_64 random(n);
  std::vector<uint64_t> words(payload_bytes / sizeof(uint64_t) + 1);
  for (uint64_t& word : words) word = random();
  std::vector<std::byte> payload(payload_bytes);
  std::memcpy(payload.data(), words.data(), payload_bytes);
  return payload;
}

inline std::string FramePathOf(const std::string& directory, uint64_t n) {
  const std::string key = InfoOf(n, 1).key.Hex();
  return directory + "/frames/" + key.substr(0, 3) + "/" + key + ".kvf";
}

}  // namespace terrace
