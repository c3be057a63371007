// The frame: a chunk's bytes with a header that proves them. A file and an object are the same bytes: 4 KiB of header,
// then the payload, then zeros up to a multiple of 4 KiB. docs/internals/frame.md is the format;
// tests/data/frame-v1.bin a sample that every later release must read or refuse by name.
//
// The decoder is strict: any bit of the header that is not as the encoder would write it makes the frame no frame. XXH3
// finds damage, not malice.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <variant>

#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace {

inline constexpr size_t kFrameHeaderBytes = 4096;
inline constexpr uint64_t kFramePayloadBytesMax = 64ull << 30;

// What the payload is. A loader checks it against what it can read.
enum class PayloadKind : uint32_t {
  kOpaque = 0,         // Tests and benchmarks.
  kLlamaSequence = 1,  // llama.cpp's state of one sequence, one chunk's cells.
};

struct Frame {
  FrameInfo info;
  uint64_t created_ns = 0;  // Writer's wall clock, for people; decides nothing.
  SegmentHashes segments;   // One a segment of segment_bytes.
  uint64_t segment_bytes = kSegmentBytes;
};

// Header plus padded payload.
constexpr uint64_t PaddedBytes(uint64_t payload_bytes) { return (payload_bytes + 4095) / 4096 * 4096; }
constexpr uint64_t FrameBytes(uint64_t payload_bytes) { return kFrameHeaderBytes + PaddedBytes(payload_bytes); }

// Segment size for a payload: kSegmentBytes unless its table would not fit in the header, then the next power of two
// that does.
uint64_t FrameSegmentBytes(uint64_t payload_bytes);

using FrameHeader = std::array<std::byte, kFrameHeaderBytes>;

// `hashes`: of the payload, in segments of kSegmentBytes (as HashSegments gives). For payloads whose FrameSegmentBytes
// is larger, pass the payload's hashes at that size.
FrameHeader EncodeFrameHeader(const FrameInfo& info, uint64_t created_ns, std::span<const uint64_t> hashes);
// The same, from the payload. `known`: its HashSegments, or null; taken if the frame has segments of that size, else
// the payload is hashed.
FrameHeader EncodeFrameHeader(const FrameInfo& info, uint64_t created_ns, std::span<const std::byte> payload,
                              const SegmentHashes* known);

// Decodes the first kFrameHeaderBytes of a frame of `file_bytes` in all. On failure the Reason: kEmpty (0 bytes),
// kTruncated (shorter than the header says, or than a header), kDamaged, kVersion.
std::variant<Frame, Reason> DecodeFrameHeader(std::span<const std::byte> head, uint64_t file_bytes);

// Verifies one segment as it arrives: `index` from 0, `bytes` exactly that segment of the payload.
bool SegmentMatches(const Frame& frame, size_t index, std::span<const std::byte> bytes);

}  // namespace terrace
