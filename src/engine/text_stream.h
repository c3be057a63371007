// Pieces of tokens in, text that may be shown out: never half a code point, nothing of a stop string, nothing after it.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace terrace::engine {

class TextStream {
 public:
  // Empty stops are ignored.
  explicit TextStream(std::vector<std::string> stops);

  // Text that is safe to show after this piece; what may yet become a stop string or a whole code point is held back.
  std::string Push(std::string_view piece);

  // A stop string was met: all before it has been given out, nothing more will be.
  bool stopped() const { return stopped_; }

  // What was held back, when no more comes.
  std::string Finish();

 private:
  std::vector<std::string> stops_;
  std::string held_;  // Shorter than the longest stop plus the piece just pushed.
  bool stopped_ = false;
};

// Bytes at the end of `text` that begin a code point and don't finish it: 0 to 3.
size_t UnfinishedUtf8(std::string_view text);

}  // namespace terrace::engine
