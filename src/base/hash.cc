#include "base/hash.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#define XXH_STATIC_LINKING_ONLY  // The state of a streaming hash by value.
#include <xxh_x86dispatch.h>     // Picks SSE2, AVX2 or AVX-512 at run time; defines XXH3_* as the dispatching calls.

#include <algorithm>
#include <cstring>

#include "base/assert.h"

namespace terrace {

struct Sha256::Impl {
  EVP_MD_CTX* context = EVP_MD_CTX_new();
  ~Impl() { EVP_MD_CTX_free(context); }
};

Sha256::Sha256() : impl_(std::make_unique<Impl>()) {
  TERRACE_ASSERT(EVP_DigestInit_ex(impl_->context, EVP_sha256(), nullptr) == 1);
}
Sha256::~Sha256() = default;

void Sha256::Update(std::span<const std::byte> bytes) {
  TERRACE_ASSERT(EVP_DigestUpdate(impl_->context, bytes.data(), bytes.size()) == 1);
}
void Sha256::Update(std::string_view bytes) { Update(std::as_bytes(std::span(bytes))); }

Digest Sha256::Finish() {
  Digest digest;
  TERRACE_ASSERT(EVP_DigestFinal_ex(impl_->context, digest.bytes.data(), nullptr) == 1);
  return digest;
}

Digest Sha256Of(std::string_view bytes) {
  Sha256 hash;
  hash.Update(bytes);
  return hash.Finish();
}

Digest HmacSha256(std::string_view key, std::string_view message) {
  Digest digest;
  const auto* bytes = reinterpret_cast<const unsigned char*>(message.data());
  TERRACE_ASSERT(HMAC(EVP_sha256(), key.data(), static_cast<int>(key.size()), bytes, message.size(),
                      digest.bytes.data(), nullptr) != nullptr);
  return digest;
}

uint64_t Xxh3_64(std::span<const std::byte> bytes) { return XXH3_64bits(bytes.data(), bytes.size()); }

struct Xxh3Stream::Impl {
  alignas(64) XXH3_state_t state;
};

Xxh3Stream::Xxh3Stream() : impl_(std::make_unique<Impl>()) { XXH3_64bits_reset(&impl_->state); }
Xxh3Stream::~Xxh3Stream() = default;

void Xxh3Stream::Update(std::span<const std::byte> bytes) {
  XXH3_64bits_update(&impl_->state, bytes.data(), bytes.size());
}

uint64_t Xxh3Stream::Finish() {
  const uint64_t hash = XXH3_64bits_digest(&impl_->state);
  XXH3_64bits_reset(&impl_->state);
  return hash;
}

Hash128 Xxh3_128(std::span<const std::byte> bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  return {h.low64, h.high64};
}

SegmentHashes HashSegments(std::span<const std::byte> bytes) {
  SegmentHashes hashes;
  hashes.reserve((bytes.size() + kSegmentBytes - 1) / kSegmentBytes);
  for (size_t at = 0; at < bytes.size(); at += kSegmentBytes) {
    hashes.push_back(Xxh3_64(bytes.subspan(at, std::min(kSegmentBytes, bytes.size() - at))));
  }
  return hashes;
}

namespace {

// Copying waits for memory and hashing for the core, so the one is hidden behind the other: while a step is copied and
// hashed out of the first-level cache, the lines of later ones, source and target, are on their way. Small steps, so
// that memory never waits for the core. Plain copy and hash in turn reaches 0.75 of memcpy, this 0.9 and more (36 MiB,
// nothing in the cache). `ahead` bytes of `from` and `to` may be asked for, at least those to be copied.
void CopyInto(XXH3_state_t& state, const std::byte* from, std::byte* to, size_t bytes, size_t ahead) {
  constexpr size_t kStepBytes = 768;  // The state keeps 256 bytes for itself each time: not much smaller.
  constexpr size_t kAheadBytes = 2 << 10;
  constexpr size_t kLineBytes = 64;
  for (size_t step = 0; step < bytes; step += kStepBytes) {
    const size_t step_bytes = std::min(kStepBytes, bytes - step);
    const size_t ahead_end = std::min(ahead, step + kAheadBytes + kStepBytes);
    for (size_t at = step + kAheadBytes; at < ahead_end; at += kLineBytes) {
      __builtin_prefetch(from + at, 0);
      __builtin_prefetch(to + at, 1);
    }
    std::memcpy(to + step, from + step, step_bytes);
    XXH3_64bits_update(&state, to + step, step_bytes);
  }
}

}  // namespace

SegmentHashes CopyAndHash(std::span<const std::byte> from, std::span<std::byte> to) {
  TERRACE_ASSERT(from.size() == to.size());
  return CopyAndHash(from, std::span<const std::span<std::byte>>(&to, 1));
}

SegmentHashes CopyAndHash(std::span<const std::byte> from, std::span<const std::span<std::byte>> to) {
  SegmentHashes hashes;
  hashes.reserve((from.size() + kSegmentBytes - 1) / kSegmentBytes);
  alignas(64) XXH3_state_t state;
  size_t piece = 0;
  size_t in_piece = 0;
  for (size_t segment = 0; segment < from.size(); segment += kSegmentBytes) {
    const size_t end = std::min(from.size(), segment + kSegmentBytes);
    XXH3_64bits_reset(&state);
    for (size_t at = segment; at < end;) {
      while (piece < to.size() && in_piece == to[piece].size()) {
        ++piece;
        in_piece = 0;
      }
      TERRACE_ASSERT(piece < to.size());
      const size_t left = std::min(from.size() - at, to[piece].size() - in_piece);
      const size_t bytes = std::min(end - at, left);
      CopyInto(state, from.data() + at, to[piece].data() + in_piece, bytes, left);
      at += bytes;
      in_piece += bytes;
    }
    hashes.push_back(XXH3_64bits_digest(&state));
  }
  return hashes;
}

}  // namespace terrace
