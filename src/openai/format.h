// Answers of the API as bytes: whole bodies, events of a stream, errors. Pure; any thread. Text that is no valid UTF-8
// is replaced, never passed on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "openai/types.h"

namespace terrace::openai {

// What all parts of one answer share.
struct AnswerHead {
  bool chat = false;
  std::string id;       // "chatcmpl-..." or "cmpl-...".
  int64_t created = 0;  // Seconds since 1970.
  std::string model;
};

std::string NewAnswerId(bool chat);  // Random.

// A whole answer. `finish_reason`: "stop" or "length".
std::string AnswerBody(const AnswerHead& head, std::string_view text, std::string_view finish_reason,
                       const Usage& usage);

// Events of a stream, each `data: {...}\n\n`. With `include_usage` all but the last carry `"usage": null`.
std::string StreamStart(const AnswerHead& head, bool include_usage);  // Chat: the role; completion: nothing.
std::string StreamText(const AnswerHead& head, std::string_view text, bool include_usage);
// The finish reason, then the usage if asked for, then [DONE].
std::string StreamEnd(const AnswerHead& head, std::string_view finish_reason, const Usage* usage);
std::string StreamError(const ApiError& error);  // A stream that broke: an error event, then [DONE].

std::string ErrorBody(const ApiError& error);
std::string ModelsBody(std::string_view model, int64_t created, uint32_t context_tokens);
std::string HealthBody(bool degraded, std::string_view why);

struct LookupAnswer {
  uint32_t prompt_tokens = 0;
  CachedTokens cached;
  uint32_t chunk_tokens = 0;
  uint64_t pending_saves = 0;
};
std::string LookupBody(const LookupAnswer& answer);

}  // namespace terrace::openai
