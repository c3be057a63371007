#include "tier/s3_frame.h"

#include <algorithm>
#include <cstring>

namespace terrace {
namespace {

// Copied and hashed in blocks that stay in the first-level cache in between.
constexpr size_t kBlockBytes = 16 << 10;

}  // namespace

S3Frame::S3Frame(const Digest& key, const Digest& space, std::span<std::byte> into, size_t parts)
    : key_(key), space_(space), into_(into), segment_bytes_(FrameSegmentBytes(into.size())) {
  const size_t segments = (into.size() + segment_bytes_ - 1) / segment_bytes_;
  hashes_.resize(segments);
  hashed_.resize(segments);
  parts = std::clamp<size_t>(parts, 1, std::max<size_t>(segments, 1));
  for (size_t i = 0; i < parts; ++i) {
    const uint64_t first = segments * i / parts;
    const uint64_t last = segments * (i + 1) / parts;
    Part part{.range = {.begin = i == 0 ? 0 : kFrameHeaderBytes + first * segment_bytes_,
                        .end = i + 1 == parts ? object_bytes() : kFrameHeaderBytes + last * segment_bytes_},
              .hash = std::make_unique<Xxh3Stream>()};
    part.at = part.range.begin;
    parts_.push_back(std::move(part));
  }
}

bool S3Frame::Refuse(Reason reason, bool is_rubbish) {
  reason_ = reason;
  is_rubbish_ = is_rubbish;
  return false;
}

bool S3Frame::TakeHeader(uint64_t total) {
  auto decoded = DecodeFrameHeader(std::span(header_).first(header_bytes_), total);
  if (const Reason* reason = std::get_if<Reason>(&decoded)) return Refuse(*reason, *reason != Reason::kVersion);
  frame_ = std::get<Frame>(std::move(decoded));
  if (frame_->info.key != key_) return Refuse(Reason::kForeign, true);
  if (frame_->info.space != space_ || frame_->info.payload_bytes != into_.size()) {
    return Refuse(Reason::kForeign, false);
  }
  for (size_t i = 0; i < hashed_.size(); ++i) {
    if (hashed_[i] && hashes_[i] != frame_->segments[i]) return Refuse(Reason::kDamaged, true);
  }
  return true;
}

bool S3Frame::EndSegment(size_t segment, uint64_t hash) {
  hashes_[segment] = hash;
  hashed_[segment] = 1;
  return !frame_ || hash == frame_->segments[segment] || Refuse(Reason::kDamaged, true);
}

bool S3Frame::Take(size_t index, uint64_t total, uint64_t offset, std::span<const std::byte> piece) {
  if (reason_ != Reason::kNone) return false;
  Part& part = parts_[index];
  if (offset == part.range.begin && part.at != offset) {  // Once more.
    part.at = offset;
    part.hash = std::make_unique<Xxh3Stream>();
    if (index == 0) header_bytes_ = 0;
  }
  // Of another length than this frame has: the header, in the first part, says what it is.
  if (total != object_bytes() && index > 0) return false;
  // What comes behind the range would lie in the next one's place.
  const uint64_t payload_end = std::min(kFrameHeaderBytes + into_.size(), part.range.end);
  while (!piece.empty()) {
    size_t n = piece.size();
    if (part.at < kFrameHeaderBytes) {
      n = std::min<size_t>(n, kFrameHeaderBytes - part.at);
      std::memcpy(header_.data() + part.at, piece.data(), n);
      header_bytes_ = part.at + n;
      if (header_bytes_ == kFrameHeaderBytes && !TakeHeader(total)) return false;
    } else if (part.at < payload_end) {
      const uint64_t at = part.at - kFrameHeaderBytes;
      const size_t segment = at / segment_bytes_;
      const uint64_t segment_end = std::min<uint64_t>((segment + 1) * segment_bytes_, into_.size());
      n = std::min<size_t>({n, kBlockBytes, segment_end - at});
      std::memcpy(into_.data() + at, piece.data(), n);
      part.hash->Update(into_.subspan(at, n));
      if (at + n == segment_end && !EndSegment(segment, part.hash->Finish())) return false;
    } else if (part.at >= part.range.end ||
               std::any_of(piece.begin(), piece.end(), [](std::byte b) { return b != std::byte{0}; })) {
      return Refuse(Reason::kDamaged, true);
    }
    part.at += n;
    piece = piece.subspan(n);
  }
  return true;
}

Reason S3Frame::Finish(uint64_t total) {
  if (reason_ != Reason::kNone) return reason_;
  if (!frame_ && !TakeHeader(total)) return reason_;  // Shorter than a header.
  const bool whole =
      std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part.at == part.range.end; });
  if (!whole) Refuse(Reason::kTruncated, true);
  return reason_;
}

}  // namespace terrace
