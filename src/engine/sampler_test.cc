// Would catch: a field of a request that changes nothing, that changes greedy answers only or all but them, that counts
// the prompt where it should not, and a seed that does not repeat.
#include "engine/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <vector>

#include "llama.h"

namespace terrace::engine {
namespace {

constexpr uint32_t kContext = 64;

// Chooses `count` tokens; the model says the same `logits` each time.
std::vector<int32_t> Choose(const Sampling& sampling, const std::vector<float>& logits, int count,
                            const std::vector<int32_t>& prompt = {}) {
  const SamplerPtr sampler = MakeSampler(sampling, prompt, static_cast<uint32_t>(logits.size()), kContext);
  std::vector<int32_t> chosen;
  for (int i = 0; i < count; ++i) {
    std::vector<llama_token_data> candidates;
    for (size_t token = 0; token < logits.size(); ++token) {
      candidates.push_back({static_cast<int32_t>(token), logits[token], 0});
    }
    llama_token_data_array array{candidates.data(), candidates.size(), -1, false};
    llama_sampler_apply(sampler.get(), &array);
    chosen.push_back(array.data[array.selected].id);
    llama_sampler_accept(sampler.get(), chosen.back());
  }
  return chosen;
}

std::map<int32_t, int> Counted(const Sampling& sampling, const std::vector<float>& logits) {
  std::map<int32_t, int> counts;
  for (const int32_t token : Choose(sampling, logits, 2000)) ++counts[token];
  return counts;
}

using Tokens = std::vector<int32_t>;

TEST(Sampler, GreedyTakesTheMostLikely) { EXPECT_EQ(Choose({.temperature = 0}, {1, 3, 2}, 3), (Tokens{1, 1, 1})); }

TEST(Sampler, SameSeedSameTokens) {
  const std::vector<float> logits(50, 1.0f);
  const Tokens first = Choose({.seed = 7}, logits, 20);
  EXPECT_EQ(Choose({.seed = 7}, logits, 20), first);
  EXPECT_NE(Choose({.seed = 8}, logits, 20), first);
}

TEST(Sampler, BiasMovesAGreedyChoice) {
  EXPECT_EQ(Choose({.temperature = 0, .logit_bias = {{2, 1.5f}}}, {1, 3, 2}, 1), Tokens{2});
  EXPECT_EQ(Choose({.temperature = 0, .logit_bias = {{1, -100}, {2, -100}}}, {1, 3, 2}, 1), Tokens{0});
}

TEST(Sampler, PresencePenaltyCountsOnceAndOnlyTheAnswer) {
  // After one choice token 1 is at 2.5, below token 2; after both stand penalized, 2.5 and 1.75, nothing changes more.
  const Sampling sampling{.temperature = 0, .presence_penalty = 1};
  EXPECT_EQ(Choose(sampling, {0, 3.5f, 2.75f}, 4, /*prompt=*/{1, 1, 1}), (Tokens{1, 2, 1, 1}));
}

TEST(Sampler, FrequencyPenaltyCountsEachTime) {
  EXPECT_EQ(Choose({.temperature = 0, .frequency_penalty = 1}, {0, 3.5f, 2.75f}, 5, /*prompt=*/{1, 1, 1}),
            (Tokens{1, 2, 1, 2, 1}));
}

TEST(Sampler, RepetitionPenaltyCountsThePromptToo) {
  EXPECT_EQ(Choose({.temperature = 0, .repetition_penalty = 2}, {0, 3.5f, 2.75f}, 2, /*prompt=*/{1}), (Tokens{2, 1}));
  EXPECT_EQ(Choose({.temperature = 0, .repetition_penalty = 2}, {0, 3.5f, 2.75f}, 2), (Tokens{1, 2}));
}

TEST(Sampler, TopKLeavesTheMostLikely) {
  const auto counts = Counted({.top_k = 2, .seed = 1}, {1, 1.1f, 1.2f, 1.3f});
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_TRUE(counts.contains(2) && counts.contains(3));
  EXPECT_EQ(Counted({.seed = 1}, {1, 1.1f, 1.2f, 1.3f}).size(), 4u) << "0 leaves all";
  EXPECT_EQ(Counted({.top_k = 1000, .seed = 1}, {1, 1.1f, 1.2f, 1.3f}).size(), 4u);
}

TEST(Sampler, MinPLeavesWhatIsNotFarBehind) {
  // Token 0 has half the probability of token 2, token 1 a tenth.
  const std::vector<float> logits = {std::log(0.5f), std::log(0.1f), std::log(1.0f)};
  const auto counts = Counted({.min_p = 0.3f, .seed = 1}, logits);
  EXPECT_EQ(counts.size(), 2u);
  EXPECT_FALSE(counts.contains(1));
  EXPECT_EQ(Counted({.min_p = 0.05f, .seed = 1}, logits).size(), 3u);
}

TEST(Sampler, TopPLeavesTheMostLikelyHalf) {
  EXPECT_EQ(Counted({.top_p = 0.4f, .seed = 1}, {std::log(0.5f), std::log(0.3f), std::log(0.2f)}).size(), 1u);
  EXPECT_EQ(Counted({.top_p = 0.7f, .seed = 1}, {std::log(0.5f), std::log(0.3f), std::log(0.2f)}).size(), 2u);
}

}  // namespace
}  // namespace terrace::engine
