// Naming KV: the space (everything that must be equal for two engines to share KV) and the key of a chunk in it.
//
// The format, with test vectors, is docs/internals/keys.md. Nothing here depends on process, host, seed or time: the
// same fields and tokens give the same bytes everywhere. All functions are pure and may be called from any thread.
#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace terrace {

// SHA-256 output. Names spaces, chunks, weights and adapters.
struct Digest {
  std::array<uint8_t, 32> bytes{};
  auto operator<=>(const Digest&) const = default;
  std::string Hex() const;
  static std::optional<Digest> FromHex(std::string_view hex);  // Exactly 64 lower-case hex digits.
};

// For hash maps: a digest is uniform already.
struct DigestHash {
  using is_avalanching = void;
  size_t operator()(const Digest& d) const noexcept {
    size_t h;
    std::memcpy(&h, d.bytes.data(), sizeof h);
    return h;
  }
};

struct Adapter {
  Digest content;      // SHA-256 of all bytes of the adapter's files.
  double scale = 1.0;  // As applied.
};

// What must be equal for KV to be shared. Absent text equals "" (D2).
struct SpaceFields {
  Digest weights;                     // SHA-256 of all bytes of the weights.
  std::string engine;                 // "llama.cpp".
  uint32_t engine_state_version = 0;  // Version of the engine's state bytes.
  std::string engine_build;           // Build whose kernels and format made the bytes, "b11434".
  std::string kv_dtype_k;             // Effective, not requested: "f16", "bf16", "q8_0".
  std::string kv_dtype_v;
  uint32_t layers = 0;
  uint32_t kv_heads = 0;
  uint32_t head_size = 0;  // Elements a head, K side.
  uint32_t head_size_v = 0;
  std::string layout;     // "llama.seq/v-rows" or "llama.seq/v-transposed".
  std::string attention;  // "full", "swa:512:full-cache", "mla".
  std::string rope_type;
  double rope_freq_base = 0;  // Doubles are encoded by their IEEE-754 bits; -0.0 as 0.0.
  double rope_freq_scale = 0;
  double rope_ext_factor = 0;
  double rope_attn_factor = 0;
  double rope_beta_fast = 0;
  double rope_beta_slow = 0;
  uint32_t rope_orig_context = 0;
  std::vector<Adapter> adapters;      // In the order applied.
  uint32_t tp_size = 1, tp_rank = 0;  // Tensor-parallel shard.
  uint32_t pp_size = 1, pp_rank = 0;  // Pipeline shard.
  uint32_t kv_group = 0;              // Group of layers in hybrid models.
  uint32_t chunk_tokens = 256;
  std::string salt;  // vLLM's cache_salt; also separates tenants.
};

// Canonical, typed, length-prefixed and injective encoding; SpaceId is its SHA-256.
std::string EncodeSpace(const SpaceFields& fields);
Digest SpaceId(const SpaceFields& fields);

// An image, audio clip or video in the prompt: `length` placeholder tokens from `position` on stand for it.
struct MediaItem {
  uint32_t position = 0;  // First token, from the start of the sequence.
  uint32_t length = 0;    // Tokens.
  std::string id;         // Content identity, any bytes.
};

// The part of an item that lies in one chunk.
struct MediaSpan {
  uint32_t offset_in_chunk = 0;
  uint32_t start_in_item = 0;
  std::string_view id;
};

// key_i from key_{i-1} (the space id for i = 0). `media` in order of offset.
Digest ChunkKey(const Digest& parent, std::span<const int32_t> tokens, std::span<const MediaSpan> media = {});

// Keys of a growing sequence: Extend hashes only chunks that became whole since the last call.
class KeyChain {
 public:
  // chunk_tokens > 0. `media` must be known up front, ordered by position and not overlapping.
  KeyChain(const Digest& space, uint32_t chunk_tokens, std::vector<MediaItem> media = {});

  // `tokens` is the whole sequence so far; its first part must be what earlier calls saw.
  void Extend(std::span<const int32_t> tokens);

  // One key a whole chunk, in order.
  const std::vector<Digest>& keys() const { return keys_; }
  // Parent of chunk i: keys()[i-1], or the space.
  const Digest& parent(size_t i) const { return i == 0 ? space_ : keys_[i - 1]; }
  const Digest& space() const { return space_; }
  uint32_t chunk_tokens() const { return chunk_tokens_; }

 private:
  Digest space_;
  uint32_t chunk_tokens_;
  std::vector<MediaItem> media_;
  std::vector<Digest> keys_;
};

}  // namespace terrace
