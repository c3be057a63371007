// A frame as the pieces that a disk tier reads or writes at once: each 1 MiB of payload (and of hash segment), the
// first with the header before it, the last with the padding behind it. Shared by its loads and saves.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "chunk/frame.h"
#include "io/disk_io.h"
#include "terrace/tier.h"

namespace terrace {

inline constexpr size_t kDiskPieceBytes = kSegmentBytes;

// Pieces that wait or are under way, reading or writing: twice the usual depth of the device, so that it never waits
// for us, and a load that comes waits for no more.
inline constexpr size_t kDiskPiecesMax = 16;

constexpr size_t DiskPieceCount(uint64_t payload_bytes) {
  return static_cast<size_t>((payload_bytes + kDiskPieceBytes - 1) / kDiskPieceBytes);
}

// What of a frame does not lie in the caller's memory.
struct alignas(kDirectAlignment) DiskScratch {
  FrameHeader header;
  std::array<std::byte, kDirectAlignment> tail{};  // The last bytes of the payload and the padding, if there is any.
};
static_assert(kFrameHeaderBytes % kDirectAlignment == 0);

// Bytes of the payload that go through DiskScratch::tail.
constexpr size_t DiskTailBytes(uint64_t payload_bytes) { return static_cast<size_t>(payload_bytes % kDirectAlignment); }

// The operation that moves piece `i` of `payload`.
inline DiskOp DiskPiece(DiskOp::Kind kind, std::shared_ptr<DiskFile> file, size_t i, std::span<std::byte> payload,
                        DiskScratch& scratch, std::function<void(Result<size_t>)> done) {
  const size_t at = i * kDiskPieceBytes;
  const std::span<std::byte> piece = payload.subspan(at, std::min(kDiskPieceBytes, payload.size() - at));
  const size_t tail = piece.size() % kDirectAlignment;
  DiskOp op;
  op.kind = kind;
  op.file = std::move(file);
  op.offset = i == 0 ? 0 : kFrameHeaderBytes + at;
  if (i == 0) op.parts[0] = scratch.header;
  op.parts[1] = piece.first(piece.size() - tail);
  if (tail > 0) op.parts[2] = scratch.tail;
  op.done = std::move(done);
  return op;
}

inline size_t DiskOpBytes(const DiskOp& op) {
  size_t bytes = 0;
  for (const auto part : op.parts) bytes += part.size();
  return bytes;
}

inline bool DiskAligned(const void* address) { return reinterpret_cast<uintptr_t>(address) % kDirectAlignment == 0; }

}  // namespace terrace
