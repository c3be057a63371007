// One client of the node: what it asked for and what is lent to it. The loop's thread alone touches it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "client/load_follower.h"
#include "client/packet_socket.h"
#include "terrace/store.h"

namespace terrace {

// Chunks lent to one session, by handles that are never used twice.
class LeaseTable {
 public:
  struct Lent {
    Lease lease;
    LoadFollower::Handle load;
  };
  uint64_t Add(Lent lent) {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(places_.size()));
      places_.emplace_back();
    }
    const uint32_t index = free_.back();
    free_.pop_back();
    places_[index].lent = std::move(lent);
    return uint64_t{++places_[index].generation} << 32 | index;
  }
  // Nothing for a handle of before, or of nobody.
  std::optional<Lent> Take(uint64_t handle) {
    const auto index = static_cast<uint32_t>(handle);
    if (index >= places_.size() || places_[index].generation != handle >> 32 || !places_[index].lent) {
      return std::nullopt;
    }
    free_.push_back(index);
    return std::exchange(places_[index].lent, std::nullopt);
  }
  size_t size() const { return places_.size() - free_.size(); }

 private:
  struct Place {
    uint32_t generation = 0;
    std::optional<Lent> lent;
  };
  std::vector<Place> places_;
  std::vector<uint32_t> free_;
};

struct Session {
  struct Outgoing {
    std::vector<std::byte> message;
    std::shared_ptr<const Fd> passed;  // Null: none.
  };

  bool welcomed = false;
  // Hung up on by us. It asks for nothing any more, and keeps what it was lent until it hangs up, too: it may be
  // reading that memory.
  bool cut = false;
  bool wants_out = false;  // Registered for EPOLLOUT.
  TimePoint since = std::chrono::steady_clock::now();
  Fd fd;
  uint64_t id = 0;
  std::deque<Outgoing> outbox;
  uint64_t outbox_bytes = 0;
  std::map<uint64_t, LoadFollower::Handle> loads;  // By call.
  size_t calls = 0, items = 0;                     // Under way, of clients' calls.
  LeaseTable leases;
  uint64_t leased_bytes = 0;
  std::map<uint64_t, std::shared_ptr<Mapping>> segments;  // By handle.
  uint64_t segments_bytes = 0;
};

}  // namespace terrace
