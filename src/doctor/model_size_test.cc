// What could go wrong: an operator buys ten times the storage, or a tenth, because a shape was read wrong; a model
// whose KV is of another kind gets a figure all the same; a damaged file crashes the program, or takes all memory.
#include "doctor/model_size.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <utility>

#include "doctor/gguf.h"

namespace terrace::doctor {
namespace {

// Metadata of a GGUF file, key by key.
class Gguf {
 public:
  Gguf& Text(const std::string& key, const std::string& text) { return Pair(key, 8).Put(text); }
  Gguf& Number(const std::string& key, uint32_t number) { return Pair(key, 4).Raw(number); }
  Gguf& Numbers(const std::string& key, const std::vector<uint32_t>& numbers) {
    Pair(key, 9).Raw(uint32_t{4}).Raw(uint64_t{numbers.size()});
    for (const uint32_t n : numbers) Raw(n);
    return *this;
  }
  Gguf& Texts(const std::string& key, const std::vector<std::string>& texts) {
    Pair(key, 9).Raw(uint32_t{8}).Raw(uint64_t{texts.size()});
    for (const std::string& text : texts) Put(text);
    return *this;
  }
  Gguf& Float(const std::string& key, float value) { return Pair(key, 6).Raw(value); }
  std::string Bytes() const {
    Gguf head;
    head.bytes_ = "GGUF";
    head.Raw(uint32_t{3}).Raw(uint64_t{0}).Raw(pairs_);
    return head.bytes_ + bytes_;
  }

 private:
  Gguf& Pair(const std::string& key, uint32_t type) {
    ++pairs_;
    return Put(key).Raw(type);
  }
  Gguf& Put(const std::string& text) {
    Raw(uint64_t{text.size()});
    bytes_ += text;
    return *this;
  }
  template <class T>
  Gguf& Raw(T value) {
    bytes_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  std::string bytes_;
  uint64_t pairs_ = 0;
};

class ModelSizeTest : public testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "terrace-size-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(directory_); }

