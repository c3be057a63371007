// Would catch: other token ids than llama.cpp gives for the same text, which is another prompt and shares with nobody;
// a text that costs the square of its special tokens; a run that is taken for shorter than it is, which would end the
// process when it is tokenized; a prompt that fits and is refused, or one that can't fit and is tokenized to the end.
#include "engine/tokenizer.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "engine/model.h"
#include "llama.h"

namespace terrace::engine {
namespace {

TEST(LongestRun, IsOfBlanksAloneOrOfNone) {
  EXPECT_EQ(LongestRun(""), 0u);
  EXPECT_EQ(LongestRun("a"), 1u);
  EXPECT_EQ(LongestRun("abc de"), 3u);
  EXPECT_EQ(LongestRun("de abc"), 3u);
  EXPECT_EQ(LongestRun("abc de \t\r\n f"), 5u);
  EXPECT_EQ(LongestRun("\xc3\xa9\xc3\xa9 e"), 4u);
  EXPECT_EQ(LongestRun(std::string("a\0b c", 5)), 3u);
}

// Vocabularies that llama.cpp's sources bring: BPE and SPM, with and without a prefixed blank, special tokens that
// strip blanks (phi-3), that overlap (runs of blanks in gpt-neox and mpt), and thousands of them (gemma-4).
constexpr const char* kVocabularies[] = {"llama-spm", "phi-3", "baichuan", "llama-bpe", "gpt-2",          "gpt-neox",
                                         "mpt",       "qwen2", "qwen35",   "gemma-4",   "deepseek-coder", "command-r"};

std::unique_ptr<llama_model, ModelDeleter> LoadVocabulary(const std::string& path) {
  llama_log_set([](ggml_log_level, const char*, void*) {}, nullptr);
  llama_model_params params = llama_model_default_params();
  params.vocab_only = true;
  return std::unique_ptr<llama_model, ModelDeleter>(llama_model_load_from_file(path.c_str(), params));
}

std::string VocabularyPath(const std::string& name) {
  const char* directory = std::getenv("LLAMA_DIR");
  return std::string(directory == nullptr ? "" : directory) + "/source/models/ggml-vocab-" + name + ".gguf";
}

std::vector<int32_t> ByLlama(const llama_vocab* vocab, const std::string& text) {
  std::vector<int32_t> tokens(text.size() + 16);
  const int32_t count = llama_tokenize(vocab, text.data(), static_cast<int32_t>(text.size()), tokens.data(),
                                       static_cast<int32_t>(tokens.size()), true, true);
  EXPECT_GE(count, 0);
  tokens.resize(static_cast<size_t>(std::max(count, 0)));
  return tokens;
}

class Texts {
 public:
  Texts(const llama_vocab* vocab, unsigned seed) : random_(seed) {
    constexpr int kSpecial = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
    for (int32_t token = 0; token < llama_vocab_n_tokens(vocab); ++token) {
      if ((llama_vocab_get_attr(vocab, token) & kSpecial) != 0) {
        specials_.emplace_back(llama_vocab_get_text(vocab, token));
      }
    }
  }

  std::string Next() {
    static const std::vector<std::string> words = {
        " ", "  ", "\n", "\n\n",         "\t", "a",  " the", "Hello", "12345", "é", "中文", "<",   "|>",  "<|",
        ">", "</", "_",  "\xe2\x96\x81", "\r", "\v", "=",    "🙂",    "[",     "]", "'s",   ".\n", "    "};
    std::string text;
    for (size_t parts = Below(12); parts > 0; --parts) {
      const std::string& special = specials_.empty() ? words[0] : specials_[Below(specials_.size())];
      switch (Below(5)) {
        case 0: text += special; break;
        case 1: text += special.substr(0, Below(special.size() + 1)); break;  // Begun.
        case 2: text += special.substr(Below(special.size())); break;         // The end of one.
        case 3: text.append(Below(9), Below(2) == 0 ? ' ' : '\n'); break;
        default: text += words[Below(words.size())];
      }
    }
    return text;
  }

 private:
  size_t Below(size_t n) { return std::uniform_int_distribution<size_t>(0, n - 1)(random_); }

