// When is a hit worth while? Loading a token's KV must be quicker than computing it.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "doctor/directory.h"
#include "doctor/model_size.h"
#include "doctor/report.h"

namespace terrace::doctor {

struct Payoff {
  uint32_t chunk_tokens = 256;
  uint64_t user_tokens = 4096;                           // Of each of 1,000 users.
  double prefill_tokens_per_s = 0;                       // Measured; 0: unknown.
  std::vector<std::pair<std::string, Bandwidth>> tiers;  // By section, those that were measured.
};

// Bytes a token, a chunk, 1,000 users; the bandwidth at which a hit pays, for usual speeds or the measured one; and
// each measured tier against it.
void TellPayoff(const ModelSize& size, const Payoff& payoff, Report& report);

}  // namespace terrace::doctor
