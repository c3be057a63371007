// A frame on its way from a bucket: its ranges, in any order and several at once, straight into the caller's buffer,
// each segment hashed while it is copied and compared as soon as its hash is known. One thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/hash.h"
#include "chunk/frame.h"
#include "terrace/tier.h"

namespace terrace {

class S3Frame {
 public:
  // `into` is the payload's place. `parts` ranges of whole segments, as equal as can be.
  S3Frame(const Digest& key, const Digest& space, std::span<std::byte> into, size_t parts);

  struct Range {
    uint64_t begin = 0, end = 0;  // In the object. The first holds the header, the last the padding.
  };
  size_t parts() const { return parts_.size(); }
  const Range& range(size_t part) const { return parts_[part].range; }
  uint64_t object_bytes() const { return FrameBytes(into_.size()); }

  // Bytes of a part, in order; from its beginning again, if they came in vain. `total`: of the object. False: no more
  // are needed, reason() says why.
  bool Take(size_t part, uint64_t total, uint64_t offset, std::span<const std::byte> piece);

  // All ranges have come, or the object has no more. The verdict.
  Reason Finish(uint64_t total);

  Reason reason() const { return reason_; }  // kNone so far.
  // The object can serve nobody: it disagrees with its own name or checksums.
  bool is_rubbish() const { return is_rubbish_; }
  const Frame& frame() const { return *frame_; }           // Of a whole header.
  const SegmentHashes& hashes() const { return hashes_; }  // In segments of frame().segment_bytes.

 private:
  struct Part {
    Range range;
    std::unique_ptr<Xxh3Stream> hash;  // Of the segment that is under way.
    uint64_t at = 0;                   // Next byte.
  };
  bool Refuse(Reason reason, bool is_rubbish);
  bool TakeHeader(uint64_t total);
  bool EndSegment(size_t segment, uint64_t hash);

  const Digest key_, space_;
  const std::span<std::byte> into_;
  const uint64_t segment_bytes_;
  FrameHeader header_{};
  size_t header_bytes_ = 0;
  std::optional<Frame> frame_;
  SegmentHashes hashes_;
  std::vector<uint8_t> hashed_;  // hashes_[i] is known.
  std::vector<Part> parts_;
  Reason reason_ = Reason::kNone;
  bool is_rubbish_ = false;
};

}  // namespace terrace