  std::mt19937 random_;
  std::vector<std::string> specials_;
};

void ExpectLlamasTokens(const llama_vocab* vocab, const std::string& name) {
  const unsigned seed = std::random_device{}();
  SCOPED_TRACE(name + ", seed " + std::to_string(seed));
  const Tokenizer tokenizer(vocab);
  Texts texts(vocab, seed);
  for (int i = 0; i < 700; ++i) {
    const std::string text = texts.Next();
    const Tokenized found = tokenizer.Tokenize(text, {});
    ASSERT_TRUE(found.whole);
    ASSERT_EQ(found.tokens, ByLlama(vocab, text)) << '"' << text << '"';
    ASSERT_EQ(found.at_least, found.tokens.size()) << '"' << text << '"';
    if (found.tokens.empty()) continue;
    ASSERT_TRUE(tokenizer.Tokenize(text, {.tokens_max = found.tokens.size()}).whole) << '"' << text << '"';
  }
}

TEST(Tokenizer, GivesTheTokensThatLlamaGives) {
  for (const char* name : kVocabularies) {
    const auto model = LoadVocabulary(VocabularyPath(name));
    ASSERT_NE(model, nullptr) << VocabularyPath(name);
    ExpectLlamasTokens(llama_model_get_vocab(model.get()), name);
  }
}

TEST(Tokenizer, GivesThemForTheModelOfTheTests) {
  const auto model = LoadVocabulary(std::getenv("MODEL_F16"));
  ASSERT_NE(model, nullptr);
  ExpectLlamasTokens(llama_model_get_vocab(model.get()), "MODEL_F16");
}

TEST(Tokenizer, TakesAMillionSpecialTokens) {  // By the square of them, that would take days.
  const auto model = LoadVocabulary(VocabularyPath("qwen2"));
  ASSERT_NE(model, nullptr);
  const Tokenizer tokenizer(llama_model_get_vocab(model.get()));
  std::string text;
  for (int i = 0; i < 500'000; ++i) text += "<|im_start|> ";
  EXPECT_EQ(tokenizer.Tokenize(text, {}).tokens.size(), 1'000'000u);
}

TEST(Tokenizer, GivesUpOnWhatCannotFit) {
  const auto model = LoadVocabulary(VocabularyPath("qwen2"));
  ASSERT_NE(model, nullptr);
  const Tokenizer tokenizer(llama_model_get_vocab(model.get()));
  // By its bytes, by its special tokens, and once a first piece has too many.
  const std::string long_text(1 << 18, 'x');
  const std::string pieces[] = {long_text, "<|im_start|>a<|im_start|>b<|im_start|>", "a b c d e<|im_start|>f g h"};
  for (const std::string& text : pieces) {
    size_t asked = 0;
    const auto count = [&asked] { return ++asked == 0; };
    const Tokenized found = tokenizer.Tokenize(text, {.tokens_max = 4, .stop = count});
    EXPECT_FALSE(found.whole) << text;
    EXPECT_GT(found.at_least, 4u) << text;
    EXPECT_LE(asked, 1u) << "no piece after it is known";
  }
}

TEST(Tokenizer, StopsWhenNobodyWaitsAnyMore) {
  const auto model = LoadVocabulary(VocabularyPath("qwen2"));
  ASSERT_NE(model, nullptr);
  const Tokenizer tokenizer(llama_model_get_vocab(model.get()));
  int pieces = 0;
  const Tokenized found =
      tokenizer.Tokenize("a<|im_start|>b<|im_start|>c", {.stop = [&pieces] { return ++pieces == 3; }});
  EXPECT_FALSE(found.whole);
  EXPECT_EQ(found.tokens.size(), 2u);
}

TEST(Tokenizer, RefusesNothingThatBlanksMakeLong) {  // Blanks after phi-3's special tokens are no tokens.
  const auto model = LoadVocabulary(VocabularyPath("phi-3"));
  ASSERT_NE(model, nullptr);
  const llama_vocab* vocab = llama_model_get_vocab(model.get());
  const std::string text = "<|user|>" + std::string(100'000, ' ') + "<|end|>";
  const Tokenized found = Tokenizer(vocab).Tokenize(text, {.tokens_max = 8});
  EXPECT_TRUE(found.whole);
  EXPECT_EQ(found.tokens, ByLlama(vocab, text));
}

}  // namespace
}  // namespace terrace::engine
