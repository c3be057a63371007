// Text to token ids, as llama.cpp's own `llama_tokenize` does it with special tokens recognised, in time that grows
// with the text: llama.cpp's search for special tokens takes the square of how many there are.
//
// Made once for a vocabulary, then used by any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

struct llama_vocab;

namespace terrace::engine {

// Bytes of the longest stretch of `text` that is blanks alone, or has none.
size_t LongestRun(std::string_view text);
// What Tokenize takes of that: it may cost a stack of a thousand times as many bytes.
inline constexpr size_t kRunBytesMax = 256 << 10;

struct TokenBounds {
  size_t tokens_max = std::numeric_limits<size_t>::max();
  std::function<bool()> stop = [] { return false; };  // Asked between pieces: nobody wants the tokens any more.
};

struct Tokenized {
  std::vector<int32_t> tokens;  // Of all the text, if `whole`.
  size_t at_least = 0;          // How many tokens the text has; if not `whole`, as far as that is known.
  bool whole = false;           // False: given up, because at_least is above the bound, or because `stop` said so.
};

class Tokenizer {
 public:
  explicit Tokenizer(const llama_vocab* vocab);  // Outlives the tokenizer; not of type NONE.

  // With the tokens that the model wants at the start and the end of a sequence. The text's LongestRun is at most
  // kRunBytesMax. May throw: what llama.cpp throws, or for want of memory.
  Tokenized Tokenize(std::string_view text, const TokenBounds& bounds) const;

  // One special token, or text that has none.
  struct Piece {
    int32_t token = -1;  // -1: text.
    std::string_view text;
  };
  // Where llama.cpp would cut: longer special tokens first, each from left to right.
  std::vector<Piece> Split(std::string_view text) const;

 private:
  struct Special {
    int32_t token;
    std::string text;
    bool strips_left, strips_right;  // Blanks on that side belong to no piece.
  };

  void TokenizePieces(const std::vector<Piece>& pieces, const TokenBounds& bounds, Tokenized& into) const;
  size_t LeastTokens(const Piece& piece) const;
  std::vector<std::pair<size_t, size_t>> FindSpans(std::string_view text) const;

  const llama_vocab* vocab_;
  std::vector<Special> specials_;      // In llama.cpp's order.
  std::vector<size_t> by_text_;        // Indexes of specials_, in the order of their texts.
  std::array<bool, 256> begins_{};     // One of them begins with this byte.
  bool strips_ = false;                // One of them strips blanks.
  size_t longest_piece_ = 1;           // Bytes of text that a token stands for, at most.
  std::vector<int32_t> first_, last_;  // What the model wants around a sequence.
};

}  // namespace terrace::engine
