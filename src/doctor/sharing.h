// Do instances share? Asks them as a client would: a long prompt that nobody has seen to the first, the same to each
// other one and through the router. Works with every OpenAI-compatible server that tells cached tokens; what only
// `terrace serve` tells (usage.terrace, /terrace/lookup) is used where it is there.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "doctor/report.h"
#include "s3/client.h"

namespace terrace::doctor {

struct SharingCheck {
  std::vector<std::string> instances;  // "http://host:port", without /v1.
  std::string router;                  // The same; "": none.
  std::string api_key;
  std::string ca_file;                        // For https; "": the system's.
  std::string shared_directory;               // To see frames appear; "": not looked at.
  const s3::ClientOptions* bucket = nullptr;  // The same.
  uint32_t prompt_tokens = 1024;              // About.
  uint64_t seed = 0;                          // Of the prompt; 0: a random one.
  std::chrono::seconds answer_max{300};
  std::chrono::seconds saved_max{60};  // For the first instance to have saved, ...
  std::chrono::seconds seen_max{10};   // ... and then for the others to see it.
};

struct SharingResult {
  double prefill_tokens_per_s = 0;  // Of a cold prompt, as its client sees it; 0: not measured.
};
SharingResult CheckSharing(const SharingCheck& check, const std::atomic<bool>& stop, Report& report);

}  // namespace terrace::doctor
