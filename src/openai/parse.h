// Bodies of the API to structs, strictly: a value of the wrong type or out of range is a 400 that names it, and so is a
// field that nobody knows, that is known and can't be honoured (fields.h), or that stands there twice.
// docs/reference/api.md has the list.
#pragma once

#include <string>
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

// The `model` of a body of any endpoint, for who passes it on; "" if it is missing, null or empty, as in
// Request::model. What else the body has is the next one's to judge, errors of its JSON behind the model included.
std::variant<std::string, ApiError> FindModel(std::string_view body);

}  // namespace terrace::openai
