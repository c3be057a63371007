#include "engine/model_thread.h"

#include <pthread.h>

#include <algorithm>
#include <string>
#include <utility>

#include "base/assert.h"
#include "base/log.h"
#include "chunk/frame.h"
#include "engine/sampler.h"
#include "engine/text_stream.h"
#include "llama.h"

namespace terrace::engine {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Sequences kept between requests. Each costs a bit a cell; more distinct prefixes than this don't fit the budget of
// cells in practice.
constexpr size_t kRetainedSequences = 32;
constexpr milliseconds kLoadBudgetMin{200};
// Requests that load ahead of their turn. What they stage is pinned in RAM, so not the whole queue, and together they
// get this share of RAM: the request whose turn it is has to save.
constexpr size_t kPrefetchAhead = 4;
constexpr uint64_t kPrefetchShare = 2;
constexpr milliseconds kGlance{20};  // From one look at whether a client waits on to the next, while nothing happens.
constexpr int32_t kAborted = 2;      // llama_decode did as it was told; the sequence is as before.
// Weight of the newest piece in the running mean of prefill speed.
constexpr double kNewest = 0.2;

// Adds the time it lives to a counter.
class Stopwatch {
 public:
  explicit Stopwatch(std::atomic<uint64_t>& ns) : ns_(ns) {}
  ~Stopwatch() { ns_.fetch_add(static_cast<uint64_t>((Clock::now() - begin_).count()), std::memory_order_relaxed); }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;
  double seconds() const { return std::chrono::duration<double>(Clock::now() - begin_).count(); }

 private:
  std::atomic<uint64_t>& ns_;
  const Clock::time_point begin_ = Clock::now();
};

// Rung on any thread, maybe after whoever waited for it has gone.
class Bell {
 public:
  void Ring() {
    {
      const std::lock_guard lock(mutex_);
      rung_ = true;
    }
    changed_.notify_all();
  }
  bool WaitUntil(TimePoint until) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, until, [&] { return rung_; }) && std::exchange(rung_, false);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool rung_ = false;  // Guarded by mutex_.
};

openai::ApiError ServerError(int status, std::string message) {
  return {.status = status, .message = std::move(message), .type = "server_error", .param = {}, .code = {}};
}

}  // namespace

openai::ApiError ShuttingDown() {
  openai::ApiError error = ServerError(503, "the server is shutting down; ask again, or another one");
  error.code = "shutting_down";
  return error;
}

struct ModelThread::Active {
  std::unique_ptr<Generation> generation;
  int32_t sequence = 0;
  uint32_t position = 0;  // Tokens of the sequence in engine memory.
  bool loading = false;   // Chunks are still being taken from the store.
  TimePoint load_deadline;
  bool keeps = false;           // Whole chunks are named, saved and kept.
  std::vector<int32_t> tokens;  // Prompt, and what has been generated.
  uint32_t generated = 0;
  SamplerPtr sampler;
  TextStream text{{}};
  openai::CachedTokens cached;
  Clock::time_point admitted;
  double first_token_seconds = 0;

  uint32_t prompt_tokens() const { return static_cast<uint32_t>(generation->tokens.size()); }
};

struct ModelThread::Counters {
  explicit Counters(Metrics& metrics, const Store& store)
      : prompt_tokens(metrics.GetCounter("terrace_engine_prompt_tokens_total", "Prompt tokens of admitted requests.")),
        generated_tokens(metrics.GetCounter("terrace_engine_generated_tokens_total", "Tokens generated.")),
        first_token(
            metrics.GetHistogram("terrace_engine_first_token_seconds", "From a request's turn to its first token.")),
        save_declined(
            metrics.GetCounter("terrace_engine_saves_declined_total", "Chunks that the store had no room for.")),
        refused_blobs(metrics.GetCounter("terrace_engine_refused_blobs_total",
                                         "Chunks whose structure the engine would not read.")) {
    const auto cached = [&](const std::string& tier) {
      return &metrics.GetCounter("terrace_engine_cached_tokens_total",
                                 "Prompt tokens not computed, by where they came from.", {{"tier", tier}});
    };
    engine_tokens = cached("engine");
    for (const std::string& tier : store.tier_names()) tier_tokens.push_back(cached(tier));
    for (int i = 0; i < kReasonCount; ++i) {
      misses.push_back(&metrics.GetCounter("terrace_engine_misses_total",
                                           "Requests by why their next chunk was not found.",
                                           {{"reason", ReasonName(static_cast<Reason>(i))}}));
    }
    for (const char* outcome : {"done", "failed", "gone"}) {
      outcomes[outcome] = &metrics.GetCounter("terrace_engine_requests_total", "Requests that left the model thread.",
                                              {{"outcome", outcome}});
    }
  }

