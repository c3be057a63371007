// How the next token is chosen, by llama.cpp's samplers.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "engine/generation.h"

struct llama_sampler;  // NOLINT(readability-identifier-naming): llama.cpp's.

namespace terrace::engine {

struct SamplerDeleter {
  void operator()(llama_sampler* sampler) const;
};
using SamplerPtr = std::unique_ptr<llama_sampler, SamplerDeleter>;

// For the answer to `prompt`. The same logits, sampling and prompt give the same tokens. `context_tokens`: penalties
// reach back so far, which is as far as a sequence goes.
SamplerPtr MakeSampler(const Sampling& sampling, std::span<const int32_t> prompt, uint32_t vocabulary,
                       uint32_t context_tokens);

}  // namespace terrace::engine
