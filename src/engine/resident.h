// What lies in engine memory: whole-chunk prefixes of sequences, under which sequence ids and in which cells. Decides
// what stays; does nothing itself: every method answers with what its caller has to do to the engine, in order.
//
// Cells are counted in slots of one chunk. Between requests the slots in use are 0..n-1 without a hole, and a
// sequence's cells ascend: results depend on the order of cells, so a prefix in the same order gives the same bits as a
// cold run (docs/internals/engine.md).
//
// Owned by the model thread; only Known may be called from others.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "terrace/key.h"

namespace terrace::engine {

class ResidentPrefixes {
 public:
  // Up to `chunks_max` chunks stay between requests, under ids first_sequence .. first_sequence + sequences - 1.
  ResidentPrefixes(size_t chunks_max, int32_t first_sequence, size_t sequences);

  // Remove a sequence's cells from this chunk on; 0: all of them.
  struct Cut {
    int32_t sequence = 0;
    size_t from_chunk = 0;
  };
  // Take a chunk's cells out of these sequences and put the same bytes back, which then fill the lowest free cells.
  struct Move {
    size_t chunk = 0;  // Index in the sequence.
    std::vector<int32_t> sequences;
  };
  struct Plan {
    std::vector<Cut> cuts;
    std::vector<Move> moves;
    int32_t sequence = 0;  // Of the new request.
    int32_t source = 0;    // Shares its first chunks with it,
    size_t shared = 0;     // this many.
  };

  // Begins a request whose chunks are named `keys`; only the first `usable` may be shared. What the request does not
  // share leaves engine memory if `may_leave` says so, since every cell costs every token that is computed beside it.
  Plan Begin(std::span<const Digest> keys, size_t usable, const std::function<bool(const Digest&)>& may_leave);

  // The next whole chunk of the request's sequence is in place. False: the same chunk is here in other cells already
  // (generated text that was generated before), so this one goes at the end of the request, and so do all after it.
  bool Append(int32_t sequence, const Digest& key);

  // Ends a request: its whole chunks stay, within the bound; least recently used ones leave for them.
  std::vector<Cut> Finish(int32_t sequence);

  // The engine's memory is empty.
  void Clear();

  // How many of `keys`, from the first, are here. Any thread.
  size_t Known(std::span<const Digest> keys) const;
  size_t chunks() const;  // Any thread.

 private:
  struct Path {
    int32_t sequence = 0;
    std::vector<Digest> keys;
    uint64_t last_use = 0;
    bool active = false;
  };
  struct Chunk {
    size_t slot = 0;
    size_t paths = 0;  // That hold it.
  };

  Path& Find(int32_t sequence);
  static size_t Common(const Path& path, std::span<const Digest> keys);
  void PopLocked(Path& path);
  void TruncateLocked(Path& path, size_t chunks, std::vector<Cut>& cuts);
  void DropEmptyLocked();
  std::vector<Move> CompactLocked();

  const size_t chunks_max_;
  std::vector<int32_t> free_sequences_;
  uint64_t clock_ = 0;
  std::vector<Path> paths_;

  mutable std::mutex mutex_;  // Writes hold it; the model thread, the only writer, reads without.
  std::unordered_map<Digest, Chunk, DigestHash> chunks_;  // Guarded by mutex_.
};

}  // namespace terrace::engine
