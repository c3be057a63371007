#include "base/text.h"

#include <algorithm>
#include <cctype>

namespace terrace {
namespace {

bool IsBlank(char c) { return std::isspace(static_cast<unsigned char>(c)) != 0; }

}  // namespace

std::string Lower(std::string_view text) {
  std::string lower(text);
  for (char& c : lower) c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  return lower;
}

std::string_view Trimmed(std::string_view text) {
  while (!text.empty() && IsBlank(text.front())) text.remove_prefix(1);
  return TrimmedEnd(text);
}

std::string_view TrimmedEnd(std::string_view text) {
  while (!text.empty() && IsBlank(text.back())) text.remove_suffix(1);
  return text;
}

std::vector<std::string> SplitList(std::string_view text) {
  std::vector<std::string> items;
  while (!text.empty()) {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view item = Trimmed(text.substr(0, comma));
    if (!item.empty()) items.emplace_back(item);
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return items;
}

std::string Quoted(std::string_view text) { return '"' + std::string(text) + '"'; }

std::string Replaced(std::string_view text, char from, char to) {
  std::string out(text);
  std::replace(out.begin(), out.end(), from, to);
  return out;
}

std::string WithoutUserInfo(std::string_view text) {
  constexpr std::string_view kScheme = "://";
  std::string shown;
  const size_t first = text.find(kScheme);
  const size_t query = first == std::string_view::npos ? first : text.find('?', first);
  if (query != std::string_view::npos) return WithoutUserInfo(text.substr(0, query)) + "?***";
  while (!text.empty()) {
    const size_t end = std::min(text.find(','), text.size());
    const std::string_view item = text.substr(0, end);
    const size_t scheme = item.find(kScheme);
    const size_t begin = scheme == std::string_view::npos ? 0 : scheme + kScheme.size();
    const size_t at = item.rfind('@');
    const bool is_url = begin > 0 || (!item.starts_with('/') && item.find(':') < at);
    if (is_url && at != std::string_view::npos && at >= begin) {
      shown += std::string(item.substr(0, begin)) + "***" + std::string(item.substr(at));
    } else {
      shown += item;
    }
    if (end < text.size()) shown += ',';
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return shown;
}

}  // namespace terrace
