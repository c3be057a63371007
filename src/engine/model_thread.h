// The thread that owns the llama.cpp context. Requests come in through a bounded queue, answers leave through their
// sinks.
//
// Its loop goes in steps: take a chunk from the store, compute a piece of a prompt up to the next chunk boundary, or
// one token. It sees at any time whether the client is still there. One request is computed at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "chunk/weights.h"
#include "engine/generation.h"
#include "engine/kv_bridge.h"
#include "engine/model.h"
#include "engine/resident.h"
#include "terrace/metrics.h"
#include "terrace/store.h"

namespace terrace::engine {

struct EngineOptions {
  uint32_t context_tokens = 8192;    // Of one sequence.
  uint32_t engine_kv_tokens = 8192;  // Kept between requests.
  uint32_t chunk_tokens = 256;
  KvType kv_type = KvType::kF16;
  uint32_t threads = 1;
  size_t queue_max = 64;
  bool strict = false;             // Beside the sequence being computed nothing else is in engine memory.
  bool save_decode_cache = false;  // Chunks that decode completes are cached too.
  int64_t load_deadline_ms = 0;    // 0: from the predicted prefill time.
  // The load of a request that has to wait its turn is given this much longer; then it is begun anew at its turn.
  std::chrono::milliseconds queue_allowance{30'000};
  // Asked before each save; outlives the thread. Null: the weights can't change.
  const WeightsDigest* weights = nullptr;
};

// What a request is told that comes, waits or runs when the server stops.
openai::ApiError ShuttingDown();

class ModelThread {
 public:
  // Makes the context and starts the thread. `model`, `store` and `metrics` outlive it.
  static Result<std::unique_ptr<ModelThread>> Start(const EngineOptions& options, const Model& model, Store& store,
                                                    Metrics& metrics);
  ~ModelThread();  // Stop().

  // All but the weights' digest and the salt.
  const SpaceFields& space() const { return space_; }

  // Why chunks don't leave and enter engine memory; "" if they do.
  const std::string& not_cacheable() const { return not_cacheable_; }
  // Of one chunk's payload; 0 if not_cacheable.
  uint64_t chunk_bytes() const { return bridge_ ? bridge_->chunk_bytes() : 0; }

  // Queues a generation; if the queue is full it comes back. Any thread.
  std::unique_ptr<Generation> Submit(std::unique_ptr<Generation> generation);

  // Drops what waits in the queue for a client that has left. Any thread.
  void DropGone();

  // How many of `keys` lie in engine memory. Any thread.
  size_t ResidentPrefix(std::span<const Digest> keys) const { return resident_.Known(keys); }

  // From now on nothing is queued, and what waits ends with a 503; what runs does so at `deadline`. Does not wait. Not
  // from a sink.
  void StopBy(TimePoint deadline);
  // StopBy(now), and waits. Idempotent.
  void Stop();
  bool stopping() const;  // One of the two was called. Any thread.
  bool cut() const;       // And something was not finished. Any thread.

 private:
  struct Active;

  ModelThread(const EngineOptions& options, const ContextOptions& context_options, const Model& model, Store& store,
              Metrics& metrics, ContextPtr context);

  void Run();
  std::unique_ptr<Generation> Next();  // Null: stopping.
  bool MustEnd();                      // What runs has had its time.
  bool ShouldAbort() const;            // In the middle of a step: for one of the reasons that end what runs after it.

  // Looks up and begins to load chunks [first, generation.usable). Any thread.
  // `waits`: it is not the generation's turn yet.
  Prefetch BeginPrefetch(const Generation& generation, size_t first, bool waits);

  void Admit(std::unique_ptr<Generation> generation);
  void Step(Active& active);
  void LoadStep(Active& active);
  // False: the request has to end now, which Run() will see. True: the chunk has come or won't, or its time is up.
  bool AwaitChunk(const Active& active, const Prefetch& from, size_t chunk);
  void PrefillStep(Active& active);
  void DecodeStep(Active& active);
  // False: `active` failed, which is settled, or the computation was aborted.
  bool Decode(Active& active, std::span<const int32_t> tokens, bool wants_logits);
  void Sample(Active& active);
  void FinishChunk(Active& active);
  void SaveChunk(Active& active, size_t chunk);
  void End(Active& active, FinishReason reason);
  void Fail(Active& active, openai::ApiError error);
  void Retire(Active& active);
  void Apply(const std::vector<ResidentPrefixes::Cut>& cuts);
  bool Place(const ResidentPrefixes::Plan& plan);
  void BeginLoading(Active& active, size_t shared);
  void EndLoading(Active& active, Reason reason);
  bool InRam(const Digest& key);
  std::chrono::milliseconds LoadBudget(size_t tokens) const;
  void CountRequest(const Active& active, const char* outcome);

  const EngineOptions options_;
  const Model& model_;
  Store& store_;
  const SpaceFields space_;
  const ContextPtr context_;            // Used by thread_ only, once it runs.
  std::optional<KvBridge> bridge_;      // As context_, and set before. Nothing: not cacheable.
  std::string not_cacheable_;           // Set before the thread starts.
  size_t prefetch_chunks_ = 1;          // As above. Of one request, before its turn.
  ResidentPrefixes resident_;           // Changed by thread_ only.
  std::unique_ptr<Active> active_;      // Used by thread_ only.
  std::vector<std::byte> move_buffer_;  // Used by thread_ only: one chunk on its way to lower cells.

  // Running mean of prefill. Relaxed: a hint, nothing is published by it.
  std::atomic<double> seconds_per_token_{0.005};
  // Nanoseconds on the thread, for metrics. Relaxed: counts.
  std::atomic<uint64_t> cache_ns_{0}, compute_ns_{0}, wait_ns_{0};

  struct Counters;
  const std::unique_ptr<Counters> counters_;

  mutable std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<std::unique_ptr<Generation>> queue_;  // Guarded by mutex_.
  bool busy_ = false;                              // Guarded by mutex_. A generation is being computed.
  TimePoint stop_by_ = TimePoint::max();           // Guarded by mutex_. Not max: stopping.
  bool cut_ = false;                               // Guarded by mutex_.
  std::thread thread_;
};

}  // namespace terrace::engine