  Counter& prompt_tokens;
  Counter& generated_tokens;
  Histogram& first_token;
  Counter& save_declined;
  Counter& refused_blobs;
  Counter* engine_tokens = nullptr;
  std::vector<Counter*> tier_tokens;  // As store.tier_names().
  std::vector<Counter*> misses;       // By Reason.
  std::map<std::string, Counter*> outcomes;
};

Result<std::unique_ptr<ModelThread>> ModelThread::Start(const EngineOptions& options, const Model& model, Store& store,
                                                        Metrics& metrics) {
  const uint32_t kept = options.engine_kv_tokens / options.chunk_tokens * options.chunk_tokens;
  // The sequence being computed always fits, whatever is kept: so decode can't run out of cells.
  const uint32_t cells = (options.context_tokens + kept + 255) / 256 * 256;
  const bool may_cache = model.not_cacheable().empty();
  const size_t sequences = may_cache ? kRetainedSequences + 1 : 2;
  const ContextOptions context_options{.cells = cells,
                                       .chunk_tokens = options.chunk_tokens,
                                       .sequences_max = static_cast<uint32_t>(sequences) + 1,
                                       .kv_type = options.kv_type,
                                       .threads = options.threads};
  Result<ContextPtr> context = model.NewContext(context_options);
  if (!context) return tl::unexpected(context.error());
  std::unique_ptr<ModelThread> thread(
      new ModelThread(options, context_options, model, store, metrics, std::move(*context)));
  thread->not_cacheable_ = model.not_cacheable();
  if (may_cache) {
    Result<KvBridge> bridge = KvBridge::Open(thread->context_.get(), options.chunk_tokens);
    if (bridge) {
      thread->move_buffer_.resize(bridge->chunk_bytes());
      store.ExpectChunks(bridge->chunk_bytes());
      const uint64_t each = store.ram_stats().bytes_max / kPrefetchShare / kPrefetchAhead;
      thread->prefetch_chunks_ = std::max<size_t>(each / bridge->chunk_bytes(), 1);
      thread->bridge_ = std::move(*bridge);
    } else if (bridge.error().code == Code::kUnavailable) {
      thread->not_cacheable_ = bridge.error().what;
    } else {
      return tl::unexpected(bridge.error());
    }
  }
  // A chunk of a large model takes many seconds on a CPU.
  llama_set_abort_callback(
      thread->context_.get(), [](void* self) { return static_cast<ModelThread*>(self)->ShouldAbort(); }, thread.get());
  thread->thread_ = std::thread([raw = thread.get()] { raw->Run(); });
  return thread;
}

