#include "chunk/name.h"

namespace terrace {
namespace {

constexpr size_t kComponentBytes = 200;   // Leaves room below NAME_MAX (255) for a suffix.
constexpr std::string_view kEmpty = "%";  // No name encodes to a lone percent sign.

bool Plain(char c) { return (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9') || c == '_' || c == '-' || c == '.'; }

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  return -1;
}

}  // namespace

std::string EncodeName(std::string_view name) {
  static constexpr char kDigits[] = "0123456789abcdef";
  if (name.empty()) return std::string(kEmpty);
  std::string path;
  size_t component = 0;  // Bytes in the component being written.
  for (const char c : name) {
    if (component + 3 > kComponentBytes - 1) {  // The longest piece and the '+' must fit.
      path += "+/";
      component = 0;
    }
    if (Plain(c) && !(c == '.' && component == 0)) {
      path.push_back(c);
      component += 1;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      path.push_back('%');
      path.push_back(kDigits[byte >> 4]);
      path.push_back(kDigits[byte & 15]);
      component += 3;
    }
  }
  return path;
}

std::optional<std::string> DecodeName(std::string_view path) {
  std::string name;
  if (path != kEmpty) {
    for (size_t i = 0; i < path.size();) {
      if (path[i] == '%' && i + 2 < path.size()) {
        const int high = HexValue(path[i + 1]);
        const int low = HexValue(path[i + 2]);
        if (high < 0 || low < 0) return std::nullopt;
        name.push_back(static_cast<char>(high << 4 | low));
        i += 3;
      } else if (path[i] == '+' && i + 1 < path.size() && path[i + 1] == '/') {
        i += 2;
      } else {
        name.push_back(path[i++]);
      }
    }
  }
  // One spelling a name: whatever else was in `path`, it does not encode back to itself.
  if (EncodeName(name) != path) return std::nullopt;
  return name;
}

}  // namespace terrace
