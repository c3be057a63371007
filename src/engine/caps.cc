#include "engine/caps.h"

#include <string>

#include "chunk/frame.h"

namespace terrace {
namespace {

std::string MiB(uint64_t bytes) { return std::to_string((bytes + (1 << 20) - 1) >> 20) + " MiB"; }

}  // namespace

Result<void> HoldAChunk(const Caps& caps, uint64_t chunk_bytes, uint32_t chunk_tokens) {
  const uint64_t frame_bytes = FrameBytes(chunk_bytes);
  const std::string chunk =
      "one chunk (" + std::to_string(chunk_tokens) + " tokens of this model are " + MiB(frame_bytes) + ")";
  const auto too_small = [&](const char* option) {
    return Fail(Code::kInvalid, std::string(option) + " is less than " + chunk +
                                    ", so nothing could be kept: give it several times that, or a smaller --chunk");
  };
  if (caps.ram_bytes < chunk_bytes) return too_small("--ram");
  if (caps.disk_bytes > 0 && caps.disk_bytes < frame_bytes) return too_small("--disk-size");
  if (caps.shared_bytes > 0 && caps.shared_bytes < frame_bytes) return too_small("--shared-size");
  if (caps.shared_volume_bytes > 0 && caps.shared_free_bytes_min + frame_bytes > caps.shared_volume_bytes) {
    return Fail(Code::kInvalid, "--shared-free-min leaves no room for " + chunk +
                                    " on the volume of --shared, which has " + MiB(caps.shared_volume_bytes) +
                                    ": give less");
  }
  return {};
}

}  // namespace terrace
