// Would catch: KV that comes back as other KV than left (positions, order, values), a difference between a warm and a
// cold run with the same cut, and foreign bytes reaching llama.cpp's reader. Runs the real model; MODEL_F16 is its
// path.
#include "engine/kv_bridge.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "engine/model.h"
#include "llama.h"

namespace terrace::engine {
namespace {

constexpr uint32_t kChunk = 64;
constexpr uint32_t kChunks = 3;
constexpr uint32_t kPrefix = kChunk * kChunks;
constexpr uint32_t kSuffix = 20;

using Logits = std::vector<float>;
using Chunks = std::vector<std::vector<std::byte>>;

class Engine {
 public:
  Engine(const Model& model, KvType kv_type) : model_(model) {
    auto context =
        model.NewContext({.cells = 512, .chunk_tokens = kChunk, .sequences_max = 4, .kv_type = kv_type, .threads = 2});
    EXPECT_TRUE(context) << context.error().what;
    context_ = std::move(*context);
    auto opened = KvBridge::Open(context_.get(), kChunk);
    EXPECT_TRUE(opened) << opened.error().what;
    bridge_.emplace(std::move(*opened));
  }

  KvBridge& bridge() { return *bridge_; }
  llama_memory_t memory() { return llama_get_memory(context_.get()); }

  // Computes tokens [first, end) of the text in pieces of `piece`; returns the logits after the last.
  Logits Compute(int32_t sequence, std::span<const int32_t> text, uint32_t first, uint32_t end,
                 uint32_t piece = kChunk) {
    for (uint32_t at = first; at < end; at += piece) {
      const uint32_t count = std::min(piece, end - at);
      llama_batch batch = llama_batch_init(static_cast<int32_t>(count), 0, 1);
      batch.n_tokens = static_cast<int32_t>(count);
      for (uint32_t i = 0; i < count; ++i) {
        batch.token[i] = text[at + i];
        batch.pos[i] = static_cast<llama_pos>(at + i);
        batch.n_seq_id[i] = 1;
        batch.seq_id[i][0] = sequence;
        batch.logits[i] = at + i + 1 == end;
      }
      EXPECT_EQ(llama_decode(context_.get(), batch), 0);
      llama_batch_free(batch);
    }
    const float* logits = llama_get_logits_ith(context_.get(), -1);
    return {logits, logits + model_.vocabulary()};
  }

  Chunks Export(int32_t sequence, uint32_t chunks) {
    Chunks exported;
    for (uint32_t i = 0; i < chunks; ++i) {
      exported.emplace_back(bridge_->chunk_bytes());
      const auto good = bridge_->Export(sequence, i * kChunk, exported.back());
      EXPECT_TRUE(good) << good.error().what;
    }
    return exported;
  }

  void Restore(int32_t sequence, const Chunks& chunks, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; ++i) {
      const auto good = bridge_->Restore(sequence, i * kChunk, chunks[i]);
      EXPECT_TRUE(good) << good.error().what;
    }
  }

 private:
  const Model& model_;
  ContextPtr context_;
  std::optional<KvBridge> bridge_;
};

class KvBridgeTest : public testing::TestWithParam<KvType> {
 protected:
  static void SetUpTestSuite() {
    const char* path = std::getenv("MODEL_F16");
    ASSERT_NE(path, nullptr) << "MODEL_F16 is not set; scripts/setup env prints it";
    auto model = Model::Load(path);
    ASSERT_TRUE(model) << model.error().what;
    loaded_model = std::move(*model);
    std::string text;
    for (int i = 0; i < 60; ++i)
      text += "Line " + std::to_string(i * 37 % 101) + " of a text about terraces and rice. ";
    prompt = loaded_model->Tokenize(text);
    ASSERT_GE(prompt.size(), kPrefix + kSuffix);
  }
  static void TearDownTestSuite() { loaded_model.reset(); }

