// A long prefix of a real text: its tokens, its keys, and an engine to compute it, to export it and to put it back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bench/store/frames.h"
#include "engine/kv_bridge.h"
#include "engine/model.h"
#include "terrace/key.h"
#include "terrace/metrics.h"
#include "terrace/store.h"

namespace terrace::bench {

constexpr uint32_t kChunkTokens = 256;

// Ends the program with the error.
template <class T>
T Must(Result<T> result) {
  Check(result.has_value(), result ? "" : result.error().what);
  return *std::move(result);
}

TimePoint Later();

struct Engine {
  Engine(const std::string& path, uint32_t cells, uint32_t threads);
  // Computes tokens [from, to) of `tokens`, cut at chunk boundaries as the server does.
  void Prefill(const std::vector<int32_t>& tokens, size_t from, size_t to);
  void Clear();
  // Puts the whole chain back, chunk by chunk as they arrive; every one must be a hit. Seconds.
  double Restore(Store& store, const KeyChain& chain);

  std::unique_ptr<engine::Model> model;
  engine::ContextPtr context;
  engine::KvBridge bridge;
};

std::vector<int32_t> Document(const engine::Model& model, size_t tokens);
KeyChain Keys(const engine::Model& model, const std::vector<int32_t>& tokens);

// Exports the computed chain into the store, and closes that when all tiers have it. Seconds in exports.
double SavePrefix(Engine& engine, Store& store, const KeyChain& chain);

// Until RAM has the pages that it gets ahead, as a server has long before the first request.
void AwaitResident(Store& store, const Metrics& metrics, uint64_t chunk_bytes);

}  // namespace terrace::bench
