#include "engine/tokenizer.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <numeric>
#include <span>
#include <system_error>
#include <utility>

#include "base/assert.h"
#include "llama.h"

namespace terrace::engine {
namespace {

// For many models (gpt-oss, Mistral, DeepSeek) llama.cpp splits text by std::regex, which goes down some stack frames
// for each character of a match: a genome of 20,000 letters would end the process. What a match may be is a run,
// nearly.
constexpr size_t kRunBytesAnyStack = 2 << 10;  // Fits into any thread's stack.
constexpr size_t kStackBytesPerByte = 1 << 10;

constexpr size_t kNowhere = std::string_view::npos;

// Runs `work` on a thread with such a stack, and waits for it. Pages of it that are not used cost nothing.
void OnStackOf(size_t bytes, const std::function<void()>& work) {
  struct Call {
    const std::function<void()>& work;
    std::exception_ptr thrown;
  } call{work, nullptr};
  const auto run = [](void* raw) -> void* {
    Call& of_caller = *static_cast<Call*>(raw);
    try {
      of_caller.work();
    } catch (...) {
      of_caller.thrown = std::current_exception();
    }
    return nullptr;
  };
  pthread_attr_t attributes;
  pthread_attr_init(&attributes);
  pthread_attr_setstacksize(&attributes, bytes);
  pthread_t thread{};
  const int failed = pthread_create(&thread, &attributes, run, &call);
  pthread_attr_destroy(&attributes);
  if (failed != 0) throw std::system_error(failed, std::generic_category(), "no thread to tokenize a long run on");
  pthread_join(thread, nullptr);
  if (call.thrown) std::rethrow_exception(call.thrown);
}

bool IsBlank(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }

// Appends the tokens of text without special tokens.
void Append(const llama_vocab* vocab, std::string_view text, bool add_special, std::vector<int32_t>& into) {
  // A token mostly has at least one byte of text; if that is not enough llama.cpp says how many there are.
  const size_t before = into.size();
  for (size_t room = text.size() + 8;;) {
    into.resize(before + room);
    const int32_t count = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), into.data() + before,
                                         static_cast<int32_t>(room), add_special, /*parse_special=*/false);
    if (count >= 0 || count == std::numeric_limits<int32_t>::min()) {
      into.resize(before + static_cast<size_t>(std::max(count, 0)));
      return;
    }
    room = static_cast<size_t>(-count);
  }
}

}  // namespace

size_t LongestRun(std::string_view text) {
  size_t longest = 0, begin = 0;
  for (size_t i = 1; i <= text.size(); ++i) {
    if (i < text.size() && IsBlank(text[i]) == IsBlank(text[begin])) continue;
    longest = std::max(longest, i - begin);
    begin = i;
  }
  return longest;
}

Tokenizer::Tokenizer(const llama_vocab* vocab) : vocab_(vocab) {
  constexpr int kSpecial = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
  for (int32_t token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
    const int32_t bytes = -llama_token_to_piece(vocab, token, nullptr, 0, 0, /*special=*/true);
    longest_piece_ = std::max(longest_piece_, static_cast<size_t>(std::max(bytes, 1)));
    const int attributes = llama_vocab_get_attr(vocab, token);
    std::string text = llama_vocab_get_text(vocab, token);
    if ((attributes & kSpecial) == 0 || text.empty()) continue;
    specials_.push_back({.token = token,
                         .text = std::move(text),
                         .strips_left = (attributes & LLAMA_TOKEN_ATTR_LSTRIP) != 0,
                         .strips_right = (attributes & LLAMA_TOKEN_ATTR_RSTRIP) != 0});
    strips_ = strips_ || specials_.back().strips_left || specials_.back().strips_right;
    longest_piece_ = std::max(longest_piece_, specials_.back().text.size());
  }
  // Not a stable sort: of equally long tokens that overlap in a text the first one wins, and llama.cpp sorts the same
  // list by the same comparison.
  std::ranges::sort(specials_, std::ranges::greater{}, [](const Special& special) { return special.text.size(); });
  for (const Special& special : specials_) begins_[static_cast<unsigned char>(special.text.front())] = true;
  by_text_.resize(specials_.size());
  std::iota(by_text_.begin(), by_text_.end(), size_t{0});
  std::ranges::sort(by_text_, {}, [this](size_t i) -> std::string_view { return specials_[i].text; });

  std::vector<int32_t> around;
  Append(vocab, "", /*add_special=*/true, around);
  const size_t first = around.size() == 1 ? size_t{llama_vocab_get_add_bos(vocab)} : around.size() / 2;
  first_.assign(around.begin(), around.begin() + static_cast<std::ptrdiff_t>(first));
  last_.assign(around.begin() + static_cast<std::ptrdiff_t>(first), around.end());
}