  static inline std::unique_ptr<Model> loaded_model;
  static inline std::vector<int32_t> prompt;
};

bool SameBits(const Logits& a, const Logits& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

TEST_P(KvBridgeTest, WarmRunsEqualColdBitForBit) {
  Engine engine(*loaded_model, GetParam());
  engine.Compute(1, prompt, 0, kPrefix);
  const Chunks chunks = engine.Export(1, kChunks);
  const Logits cold = engine.Compute(1, prompt, kPrefix, kPrefix + kSuffix);
  EXPECT_EQ(engine.Export(1, kChunks), chunks) << "exporting or computing on changed the cells";

  llama_memory_clear(engine.memory(), false);
  engine.Restore(1, chunks, 0, kChunks);
  EXPECT_EQ(engine.Export(1, kChunks), chunks);
  EXPECT_TRUE(SameBits(engine.Compute(1, prompt, kPrefix, kPrefix + kSuffix), cold))
      << "same context, all chunks restored";

  llama_memory_clear(engine.memory(), false);
  engine.Restore(1, chunks, 0, 2);
  engine.Compute(1, prompt, 2 * kChunk, kPrefix);
  EXPECT_TRUE(SameBits(engine.Compute(1, prompt, kPrefix, kPrefix + kSuffix), cold)) << "two restored, one computed";

  Engine other(*loaded_model, GetParam());
  other.Restore(2, chunks, 0, kChunks);
  EXPECT_TRUE(SameBits(other.Compute(2, prompt, kPrefix, kPrefix + kSuffix), cold))
      << "another context, another sequence id";

  // The suffix of sequence 2 goes, as serve does it: what remains are whole chunks, so offsets stay multiples of 64
  // cells.
  llama_memory_seq_rm(other.memory(), 2, kPrefix, -1);
  llama_memory_seq_cp(other.memory(), 2, 3, 0, kPrefix);
  EXPECT_TRUE(SameBits(other.Compute(3, prompt, kPrefix, kPrefix + kSuffix), cold)) << "prefix shared by two sequences";

  llama_memory_seq_rm(other.memory(), 3, -1, -1);
  other.Restore(3, chunks, 0, 1);
  EXPECT_TRUE(SameBits(other.Compute(2, prompt, kPrefix, kPrefix + kSuffix), cold))
      << "a chunk of another sequence between prefix and suffix";
}

// The rule that one cut serves cold and warm runs stands on this only with F16 without flash attention and q8_0 with
// it, which is what serve uses.
TEST_P(KvBridgeTest, ResultsDoNotDependOnHowThePromptIsCut) {
  Engine engine(*loaded_model, GetParam());
  const Logits whole = engine.Compute(1, prompt, 0, kPrefix + kSuffix);
  llama_memory_clear(engine.memory(), false);
  EXPECT_TRUE(SameBits(engine.Compute(1, prompt, 0, kPrefix + kSuffix, 50), whole));
}

TEST_P(KvBridgeTest, BlobsOfAnotherPlaceOrTypeAreRefusedBeforeLlamaSeesThem) {
  Engine engine(*loaded_model, GetParam());
  engine.Compute(1, prompt, 0, kPrefix);
  const Chunks chunks = engine.Export(1, kChunks);
  const Logits before = engine.Compute(1, prompt, kPrefix, kPrefix + kSuffix);
  llama_memory_seq_rm(engine.memory(), 1, kPrefix, -1);

  EXPECT_EQ(engine.bridge().Restore(2, 0, chunks[1]).error().code, Code::kCorrupt);
  Engine other(*loaded_model, GetParam() == KvType::kF16 ? KvType::kQ8_0 : KvType::kF16);
  EXPECT_EQ(other.bridge().Restore(1, 0, chunks[0]).error().code, Code::kCorrupt);
  EXPECT_EQ(engine.bridge().Restore(2, 0, std::span(chunks[0]).first(chunks[0].size() - 1)).error().code,
            Code::kCorrupt);
  // Magic, sequence, streams, cells, first position: each bit of them.
  for (size_t byte = 0; byte < 24; ++byte) {
    auto flipped = chunks[0];
    flipped[byte] ^= std::byte{0x10};
    EXPECT_EQ(engine.bridge().Restore(2, 0, flipped).error().code, Code::kCorrupt) << "byte " << byte;
  }
  EXPECT_EQ(llama_memory_seq_pos_max(engine.memory(), 2), -1);
  EXPECT_TRUE(SameBits(engine.Compute(1, prompt, kPrefix, kPrefix + kSuffix), before))
      << "the live sequence was touched";
}

TEST_P(KvBridgeTest, FullMemoryIsSaidAndChangesNothing) {
  Engine engine(*loaded_model, GetParam());
  engine.Compute(1, prompt, 0, kPrefix);
  const Chunks chunks = engine.Export(1, kChunks);
  engine.Restore(2, chunks, 0, kChunks);
  engine.Compute(3, prompt, 0, 512 - 2 * kPrefix);  // That was the last free cell.
  std::vector<std::byte> next = chunks[0];          // A good chunk that follows on the prefix.
  for (size_t i = 0; i < kChunk; ++i) {
    const auto position = static_cast<int32_t>(kPrefix + i);
    std::memcpy(next.data() + 16 + 12 * i, &position, sizeof position);
  }
  EXPECT_EQ(engine.bridge().Restore(1, kPrefix, next).error().code, Code::kFull);
  EXPECT_EQ(llama_memory_seq_pos_max(engine.memory(), 1), static_cast<llama_pos>(kPrefix) - 1);
  EXPECT_EQ(engine.Export(1, kChunks), chunks);
}

INSTANTIATE_TEST_SUITE_P(KvTypes, KvBridgeTest, testing::Values(KvType::kF16, KvType::kQ8_0),
                         [](const auto& tested) { return tested.param == KvType::kF16 ? "F16" : "Q8"; });

TEST(ModelLoad, BadFilesGiveOneLine) {
  const std::string directory = testing::TempDir();
  const std::string path = std::getenv("MODEL_F16");
  const auto cut = [&](const std::string& name, size_t bytes, const std::string& prefix = "") {
    std::vector<char> buffer(bytes);
    std::FILE* from = std::fopen(path.c_str(), "rb");
    buffer.resize(std::fread(buffer.data(), 1, bytes, from));
    std::fclose(from);
    std::FILE* to = std::fopen((directory + name).c_str(), "wb");
    std::fwrite(prefix.data(), 1, prefix.size(), to);
    std::fwrite(buffer.data(), 1, buffer.size(), to);
    std::fclose(to);
    return directory + name;
  };
  for (const auto& [file, word] :
       std::vector<std::pair<std::string, std::string>>{{directory + "no-such-file", "No such file"},
                                                        {directory, "not a file"},
                                                        {cut("empty.gguf", 0), "not a GGUF"},
                                                        {cut("text.gguf", 10, "hello"), "not a GGUF"},
                                                        {cut("magic.gguf", 4), "damaged or cut off"},
                                                        {cut("header.gguf", 100'000), "damaged or cut off"},
                                                        {cut("tensors.gguf", 50'000'000), "truncated"}}) {
    const auto model = Model::Load(file);
    ASSERT_FALSE(model) << file;
    EXPECT_NE(model.error().what.find(word), std::string::npos) << model.error().what;
    EXPECT_NE(model.error().what.find(file), std::string::npos) << model.error().what;
    EXPECT_EQ(model.error().what.find('\n'), std::string::npos) << model.error().what;
  }
}

}  // namespace
}  // namespace terrace::engine
