#include "bench/engine/prefix.h"

#include <unistd.h>

#include <fstream>
#include <iterator>
#include <string_view>

#include "base/hash.h"
#include "bench/harness.h"
#include "chunk/frame.h"
#include "llama.h"

namespace terrace::bench {

using engine::KvBridge;
using engine::KvType;
using engine::Model;

namespace {
constexpr int32_t kSequence = 1;
}  // namespace

TimePoint Later() { return std::chrono::steady_clock::now() + std::chrono::minutes(10); }

Engine::Engine(const std::string& path, uint32_t cells, uint32_t threads)
    : model(Must(Model::Load(path))),
      context(Must(model->NewContext({.cells = cells,
                                      .chunk_tokens = kChunkTokens,
                                      .sequences_max = 2,
                                      .kv_type = KvType::kF16,
                                      .threads = threads}))),
      bridge(Must(KvBridge::Open(context.get(), kChunkTokens))) {}

void Engine::Prefill(const std::vector<int32_t>& tokens, size_t from, size_t to) {
  llama_batch batch = llama_batch_init(kChunkTokens, 0, 1);
  while (from < to) {
    const size_t end = std::min(to, (from / kChunkTokens + 1) * kChunkTokens);
    batch.n_tokens = static_cast<int32_t>(end - from);
    for (size_t i = from; i < end; ++i) {
      const size_t k = i - from;
      batch.token[k] = tokens[i];
      batch.pos[k] = static_cast<int32_t>(i);
      batch.n_seq_id[k] = 1;
      batch.seq_id[k][0] = kSequence;
      batch.logits[k] = i + 1 == to;
    }
    Check(llama_decode(context.get(), batch) == 0, "llama_decode failed");
    from = end;
  }
  llama_synchronize(context.get());
  llama_batch_free(batch);
}

void Engine::Clear() { llama_memory_clear(llama_get_memory(context.get()), false); }

double Engine::Restore(Store& store, const KeyChain& chain) {
  return Seconds([&] {
    const auto job = store.Load(chain.space(), chain.keys(), bridge.chunk_bytes(), Later());
    for (size_t i = 0; i < chain.keys().size(); ++i) {
      const LoadJob::Item item = job->Wait(i, Later());
      Check(item.outcome == Outcome::kHit, std::string("chunk is a miss: ") + ReasonName(item.reason));
      Check(bridge.Restore(kSequence, static_cast<uint32_t>(i * kChunkTokens), item.lease.bytes).has_value(),
            "restore failed");
    }
  });
}

std::vector<int32_t> Document(const Model& model, size_t tokens) {
  std::ifstream in("/usr/share/common-licenses/GPL-3");
  const std::string text((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  std::vector<int32_t> all = model.Tokenize(text);
  Check(!all.empty(), "no document: /usr/share/common-licenses/GPL-3");
  while (all.size() < tokens)
    all.insert(all.end(), all.begin(), all.begin() + static_cast<ptrdiff_t>(std::min(all.size(), tokens - all.size())));
  all.resize(tokens);
  return all;
}

KeyChain Keys(const Model& model, const std::vector<int32_t>& tokens) {
  SpaceFields fields = model.Space({.chunk_tokens = kChunkTokens, .kv_type = KvType::kF16});
  fields.weights = Sha256Of("bench");  // The digest is measured elsewhere.
  KeyChain chain(SpaceId(fields), kChunkTokens);
  chain.Extend(tokens);
  return chain;
}

double SavePrefix(Engine& engine, Store& store, const KeyChain& chain) {
  double seconds = 0;
  for (size_t i = 0; i < chain.keys().size(); ++i) {
    FrameInfo info;
    info.space = chain.space();
    info.key = chain.keys()[i];
    info.parent = chain.parent(i);
    info.first_token = static_cast<uint32_t>(i * kChunkTokens);
    info.token_count = kChunkTokens;
    info.payload_kind = static_cast<uint32_t>(PayloadKind::kLlamaSequence);
    info.payload_bytes = engine.bridge.chunk_bytes();
    SaveSlot slot = Must(store.BeginSave(info));
    seconds += Seconds(
        [&] { Check(engine.bridge.Export(kSequence, info.first_token, slot.bytes).has_value(), "export failed"); });
    store.Commit(std::move(slot));
  }
  Check(store.Close(Later()).clean, "the tier did not take all frames");
  return seconds;
}

void AwaitResident(Store& store, const Metrics& metrics, uint64_t chunk_bytes) {
  store.ExpectChunks(chunk_bytes);
  constexpr std::string_view kName = "\nterrace_ram_resident_bytes ";
  const auto resident = [&] {
    const std::string text = metrics.Text();
    return std::stod(text.substr(text.find(kName) + kName.size()));
  };
  for (double before = -1; before != resident();) {
    before = resident();
    usleep(100'000);
  }
}

}  // namespace terrace::bench
