// vLLM's KV pages on one side, chunks on the other: the copies between them, on threads of their own.
//
// vLLM keeps KV in tensors of equal blocks (a page a layer and block). A chunk is a few blocks in a row; its payload
// is, for each part of the group (a layer, mostly), the pages of its blocks one after the other:
//
//   | part 0: block 0, block 1, ... | part 1: block 0, block 1, ... | ...
//
// Jobs are started by vLLM's thread, which only lists addresses, and are asked for by number. A load copies from leased
// memory and can't fail. A save hands vLLM's own pages to the client; vLLM keeps them as they are until the job is
// done, or waits for its copies if it needs them earlier. A save that is declined is done, too: it costs a later hit,
// nothing else.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <thread>
#include <unordered_set>
#include <vector>

#include "terrace/client.h"

namespace terrace::pages {

// Blocks of a tensor: block i begins at base + i * stride.
struct Tensor {
  std::byte* base = nullptr;
  size_t stride = 0;
  size_t blocks = 0;
};

// What a block of a group has in one tensor.
struct Part {
  size_t tensor = 0;  // Index.
  size_t bytes = 0;   // Of a page, without padding; at most the tensor's stride.
};

// Blocks of a sequence, the groups one after the other, as vLLM lists them.
struct Blocks {
  std::span<const int32_t> ids;
  std::span<const int32_t> group_sizes;    // Blocks of each group.
  std::span<const int32_t> first_indices;  // Index in the sequence of each group's first block.
};

struct Done {
  uint64_t job = 0;
  uint64_t bytes = 0;  // That were copied.
  double seconds = 0;
  // Chunks of a save: taken, there before, so that nothing was copied, and not taken.
  uint32_t written = 0, existed = 0, declined = 0;
};

class Pages {
 public:
  // The tensors' memory outlives this. Each group lists its parts in the order of the payload.
  static Result<std::unique_ptr<Pages>> Create(std::shared_ptr<Client> client, std::vector<Tensor> tensors,
                                               std::vector<std::vector<Part>> groups, size_t blocks_per_chunk);
  ~Pages();  // Ends the copies under way first.
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;

  uint64_t payload_bytes(size_t group) const { return payload_bytes_[group]; }

  // One lease for each chunk that the blocks touch; of the first and the last, maybe only some blocks are wanted.
  Result<void> Load(uint64_t job, std::vector<terrace::Lease> leases, const Blocks& blocks);
  // One info for each chunk, parents first; of each chunk all blocks are there.
  Result<void> Save(uint64_t job, std::vector<FrameInfo> chunks, const Blocks& blocks);

  std::vector<Done> Finished();               // Since the last call.
  void Wait(std::span<const uint64_t> jobs);  // Until their pages are not needed any more.

 private:
  struct Copy {
    std::byte* to;
    const std::byte* from;
    size_t bytes;
  };
  struct LoadJob {
    uint64_t job = 0;
    std::vector<Copy> copies;
    std::vector<terrace::Lease> leases;
    uint64_t bytes = 0;
    TimePoint begun;
  };
  // Ends when a save's pages are not read any more, which is before it is settled.
  class Reading;
  struct SaveJob {
    uint64_t job = 0;
    std::shared_ptr<CallOf<SavedChunk>> call;
    std::shared_ptr<Reading> reading;
    std::vector<uint64_t> chunk_bytes;
    TimePoint begun;
  };
  // A page of a chunk: where it is in vLLM's memory and in the payload.
  struct Place {
    size_t chunk;  // Of those listed.
    size_t offset;
    std::byte* page;
    size_t bytes;
  };

  Pages(std::shared_ptr<Client> client, std::vector<Tensor> tensors, std::vector<std::vector<Part>> groups,
        size_t blocks_per_chunk);
  // `part` by part within a chunk, so in the order of the payload.
  Result<std::vector<Place>> Places(const Blocks& blocks, size_t chunks) const;
  void Run();

  const std::shared_ptr<Client> client_;
  const std::vector<Tensor> tensors_;
  const std::vector<std::vector<Part>> groups_;
  const size_t blocks_per_chunk_;
  std::vector<uint64_t> payload_bytes_;

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<LoadJob> loads_;                // Guarded by mutex_. One a request at most, so vLLM bounds them.
  std::unordered_set<uint64_t> unfinished_;  // Loads. Guarded by mutex_.
  std::vector<Done> done_;                   // Guarded by mutex_.
  bool stop_ = false;                        // Guarded by mutex_.
  std::vector<SaveJob> saves_;               // Of vLLM's thread alone.
  std::thread thread_;                       // Last: it uses all of the above.
};

}  // namespace terrace::pages