// For each special token where its first occurrence begins and its last one ends; nowhere if it does not occur.
std::vector<std::pair<size_t, size_t>> Tokenizer::FindSpans(std::string_view text) const {
  std::vector<std::pair<size_t, size_t>> spans(specials_.size(), {kNowhere, 0});
  for (size_t at = 0; at < text.size(); ++at) {
    if (!begins_[static_cast<unsigned char>(text[at])]) continue;
    // Those whose first `depth` bytes stand at `at`; texts of just that length come first among them.
    std::span<const size_t> same = by_text_;
    for (size_t depth = 0; at + depth < text.size() && !same.empty(); ++depth) {
      const auto byte = [&](size_t i) {
        const std::string& of = specials_[i].text;
        return depth < of.size() ? int{static_cast<unsigned char>(of[depth])} : -1;
      };
      const auto narrowed = std::ranges::equal_range(same, int{static_cast<unsigned char>(text[at + depth])}, {}, byte);
      same = {narrowed.begin(), narrowed.end()};
      for (size_t i = 0; i < same.size() && specials_[same[i]].text.size() == depth + 1; ++i) {
        auto& [begin, end] = spans[same[i]];
        begin = std::min(begin, at);
        end = at + depth + 1;
      }
    }
  }
  return spans;
}

std::vector<Tokenizer::Piece> Tokenizer::Split(std::string_view text) const {
  const std::vector<std::pair<size_t, size_t>> spans = FindSpans(text);
  std::string taken(text.size(), 0);  // 1: the byte is of a special token, or stripped by one.
  std::vector<Piece> pieces;
  for (size_t i = 0; i < specials_.size(); ++i) {
    const auto& [token, looks, strips_left, strips_right] = specials_[i];
    const auto [span_begin, span_end] = spans[i];
    if (span_begin == kNowhere) continue;
    const std::string_view within = text.substr(0, span_end);
    for (size_t at = span_begin; (at = within.find(looks, at)) != kNowhere;) {
      const size_t end = at + looks.size();
      const size_t last_taken = std::string_view(taken).substr(at, looks.size()).rfind('\1');
      if (last_taken != kNowhere) {
        at += last_taken + 1;
        continue;
      }
      pieces.push_back({.token = token, .text = text.substr(at, looks.size())});
      std::fill(taken.begin() + static_cast<std::ptrdiff_t>(at), taken.begin() + static_cast<std::ptrdiff_t>(end),
                '\1');
      for (size_t b = at; strips_left && b > 0 && taken[b - 1] == 0 && IsBlank(text[b - 1]); --b) taken[b - 1] = 1;
      for (at = end; strips_right && at < text.size() && taken[at] == 0 && IsBlank(text[at]); ++at) taken[at] = 1;
    }
  }
  const std::string_view map = taken;
  for (size_t at = 0; (at = map.find('\0', at)) != kNowhere;) {
    const size_t end = std::min(map.find('\1', at), map.size());
    pieces.push_back({.token = -1, .text = text.substr(at, end - at)});
    at = end;
  }
  std::ranges::sort(pieces, {}, [](const Piece& piece) { return piece.text.data(); });
  return pieces;
}

size_t Tokenizer::LeastTokens(const Piece& piece) const {
  return piece.token >= 0 ? 1 : (piece.text.size() + longest_piece_ - 1) / longest_piece_;
}

void Tokenizer::TokenizePieces(const std::vector<Piece>& pieces, const TokenBounds& bounds, Tokenized& into) const {
  for (const Piece& piece : pieces) {
    if (into.at_least > bounds.tokens_max || bounds.stop()) return;
    const size_t before = into.tokens.size();
    if (piece.token >= 0) {
      into.tokens.push_back(piece.token);
    } else {
      Append(vocab_, piece.text, /*add_special=*/false, into.tokens);
    }
    into.at_least += into.tokens.size() - before;
    into.at_least -= std::min(into.at_least, LeastTokens(piece));  // Now counted, no longer guessed.
  }
  into.tokens.insert(into.tokens.end(), last_.begin(), last_.end());
  into.whole = true;
}

Tokenized Tokenizer::Tokenize(std::string_view text, const TokenBounds& bounds) const {
  const size_t run = LongestRun(text);
  TERRACE_ASSERT(run <= kRunBytesMax);
  Tokenized done;
  // Before anything else, unless blanks without end may be stripped.
  done.at_least = text.size() / longest_piece_;
  if (!strips_ && done.at_least > bounds.tokens_max) return done;

  const std::vector<Piece> pieces = Split(text);
  done.tokens = first_;
  done.at_least = first_.size() + last_.size();
  for (const Piece& piece : pieces) done.at_least += LeastTokens(piece);
  const auto tokenize = [&] { TokenizePieces(pieces, bounds, done); };
  if (run <= kRunBytesAnyStack || done.at_least > bounds.tokens_max) {
    tokenize();
  } else {
    OnStackOf((1 << 20) + run * kStackBytesPerByte, tokenize);
  }
  return done;
}

}  // namespace terrace::engine
