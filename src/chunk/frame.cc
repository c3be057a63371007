#include "chunk/frame.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "base/assert.h"
#include "base/hash.h"
#include "terrace/version.h"

namespace terrace {
namespace {

// Offsets in the header; all numbers little-endian. docs/internals/frame.md is this table for people.
constexpr char kMagic[8] = {'T', 'E', 'R', 'R', 'A', 'C', 'E', '\x01'};
constexpr size_t kAtVersion = 8;
constexpr size_t kAtHeaderBytes = 12;
constexpr size_t kAtChecksum = 16;  // XXH3-128 of the header with these 16 bytes zero.
constexpr size_t kAtSpace = 32;
constexpr size_t kAtKey = 64;
constexpr size_t kAtParent = 96;
constexpr size_t kAtFirstToken = 128;
constexpr size_t kAtTokenCount = 132;
constexpr size_t kAtTpRank = 136;
constexpr size_t kAtPpRank = 140;
constexpr size_t kAtKvGroup = 144;
constexpr size_t kAtPayloadKind = 148;
constexpr size_t kAtCodec = 152;  // 0: none. No other is defined.
constexpr size_t kAtSegmentCount = 156;
constexpr size_t kAtPayloadBytes = 160;
constexpr size_t kAtPaddedBytes = 168;
constexpr size_t kAtSegmentBytes = 176;
constexpr size_t kAtCreated = 184;
// 192: encryption key id (16), nonce (16), tag (16), HMAC of frame_key (32): zero, no release writes them yet.
constexpr size_t kAtReservedEnd = 512;  // 192..512 zero.
constexpr size_t kAtSegments = 512;
constexpr size_t kSegmentsMax = (kFrameHeaderBytes - kAtSegments) / 8;  // 448: 448 MiB of payload in segments of 1 MiB.

template <class T>
void Put(FrameHeader& h, size_t at, T v) {
  for (size_t i = 0; i < sizeof v; ++i) h[at + i] = static_cast<std::byte>(static_cast<uint64_t>(v) >> (8 * i));
}
template <class T>
T Get(std::span<const std::byte> h, size_t at) {
  uint64_t v = 0;
  for (size_t i = 0; i < sizeof(T); ++i) v |= static_cast<uint64_t>(h[at + i]) << (8 * i);
  return static_cast<T>(v);
}
void PutDigest(FrameHeader& h, size_t at, const Digest& d) { std::memcpy(h.data() + at, d.bytes.data(), 32); }
Digest GetDigest(std::span<const std::byte> h, size_t at) {
  Digest d;
  std::memcpy(d.bytes.data(), h.data() + at, 32);
  return d;
}
bool Zero(std::span<const std::byte> bytes) {
  return std::all_of(bytes.begin(), bytes.end(), [](std::byte b) { return b == std::byte{0}; });
}
uint64_t SegmentCount(uint64_t payload_bytes, uint64_t segment_bytes) {
  return (payload_bytes + segment_bytes - 1) / segment_bytes;
}

Hash128 HeaderChecksum(std::span<const std::byte> head) {
  FrameHeader copy;
  std::memcpy(copy.data(), head.data(), copy.size());
  std::memset(copy.data() + kAtChecksum, 0, 16);
  return Xxh3_128(copy);
}

}  // namespace

uint64_t FrameSegmentBytes(uint64_t payload_bytes) {
  uint64_t segment = kSegmentBytes;
  while (SegmentCount(payload_bytes, segment) > kSegmentsMax) segment *= 2;
  return segment;
}

FrameHeader EncodeFrameHeader(const FrameInfo& info, uint64_t created_ns, std::span<const std::byte> payload,
                              const SegmentHashes* known) {
  const uint64_t segment_bytes = FrameSegmentBytes(payload.size());
  if (known && segment_bytes == kSegmentBytes) return EncodeFrameHeader(info, created_ns, *known);
  SegmentHashes hashes;
  for (uint64_t at = 0; at < payload.size(); at += segment_bytes) {
    hashes.push_back(Xxh3_64(payload.subspan(at, std::min<uint64_t>(segment_bytes, payload.size() - at))));
  }
  return EncodeFrameHeader(info, created_ns, hashes);
}

FrameHeader EncodeFrameHeader(const FrameInfo& info, uint64_t created_ns, std::span<const uint64_t> hashes) {
  const uint64_t segment_bytes = FrameSegmentBytes(info.payload_bytes);
  TERRACE_ASSERT(info.payload_bytes > 0 && info.payload_bytes <= kFramePayloadBytesMax);
  TERRACE_ASSERT(hashes.size() == SegmentCount(info.payload_bytes, segment_bytes));
  FrameHeader h{};
  std::memcpy(h.data(), kMagic, sizeof kMagic);
  Put(h, kAtVersion, kFrameFormatVersion);
  Put(h, kAtHeaderBytes, static_cast<uint32_t>(kFrameHeaderBytes));
  PutDigest(h, kAtSpace, info.space);
  PutDigest(h, kAtKey, info.key);
  PutDigest(h, kAtParent, info.parent);
  Put(h, kAtFirstToken, info.first_token);
  Put(h, kAtTokenCount, info.token_count);
  Put(h, kAtTpRank, info.tp_rank);
  Put(h, kAtPpRank, info.pp_rank);
  Put(h, kAtKvGroup, info.kv_group);
  Put(h, kAtPayloadKind, info.payload_kind);
  Put(h, kAtSegmentCount, static_cast<uint32_t>(hashes.size()));
  Put(h, kAtPayloadBytes, info.payload_bytes);
  Put(h, kAtPaddedBytes, PaddedBytes(info.payload_bytes));
  Put(h, kAtSegmentBytes, segment_bytes);
  Put(h, kAtCreated, created_ns);
  for (size_t i = 0; i < hashes.size(); ++i) Put(h, kAtSegments + 8 * i, hashes[i]);
  const Hash128 checksum = HeaderChecksum(h);
  Put(h, kAtChecksum, checksum.low);
  Put(h, kAtChecksum + 8, checksum.high);
  return h;
}

std::variant<Frame, Reason> DecodeFrameHeader(std::span<const std::byte> head, uint64_t file_bytes) {
  if (file_bytes == 0) return Reason::kEmpty;
  if (file_bytes < kFrameHeaderBytes || head.size() < kFrameHeaderBytes) return Reason::kTruncated;
  head = head.first(kFrameHeaderBytes);
  if (std::memcmp(head.data(), kMagic, sizeof kMagic) != 0) return Reason::kDamaged;
  // The version stands outside what a later format may change, so that it can be refused by name and not as damage.
  const auto version = Get<uint32_t>(head, kAtVersion);
  const Hash128 stated{Get<uint64_t>(head, kAtChecksum), Get<uint64_t>(head, kAtChecksum + 8)};
  if (HeaderChecksum(head) != stated) return Reason::kDamaged;
  if (version != kFrameFormatVersion) return Reason::kVersion;

  Frame frame;
  frame.info.space = GetDigest(head, kAtSpace);
  frame.info.key = GetDigest(head, kAtKey);
  frame.info.parent = GetDigest(head, kAtParent);
  frame.info.first_token = Get<uint32_t>(head, kAtFirstToken);
  frame.info.token_count = Get<uint32_t>(head, kAtTokenCount);
  frame.info.tp_rank = Get<uint32_t>(head, kAtTpRank);
  frame.info.pp_rank = Get<uint32_t>(head, kAtPpRank);
  frame.info.kv_group = Get<uint32_t>(head, kAtKvGroup);
  frame.info.payload_kind = Get<uint32_t>(head, kAtPayloadKind);
  frame.info.payload_bytes = Get<uint64_t>(head, kAtPayloadBytes);
  frame.segment_bytes = Get<uint64_t>(head, kAtSegmentBytes);
  frame.created_ns = Get<uint64_t>(head, kAtCreated);
  const auto segment_count = Get<uint32_t>(head, kAtSegmentCount);
  const uint64_t payload = frame.info.payload_bytes;
  if (Get<uint32_t>(head, kAtHeaderBytes) != kFrameHeaderBytes || Get<uint32_t>(head, kAtCodec) != 0 || payload == 0 ||
      payload > kFramePayloadBytesMax || Get<uint64_t>(head, kAtPaddedBytes) != PaddedBytes(payload) ||
      frame.segment_bytes != FrameSegmentBytes(payload) ||
      segment_count != SegmentCount(payload, frame.segment_bytes) || !Zero(head.subspan(192, kAtReservedEnd - 192)) ||
      !Zero(head.subspan(kAtSegments + 8ull * segment_count))) {
    return Reason::kDamaged;
  }
  if (file_bytes < FrameBytes(payload)) return Reason::kTruncated;
  if (file_bytes > FrameBytes(payload)) return Reason::kDamaged;
  frame.segments.resize(segment_count);
  for (size_t i = 0; i < segment_count; ++i) frame.segments[i] = Get<uint64_t>(head, kAtSegments + 8 * i);
  return frame;
}

bool SegmentMatches(const Frame& frame, size_t index, std::span<const std::byte> bytes) {
  if (index >= frame.segments.size()) return false;
  const uint64_t begin = index * frame.segment_bytes;
  if (bytes.size() != std::min(frame.segment_bytes, frame.info.payload_bytes - begin)) return false;
  return Xxh3_64(bytes) == frame.segments[index];
}

}  // namespace terrace
