// A sequence blob of a made-up shape, written as llama.cpp writes it: for tests and fuzzing without a model.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "engine/sequence_blob.h"

namespace terrace::engine {

class BlobWriter {
 public:
  template <class T>
  void Put(T value) {
    const size_t at = bytes_.size();
    bytes_.resize(at + sizeof(T));
    std::memcpy(bytes_.data() + at, &value, sizeof(T));
  }
  void Rows(uint64_t bytes) { bytes_.resize(bytes_.size() + bytes, std::byte{0x5a}); }
  std::vector<std::byte> Take() { return std::move(bytes_); }

 private:
  std::vector<std::byte> bytes_;
};

inline std::vector<std::byte> MakeBlob(const SequenceShape& shape, uint32_t first_token, uint32_t token_count) {
  BlobWriter blob;
  blob.Put<uint32_t>(0xaf143cd8);
  blob.Put<int32_t>(0);
  for (const CacheShape& cache : shape.caches) {
    blob.Put<uint32_t>(1);
    blob.Put<uint32_t>(token_count);
    for (uint32_t i = 0; i < token_count; ++i) {
      blob.Put<int32_t>(static_cast<int32_t>(first_token + i));
      blob.Put<uint32_t>(1);
      blob.Put<int32_t>(0);
    }
    blob.Put<uint32_t>(cache.v_transposed ? 1 : 0);
    blob.Put<uint32_t>(static_cast<uint32_t>(cache.layers.size()));
    blob.Put<uint32_t>(cache.k_rotation);
    blob.Put<uint32_t>(cache.v_rotation);
    for (const LayerShape& layer : cache.layers) {
      blob.Put<int32_t>(layer.k_type);
      blob.Put<uint64_t>(layer.k_row_bytes);
      blob.Rows(layer.k_row_bytes * token_count);
    }
    if (!cache.has_v) continue;
    for (const LayerShape& layer : cache.layers) {
      blob.Put<int32_t>(layer.v_type);
      if (cache.v_transposed) {
        blob.Put<uint32_t>(static_cast<uint32_t>(layer.v_row_bytes / layer.v_elements));
        blob.Put<uint32_t>(layer.v_elements);
      } else {
        blob.Put<uint64_t>(layer.v_row_bytes);
      }
      blob.Rows(layer.v_row_bytes * token_count);
    }
  }
  return blob.Take();
}

// Two layers of different width. `transposed`: as with F16; otherwise as with q8_0.
inline SequenceShape SmallShape(bool transposed) {
  CacheShape cache;
  cache.v_transposed = transposed;
  cache.k_rotation = transposed ? 0 : 64;
  for (const uint64_t elements : {8, 16}) {
    cache.layers.push_back({.k_type = transposed ? 1 : 8,
                            .k_row_bytes = elements * 2,
                            .v_type = transposed ? 1 : 8,
                            .v_row_bytes = elements * 2,
                            .v_elements = transposed ? static_cast<uint32_t>(elements) : 0});
  }
  return {.caches = {cache}};
}

}  // namespace terrace::engine
