#include "openai/errors.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

namespace terrace::openai {
namespace {

// Reads up to the error and knows the way there: `messages[0].content`.
class PathFinder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Value(); }
  bool string(string_t&) override { return Value(); }
  bool start_object(size_t) override { return levels_.push_back({.is_array = false}), true; }
  bool start_array(size_t) override { return levels_.push_back({.is_array = true}), true; }
  bool key(string_t& name) override { return levels_.back().key = std::move(name), true; }
  bool end_object() override { return levels_.pop_back(), Value(); }
  bool end_array() override { return levels_.pop_back(), Value(); }
  bool parse_error(size_t at, const std::string&, const nlohmann::json::exception& error) override {
    position = at;
    why = error.what();
    return false;
  }

  std::string Path() const {
    std::string path;
    for (const Level& level : levels_) {
      if (level.is_array) {
        path += '[' + std::to_string(level.index) + ']';
      } else if (!level.key.empty()) {
        path += (path.empty() ? "" : ".") + level.key;
      }
    }
    return path;
  }

  size_t position = 0;  // Bytes read when the error was met.
  std::string why;

 private:
  struct Level {
    bool is_array = false;
    size_t index = 0;      // Of an array: the element that is being read.
    std::string key = {};  // Of an object: the member that is being read; "" between two.
  };

  // A whole value was read: what comes is the next one.
  bool Value() {
    if (levels_.empty()) return true;
    ++levels_.back().index;
    levels_.back().key.clear();
    return true;
  }

  std::vector<Level> levels_;
};

std::string Where(size_t byte, const std::string& path) {
  return " at byte " + std::to_string(byte) + (path.empty() ? "" : ", in '" + path + "'");
}

// Index of the byte that is no UTF-8, where the parser has read `bytes_read` up to its error: the last of them, or the
// beginning of the character that this one does not belong to.
size_t BadByte(std::string_view body, size_t bytes_read) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(body[i]); };
  const size_t last = std::min(bytes_read, body.size()) - 1;
  size_t begin = last;
  while (begin > 0 && (byte(begin - 1) & 0xc0) == 0x80) --begin;
  if (begin == 0) return last;
  const size_t lead = begin - 1;
  const size_t length = byte(lead) >= 0xf0 ? 4 : byte(lead) >= 0xe0 ? 3 : byte(lead) >= 0xc0 ? 2 : 1;
  return lead + length > last ? lead : last;
}

bool Has(std::string_view text, std::string_view part) { return text.find(part) != std::string_view::npos; }

}  // namespace

ApiError ExplainBadJson(std::string_view body) {
  PathFinder finder;
  nlohmann::json::sax_parse(body.begin(), body.end(), &finder);
  const std::string path = finder.Path();
  const std::string where = " at byte " + std::to_string(finder.position) + (path.empty() ? "" : ", in '" + path + "'");
  if (Has(finder.why, "surrogate")) {
    return {.message = "the body has half of a surrogate pair" + where +
                       ": \\ud800 to \\udbff and \\udc00 to \\udfff stand for a character only together",
            .param = path,
            .code = "invalid_unicode"};
  }
  if (Has(finder.why, "ill-formed UTF-8")) {
    const size_t at = BadByte(body, finder.position);
    std::array<char, 8> hex;
    std::snprintf(hex.data(), hex.size(), "0x%02X", static_cast<uint8_t>(body[at]));
    return {
        .message = "the body is not UTF-8: " + std::string(hex.data()) + Where(at + 1, path) + "; send JSON as UTF-8",
        .param = path,
        .code = "invalid_unicode"};
  }
  // Of "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while ..." the last part.
  const size_t colon = finder.why.find(": ");
  const std::string why = colon == std::string::npos ? finder.why : finder.why.substr(colon + 2);
  return {.message = "the body is not valid JSON" + where + ": " + why, .code = "invalid_json"};
}

std::string Echo(std::string_view text) {
  if (text.size() <= kEchoBytesMax) return std::string(text);
  size_t end = kEchoBytesMax;
  while (end > 0 && (static_cast<uint8_t>(text[end]) & 0xc0) == 0x80) --end;  // Not within a character.
  return std::string(text.substr(0, end)) + "...";
}

ApiError BodyIsCoded(std::string_view coding) {
  return {.status = 415,
          .message = "the body has Content-Encoding '" + Echo(coding) + "'; send it as it is, without one",
          .code = "unsupported_encoding"};
}

ApiError NotAnObject() { return {.message = "the body must be a JSON object", .code = "invalid_json"}; }

ApiError GivenTwice(std::string_view name) {
  const std::string shown = Echo(name);
  return {.message = "'" + shown + "' is given twice; which one is meant?", .param = shown};
}

ApiError ModelNotFound(std::string_view name, std::string_view there_is) {
  return {.status = 404,
          .message = "the model '" + Echo(name) + "' does not exist; " + std::string(there_is),
          .param = "model",
          .code = "model_not_found"};
}

}  // namespace terrace::openai
