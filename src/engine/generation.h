// One request as it goes from the HTTP side to the model thread, and what comes back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "openai/types.h"
#include "terrace/key.h"
#include "terrace/store.h"

namespace terrace::engine {

struct Sampling {
  float temperature = 1.0f;  // 0: greedy.
  float top_p = 1.0f;
  float min_p = 0.0f;
  uint32_t top_k = 0;  // 0: all.
  // For each token of the answer so far, and as often as it is there.
  float presence_penalty = 0.0f, frequency_penalty = 0.0f;
  float repetition_penalty = 1.0f;            // For tokens of the prompt too.
  std::vector<openai::LogitBias> logit_bias;  // Of tokens that the model knows.
  uint32_t seed = 0;
};

enum class FinishReason { kStop, kLength };

// Where a generation goes. Called on the model thread, which must not be held up; gone() on any thread; Failed() of one
// that waits its turn by whoever stops the thread.
class GenerationSink {
 public:
  virtual ~GenerationSink() = default;
  // Text that is safe to show. Not empty.
  virtual void Text(std::string text) = 0;
  // The last call is one of these two.
  virtual void Done(FinishReason reason, const openai::Usage& usage) = 0;
  virtual void Failed(openai::ApiError error) = 0;
  // Nobody listens any more: the generation ends at once, without a last call.
  virtual bool gone() const = 0;
};

// Chunks first .. first + chunks - 1 of a prompt on their way from the store.
struct Prefetch {
  size_t first = 0;
  size_t chunks = 0;
  Reason miss_reason = Reason::kNone;  // Why chunk first + chunks is not among them.
  std::shared_ptr<LoadJob> job;        // Null if chunks is 0.
  TimePoint deadline;                  // Of the job.
  size_t end() const { return first + chunks; }
};

struct Generation {
  std::vector<int32_t> tokens;  // The prompt; at least one.
  uint32_t max_tokens = 1;      // Prompt and these fit the context.
  Sampling sampling;
  std::vector<std::string> stops;

  KeyChain chain{Digest{}, 1};       // Names of the prompt's whole chunks; extended by decode.
  Reason not_named = Reason::kNone;  // Why there are no names: then nothing is looked up or saved.
  size_t usable = 0;                 // Chunks that may come from a cache: one token is always left to compute.
  std::vector<Prefetch> prefetches;  // Begun while the request waits its turn.
  std::unique_ptr<GenerationSink> sink;
};

}  // namespace terrace::engine
