// OpenAI's HTTP API as plain structs: what a request asks for, what an answer reports. No JSON here.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace terrace::openai {

struct Message {
  std::string role;     // system, developer, user, assistant, tool or function.
  std::string content;  // Text parts joined by newlines. "" also if there is none.
  // What else templates read, as a JSON object: `name`, `tool_call_id`, `reasoning_content`, `tool_calls`; "" if
  // nothing.
  std::string more;
};

struct LogitBias {
  int32_t token = 0;  // Not negative.
  float bias = 0;     // -100..100.
};

// A body of /v1/chat/completions (`chat`) or /v1/completions.
struct Request {
  bool chat = false;
  std::string model;                    // "" if the body has none.
  std::vector<Message> messages;        // Chat: at least one.
  std::string chat_template_kwargs;     // A JSON object: variables for the template; "" if none.
  bool add_generation_prompt = true;    // Chat: the text ends with the head of an assistant's message.
  bool continue_final_message = false;  // Chat: the answer goes on with the last message, an assistant's with content.
  std::string prompt;                   // Completion by text,
  std::vector<int32_t> prompt_tokens;   // or by token ids (then not empty).
  std::optional<uint32_t> max_tokens;   // At least 1.
  std::vector<std::string> stop;        // At most kStopsMax, none empty.
  double temperature = 1.0;             // 0..2; 0 is greedy.
  double top_p = 1.0;                   // 0..1.
  double min_p = 0.0;                   // 0..1.
  uint32_t top_k = 0;                   // 0: all.
  double presence_penalty = 0.0;        // -2..2, as the next one: for tokens of the answer so far.
  double frequency_penalty = 0.0;
  double repetition_penalty = 1.0;    // 0.1..2: for tokens of the prompt too.
  std::vector<LogitBias> logit_bias;  // At most kLogitBiasesMax, each token once.
  std::optional<int64_t> seed;
  bool stream = false;
  bool include_usage = false;  // Only with `stream`.
  std::string cache_salt;      // "" is the same as none.
};

inline constexpr size_t kStopsMax = 4;
// Bounds how much text a stream may hold back, and what a stop costs per token.
inline constexpr size_t kStopBytesMax = 1024;
// Bounds what a bias costs per token.
inline constexpr size_t kLogitBiasesMax = 1024;

// An answer in OpenAI's error shape.
struct ApiError {
  int status = 400;
  std::string message;
  std::string type = "invalid_request_error";
  std::string param;  // "": null.
  std::string code;   // "": null.
};

// The tiers of usage.terrace.cached_by_tier, always all of them and in this order.
inline constexpr std::array<std::string_view, 5> kTiers = {"engine", "ram", "disk", "shared_fs", "s3"};

struct CachedTokens {
  std::array<uint32_t, kTiers.size()> by_tier{};  // As kTiers.
  std::string miss_reason = "none";               // Why the next chunk was none.

  void Add(std::string_view tier, uint32_t tokens) {
    for (size_t i = 0; i < kTiers.size(); ++i) {
      if (kTiers[i] == tier) by_tier[i] += tokens;
    }
  }
  uint32_t total() const { return std::accumulate(by_tier.begin(), by_tier.end(), 0u); }
};

struct Usage {
  uint32_t prompt_tokens = 0;
  uint32_t completion_tokens = 0;
  CachedTokens cached;
};

}  // namespace terrace::openai
