// Follows loads of a store to their end without a thread for each, and ends them at their deadline.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "terrace/store.h"

namespace terrace {

class LoadFollower {
 public:
  struct Request {
    Digest space;
    std::vector<Digest> keys;
    uint64_t payload_bytes = 0;
    TimePoint deadline;
    bool stop_at_miss = true;
    size_t window = SIZE_MAX;  // Hits that may be delivered and not yet consumed, so that they don't fill RAM.
    // Called once for each key, in order, with no lock held, from any thread; at the end maybe from a second one.
    // Quick.
    std::function<void(size_t index, LoadJob::Item item)> on_item;
  };

  class Follow;
  // One load. Dropping the handle changes nothing.
  class Handle {
   public:
    Handle() = default;
    explicit Handle(std::weak_ptr<Follow> follow) : follow_(std::move(follow)) {}
    void End(Reason reason) const;  // What was not delivered is delivered as a miss.
    void Consumed() const;          // The lease of one hit is dropped.

   private:
    std::weak_ptr<Follow> follow_;
  };

  explicit LoadFollower(Store& store);
  ~LoadFollower();  // Close().

  // All that is in RAM is delivered before it returns; the handle is given to `begun` before the first item is.
  void Begin(Request request, const std::function<void(Handle)>& begun);
  // Ends all loads as cancelled, and those that come. When it returns, no on_item runs, and the store is not used.
  void Close();

 private:
  struct Core;
  void WatchDeadlines();

  Store& store_;
  const std::shared_ptr<Core> core_;
  std::thread watcher_;
};

}  // namespace terrace
