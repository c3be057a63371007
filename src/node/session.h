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
    bool in_turn = false;  // To be copied and given back at once.
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
  // All that were lent to be given back at once.
  std::vector<Lent> TakeInTurn() {
    std::vector<Lent> taken;
    for (uint32_t i = 0; i < places_.size(); ++i) {
      if (!places_[i].lent || !places_[i].lent->in_turn) continue;
      taken.push_back(*std::exchange(places_[i].lent, std::nullopt));
      free_.push_back(i);
    }
    return taken;
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
  // Hung up on by us. It asks for nothing any more, and keeps what it was lent to hold until it hangs up, too: it may
  // be reading that memory.
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
  uint64_t held_bytes = 0;     // Of leases that it may keep.
  uint64_t in_turn_bytes = 0;  // Of those that it copies and gives back.
  TimePoint copies_since;      // With in_turn_bytes: when it last gave one back, or was lent the first.
  const std::shared_ptr<LoadFollower::Window> window = std::make_shared<LoadFollower::Window>(0);  // For the latter.
  std::map<uint64_t, std::shared_ptr<Mapping>> segments;                                           // By handle.
  uint64_t segments_bytes = 0;
};

}  // namespace terrace
