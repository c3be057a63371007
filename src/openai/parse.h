// Bodies of the API to structs, strictly: a value of the wrong type or out of range is a 400 that names it. Fields that
// are known to change an answer and can't be honoured are refused unless they say what happens anyway; fields that are
// not known are ignored, as vLLM does. docs/reference/api.md has the list.
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
