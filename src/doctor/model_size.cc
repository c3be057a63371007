#include "doctor/model_size.h"

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "base/config.h"
#include "doctor/gguf.h"

namespace terrace::doctor {
namespace {

using Json = nlohmann::json;

constexpr int64_t kSaneMax = 1 << 20;  // Layers, heads, values of a head.

struct ValueType {
  const char* name;
  uint64_t bytes;   // Of ...
  uint64_t values;  // ... so many values.
};
constexpr ValueType kF16 = {"f16", 2, 1};
constexpr ValueType kQ80 = {"q8_0", 34, 32};

std::string Times(const std::string& family, int64_t layers, const std::string& heads, const std::string& values) {
  return family + ": " + std::to_string(layers) + " layers x " + heads + " x " + values + " values";
}

void Fill(ModelSize& size, int64_t values, const ValueType& type) {
  size.type = type.name;
  size.bytes_per_token = static_cast<uint64_t>(values) * type.bytes / type.values;
}

void NoteWindow(ModelSize& size, int64_t window) {
  size.notes.push_back(
      "it has layers with a sliding window of " + std::to_string(window) +
      " tokens: an engine that drops what leaves the window stores less than this; Terrace stores all");
}

tl::unexpected<Error> NotSaid(const std::string& what) {
  return Fail(Code::kInvalid, "its metadata does not say " + what + ", so its KV can't be computed");
}

// --- GGUF ------------------------------------------------------------------------------------------------------------

class Gguf {
 public:
  explicit Gguf(GgufMetadata metadata) : metadata_(std::move(metadata)) {
    architecture_ = metadata_.texts["general.architecture"];
  }

  Result<ModelSize> Size(const ValueType& type) const {
    if (architecture_.empty()) return NotSaid("general.architecture");
    const auto blocks = Number("block_count");
    if (!blocks) return NotSaid(architecture_ + ".block_count");
    ModelSize size;
    size.context = static_cast<uint64_t>(Number("context_length").value_or(0));
    for (const char* key : {"ssm.state_size", "ssm.conv_kernel", "wkv.head_size", "full_attention_interval"}) {
      if (!Number(key)) continue;
      size.notes.push_back("it has recurrent layers (" + architecture_ + "." + key +
                           "): only its attention layers are counted, and Terrace does not cache it");
      break;
    }
    // Layers that reuse the KV of others have none of their own.
    const int64_t layers = *blocks - Number("attention.shared_kv_layers").value_or(0);
    if (layers < 1) return NotSaid("how many layers keep KV");

    if (Number("attention.key_length_mla")) {
      // Latent attention: one compressed row a layer, which holds K and V.
      const auto row = Number("attention.key_length");
      if (!row) return NotSaid(architecture_ + ".attention.key_length");
      size.shape = Times(architecture_ + " (latent attention)", layers, "1 row", std::to_string(*row));
      Fill(size, layers * *row, type);
      return size;
    }

    const auto heads = Number("attention.head_count");
    std::optional<int64_t> k = Number("attention.key_length"), v = Number("attention.value_length");
    if (!k || !v) {
      const auto width = Number("embedding_length");
      if (!width || !heads || *heads == 0) return NotSaid(architecture_ + ".attention.key_length");
      if (!k) k = *width / *heads;
      if (!v) v = *width / *heads;
    }
    int64_t kv_heads = 0;  // Of all layers together.
    std::string heads_text;
    const std::vector<int64_t> per_layer = Numbers("attention.head_count_kv");
    if (per_layer.size() > 1) {
      if (per_layer.size() != static_cast<size_t>(*blocks)) return NotSaid("KV heads for each layer");
      for (size_t i = 0; i < static_cast<size_t>(layers); ++i) {
        if (per_layer[i] < 0 || per_layer[i] > kSaneMax) return NotSaid("sane KV heads");
        kv_heads += per_layer[i];
      }
      heads_text = std::to_string(kv_heads) + " KV heads in all";
    } else {
      const auto one = per_layer.empty() ? heads : Number("attention.head_count_kv");
      if (!one) return NotSaid(architecture_ + ".attention.head_count_kv");
      kv_heads = layers * *one;
      heads_text = std::to_string(*one) + " KV heads";
    }
    size.shape = Times(architecture_, layers, heads_text, "(" + std::to_string(*k) + " + " + std::to_string(*v) + ")");
    Fill(size, kv_heads * (*k + *v), type);
    if (const auto window = Number("attention.sliding_window"); window && *window > 0) NoteWindow(size, *window);
    return size;
  }

 private:
  std::vector<int64_t> Numbers(const std::string& key) const {
    const auto found = metadata_.numbers.find(architecture_ + "." + key);
    return found == metadata_.numbers.end() ? std::vector<int64_t>{} : found->second;
  }
  std::optional<int64_t> Number(const std::string& key) const {
    const std::vector<int64_t> numbers = Numbers(key);
    if (numbers.empty() || numbers[0] < 0 || numbers[0] > kSaneMax * 16) return std::nullopt;
    return numbers[0];
  }

  GgufMetadata metadata_;
  std::string architecture_;
};

// --- Hugging Face ----------------------------------------------------------------------------------------------------

class HuggingFace {
 public:
  explicit HuggingFace(const Json& config) : config_(Inner(config)) {}

