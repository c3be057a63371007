// Follows loads of a store to their end without a thread for each, and ends them at their deadline.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
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
  class Follow;
  // Bytes of hits that may be delivered and not yet consumed, of all loads that share it: the rest waits in storage and
  // does not fill RAM. One hit always may, however large.
  class Window {
   public:
    explicit Window(uint64_t bytes_max) : bytes_max_(bytes_max) {}
    void SetMax(uint64_t bytes);

   private:
    friend class LoadFollower;
    bool Take(uint64_t bytes, const std::shared_ptr<Follow>& follow);  // False: the load waits for its turn here.
    void TakeAnyway(uint64_t bytes);
    void Give(uint64_t bytes);
    std::shared_ptr<Follow> Next();  // Null: there is no room, or nobody waits for any.
    bool HasRoomLocked(uint64_t bytes) const {
      return out_bytes_ == 0 || (bytes <= bytes_max_ && out_bytes_ <= bytes_max_ - bytes);
    }

    std::mutex mutex_;
    uint64_t bytes_max_;                                              // Guarded by mutex_.
    uint64_t out_bytes_ = 0;                                          // Guarded by mutex_.
    std::deque<std::pair<uint64_t, std::weak_ptr<Follow>>> waiting_;  // Guarded by mutex_. With what each needs.
  };

  struct Request {
    Digest space;
    std::vector<Digest> keys;
    uint64_t payload_bytes = 0;
    TimePoint deadline;
    bool stop_at_miss = true;
    std::shared_ptr<Window> window;  // Null: any number of hits at once.
    // Called once for each key, in order, with no lock held, from any thread; at the end maybe from a second one.
    // Quick.
    std::function<void(size_t index, LoadJob::Item item)> on_item;
  };

  // One load. Dropping the handle changes nothing.
  class Handle {
   public:
    Handle() = default;
    explicit Handle(const std::shared_ptr<Follow>& follow);
    void End(Reason reason) const;  // What was not delivered is delivered as a miss.
    void Consumed() const;          // The lease of one hit is dropped. Also when the load has ended.

   private:
    std::weak_ptr<Follow> follow_;
    std::shared_ptr<Window> window_;
    uint64_t bytes_ = 0;
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
