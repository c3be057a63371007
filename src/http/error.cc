#include "http/error.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>

namespace terrace::http {
namespace {

// Length of the well-formed UTF-8 sequence at the front of `text`, or 0.
size_t Utf8Length(std::string_view text) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return 1;
  const size_t length = lead >= 0xf0 ? 4 : lead >= 0xe0 ? 3 : 2;
  if (lead < 0xc2 || lead > 0xf4 || text.size() < length) return 0;
  for (size_t i = 1; i < length; ++i) {
    if ((at(i) & 0xc0) != 0x80) return 0;
  }
  // Overlong forms, surrogates and what lies above U+10FFFF differ in the second byte.
  if ((lead == 0xe0 && at(1) < 0xa0) || (lead == 0xed && at(1) > 0x9f)) return 0;
  if ((lead == 0xf0 && at(1) < 0x90) || (lead == 0xf4 && at(1) > 0x8f)) return 0;
  return length;
}

void AppendQuoted(std::string& out, std::string_view text) {
  out += '"';
  while (!text.empty()) {
    const size_t length = Utf8Length(text);
    if (length == 0) {
      out += "\xEF\xBF\xBD";
      text.remove_prefix(1);
      continue;
    }
    const char c = text[0];
    if (c == '"' || c == '\\') {
      (out += '\\') += c;
    } else if (length == 1 && static_cast<uint8_t>(c) < 0x20) {
      std::array<char, 8> escaped;
      std::snprintf(escaped.data(), escaped.size(), "\\u%04x", static_cast<unsigned>(c));
      out += escaped.data();
    } else {
      out += text.substr(0, length);
    }
    text.remove_prefix(length);
  }
  out += '"';
}

}  // namespace

std::string ErrorBody(std::string_view message, std::string_view type, std::string_view code) {
  std::string out = R"({"error":{"message":)";
  AppendQuoted(out, message);
  out += R"(,"type":)";
  AppendQuoted(out, type);
  out += R"(,"param":null,"code":)";
  if (code.empty()) {
    out += "null";
  } else {
    AppendQuoted(out, code);
  }
  out += "}}";
  return out;
}

std::string_view ErrorType(int status) { return status < 500 ? "invalid_request_error" : "server_error"; }

}  // namespace terrace::http
