// Memory that clients fill with chunks to be saved: memfds of the node's, each lent to one session. The loop's thread
// alone touches it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>

#include "client/packet_socket.h"
#include "client/wire.h"
#include "node/session.h"

namespace terrace {

class SegmentLender {
 public:
  struct Bounds {
    uint64_t bytes_max = 0;          // Lent to all.
    uint64_t segment_bytes_max = 0;  // Of one.
    size_t segments_max = 0;         // Of one session.
  };
  // Handles begin after `first_handle`.
  SegmentLender(const Bounds& bounds, uint64_t first_handle) : bounds_(bounds), last_handle_(first_handle) {}

  struct Granted {
    uint64_t handle = 0, bytes = 0;
    std::shared_ptr<const Fd> memory;
  };
  // At most `wanted` bytes, with room for a chunk of `chunk_bytes`; handle 0: there is none.
  Granted Lend(Session& session, uint64_t wanted, uint64_t chunk_bytes);
  void TakeBack(const Session& session) { bytes_ -= session.segments_bytes; }  // The session is about to end.
  uint64_t bytes() const { return bytes_; }

  struct Filled {
    std::span<const std::byte> bytes;
    std::shared_ptr<const void> owner;
  };
  // Nothing if it is not within a segment that the session was lent.
  static std::optional<Filled> Find(const Session& session, const wire::CommitItem& item);

 private:
  const Bounds bounds_;
  uint64_t last_handle_;
  uint64_t bytes_ = 0;
};

}  // namespace terrace
