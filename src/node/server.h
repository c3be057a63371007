// A node's side of its socket: clients of this host, what they ask of the store, and what is lent to them.
//
// One thread of its own talks to all of them; it waits for nothing but the next event. Loads come back by callback;
// saves are copied from the client's segment into RAM on a second thread, in order, and hashed there: what the client
// writes to its segment later reaches nobody. A client that is gone, however it went, leaves nothing behind: its
// leases, segments and loads end with its session.
//
// What is lent is of two kinds. What a client copies and gives back at once, as it says with its load, it verifies as
// it copies, so the node may take it back from one that hangs. What a client holds on to is its own
// until it has hung up, even when it was cut off, as it may be reading there. A quarter of what may be lent is for the
// first kind alone. A session copies from no more than its share at a time, and holds at most twice what is still free
// for that: whatever some of them keep, there is room for the loads of others.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "client/packet_socket.h"
#include "terrace/metrics.h"
#include "terrace/result.h"
#include "terrace/store.h"

namespace terrace {

struct NodeServerOptions {
  size_t sessions_max = 256;      // More are refused.
  size_t calls_max = 4096;        // Of one session, under way. Beyond: its calls end at once, with kFull.
  size_t items_max = 256 << 10;   // Of these calls.
  size_t leases_max = 64 << 10;   // Of one session.
  uint64_t leased_bytes_max = 0;  // Of RAM, lent for reading. 0: half of it.
  // For a client to give back some of what it copies. Beyond: it hangs, and is cut off.
  std::chrono::milliseconds copy_max{60'000};
  uint64_t segments_bytes_max = 0;         // Lent for writing, beside the store's RAM.
  uint64_t segment_bytes_max = 256 << 20;  // Of one.
  size_t segments_max = 16;                // Of one session.
};

class NodeServer {
 public:
  // Takes clients from `listener` (see ListenAt). `store` and `metrics` outlive it.
  static Result<std::unique_ptr<NodeServer>> Start(const NodeServerOptions& options, Fd listener, Store& store,
                                                   Metrics& metrics);
  virtual ~NodeServer() = default;  // Stop at once.

  struct Report {
    size_t sessions = 0;   // That were open.
    size_t calls_cut = 0;  // That had not ended by the deadline.
  };
  // Takes no clients any more, and calls as misses with kUnavailable; finishes what is under way until the deadline,
  // then hangs up. What is lent stays lent until the server is destroyed. Idempotent.
  virtual Report Stop(TimePoint deadline) = 0;
};

}  // namespace terrace
