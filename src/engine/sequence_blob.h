// The bytes that llama.cpp makes of one sequence's cells (`llama_state_seq_get_data`), read without llama.cpp.
//
// llama.cpp's own reader trusts what it reads beyond a few shape checks. So no blob reaches it that CheckSequenceBlob
// has not walked to its last byte first: every field that steers the reader must be what this context itself would
// write. Only the KV values are free.
//
// The layout (state version 4, host byte order; docs/internals/engine.md): u32 magic, i32 sequence; then for each cache
// u32 streams (1), u32 cells, cells x {i32 position, u32 sequences (1), i32 sequence}, u32 V transposed, u32 layers,
// u32 K rotation, u32 V rotation, layers x {i32 type, u64 row bytes, rows}, and V the same, or, transposed, layers x
// {i32 type, u32 element bytes, u32 elements, columns}.
//
// Pure functions; any thread. No llama.h here, so that the checks build and are fuzzed without the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "terrace/result.h"

namespace terrace::engine {

// Chunks leave and enter under this sequence id, so that their bytes don't depend on how many sequences a process
// serves.
inline constexpr int32_t kScratchSequence = 0;

struct LayerShape {
  int32_t k_type = 0;
  uint64_t k_row_bytes = 0;  // Of one cell.
  int32_t v_type = 0;
  uint64_t v_row_bytes = 0;  // Of one cell.
  uint32_t v_elements = 0;   // Transposed V only: columns.
  bool operator==(const LayerShape&) const = default;
};

// One KV cache; a model with sliding windows has two.
struct CacheShape {
  bool has_v = true;  // False: K holds all (multi-head latent attention).
  bool v_transposed = false;
  uint32_t k_rotation = 0, v_rotation = 0;
  std::vector<LayerShape> layers;
  bool operator==(const CacheShape&) const = default;
};

struct SequenceShape {
  std::vector<CacheShape> caches;
  bool operator==(const SequenceShape&) const = default;
};

// The shape of a blob of `token_count` cells that starts at position `first_token`, learned from the blob itself: from
// one that this process has just exported, never from foreign bytes. Nothing if the blob has parts that we don't know
// (position extensions, recurrent state).
std::optional<SequenceShape> LearnSequenceShape(std::span<const std::byte> bytes, uint32_t first_token,
                                                uint32_t token_count);

// Bytes of a blob of `token_count` cells.
uint64_t SequenceBlobBytes(const SequenceShape& shape, uint32_t token_count);

// That `bytes` is a blob of exactly the cells [first_token, first_token + token_count) in ascending order, of `shape`,
// to its last byte. The error (kCorrupt) says which field disagrees: `layer 3 of cache 0: K row bytes are 4, not 384`.
Result<void> CheckSequenceBlob(std::span<const std::byte> bytes, const SequenceShape& shape, uint32_t first_token,
                               uint32_t token_count);

}  // namespace terrace::engine
