// Would catch: a datagram that makes the decoder read outside of it, or that decodes to anything but its own bytes.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/assert.h"
#include "client/wire.h"

using terrace::wire::Message;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto datagram = std::as_bytes(std::span(data, size));
  const terrace::Result<Message> message = terrace::wire::Decode(datagram);
  if (!message) return 0;
  TERRACE_ASSERT(size == sizeof message->header + message->bytes.size());
  TERRACE_ASSERT(std::memcmp(&message->header, data, sizeof message->header) == 0);
  const auto loaded = message->Items<terrace::wire::LoadedItem>();
  for (const auto& item : loaded) static_cast<void>(item.info == terrace::FrameInfo{});
  return 0;
}