  Result<ModelSize> Of(const Gguf& gguf, const std::string& kv_type = "f16") {
    std::ofstream(directory_ + "/m.gguf", std::ios::binary) << gguf.Bytes();
    return ReadModelSize(directory_ + "/m.gguf", kv_type);
  }
  Result<ModelSize> OfConfig(const std::string& json) {
    std::ofstream(directory_ + "/config.json") << json;
    return ReadModelSize(directory_, "f16");
  }
  std::string directory_;
};

Gguf Llama() {
  Gguf gguf;
  gguf.Text("general.architecture", "llama").Number("llama.block_count", 30).Number("llama.embedding_length", 576);
  return gguf.Number("llama.attention.head_count", 9);
}

TEST_F(ModelSizeTest, CountsLayersHeadsAndValues) {
  auto size = Of(Llama().Number("llama.attention.head_count_kv", 3).Float("llama.rope.freq_base", 1e4F));
  ASSERT_TRUE(size) << size.error().what;
  EXPECT_EQ(size->bytes_per_token, 30u * 3 * (64 + 64) * 2);
  EXPECT_TRUE(size->notes.empty());
  size = Of(Llama().Number("llama.attention.head_count_kv", 3), "q8_0");
  EXPECT_EQ(size->bytes_per_token, 30u * 3 * (64 + 64) * 34 / 32);
  size = Of(Llama());  // No grouped queries: as many KV heads as heads.
  EXPECT_EQ(size->bytes_per_token, 30u * 9 * (64 + 64) * 2);
  size = Of(Llama().Number("llama.attention.key_length", 128).Number("llama.attention.value_length", 96));
  EXPECT_EQ(size->bytes_per_token, 30u * 9 * (128 + 96) * 2);
}

TEST_F(ModelSizeTest, TakesHeadsLayerByLayer) {
  std::vector<uint32_t> heads(30, 2);
  heads[3] = 0;
  const auto size = Of(Llama().Numbers("llama.attention.head_count_kv", heads));
  ASSERT_TRUE(size) << size.error().what;
  EXPECT_EQ(size->bytes_per_token, 29u * 2 * 128 * 2);
  EXPECT_FALSE(Of(Llama().Numbers("llama.attention.head_count_kv", {1, 2})));
}

TEST_F(ModelSizeTest, LatentAttentionHasOneRowALayer) {
  Gguf gguf;
  gguf.Text("general.architecture", "deepseek2").Number("deepseek2.block_count", 61);
  gguf.Number("deepseek2.attention.head_count", 128).Number("deepseek2.attention.key_length", 576);
  gguf.Number("deepseek2.attention.value_length", 512).Number("deepseek2.attention.key_length_mla", 192);
  const auto size = Of(gguf);
  ASSERT_TRUE(size) << size.error().what;
  EXPECT_EQ(size->bytes_per_token, 61u * 576 * 2);
}

TEST_F(ModelSizeTest, SaysWhatTheFigureDoesNot) {
  auto size = Of(Llama().Number("llama.attention.sliding_window", 512));
  ASSERT_EQ(size->notes.size(), 1u);
  EXPECT_NE(size->notes[0].find("512"), std::string::npos);
  size = Of(Llama().Number("llama.ssm.state_size", 128));
  ASSERT_EQ(size->notes.size(), 1u);
  EXPECT_NE(size->notes[0].find("recurrent"), std::string::npos);
}

TEST_F(ModelSizeTest, ModelsThatDoNotSayEnoughGetNoFigure) {
  Gguf gguf;
  gguf.Text("general.architecture", "odd").Number("odd.block_count", 3);
  auto size = Of(gguf);
  ASSERT_FALSE(size);
  EXPECT_NE(size.error().what.find("does not say odd.attention.key_length"), std::string::npos) << size.error().what;
  EXPECT_FALSE(OfConfig("{}"));
  EXPECT_FALSE(OfConfig("[1]"));
  EXPECT_FALSE(
      OfConfig(R"({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8, "multi_query": true})"));
  EXPECT_FALSE(OfConfig(R"({"num_hidden_layers": 2, "state_size": 16})"));
  EXPECT_FALSE(ReadModelSize(directory_ + "/none.gguf", "f16"));
}

TEST_F(ModelSizeTest, ReadsConfigsOfHuggingFace) {
  auto size = OfConfig(R"({"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "head_dim": 128,
      "num_key_value_heads": 8, "hidden_size": 4096, "torch_dtype": "bfloat16", "sliding_window": 4096,
      "use_sliding_window": false, "max_position_embeddings": 40960})");
  ASSERT_TRUE(size) << size.error().what;
  EXPECT_EQ(size->bytes_per_token, 36u * 8 * 2 * 128 * 2);
  EXPECT_EQ(size->type, "bfloat16");
  EXPECT_EQ(size->context, 40960u);
  EXPECT_TRUE(size->notes.empty());
  size = OfConfig(R"({"model_type": "deepseek_v3", "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
      "num_attention_heads": 128, "num_key_value_heads": 128, "torch_dtype": "bfloat16"})");
  EXPECT_EQ(size->bytes_per_token, 61u * 576 * 2);
  size = OfConfig(R"({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", "num_hidden_layers": 4,
      "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 1024,
      "dtype": "float32"}})");
  EXPECT_EQ(size->bytes_per_token, 4u * 4 * 2 * 256 * 4);
  EXPECT_EQ(size->notes.size(), 1u);
  size = OfConfig(R"({"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256,
      "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]})");
  EXPECT_EQ(size->bytes_per_token, 1u * 2 * 2 * 256 * 2);
  EXPECT_EQ(size->notes.size(), 1u);
}

TEST(Gguf, PassesOverWhatIsNotWanted) {
  std::istringstream file(Llama()
                              .Texts("tokenizer.ggml.tokens", {"a", "b", ""})
                              .Numbers("tokenizer.ggml.token_type", std::vector<uint32_t>(5000, 1))
                              .Number("last", 7)
                              .Bytes());
  const auto metadata = ReadGgufMetadata(file);
  ASSERT_TRUE(metadata) << metadata.error().what;
  EXPECT_EQ(metadata->numbers.at("last"), std::vector<int64_t>{7});
  EXPECT_EQ(metadata->texts.at("general.architecture"), "llama");
  EXPECT_FALSE(metadata->numbers.contains("tokenizer.ggml.token_type"));
}

TEST(Gguf, EveryCutAndEveryWrongByteIsAnErrorAtWorst) {
  const std::string whole = Llama().Texts("t", {"abc"}).Numbers("n", {1, 2}).Bytes();
  for (size_t bytes = 0; bytes < whole.size(); ++bytes) {
    std::istringstream cut(whole.substr(0, bytes));
    EXPECT_FALSE(ReadGgufMetadata(cut)) << bytes;
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string wrong = whole;
    wrong[at] = static_cast<char>(wrong[at] ^ 0xff);
    std::istringstream file(wrong);
    const auto metadata = ReadGgufMetadata(file);
    EXPECT_TRUE(metadata.has_value() || !metadata.error().what.empty());
  }
}

}  // namespace
}  // namespace terrace::doctor
