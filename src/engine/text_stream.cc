#include "engine/text_stream.h"

#include <algorithm>
#include <utility>

namespace terrace::engine {
namespace {

// Bytes at the end of `text` that are the beginning of `stop` and not all of it.
size_t BegunStop(std::string_view text, std::string_view stop) {
  for (size_t length = std::min(text.size(), stop.size() - 1); length > 0; --length) {
    if (text.substr(text.size() - length) == stop.substr(0, length)) return length;
  }
  return 0;
}

}  // namespace

size_t UnfinishedUtf8(std::string_view text) {
  for (size_t back = 1; back <= std::min<size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if ((byte & 0xc0) == 0x80) continue;  // A continuation; its beginning lies further back.
    const size_t length = byte >= 0xf0 && byte < 0xf8 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return byte < 0xf8 && length > back ? back : 0;
  }
  return 0;
}

TextStream::TextStream(std::vector<std::string> stops) : stops_(std::move(stops)) {
  std::erase_if(stops_, [](const std::string& stop) { return stop.empty(); });
}

std::string TextStream::Push(std::string_view piece) {
  if (stopped_) return "";
  held_ += piece;
  size_t first = std::string::npos;
  size_t hold = UnfinishedUtf8(held_);
  for (const std::string& stop : stops_) {
    first = std::min(first, held_.find(stop));
    hold = std::max(hold, BegunStop(held_, stop));
  }
  stopped_ = first != std::string::npos;
  std::string text = held_.substr(0, stopped_ ? first : held_.size() - hold);
  held_.erase(0, stopped_ ? held_.size() : text.size());
  return text;
}

std::string TextStream::Finish() { return std::exchange(held_, ""); }

}  // namespace terrace::engine
