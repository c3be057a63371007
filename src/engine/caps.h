// Do the caps of the tiers hold anything at all? Known once the model is: only it says how large a chunk is.
#pragma once

#include <cstdint>

#include "terrace/result.h"

namespace terrace {

// 0: there is no such tier, or no such bound.
struct Caps {
  uint64_t ram_bytes = 0;
  uint64_t disk_bytes = 0;
  uint64_t shared_bytes = 0;           // Of frames: without what is kept for quarantine.
  uint64_t shared_free_bytes_min = 0;  // On a volume of shared_volume_bytes, if that is known.
  uint64_t shared_volume_bytes = 0;
};

// Fails if a tier could never keep one chunk: in silence it would keep nothing. One line, with the option and what to
// give it.
Result<void> HoldAChunk(const Caps& caps, uint64_t chunk_bytes, uint32_t chunk_tokens);

}  // namespace terrace