ModelThread::ModelThread(const EngineOptions& options, const ContextOptions& context_options, const Model& model,
                         Store& store, Metrics& metrics, ContextPtr context)
    : options_(options),
      model_(model),
      store_(store),
      space_(model.Space(context_options)),
      context_(std::move(context)),
      resident_(options.engine_kv_tokens / options.chunk_tokens, kScratchSequence + 1,
                context_options.sequences_max - 1),
      counters_(std::make_unique<Counters>(metrics, store)) {
  const auto seconds = [&](const char* name, const char* help, const std::atomic<uint64_t>& ns) {
    metrics.AddGaugeCallback(name, help, {},
                             [&ns] { return static_cast<double>(ns.load(std::memory_order_relaxed)) / 1e9; });
  };
  seconds("terrace_engine_cache_seconds_total", "Time of the model thread spent on moving and naming KV.", cache_ns_);
  seconds("terrace_engine_compute_seconds_total", "Time of the model thread spent in llama_decode.", compute_ns_);
  seconds("terrace_engine_load_wait_seconds_total", "Time of the model thread spent waiting for loads.", wait_ns_);
  metrics.AddGaugeCallback("terrace_engine_queue_requests", "Requests that wait for the model thread.", {}, [this] {
    const std::lock_guard lock(mutex_);
    return static_cast<double>(queue_.size());
  });
  metrics.AddGaugeCallback("terrace_requests_in_flight", "Requests that wait for the model thread or are computed.", {},
                           [this] {
                             const std::lock_guard lock(mutex_);
                             return static_cast<double>(queue_.size() + (busy_ ? 1 : 0));
                           });
  metrics.AddGaugeCallback("terrace_engine_resident_chunks", "Chunks kept in engine memory.", {},
                           [this] { return static_cast<double>(resident_.chunks()); });
}

ModelThread::~ModelThread() { Stop(); }

void ModelThread::StopBy(TimePoint deadline) {
  std::deque<std::unique_ptr<Generation>> waiting;
  {
    const std::lock_guard lock(mutex_);
    stop_by_ = std::min(stop_by_, deadline);
    waiting.swap(queue_);
    cut_ = cut_ || !waiting.empty();
  }
  wake_.notify_all();
  for (const auto& generation : waiting) generation->sink->Failed(ShuttingDown());
}

void ModelThread::Stop() {
  StopBy(Clock::now());
  if (thread_.joinable()) thread_.join();
}

bool ModelThread::stopping() const {
  const std::lock_guard lock(mutex_);
  return stop_by_ != TimePoint::max();
}

bool ModelThread::cut() const {
  const std::lock_guard lock(mutex_);
  return cut_;
}

bool ModelThread::MustEnd() {
  const std::lock_guard lock(mutex_);
  const bool must = stop_by_ <= Clock::now();
  cut_ = cut_ || must;
  return must;
}

// Once a node of the graph, some hundred times a step.
bool ModelThread::ShouldAbort() const {
  if (active_->generation->sink->gone()) return true;
  const std::lock_guard lock(mutex_);
  return stop_by_ <= Clock::now();
}

Prefetch ModelThread::BeginPrefetch(const Generation& generation, size_t first, bool waits) {
  const std::vector<Digest>& keys = generation.chain.keys();
  const std::span<const Digest> wanted(keys.data() + first, generation.usable - first);
  Prefetch prefetch{.first = first};
  const PrefixHit hit = store_.Lookup(wanted);
  // A store that asks finds out while the request waits.
  prefetch.chunks = store_.asks() ? wanted.size() : hit.chunks;
  if (waits) prefetch.chunks = std::min(prefetch.chunks, prefetch_chunks_);  // The rest at its turn.
  prefetch.miss_reason = hit.miss_reason;
  if (prefetch.chunks > 0) {
    const milliseconds budget = LoadBudget(prefetch.chunks * options_.chunk_tokens);
    prefetch.deadline = Clock::now() + (waits ? budget + options_.queue_allowance : budget);
    prefetch.job =
        store_.Load(generation.chain.space(), wanted.first(prefetch.chunks), bridge_->chunk_bytes(), prefetch.deadline);
  }
  return prefetch;
}

