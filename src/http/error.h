// Error answers in OpenAI's shape, so that every client library shows the message instead of a parse error.
#pragma once

#include <string>
#include <string_view>

namespace terrace::http {

// {"error":{"message":...,"type":...,"param":null,"code":...}}; `code` "" is null. Any bytes may stand in the texts:
// what is not UTF-8 becomes U+FFFD.
std::string ErrorBody(std::string_view message, std::string_view type, std::string_view code);

// The type OpenAI uses with a status: "invalid_request_error" below 500, "server_error" from there on.
std::string_view ErrorType(int status);

}  // namespace terrace::http
