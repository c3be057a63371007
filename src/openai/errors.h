// What is said of a body that can't be taken. Pure; any thread.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

#include "openai/types.h"

namespace terrace::openai {

// For a body that the parser refused: bytes that are no UTF-8, half of a surrogate pair, or what else, with the byte
// and the field where it stands.
ApiError ExplainBadJson(std::string_view body);

// Of what a client wrote, an error repeats no more than this: a name of a megabyte is none.
inline constexpr size_t kEchoBytesMax = 100;
std::string Echo(std::string_view text);  // The text, or its beginning and "...".

// A 415: a body with a Content-Encoding.
ApiError BodyIsCoded(std::string_view coding);
ApiError NotAnObject();
ApiError GivenTwice(std::string_view name);
// A 404; `there_is` says what is served instead.
ApiError ModelNotFound(std::string_view name, std::string_view there_is);

}  // namespace terrace::openai