std::unique_ptr<Generation> ModelThread::Submit(std::unique_ptr<Generation> generation) {
  size_t waiting = 0;
  bool waits = false;
  {
    const std::lock_guard lock(mutex_);
    if (stop_by_ != TimePoint::max() || queue_.size() >= options_.queue_max) return generation;
    waiting = queue_.size();
    waits = waiting > 0 || busy_;
  }
  const size_t resident = resident_.Known({generation->chain.keys().data(), generation->usable});
  if (waiting < kPrefetchAhead && resident < generation->usable) {
    generation->prefetches.push_back(BeginPrefetch(*generation, resident, waits));
  }
  {
    const std::lock_guard lock(mutex_);
    if (stop_by_ != TimePoint::max() || queue_.size() >= options_.queue_max) return generation;
    queue_.push_back(std::move(generation));
  }
  wake_.notify_all();
  return nullptr;
}

void ModelThread::DropGone() {
  std::vector<std::unique_ptr<Generation>> gone;  // Destroyed without the lock.
  const std::lock_guard lock(mutex_);
  for (auto& waiting : queue_) {
    if (waiting->sink->gone()) gone.push_back(std::move(waiting));
  }
  std::erase(queue_, nullptr);
}

std::unique_ptr<Generation> ModelThread::Next() {
  std::unique_lock lock(mutex_);
  busy_ = false;
  wake_.wait(lock, [&] { return stop_by_ != TimePoint::max() || !queue_.empty(); });
  if (queue_.empty()) return nullptr;
  std::unique_ptr<Generation> next = std::move(queue_.front());
  queue_.pop_front();
  busy_ = true;
  return next;
}

void ModelThread::Run() {
  pthread_setname_np(pthread_self(), "terrace-model");
  while (true) {
    if (active_ == nullptr) {
      std::unique_ptr<Generation> next = Next();
      if (next == nullptr) break;
      if (!next->sink->gone()) Admit(std::move(next));
    } else if (active_->generation->sink->gone()) {
      CountRequest(*active_, "gone");
      Retire(*active_);
    } else if (MustEnd()) {
      Fail(*active_, ShuttingDown());
    } else {
      Step(*active_);
    }
  }
}

bool ModelThread::InRam(const Digest& key) {
  const PrefixHit hit = store_.Lookup({&key, 1});
  return hit.chunks == 1 && hit.tier[0] == 0;
}

milliseconds ModelThread::LoadBudget(size_t tokens) const {
  if (options_.load_deadline_ms > 0) return milliseconds(options_.load_deadline_ms);
  // Half of what computing them would take: a load that is slower than that does not pay.
  const double seconds = static_cast<double>(tokens) * seconds_per_token_.load(std::memory_order_relaxed) / 2;
  return std::max(kLoadBudgetMin, milliseconds(static_cast<int64_t>(seconds * 1000)));
}

void ModelThread::Apply(const std::vector<ResidentPrefixes::Cut>& cuts) {
  for (const auto& cut : cuts) {
    const auto from = cut.from_chunk == 0 ? -1 : static_cast<llama_pos>(cut.from_chunk * options_.chunk_tokens);
    llama_memory_seq_rm(llama_get_memory(context_.get()), cut.sequence, from, -1);
  }
}

// Puts engine memory into the planned order. False: it does not hold what it should; it is empty then.
bool ModelThread::Place(const ResidentPrefixes::Plan& plan) {
  llama_memory_t memory = llama_get_memory(context_.get());
  Apply(plan.cuts);
  bool good = true;
  for (const auto& move : plan.moves) {
    const auto first = static_cast<uint32_t>(move.chunk * options_.chunk_tokens);
    const auto end = static_cast<llama_pos>(first + options_.chunk_tokens);
    good = good && bridge_->Export(move.sequences[0], first, move_buffer_).has_value();
    if (!good) break;
    for (const int32_t sequence : move.sequences)
      llama_memory_seq_rm(memory, sequence, static_cast<llama_pos>(first), end);
    for (const int32_t sequence : move.sequences) {
      if (sequence == move.sequences[0]) {
        good = good && bridge_->Restore(sequence, first, move_buffer_).has_value();
      } else {
        llama_memory_seq_cp(memory, move.sequences[0], sequence, static_cast<llama_pos>(first), end);
      }
    }
  }
  if (good && plan.shared > 0) {
    const auto end = static_cast<llama_pos>(plan.shared * options_.chunk_tokens);
    llama_memory_seq_cp(memory, plan.source, plan.sequence, 0, end);
    // A sliding-window cache may reuse the cells of a kept sequence that lie outside its window.
    good = llama_memory_seq_pos_min(memory, plan.sequence) == 0 &&
           llama_memory_seq_pos_max(memory, plan.sequence) == end - 1;
  }
  if (!good) {
    log::Warn("engine_memory_cleared", {{"why", "kept prefixes were not as expected"}});
    llama_memory_clear(memory, /*data=*/false);
    resident_.Clear();
  }
  return good;
}

