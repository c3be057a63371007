#include "terrace/key.h"

#include <algorithm>
#include <bit>

#include "base/assert.h"
#include "base/hash.h"
#include "terrace/version.h"

namespace terrace {
namespace {

void PutU32(std::string& out, uint32_t v) {
  for (int shift = 0; shift < 32; shift += 8) out.push_back(static_cast<char>(v >> shift));
}

// One field of a space: tag, type, length, value. Tags and types never change meaning; a new field takes a new tag.
class FieldWriter {
 public:
  void Text(uint32_t tag, std::string_view v) {
    if (!v.empty()) Put(tag, 't', v);  // Absent equals empty.
  }
  void Number(uint32_t tag, uint32_t v) {
    std::string bytes;
    PutU32(bytes, v);
    Put(tag, 'u', bytes);
  }
  void Real(uint32_t tag, double v) { Put(tag, 'd', RealBytes(v)); }
  void Digest32(uint32_t tag, const Digest& v) { Put(tag, 'h', DigestBytes(v)); }
  void Adapters(uint32_t tag, const std::vector<Adapter>& adapters) {
    if (adapters.empty()) return;
    std::string bytes;
    for (const Adapter& a : adapters) bytes.append(DigestBytes(a.content)).append(RealBytes(a.scale));
    Put(tag, 'a', bytes);
  }
  std::string Take() { return std::move(out_); }

 private:
  static std::string_view DigestBytes(const Digest& v) {
    return {reinterpret_cast<const char*>(v.bytes.data()), v.bytes.size()};
  }
  static std::string RealBytes(double v) {
    if (v == 0) v = 0;  // -0.0 and 0.0 are the same parameter.
    const auto bits = std::bit_cast<uint64_t>(v);
    std::string bytes;
    PutU32(bytes, static_cast<uint32_t>(bits));
    PutU32(bytes, static_cast<uint32_t>(bits >> 32));
    return bytes;
  }
  void Put(uint32_t tag, char type, std::string_view value) {
    PutU32(out_, tag);
    out_.push_back(type);
    PutU32(out_, static_cast<uint32_t>(value.size()));
    out_.append(value);
  }
  std::string out_ = "terrace.space";
};

}  // namespace

std::string Digest::Hex() const {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string hex;
  hex.reserve(64);
  for (const uint8_t b : bytes) {
    hex.push_back(kDigits[b >> 4]);
    hex.push_back(kDigits[b & 15]);
  }
  return hex;
}

std::optional<Digest> Digest::FromHex(std::string_view hex) {
  if (hex.size() != 64) return std::nullopt;
  Digest digest;
  for (size_t i = 0; i < 64; ++i) {
    const char c = hex[i];
    int nibble = 0;
    if (c >= '0' && c <= '9') {
      nibble = c - '0';
    } else if (c >= 'a' && c <= 'f') {
      nibble = c - 'a' + 10;
    } else {
      return std::nullopt;
    }
    digest.bytes[i / 2] = static_cast<uint8_t>(digest.bytes[i / 2] << 4 | nibble);
  }
  return digest;
}

std::string EncodeSpace(const SpaceFields& f) {
  FieldWriter w;
  w.Number(1, kKeyFormatVersion);
  w.Digest32(2, f.weights);
  w.Text(3, f.engine);
  w.Number(4, f.engine_state_version);
  w.Text(5, f.engine_build);
  w.Text(6, f.kv_dtype_k);
  w.Text(7, f.kv_dtype_v);
  w.Number(8, f.layers);
  w.Number(9, f.kv_heads);
  w.Number(10, f.head_size);
  w.Number(11, f.head_size_v);
  w.Text(12, f.layout);
  w.Text(13, f.attention);
  w.Text(14, f.rope_type);
  w.Real(15, f.rope_freq_base);
  w.Real(16, f.rope_freq_scale);
  w.Real(17, f.rope_ext_factor);
  w.Real(18, f.rope_attn_factor);
  w.Real(19, f.rope_beta_fast);
  w.Real(20, f.rope_beta_slow);
  w.Number(21, f.rope_orig_context);
  w.Adapters(22, f.adapters);
  w.Number(23, f.tp_size);
  w.Number(24, f.tp_rank);
  w.Number(25, f.pp_size);
  w.Number(26, f.pp_rank);
  w.Number(27, f.kv_group);
  w.Number(28, f.chunk_tokens);
  w.Text(29, f.salt);
  return w.Take();
}

Digest SpaceId(const SpaceFields& fields) { return Sha256Of(EncodeSpace(fields)); }

Digest ChunkKey(const Digest& parent, std::span<const int32_t> tokens, std::span<const MediaSpan> media) {
  std::string bytes = "terrace.key.1";
  bytes.reserve(bytes.size() + 32 + 8 + tokens.size() * 4);
  bytes.append(reinterpret_cast<const char*>(parent.bytes.data()), parent.bytes.size());
  PutU32(bytes, static_cast<uint32_t>(tokens.size()));
  if constexpr (std::endian::native == std::endian::little) {
    bytes.append(reinterpret_cast<const char*>(tokens.data()), tokens.size_bytes());
  } else {
    for (const int32_t t : tokens) PutU32(bytes, static_cast<uint32_t>(t));
  }
  PutU32(bytes, static_cast<uint32_t>(media.size()));
  for (const MediaSpan& span : media) {
    PutU32(bytes, span.offset_in_chunk);
    PutU32(bytes, span.start_in_item);
    PutU32(bytes, static_cast<uint32_t>(span.id.size()));
    bytes.append(span.id);
  }
  return Sha256Of(bytes);
}

KeyChain::KeyChain(const Digest& space, uint32_t chunk_tokens, std::vector<MediaItem> media)
    : space_(space), chunk_tokens_(chunk_tokens), media_(std::move(media)) {
  TERRACE_ASSERT(chunk_tokens_ > 0);
}

void KeyChain::Extend(std::span<const int32_t> tokens) {
  const size_t whole = tokens.size() / chunk_tokens_;
  keys_.reserve(whole);
  for (size_t i = keys_.size(); i < whole; ++i) {
    const uint64_t begin = static_cast<uint64_t>(i) * chunk_tokens_;
    const uint64_t end = begin + chunk_tokens_;
    std::vector<MediaSpan> spans;
    for (const MediaItem& item : media_) {
      const uint64_t item_end = static_cast<uint64_t>(item.position) + item.length;
      const uint64_t from = std::max<uint64_t>(begin, item.position);
      if (from >= std::min(end, item_end)) continue;
      spans.push_back({static_cast<uint32_t>(from - begin), static_cast<uint32_t>(from - item.position),
                       std::string_view(item.id)});
    }
    keys_.push_back(ChunkKey(parent(i), tokens.subspan(begin, chunk_tokens_), spans));
  }
}

}  // namespace terrace
