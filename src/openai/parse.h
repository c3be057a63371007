// Bodies of the API to structs, strictly: a value of the wrong type or out of range is a 400 that names it. Fields that
// are not known are ignored, as OpenAI-compatible servers do; fields that would change the shape of the answer and
// can't be honoured are refused.
#pragma once

#include <string_view>
#include <variant>

#include "openai/types.h"

namespace terrace::openai {

enum class Endpoint {
  kChat,        // /v1/chat/completions
  kCompletion,  // /v1/completions
  kEither,      // By whether the body has `messages`.
};

std::variant<Request, ApiError> ParseRequest(std::string_view body, Endpoint endpoint);

}  // namespace terrace::openai