void ModelThread::Admit(std::unique_ptr<Generation> generation) {
  const Stopwatch watch(cache_ns_);
  active_ = std::make_unique<Active>();
  Active& active = *active_;
  active.admitted = Clock::now();
  active.generation = std::move(generation);
  const Generation& request = *active.generation;
  active.tokens = request.tokens;
  active.text = TextStream(request.stops);
  active.sampler = MakeSampler(request.sampling, request.tokens, model_.vocabulary(), options_.context_tokens);
  active.keeps = bridge_.has_value() && request.not_named == Reason::kNone;

  const auto plan = resident_.Begin(request.chain.keys(), request.usable,
                                    [this](const Digest& key) { return options_.strict || InRam(key); });
  active.sequence = plan.sequence;
  const size_t shared = Place(plan) ? plan.shared : 0;
  active.position = static_cast<uint32_t>(shared * options_.chunk_tokens);
  active.cached.Add("engine", active.position);
  counters_->engine_tokens->Add(active.position);
  counters_->prompt_tokens.Add(active.prompt_tokens());
  // Engine memory hides from the store that a chunk is still wanted.
  if (shared > 0 && active.keeps) store_.Offer(request.chain.keys()[shared - 1]);
  BeginLoading(active, shared);
}

void ModelThread::BeginLoading(Active& active, size_t shared) {
  Generation& request = *active.generation;
  if (!active.keeps || request.usable == 0) {
    const Reason why = !bridge_ ? Reason::kNotCacheable : request.not_named;
    return EndLoading(active, why == Reason::kNone ? Reason::kShortPrompt : why);
  }
  if (shared == request.usable) return EndLoading(active, Reason::kNone);
  // While the request waited engine memory may have lost or the store gained chunks, and its load run out of time: what
  // that brought is in RAM, and stays there until the new one has it.
  auto& ahead = request.prefetches;
  const auto is_late = [&](const Prefetch& load) {
    return load.job && load.deadline < Clock::now() + LoadBudget(load.chunks * options_.chunk_tokens) / 2;
  };
  if (ahead.empty() || ahead[0].first > shared || ahead[0].end() < shared || is_late(ahead[0])) {
    ahead = {BeginPrefetch(request, shared, /*waits=*/false)};
  } else if (ahead[0].end() < request.usable) {
    ahead.push_back(BeginPrefetch(request, ahead[0].end(), /*waits=*/false));
  }
  active.loading = true;
  active.load_deadline = active.admitted + LoadBudget((ahead.back().end() - shared) * options_.chunk_tokens);
}

void ModelThread::EndLoading(Active& active, Reason reason) {
  active.loading = false;
  active.generation->prefetches.clear();  // Cancels the rest, unpins what came.
  active.cached.miss_reason = ReasonName(reason);
  counters_->misses[static_cast<size_t>(reason)]->Add();
}

void ModelThread::Step(Active& active) {
  if (active.loading) {
    LoadStep(active);
  } else if (active.position < active.prompt_tokens()) {
    PrefillStep(active);
  } else {
    DecodeStep(active);
  }
}

