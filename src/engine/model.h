// A GGUF model: its facts, its tokenizer, its chat template's source. Loaded once, then read by any thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "engine/tokenizer.h"
#include "terrace/key.h"
#include "terrace/result.h"

struct llama_model;
struct llama_vocab;
struct llama_context;

namespace terrace::engine {

struct ModelDeleter {
  void operator()(llama_model* model) const;
};
struct ContextDeleter {
  void operator()(llama_context* context) const;
};
// The model outlives its contexts.
using ContextPtr = std::unique_ptr<llama_context, ContextDeleter>;

enum class KvType { kF16, kQ8_0 };

struct ContextOptions {
  uint32_t cells = 0;           // KV cells in all, of all sequences together.
  uint32_t chunk_tokens = 256;  // Also the batch: prefill is cut at chunk boundaries.
  uint32_t sequences_max = 2;
  KvType kv_type = KvType::kF16;
  uint32_t threads = 1;
};

class Model {
 public:
  // Errors are one line for the person who started the program: no file, no GGUF, truncated, split, or why llama.cpp
  // refused it.
  static Result<std::unique_ptr<Model>> Load(const std::string& path);

  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const std::string& path() const { return path_; }
  uint32_t train_context() const;
  uint32_t vocabulary() const;
  std::string Description() const;  // "llama 135M F16".

  // Why chunks of this model's KV can't leave and enter one by one; "" if they can.
  const std::string& not_cacheable() const { return not_cacheable_; }

  // What separates the KV of such a context from others', all but the weights' digest and the salt.
  SpaceFields Space(const ContextOptions& options) const;

  Result<ContextPtr> NewContext(const ContextOptions& options) const;

  // Any thread.
  const Tokenizer& tokenizer() const { return *tokenizer_; }
  std::vector<int32_t> Tokenize(std::string_view text) const { return tokenizer_->Tokenize(text, {}).tokens; }
  // Bytes of one token, maybe part of a UTF-8 sequence; "" for control tokens.
  std::string Piece(int32_t token) const;
  bool EndsGeneration(int32_t token) const;

  // Jinja, as it stands in the file; "" if there is none. The one for tools if that is all there is.
  std::string chat_template() const;
  // Of special tokens; "" if the model has none such.
  std::string bos_text() const;
  std::string eos_text() const;
  // Tokenize puts it first.
  bool adds_bos() const;

 private:
  Model() = default;
  std::string Meta(const std::string& key) const;  // "" if absent.

  std::string path_;
  std::string not_cacheable_;
  std::unique_ptr<llama_model, ModelDeleter> model_;
  const llama_vocab* vocab_ = nullptr;  // Of model_.
  std::optional<Tokenizer> tokenizer_;  // Always, once it is loaded.
  bool long_rope_ = false;              // Its rope depends on the size of the context.
};

}  // namespace terrace::engine
