// Chunks of KV out of a llama.cpp context and into it: the only place that touches its state bytes.
//
// A range of a sequence is made a sequence of its own under the scratch id (a change of metadata in a unified cache)
// and leaves as that sequence's state; it enters the same way. Positions are kept from the bytes. All calls belong to
// the thread that owns the context.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "engine/sequence_blob.h"
#include "terrace/result.h"

struct llama_context;

namespace terrace::engine {

class KvBridge {
 public:
  // Learns from one token what this context's bytes look like, and leaves the memory empty. kUnavailable: its chunks
  // can't be moved; the error says why, and the model can still be served.
  static Result<KvBridge> Open(llama_context* context, uint32_t chunk_tokens);

  // Bytes of every chunk.
  uint64_t chunk_bytes() const { return chunk_bytes_; }
  const SequenceShape& shape() const { return shape_; }

  // Writes the chunk at position `first_token` of `sequence` into `into` (chunk_bytes()). kCorrupt: its cells don't lie
  // in ascending order, so it must not be shared.
  Result<void> Export(int32_t sequence, uint32_t first_token, std::span<std::byte> into);

  // Adds the chunk to `sequence`, which holds [0, first_token) already. kCorrupt: the bytes are no such chunk and
  // llama.cpp has not seen them. kFull: no free cells. Nothing changed then.
  Result<void> Restore(int32_t sequence, uint32_t first_token, std::span<const std::byte> bytes);

 private:
  KvBridge(llama_context* context, uint32_t chunk_tokens, SequenceShape shape);

  llama_context* context_;
  uint32_t chunk_tokens_;
  SequenceShape shape_;
  uint64_t chunk_bytes_;
};

}  // namespace terrace::engine