bool ModelThread::AwaitChunk(const Active& active, const Prefetch& from, size_t chunk) {
  const TimePoint deadline = std::min(active.load_deadline, from.deadline);
  const auto bell = std::make_shared<Bell>();
  while (!from.job->ReadyOr(chunk - from.first, [bell] { bell->Ring(); })) {
    for (TimePoint now = Clock::now(); !bell->WaitUntil(std::min(deadline, now + kGlance)); now = Clock::now()) {
      if (ShouldAbort()) return false;
      if (now >= deadline) return true;
    }
  }
  return true;
}

void ModelThread::LoadStep(Active& active) {
  Generation& request = *active.generation;
  const size_t chunk = active.position / options_.chunk_tokens;
  if (chunk == request.usable) return EndLoading(active, Reason::kNone);
  const auto from =
      std::ranges::find_if(request.prefetches, [&](const Prefetch& p) { return p.first <= chunk && chunk < p.end(); });
  if (from == request.prefetches.end()) return EndLoading(active, request.prefetches.back().miss_reason);

  LoadJob::Item item;
  {
    const Stopwatch watch(wait_ns_);
    if (!AwaitChunk(active, *from, chunk)) return;
    item = from->job->Wait(chunk - from->first, active.load_deadline);
  }
  if (item.outcome != Outcome::kHit) return EndLoading(active, item.reason);
  const Stopwatch watch(cache_ns_);
  const Result<void> restored = bridge_->Restore(active.sequence, active.position, item.lease.bytes);
  if (!restored) {
    counters_->refused_blobs.Add();
    log::Warn("chunk_refused", {{"key", request.chain.keys()[chunk].Hex()},
                                {"tier", store_.tier_names()[item.tier]},
                                {"why", restored.error().what}});
    return EndLoading(active, Reason::kForeign);
  }
  active.position += options_.chunk_tokens;
  active.cached.Add(store_.tier_names()[item.tier], options_.chunk_tokens);
  counters_->tier_tokens[item.tier]->Add(options_.chunk_tokens);
  active.keeps = resident_.Append(active.sequence, request.chain.keys()[chunk]) && active.keeps;
}

bool ModelThread::Decode(Active& active, std::span<const int32_t> tokens, bool wants_logits) {
  const auto count = static_cast<int32_t>(tokens.size());
  llama_batch batch = llama_batch_init(count, 0, 1);
  batch.n_tokens = count;
  for (int32_t i = 0; i < count; ++i) {
    batch.token[i] = tokens[static_cast<size_t>(i)];
    batch.pos[i] = static_cast<llama_pos>(active.position) + i;
    batch.n_seq_id[i] = 1;
    batch.seq_id[i][0] = active.sequence;
    batch.logits[i] = wants_logits && i == count - 1;
  }
  const int32_t failed = llama_decode(context_.get(), batch);
  llama_synchronize(context_.get());
  llama_batch_free(batch);
  if (failed == 0) {
    active.position += static_cast<uint32_t>(count);
    return true;
  }
  if (failed == kAborted) return false;  // Run() sees why.
  log::Error("decode_failed", {{"code", failed}, {"position", active.position}, {"tokens", count}});
  Fail(active,
       ServerError(500, "the model could not compute this request (llama_decode " + std::to_string(failed) + ")"));
  return false;
}

void ModelThread::PrefillStep(Active& active) {
  const uint32_t chunk = options_.chunk_tokens;
  const uint32_t end = std::min((active.position / chunk + 1) * chunk, active.prompt_tokens());
  const std::span<const int32_t> piece(active.tokens.data() + active.position, end - active.position);
  const bool last = end == active.prompt_tokens();
  {
    const Stopwatch watch(compute_ns_);
    if (!Decode(active, piece, last)) return;
    if (piece.size() == chunk) {
      const double mean = seconds_per_token_.load(std::memory_order_relaxed);
      seconds_per_token_.store(mean * (1 - kNewest) + watch.seconds() / chunk * kNewest, std::memory_order_relaxed);
    }
  }
  if (piece.size() == chunk) FinishChunk(active);
  if (!last) return;
  active.first_token_seconds = std::chrono::duration<double>(Clock::now() - active.admitted).count();
  counters_->first_token.Observe(active.first_token_seconds);
  Sample(active);
}

