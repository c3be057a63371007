// Items as both kinds of client settle them.
#pragma once

#include <cstdint>

#include "terrace/client.h"

namespace terrace {

inline LoadedChunk Missed(Reason reason) {
  LoadedChunk chunk;
  chunk.reason = reason;
  return chunk;
}
inline SavedChunk Declined(Reason reason) { return {.reason = reason}; }
inline SaveSegment NoSegment(Reason reason) {
  SaveSegment segment;
  segment.reason = reason;
  return segment;
}
inline PrefixHit NoPrefix(Reason reason) {
  PrefixHit hit;
  hit.miss_reason = reason;
  return hit;
}

template <class Pieces>
uint64_t BytesOf(const Pieces& pieces) {
  uint64_t bytes = 0;
  for (const auto& piece : pieces) bytes += piece.size();
  return bytes;
}
// There is room for every chunk.
inline bool Fits(const LoadRequest& request) {
  bool fits = request.into.size() == request.keys.size();
  for (const Pieces& pieces : request.into) fits = fits && BytesOf(pieces) == request.payload_bytes;
  return fits;
}

}  // namespace terrace
