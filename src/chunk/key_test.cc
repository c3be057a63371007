// Would catch: keys that depend on the process, its environment or its seeds; two spaces or chunks that share a name
// although they differ in something that changes the bytes; an optional whose absence has two spellings; drift from the
// published vectors.
#include "terrace/key.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <fstream>
#include <functional>
#include <map>
#include <numeric>
#include <set>
#include <string>

namespace terrace {
namespace {

std::vector<int32_t> Tokens(int32_t first, int32_t last) {
  std::vector<int32_t> tokens(static_cast<size_t>(last - first + 1));
  std::iota(tokens.begin(), tokens.end(), first);
  return tokens;
}

// The base of the published vectors (tests/data/keys.txt, docs/internals/keys.md).
SpaceFields Base() {
  SpaceFields f;
  for (size_t i = 0; i < 32; ++i) f.weights.bytes[i] = static_cast<uint8_t>(i);
  f.engine = "llama.cpp";
  f.engine_state_version = 4;
  f.engine_build = "b11434";
  f.kv_dtype_k = f.kv_dtype_v = "f16";
  f.layers = 30;
  f.kv_heads = 3;
  f.head_size = f.head_size_v = 64;
  f.layout = "llama.seq/v-transposed";
  f.attention = "full";
  f.rope_type = "norm";
  f.rope_freq_base = 100000;
  f.rope_freq_scale = 1;
  f.rope_attn_factor = 1;
  f.rope_beta_fast = 32;
  f.rope_beta_slow = 1;
  f.rope_orig_context = 8192;
  return f;
}

std::vector<Digest> KeysOf(const SpaceFields& fields, std::span<const int32_t> tokens,
                           std::vector<MediaItem> media = {}) {
  KeyChain chain(SpaceId(fields), fields.chunk_tokens, std::move(media));
  chain.Extend(tokens);
  return chain.keys();
}

std::string D1Keys() {
  const std::vector<Digest> keys = KeysOf(Base(), Tokens(1, 512));
  return keys.size() == 2 ? keys[0].Hex() + " " + keys[1].Hex() : "";
}

// D1. Prints the keys for the processes that the next test starts.
TEST(Key, PrintsTheKeysOfD1) {
  ASSERT_FALSE(D1Keys().empty());
  std::printf("D1 %s\n", D1Keys().c_str());
}

TEST(Key, TwentyProcessesWithRandomEnvironmentsAgree) {
  std::array<char, 4096> self{};
  const ssize_t n = readlink("/proc/self/exe", self.data(), self.size() - 1);
  ASSERT_GT(n, 0);
  for (int i = 0; i < 20; ++i) {
    const std::string environment = "PYTHONHASHSEED=" + std::to_string(i * 7919) +
                                    " LC_ALL=" + (i % 2 ? "C" : "tr_TR.UTF-8") + " TZ=UTC" + std::to_string(i % 12) +
                                    " X" + std::to_string(i) + "=" + std::to_string(rand());
    const std::string command = "env -i " + environment + " " + self.data() + " --gtest_filter=Key.PrintsTheKeysOfD1";
    FILE* pipe = popen(command.c_str(), "r");
    ASSERT_NE(pipe, nullptr);
    std::string output;
    std::array<char, 512> buffer;
    while (fgets(buffer.data(), buffer.size(), pipe) != nullptr) output += buffer.data();
    ASSERT_EQ(pclose(pipe), 0);
    EXPECT_NE(output.find("D1 " + D1Keys() + "\n"), std::string::npos) << output;
  }
}

TEST(Key, AbsentNullAndEmptySaltAreOneAndZeroIsAnother) {
  SpaceFields absent = Base();
  SpaceFields empty = Base();
  empty.salt = "";
  SpaceFields zero = Base();
  zero.salt = "0";
  EXPECT_EQ(SpaceId(absent), SpaceId(empty));
  EXPECT_NE(SpaceId(absent), SpaceId(zero));
}

TEST(Key, AdaptersSeparateByContentScaleAndOrder) {
  Digest a{}, b{};
  a.bytes[0] = 'A';
  b.bytes[0] = 'B';
  const auto with = [](std::vector<Adapter> adapters) {
    SpaceFields f = Base();
    f.adapters = std::move(adapters);
    return KeysOf(f, Tokens(1, 256)).at(0);
  };
  std::set<Digest> keys = {with({{a}}), with({{b}}), with({}), with({{a, 0.5}}), with({{a}, {b}}), with({{b}, {a}})};
  EXPECT_EQ(keys.size(), 6u);
  EXPECT_EQ(with({{a}}), with({{a}}));
}

TEST(Key, EveryFieldOfTheSpaceChangesTheKey) {
  std::vector<std::function<void(SpaceFields&)>> changes = {
      [](auto& f) { f.weights.bytes[31] ^= 1; },
      [](auto& f) { f.engine += "x"; },
      [](auto& f) { f.engine_state_version++; },
      [](auto& f) { f.engine_build += "x"; },
      [](auto& f) { f.kv_dtype_k = "q8_0"; },
      [](auto& f) { f.kv_dtype_v = "q8_0"; },
      [](auto& f) { f.kv_dtype_k = f.kv_dtype_v = "bf16"; },
      [](auto& f) { f.layers++; },
      [](auto& f) { f.kv_heads++; },
      [](auto& f) { f.head_size++; },
      [](auto& f) { f.head_size_v++; },
      [](auto& f) { f.layout = "llama.seq/v-rows"; },
      [](auto& f) { f.attention = "swa:512:full-cache"; },
      [](auto& f) { f.rope_type = "neox"; },
      [](auto& f) { f.rope_freq_base++; },
      [](auto& f) { f.rope_freq_scale = 0.5; },
      [](auto& f) { f.rope_ext_factor = 0.5; },
      [](auto& f) { f.rope_attn_factor = 0.5; },
      [](auto& f) { f.rope_beta_fast++; },
      [](auto& f) { f.rope_beta_slow++; },
      [](auto& f) { f.rope_orig_context++; },
      [](auto& f) { f.tp_size = 2; },
      [](auto& f) { f.tp_size = 2, f.tp_rank = 1; },
      [](auto& f) { f.pp_size = 2; },
      [](auto& f) { f.pp_size = 2, f.pp_rank = 1; },
      [](auto& f) { f.kv_group = 1; },
      [](auto& f) { f.chunk_tokens = 128; },
      [](auto& f) { f.salt = "tenant"; },
  };
  std::set<Digest> spaces = {SpaceId(Base())};
  for (const auto& change : changes) {
    SpaceFields f = Base();
    change(f);
    spaces.insert(SpaceId(f));
  }
  EXPECT_EQ(spaces.size(), changes.size() + 1);
}

TEST(Key, NeighbouringTextFieldsDoNotRunTogether) {
  SpaceFields a = Base(), b = Base();
  a.engine = "ab", a.engine_build = "c";
  b.engine = "a", b.engine_build = "bc";
  EXPECT_NE(SpaceId(a), SpaceId(b));
  a = b = Base();
  a.rope_type = "x", a.salt = "";
  b.rope_type = "", b.salt = "x";
  EXPECT_NE(SpaceId(a), SpaceId(b));
}

TEST(Key, NegativeZeroIsZero) {
  SpaceFields a = Base(), b = Base();
  a.rope_ext_factor = 0.0;
  b.rope_ext_factor = -0.0;
  EXPECT_EQ(SpaceId(a), SpaceId(b));
}

TEST(Key, MediaIdsThatAgreeInTheirLow32BitsDiffer) {
  const auto tokens = Tokens(1, 256);
  const std::string low = std::string("\x11\x22\x33\x44", 4);
  EXPECT_NE(KeysOf(Base(), tokens, {{10, 50, low + "AAAA"}}), KeysOf(Base(), tokens, {{10, 50, low + "BBBB"}}));
  EXPECT_NE(KeysOf(Base(), tokens, {{10, 50, "AAAA" + low}}), KeysOf(Base(), tokens, {{10, 50, "BBBB" + low}}));
  EXPECT_NE(KeysOf(Base(), tokens, {{10, 50, low}}), KeysOf(Base(), tokens));
}

TEST(Key, AMediaItemThatSpansChunksAppearsInEach) {
  const auto tokens = Tokens(1, 1024);
  const auto x = KeysOf(Base(), tokens, {{200, 400, "x"}});
  const auto y = KeysOf(Base(), tokens, {{200, 400, "y"}});
  for (size_t i = 0; i < 4; ++i) EXPECT_NE(x[i], y[i]) << i;
  // The last chunk has no part of it: given the same parent, its key is that of plain text.
  EXPECT_EQ(ChunkKey(x[2], std::span(tokens).subspan(768)), x[3]);
  const MediaSpan part{0, 312, "x"};
  EXPECT_EQ(ChunkKey(x[1], std::span(tokens).subspan(512, 256), std::span(&part, 1)), x[2]);
}

TEST(Key, AGrowingConversationKeepsItsKeysAndHashesOnlyWholeChunks) {
  const auto tokens = Tokens(1, 1000);
  KeyChain grown(SpaceId(Base()), 256);
  for (size_t n = 0; n <= tokens.size(); n += 125) grown.Extend(std::span(tokens).first(n));
  EXPECT_EQ(grown.keys(), KeysOf(Base(), tokens));
  EXPECT_EQ(grown.keys().size(), 3u);
  EXPECT_EQ(grown.parent(0), SpaceId(Base()));
  EXPECT_EQ(grown.parent(2), grown.keys()[1]);
}

TEST(Key, HexRoundTripsAndRefusesWhatIsNone) {
  const Digest d = SpaceId(Base());
  EXPECT_EQ(Digest::FromHex(d.Hex()), d);
  EXPECT_EQ(Digest::FromHex(""), std::nullopt);
  EXPECT_EQ(Digest::FromHex(d.Hex() + "0"), std::nullopt);
  std::string upper = d.Hex();
  upper[0] = 'G';
  EXPECT_EQ(Digest::FromHex(upper), std::nullopt);
}

// Lines of "name hex..." that docs/internals/keys.md prints and tests/build/test_keys.py computes from the
// specification alone.
TEST(Key, AgreesWithThePublishedVectors) {
  std::ifstream in(std::string(TERRACE_TEST_DATA) + "/keys.txt");
  ASSERT_TRUE(in) << "tests/data/keys.txt is missing";
  std::map<std::string, std::string> vectors;
  std::string line;
  while (std::getline(in, line)) {
    const size_t space = line.find(' ');
    if (!line.empty() && line[0] != '#') vectors[line.substr(0, space)] = line.substr(space + 1);
  }
  SpaceFields salted = Base();
  salted.salt = "tenant-7";
  SpaceFields adapted = Base();
  adapted.adapters = {{Base().weights, 0.5}};
  const auto join = [](const std::vector<Digest>& keys) {
    std::string text;
    for (const Digest& key : keys) text += (text.empty() ? "" : " ") + key.Hex();
    return text;
  };
  EXPECT_EQ(vectors["space.base"], SpaceId(Base()).Hex());
  EXPECT_EQ(vectors["space.salt"], SpaceId(salted).Hex());
  EXPECT_EQ(vectors["space.adapter"], SpaceId(adapted).Hex());
  EXPECT_EQ(vectors["keys.1to512"], join(KeysOf(Base(), Tokens(1, 512))));
  EXPECT_EQ(vectors["keys.media"], join(KeysOf(Base(), Tokens(1, 512), {{200, 100, "img-1"}})));
  EXPECT_EQ(vectors.size(), 5u);
}

}  // namespace
}  // namespace terrace