  Result<ModelSize> Size() const {
    const std::string family = Text({"model_type"}).value_or("model");
    const auto layers = Number({"num_hidden_layers", "n_layer", "num_layers"});
    if (!layers) return NotSaid("num_hidden_layers");
    ModelSize size;
    size.context = static_cast<uint64_t>(Number({"max_position_embeddings", "n_positions"}).value_or(0));
    ValueType type = kF16;
    const std::string dtype = Text({"dtype", "torch_dtype"}).value_or("");
    if (dtype == "float32") {
      type = {"float32", 4, 1};
    } else if (dtype == "bfloat16") {
      type.name = "bfloat16";
    } else if (!dtype.empty() && dtype != "float16") {
      return NotSaid("a dtype known here (\"" + dtype + "\")");
    }
    int64_t with_kv = *layers;
    if (const auto types = config_.find("layer_types"); types != config_.end() && types->is_array()) {
      with_kv = std::ranges::count_if(*types, [](const Json& t) {
        return t == "full_attention" || t == "sliding_attention" || t == "chunked_attention";
      });
    }
    const bool recurrent = config_.contains("state_size") || config_.contains("mamba_d_state") ||
                           config_.contains("linear_num_key_heads") || with_kv != *layers;
    if (recurrent && (with_kv == *layers || with_kv == 0)) return NotSaid("which of its layers keep KV");
    if (recurrent)
      size.notes.emplace_back("only its attention layers are counted: the others keep a state of fixed size");

    if (const auto rank = Number({"kv_lora_rank"})) {
      const auto rope = Number({"qk_rope_head_dim"});
      if (!rope) return NotSaid("qk_rope_head_dim");
      size.shape = Times(family + " (latent attention)", with_kv, "1 row",
                         "(" + std::to_string(*rank) + " + " + std::to_string(*rope) + ")");
      Fill(size, with_kv * (*rank + *rope), type);
      return size;
    }

    const auto heads = Number({"num_attention_heads", "n_head"});
    if (!heads || *heads == 0) return NotSaid("num_attention_heads");
    // Families that say it in words of their own.
    if (config_.contains("multi_query") || config_.contains("new_decoder_architecture")) {
      return NotSaid("num_key_value_heads in the usual way");
    }
    const int64_t kv_heads = Number({"num_key_value_heads"}).value_or(*heads);
    std::optional<int64_t> head = Number({"head_dim"});
    if (!head) {
      const auto width = Number({"hidden_size", "n_embd"});
      if (!width) return NotSaid("head_dim");
      head = *width / *heads;
    }
    size.shape = Times(family, with_kv, std::to_string(kv_heads) + " KV heads",
                       "(" + std::to_string(*head) + " + " + std::to_string(*head) + ")");
    Fill(size, with_kv * kv_heads * 2 * *head, type);
    const auto use = config_.find("use_sliding_window");
    const bool unused = use != config_.end() && *use == Json(false);
    if (const auto window = Number({"sliding_window"}); window && *window > 0 && !unused) NoteWindow(size, *window);
    return size;
  }

 private:
  // Models that see and hear keep what is meant here one level down.
  static Json Inner(const Json& config) {
    const auto inner = config.find("text_config");
    if (inner == config.end() || !inner->is_object()) return config;
    Json merged = config;
    merged.update(*inner);
    return merged;
  }
  std::optional<int64_t> Number(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      const auto found = config_.find(name);
      if (found == config_.end() || !found->is_number_integer()) continue;
      const auto value = found->get<int64_t>();
      if (value >= 0 && value <= kSaneMax * 16) return value;
    }
    return std::nullopt;
  }
  std::optional<std::string> Text(std::initializer_list<const char*> names) const {
    for (const char* name : names) {
      const auto found = config_.find(name);
      if (found != config_.end() && found->is_string()) return found->get<std::string>();
    }
    return std::nullopt;
  }

  const Json config_;
};

}  // namespace

Result<ModelSize> ReadModelSize(const std::string& path, const std::string& kv_type) {
  std::error_code error;
  const std::string file = std::filesystem::is_directory(path, error) ? path + "/config.json" : path;
  Result<ModelSize> size;
  if (file.ends_with(".json")) {
    bool others_may_read = false;
    const Result<std::string> text = config::ReadFile(file, &others_may_read);
    if (!text) return tl::unexpected(text.error());
    const Json config = Json::parse(*text, nullptr, false);
    if (!config.is_object()) return Fail(Code::kInvalid, file + ": it is no JSON object");
    size = HuggingFace(config).Size();
  } else {
    std::ifstream in(file, std::ios::binary);
    if (!in) return Fail(Code::kInvalid, file + ": it can't be opened");
    Result<GgufMetadata> metadata = ReadGgufMetadata(in);
    if (!metadata) return Fail(metadata.error(), file);
    size = Gguf(*std::move(metadata)).Size(kv_type == "q8_0" ? kQ80 : kF16);
  }
  if (!size) return Fail(size.error(), file);
  if (size->bytes_per_token == 0) return Fail(Code::kInvalid, file + ": by its metadata it keeps no KV at all");
  return size;
}

}  // namespace terrace::doctor
