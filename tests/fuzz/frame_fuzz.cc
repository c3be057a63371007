// Would catch: a header of foreign bytes that crashes the decoder, or that decodes without being exactly what the
// encoder writes.
#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <vector>

#include "chunk/frame.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace terrace;
  if (size < 8) return 0;
  uint64_t file_bytes = 0;
  for (int i = 0; i < 8; ++i) file_bytes |= static_cast<uint64_t>(data[i]) << (8 * i);
  const auto head = std::as_bytes(std::span(data + 8, size - 8));
  const auto decoded = DecodeFrameHeader(head, file_bytes);
  if (const auto* frame = std::get_if<Frame>(&decoded)) {
    const FrameHeader again = EncodeFrameHeader(frame->info, frame->created_ns, frame->segments);
    if (!std::equal(again.begin(), again.end(), head.begin())) std::abort();
    if (FrameBytes(frame->info.payload_bytes) != file_bytes) std::abort();
    (void)SegmentMatches(*frame, 0, head);
  }
  return 0;
}
