// One connection to a node, what it lent us over it, and how one is made.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "client/packet_socket.h"
#include "client/room.h"
#include "terrace/tier.h"

namespace terrace {

// Wakes the thread that talks to the node; outlives it in leases.
struct Waker {
  const Fd fd{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  void Wake() const {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(fd.get(), &one, sizeof one);
  }
  void Clear() const {
    uint64_t count = 0;
    [[maybe_unused]] const ssize_t got = read(fd.get(), &count, sizeof count);
  }
};

// Leases share it, so that what they lend stays theirs until the last one is dropped, also when the client is gone: the
// node takes back what was lent when the socket closes.
struct Link {
  Link(Fd socket, std::shared_ptr<const Waker> to_wake) : fd(std::move(socket)), waker(std::move(to_wake)) {}

  // A lease that is given back as soon as it is copied.
  void WillCopy() {
    std::lock_guard lock(mutex);
    ++copying;
  }
  // Leases go back together: waking the talker and the node for each takes from the cores that copy. Half of those that
  // a load has out are enough for the node to go on with the next.
  void ReleaseCopied(uint64_t lease) {
    bool wake = false;
    {
      std::lock_guard lock(mutex);
      released.push_back(lease);
      wake = released.size() >= --copying;
    }
    if (wake) waker->Wake();
  }
  void Release(uint64_t lease) {
    {
      std::lock_guard lock(mutex);
      released.push_back(lease);
    }
    waker->Wake();
  }

  const Fd fd;
  const std::shared_ptr<const Waker> waker;
  std::shared_ptr<Mapping> arena;       // This and the next: set before others see the link.
  std::vector<std::string> tier_names;  //
  std::mutex mutex;
  std::vector<uint64_t> released;  // Guarded by mutex.
  size_t copying = 0;              // Guarded by mutex.
};
using LinkPtr = std::shared_ptr<Link>;

// A part of the memory that the node lent us for writing.
struct Segment {
  Segment(uint64_t handle_given, std::shared_ptr<Mapping> given)
      : handle(handle_given), mapping(std::move(given)), room(mapping->bytes().size()) {}
  const uint64_t handle;
  const std::shared_ptr<Mapping> mapping;
  Room room;
};

// Room for one chunk in a segment; given back at the end.
struct Part {
  Part(LinkPtr over, std::shared_ptr<Segment> of, uint64_t at, uint64_t size)
      : link(std::move(over)), segment(std::move(of)), offset(at), bytes(size) {}
  ~Part() {
    segment->room.Give(offset, bytes);
    link->waker->Wake();
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  std::span<std::byte> memory() const { return segment->mapping->bytes().subspan(offset, bytes); }

  const LinkPtr link;
  const std::shared_ptr<Segment> segment;
  const uint64_t offset, bytes;
};

// One attempt to join the node at `socket`.
struct Joining {
  LinkPtr link;          // Null: not joined.
  std::string why;       // Then: why, and what to do.
  bool refused = false;  // Somebody is there and won't have us. Else nobody is.
  bool silent = false;   // It did not answer in time, and may yet.
};
// Takes until `deadline` at most, and ends soon when `waker` is woken and `abandoned` says so.
Joining JoinNode(const std::string& socket, const std::shared_ptr<const Waker>& waker, TimePoint deadline,
                 const std::function<bool()>& abandoned);

}  // namespace terrace