void ModelThread::DecodeStep(Active& active) {
  {
    const Stopwatch watch(compute_ns_);
    if (!Decode(active, {&active.tokens.back(), 1}, true)) return;
  }
  if (options_.save_decode_cache && active.position % options_.chunk_tokens == 0) FinishChunk(active);
  Sample(active);
}

// The chunk that ends at the sequence's position is whole.
void ModelThread::FinishChunk(Active& active) {
  if (!active.keeps) return;
  const Stopwatch watch(cache_ns_);
  KeyChain& chain = active.generation->chain;
  chain.Extend({active.tokens.data(), active.position});
  const size_t chunk = active.position / options_.chunk_tokens - 1;
  SaveChunk(active, chunk);
  active.keeps = resident_.Append(active.sequence, chain.keys()[chunk]);
}

void ModelThread::SaveChunk(Active& active, size_t chunk) {
  const KeyChain& chain = active.generation->chain;
  const Digest& key = chain.keys()[chunk];
  if (!store_.Needs(key)) return;
  if (options_.weights != nullptr && !options_.weights->Intact()) return;
  FrameInfo info;
  info.space = chain.space();
  info.key = key;
  info.parent = chain.parent(chunk);
  info.first_token = static_cast<uint32_t>(chunk) * options_.chunk_tokens;
  info.token_count = options_.chunk_tokens;
  info.payload_kind = static_cast<uint32_t>(PayloadKind::kLlamaSequence);
  info.payload_bytes = bridge_->chunk_bytes();
  Result<SaveSlot> slot = store_.BeginSave(info);
  if (!slot) {
    counters_->save_declined.Add();
    return;
  }
  if (const Result<void> exported = bridge_->Export(active.sequence, info.first_token, slot->bytes); !exported) {
    log::Error("chunk_not_exported", {{"key", key.Hex()}, {"why", exported.error().what}});
    return;
  }
  store_.Commit(std::move(*slot));
}

void ModelThread::Sample(Active& active) {
  const int32_t token = llama_sampler_sample(active.sampler.get(), context_.get(), -1);
  ++active.generated;
  counters_->generated_tokens.Add();
  if (model_.EndsGeneration(token)) return End(active, FinishReason::kStop);
  active.tokens.push_back(token);
  std::string text = active.text.Push(model_.Piece(token));
  if (!text.empty()) active.generation->sink->Text(std::move(text));
  if (active.text.stopped()) return End(active, FinishReason::kStop);
  if (active.generated == active.generation->max_tokens) End(active, FinishReason::kLength);
}

void ModelThread::End(Active& active, FinishReason reason) {
  std::string rest = active.text.Finish();
  GenerationSink& sink = *active.generation->sink;
  if (!rest.empty()) sink.Text(std::move(rest));
  CountRequest(active, "done");
  sink.Done(reason,
            {.prompt_tokens = active.prompt_tokens(), .completion_tokens = active.generated, .cached = active.cached});
  Retire(active);
}

void ModelThread::Fail(Active& active, openai::ApiError error) {
  CountRequest(active, "failed");
  active.generation->sink->Failed(std::move(error));
  Retire(active);
}

void ModelThread::CountRequest(const Active& active, const char* outcome) {
  counters_->outcomes.at(outcome)->Add();
  log::Info("request", {{"outcome", outcome},
                        {"prompt_tokens", active.prompt_tokens()},
                        {"cached_tokens", active.cached.total()},
                        {"miss_reason", active.cached.miss_reason},
                        {"generated_tokens", active.generated},
                        {"first_token_ms", static_cast<int64_t>(active.first_token_seconds * 1000)}});
}

void ModelThread::Retire(Active& active) {
  const Stopwatch watch(cache_ns_);
  Apply(resident_.Finish(active.sequence));
  active_.reset();
}

}  // namespace terrace::engine
