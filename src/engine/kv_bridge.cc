#include "engine/kv_bridge.h"

#include <utility>
#include <vector>

#include "base/assert.h"
#include "llama.h"

namespace terrace::engine {
namespace {

const uint8_t* Raw(const std::byte* bytes) { return reinterpret_cast<const uint8_t*>(bytes); }
uint8_t* Raw(std::byte* bytes) { return reinterpret_cast<uint8_t*>(bytes); }

}  // namespace

KvBridge::KvBridge(llama_context* context, uint32_t chunk_tokens, SequenceShape shape)
    : context_(context),
      chunk_tokens_(chunk_tokens),
      shape_(std::move(shape)),
      chunk_bytes_(SequenceBlobBytes(shape_, chunk_tokens)) {}

Result<KvBridge> KvBridge::Open(llama_context* context, uint32_t chunk_tokens) {
  llama_memory_t memory = llama_get_memory(context);
  if (memory == nullptr) return Fail(Code::kUnavailable, "the model keeps no KV");
  const llama_model* model = llama_get_model(context);
  const int32_t window = llama_model_n_swa(model);
  if (window > 0 && chunk_tokens > static_cast<uint32_t>(window)) {
    return Fail(Code::kUnavailable, "a chunk of " + std::to_string(chunk_tokens) +
                                        " tokens does not fit the model's sliding window of " + std::to_string(window) +
                                        "; use a smaller --chunk");
  }

  llama_token token = 0;
  llama_pos position = 0;
  int32_t sequence_count = 1;
  llama_seq_id sequence = kScratchSequence;
  llama_seq_id* sequences = &sequence;
  int8_t wants_logits = 1;
  const llama_batch batch{.n_tokens = 1,
                          .token = &token,
                          .embd = nullptr,
                          .pos = &position,
                          .n_seq_id = &sequence_count,
                          .seq_id = &sequences,
                          .logits = &wants_logits};
  if (llama_decode(context, batch) != 0) return Fail(Code::kInternal, "llama.cpp could not compute one token");
  std::vector<std::byte> bytes(llama_state_seq_get_size_ext(context, kScratchSequence, LLAMA_STATE_SEQ_FLAGS_NONE));
  const size_t written = llama_state_seq_get_data_ext(context, Raw(bytes.data()), bytes.size(), kScratchSequence,
                                                      LLAMA_STATE_SEQ_FLAGS_NONE);
  llama_memory_clear(memory, /*data=*/true);
  if (written != bytes.size()) return Fail(Code::kUnavailable, "llama.cpp did not write the state of one token");
  std::optional<SequenceShape> shape = LearnSequenceShape(bytes, 0, 1);
  if (!shape) return Fail(Code::kUnavailable, "the model's state has parts that are not keys and values of positions");
  return KvBridge(context, chunk_tokens, std::move(*shape));
}

Result<void> KvBridge::Export(int32_t sequence, uint32_t first_token, std::span<std::byte> into) {
  TERRACE_ASSERT(into.size() == chunk_bytes_);
  llama_memory_t memory = llama_get_memory(context_);
  const auto first = static_cast<llama_pos>(first_token);
  llama_memory_seq_cp(memory, sequence, kScratchSequence, first, first + static_cast<llama_pos>(chunk_tokens_));
  const size_t written = llama_state_seq_get_data_ext(context_, Raw(into.data()), into.size(), kScratchSequence,
                                                      LLAMA_STATE_SEQ_FLAGS_NONE);
  llama_memory_seq_rm(memory, kScratchSequence, -1, -1);
  if (written != into.size()) {
    return Fail(Code::kCorrupt, "llama.cpp wrote " + std::to_string(written) + " of " + std::to_string(into.size()) +
                                    " bytes of a chunk");
  }
  return CheckSequenceBlob(into, shape_, first_token, chunk_tokens_);
}

Result<void> KvBridge::Restore(int32_t sequence, uint32_t first_token, std::span<const std::byte> bytes) {
  if (Result<void> good = CheckSequenceBlob(bytes, shape_, first_token, chunk_tokens_); !good) return good;
  llama_memory_t memory = llama_get_memory(context_);
  const size_t read = llama_state_seq_set_data_ext(context_, Raw(bytes.data()), bytes.size(), kScratchSequence,
                                                   LLAMA_STATE_SEQ_FLAGS_NONE);
  if (read != bytes.size()) {
    llama_memory_seq_rm(memory, kScratchSequence, -1, -1);
    return Fail(Code::kFull, "llama.cpp did not take a chunk: no room for its cells");
  }
  const auto first = static_cast<llama_pos>(first_token);
  llama_memory_seq_cp(memory, kScratchSequence, sequence, first, first + static_cast<llama_pos>(chunk_tokens_));
  llama_memory_seq_rm(memory, kScratchSequence, -1, -1);
  return {};
}

}  // namespace terrace::engine
