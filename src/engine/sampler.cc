#include "engine/sampler.h"

#include <algorithm>
#include <vector>

#include "llama.h"

namespace terrace::engine {
namespace {

// Below it the most likely token is certain, and logits divided by it pass what a float holds.
constexpr float kTemperatureMin = 1e-5f;

}  // namespace

void SamplerDeleter::operator()(llama_sampler* sampler) const { llama_sampler_free(sampler); }

// In vLLM's order: biases and penalties steer a greedy choice too, and temperature comes before what is left to choose
// from.
SamplerPtr MakeSampler(const Sampling& sampling, std::span<const int32_t> prompt, uint32_t vocabulary,
                       uint32_t context_tokens) {
  const auto tokens = static_cast<int32_t>(vocabulary);
  const auto last = static_cast<int32_t>(context_tokens);
  SamplerPtr chain(llama_sampler_chain_init({.no_perf = true}));
  const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(chain.get(), sampler); };
  if (!sampling.logit_bias.empty()) {
    std::vector<llama_logit_bias> biases;
    for (const openai::LogitBias& bias : sampling.logit_bias) biases.push_back({bias.token, bias.bias});
    add(llama_sampler_init_logit_bias(tokens, static_cast<int32_t>(biases.size()), biases.data()));
  }
  if (sampling.repetition_penalty != 1.0f) {
    llama_sampler* penalty = llama_sampler_init_penalties(tokens, last, sampling.repetition_penalty, 0, 0);
    for (const int32_t token : prompt) llama_sampler_accept(penalty, token);
    add(penalty);
  }
  if (sampling.presence_penalty != 0.0f || sampling.frequency_penalty != 0.0f) {
    add(llama_sampler_init_penalties(tokens, last, 1, sampling.frequency_penalty, sampling.presence_penalty));
  }
  if (sampling.temperature < kTemperatureMin) {
    add(llama_sampler_init_greedy());
    return chain;
  }
  add(llama_sampler_init_temp(sampling.temperature));
  if (sampling.min_p > 0.0f) add(llama_sampler_init_min_p(sampling.min_p, 1));
  if (sampling.top_k > 0) add(llama_sampler_init_top_k(static_cast<int32_t>(std::min(sampling.top_k, vocabulary))));
  add(llama_sampler_init_top_p(sampling.top_p, 1));
  add(llama_sampler_init_dist(sampling.seed));
  return chain;
}

}  // namespace terrace::engine
