#include "engine/model.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <sstream>

#include "llama.h"

namespace terrace::engine {
namespace {

// The pinned build (scripts/setup). Part of every space: another build may compute or lay out KV differently.
constexpr const char* kLlamaBuild = "b11434";
static_assert(LLAMA_STATE_SEQ_VERSION == 4,
              "the sequence blob changed: read docs/internals/engine.md before moving to another llama.cpp");

// llama.cpp reports why it failed only through its log: the last error line of this thread is kept for our message, the
// rest is dropped.
thread_local std::string last_llama_error;

void OnLlamaLog(ggml_log_level level, const char* text, void*) {
  static thread_local ggml_log_level previous = GGML_LOG_LEVEL_NONE;
  if (level != GGML_LOG_LEVEL_CONT) previous = level;
  if (previous != GGML_LOG_LEVEL_ERROR) return;
  std::string line(text);
  while (!line.empty() && (line.back() == '\n' || line.back() == ' ')) line.pop_back();
  std::replace(line.begin(), line.end(), '\n', ' ');
  if (!line.empty()) last_llama_error = line;
}

void InitLlamaOnce() {
  static std::once_flag once;
  std::call_once(once, [] {
    llama_log_set(OnLlamaLog, nullptr);
    llama_backend_init();
  });
}

// Bytes that the file must have by its own header; 0 if the header is not readable.
uint64_t BytesByHeader(gguf_context* gguf) {
  uint64_t end = 0;
  for (int64_t i = 0; i < gguf_get_n_tensors(gguf); ++i) {
    end = std::max<uint64_t>(end, gguf_get_tensor_offset(gguf, i) + gguf_get_tensor_size(gguf, i));
  }
  return gguf_get_data_offset(gguf) + end;
}

struct FileFacts {
  bool long_rope = false;
};

// Reads the header before llama.cpp meets the file; the error is one line on what is wrong with it.
Result<FileFacts> CheckFile(const std::string& path) {
  struct stat st{};
  if (stat(path.c_str(), &st) != 0) return Fail(Code::kInvalid, "model " + path + ": " + std::strerror(errno), errno);
  if (!S_ISREG(st.st_mode)) return Fail(Code::kInvalid, "model " + path + ": not a file");
  std::FILE* file = std::fopen(path.c_str(), "rb");
  if (file == nullptr) return Fail(Code::kInvalid, "model " + path + ": " + std::strerror(errno), errno);
  char magic[4] = {};
  const bool has_magic = std::fread(magic, 1, 4, file) == 4;
  std::fclose(file);
  if (!has_magic || std::memcmp(magic, "GGUF", 4) != 0) {
    return Fail(Code::kInvalid, "model " + path + ": not a GGUF file (it does not begin with GGUF)");
  }
  gguf_context* gguf = gguf_init_from_file(path.c_str(), {.no_alloc = true, .ctx = nullptr});
  if (gguf == nullptr)
    return Fail(Code::kInvalid, "model " + path + ": its GGUF header is damaged or cut off; fetch it again");
  const uint64_t bytes = BytesByHeader(gguf);
  const FileFacts facts{.long_rope = gguf_find_tensor(gguf, "rope_factors_long.weight") >= 0};
  const int64_t split = gguf_find_key(gguf, "split.count");
  const bool is_split =
      split >= 0 && gguf_get_kv_type(gguf, split) == GGUF_TYPE_UINT16 && gguf_get_val_u16(gguf, split) > 1;
  gguf_free(gguf);
  if (static_cast<uint64_t>(st.st_size) < bytes) {
    return Fail(Code::kInvalid, "model " + path + ": truncated, " + std::to_string(st.st_size) + " of " +
                                    std::to_string(bytes) + " bytes; fetch it again");
  }
  if (is_split) {
    return Fail(Code::kInvalid,
                "model " + path + ": one part of a split GGUF; join the parts first (llama-gguf-split --merge)");
  }
  return facts;
}

double ToDouble(const std::string& text, double otherwise) {
  return text.empty() ? otherwise : std::strtod(text.c_str(), nullptr);
}

uint32_t ToUint(const std::string& text, uint32_t otherwise) {
  return text.empty() ? otherwise : static_cast<uint32_t>(std::strtoul(text.c_str(), nullptr, 10));
}

// " AVX AVX2 ...": what llama.cpp's kernels were compiled for, out of its "CPU : AVX = 1 | AVX2 = 1 | ".
std::string CpuFeatures() {
  std::istringstream words(llama_print_system_info());
  std::string features, before;
  for (std::string word; words >> word; before = word) {
    if (word == "=") features += " " + before;
  }
  return features;
}

const char* RopeName(llama_rope_type type) {
  switch (type) {
    case LLAMA_ROPE_TYPE_NONE: return "none";
    case LLAMA_ROPE_TYPE_NORM: return "norm";
    case LLAMA_ROPE_TYPE_NEOX: return "neox";
    case LLAMA_ROPE_TYPE_MROPE: return "mrope";
    case LLAMA_ROPE_TYPE_IMROPE: return "imrope";
    case LLAMA_ROPE_TYPE_VISION: return "vision";
  }
  return "unknown";
}

std::string TextOf(const llama_vocab* vocab, int32_t token, bool special) {
  char text[256];
  int32_t length = llama_token_to_piece(vocab, token, text, sizeof text, 0, special);
  if (length >= 0) return std::string(text, static_cast<size_t>(length));
  std::string longer(static_cast<size_t>(-length), '\0');
  length = llama_token_to_piece(vocab, token, longer.data(), static_cast<int32_t>(longer.size()), 0, special);
  longer.resize(static_cast<size_t>(std::max(length, 0)));
  return longer;
}

std::string SpecialText(const llama_vocab* vocab, int32_t token) {
  return token == LLAMA_TOKEN_NULL ? "" : TextOf(vocab, token, /*special=*/true);
}

}  // namespace

void ModelDeleter::operator()(llama_model* model) const { llama_model_free(model); }
void ContextDeleter::operator()(llama_context* context) const { llama_free(context); }

Result<std::unique_ptr<Model>> Model::Load(const std::string& path) {
  InitLlamaOnce();
  const Result<FileFacts> facts = CheckFile(path);
  if (!facts) return tl::unexpected(facts.error());
  last_llama_error.clear();
  llama_model_params params = llama_model_default_params();
  params.n_gpu_layers = 0;
  std::unique_ptr<Model> model(new Model);
  model->path_ = path;
  model->long_rope_ = facts->long_rope;
  model->model_.reset(llama_model_load_from_file(path.c_str(), params));
  if (model->model_ == nullptr)
    return Fail(Code::kInvalid, "model " + path + ": llama.cpp refuses it: " + last_llama_error);
  const llama_model* raw = model->model_.get();
  model->vocab_ = llama_model_get_vocab(raw);
  if (!llama_model_has_decoder(raw) || llama_model_has_encoder(raw) || llama_model_is_diffusion(raw) ||
      llama_vocab_type(model->vocab_) == LLAMA_VOCAB_TYPE_NONE) {
    return Fail(Code::kInvalid,
                "model " + path + ": it does not generate text token by token, which is all that terrace serves");
  }
  model->tokenizer_.emplace(model->vocab_);
  if (llama_model_is_hybrid(raw)) {
    model->not_cacheable_ = "a hybrid model: part of its state is recurrent and can't be cut in chunks";
  } else if (llama_model_is_recurrent(raw)) {
    model->not_cacheable_ = "a recurrent model: its state can't be cut in chunks";
  }
  return model;
}

uint32_t Model::train_context() const { return static_cast<uint32_t>(llama_model_n_ctx_train(model_.get())); }

uint32_t Model::vocabulary() const { return static_cast<uint32_t>(llama_vocab_n_tokens(vocab_)); }

std::string Model::Description() const {
  char text[256] = {};
  llama_model_desc(model_.get(), text, sizeof text);
  return text;
}

std::string Model::Meta(const std::string& key) const {
  char text[512] = {};
  return llama_model_meta_val_str(model_.get(), key.c_str(), text, sizeof text) < 0 ? "" : text;
}

SpaceFields Model::Space(const ContextOptions& options) const {
  const llama_model* model = model_.get();
  const std::string arch = Meta("general.architecture");
  const auto heads = static_cast<uint32_t>(llama_model_n_head(model));
  const uint32_t head_size = heads == 0 ? 0 : static_cast<uint32_t>(llama_model_n_embd(model)) / heads;
  const int32_t window = llama_model_n_swa(model);
  const bool f16 = options.kv_type == KvType::kF16;

  SpaceFields space;
  space.engine = "llama.cpp";
  space.engine_state_version = LLAMA_STATE_SEQ_VERSION;
  // The instruction set its kernels were compiled for comes along: other kernels round differently.
  space.engine_build = std::string(kLlamaBuild) + " " + llama_version() + CpuFeatures();
  space.kv_dtype_k = space.kv_dtype_v = f16 ? "f16" : "q8_0";
  space.layers = static_cast<uint32_t>(llama_model_n_layer(model));
  space.kv_heads = static_cast<uint32_t>(llama_model_n_head_kv(model));
  space.head_size = ToUint(Meta(arch + ".attention.key_length"), head_size);
  space.head_size_v = ToUint(Meta(arch + ".attention.value_length"), head_size);
  space.layout = f16 ? "llama.seq/v-transposed" : "llama.seq/v-rows";
  space.attention = window > 0 ? "swa:" + std::to_string(window) + ":full-cache" : "full";
  // No option of ours changes the rope, so these follow from the weights; they are named so that a later option can't
  // be forgotten here.
  space.rope_type = RopeName(llama_model_rope_type(model));
  space.rope_freq_base = ToDouble(Meta(arch + ".rope.freq_base"), 10000.0);
  space.rope_freq_scale = static_cast<double>(llama_model_rope_freq_scale_train(model));
  space.rope_orig_context = ToUint(Meta(arch + ".rope.scaling.original_context_length"), train_context());
  space.chunk_tokens = options.chunk_tokens;
  // llama.cpp takes these models' other set of factors when the context is larger than the original one.
  if (long_rope_) space.rope_type += options.cells > space.rope_orig_context ? " long" : " short";
  return space;
}

Result<ContextPtr> Model::NewContext(const ContextOptions& options) const {
  const bool f16 = options.kv_type == KvType::kF16;
  llama_context_params params = llama_context_default_params();
  params.n_ctx = options.cells;
  // A piece of prefill is never cut again inside llama.cpp, so cold and warm runs compute the same batches.
  params.n_batch = params.n_ubatch = options.chunk_tokens;
  params.n_seq_max = options.sequences_max;
  params.n_threads = params.n_threads_batch = static_cast<int32_t>(options.threads);
  // One pool of cells: copying a range from one sequence to another is metadata, and such a range is how chunks come
  // and go.
  params.kv_unified = true;
  params.swa_full = true;
  // F16: without flash attention results don't depend on how the suffix is cut, and short suffixes are faster.
  // Quantised V needs it.
  params.flash_attn_type = f16 ? LLAMA_FLASH_ATTN_TYPE_DISABLED : LLAMA_FLASH_ATTN_TYPE_ENABLED;
  params.type_k = params.type_v = f16 ? GGML_TYPE_F16 : GGML_TYPE_Q8_0;
  params.no_perf = true;
  last_llama_error.clear();
  ContextPtr context(llama_init_from_model(model_.get(), params));
  if (context == nullptr) {
    return Fail(Code::kInvalid, "model " + path_ + ": no context of " + std::to_string(options.cells) + " KV cells: " +
                                    (last_llama_error.empty() ? "llama.cpp does not say why" : last_llama_error));
  }
  return context;
}

std::string Model::Piece(int32_t token) const { return TextOf(vocab_, token, /*special=*/false); }

bool Model::EndsGeneration(int32_t token) const { return llama_vocab_is_eog(vocab_, token); }

std::string Model::chat_template() const {
  const char* source = llama_model_chat_template(model_.get(), nullptr);
  if (source == nullptr) source = llama_model_chat_template(model_.get(), "tool_use");
  return source == nullptr ? "" : source;
}

std::string Model::bos_text() const { return SpecialText(vocab_, llama_vocab_bos(vocab_)); }
std::string Model::eos_text() const { return SpecialText(vocab_, llama_vocab_eos(vocab_)); }
bool Model::adds_bos() const { return llama_vocab_get_add_bos(vocab_); }

}  // namespace terrace::engine
