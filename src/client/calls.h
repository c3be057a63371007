// The library's side of handles: who settles items, who is told, how many calls may be open.
#pragma once

#include <atomic>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "terrace/client.h"

namespace terrace {

struct CallAccess {
  // False: it was settled before, which stays. `*last`: all items are settled now.
  template <class Item>
  static bool Settle(CallOf<Item>& call, size_t index, Item item, bool* last) {
    std::function<void()> on_cancel;  // Destroyed without the lock: it may hold what leads back here.
    {
      std::lock_guard lock(call.mutex_);
      if (call.items_[index]) return false;
      call.items_[index] = std::move(item);
      *last = ++call.settled_ == call.size_;
      if (*last) on_cancel.swap(call.on_cancel_);
    }
    call.changed_.notify_all();
    return true;
  }
  // Runs `on_cancel` once if Cancel comes, or came, before all is settled.
  static void OnCancel(Call& call, std::function<void()> on_cancel);
  static bool Cancelled(const Call& call);
};

// The calls of one client. All methods may be called from any thread.
class Calls {
 public:
  explicit Calls(size_t max);
  ~Calls();
  Calls(const Calls&) = delete;
  Calls& operator=(const Calls&) = delete;

  int fd() const { return fd_; }
  void ClearEvent();
  size_t open() const { return open_.load(); }
  // From here on no call is begun.
  void Refuse() { refusing_.store(true); }

  // `refused` settles all items if there are too many calls, or no more are taken: then, or if `size` is 0, the call is
  // done already.
  template <class Item>
  std::shared_ptr<CallOf<Item>> Begin(size_t size, const std::function<Item(Reason)>& refused) {
    auto call = std::make_shared<CallOf<Item>>(size);
    if (size == 0) return call;
    const size_t others = open_.fetch_add(1);
    const bool closed = refusing_.load();
    if (closed || others >= max_ || size > kCallItemsMax) {
      SettleAll(*call, refused(closed ? Reason::kUnavailable : Reason::kFull));
    }
    return call;
  }

  template <class Item>
  void Settle(CallOf<Item>& call, size_t index, Item item) {
    bool last = false;
    if (!CallAccess::Settle(call, index, std::move(item), &last)) return;
    if (last) open_.fetch_sub(1);
    Signal();
  }
  template <class Item>
  void SettleAll(CallOf<Item>& call, const Item& item) {
    for (size_t i = 0; i < call.size(); ++i) Settle(call, i, item);
  }

 private:
  void Signal();

  const size_t max_;
  const int fd_;                        // An eventfd.
  std::atomic<size_t> open_{0};         // A count of its own.
  std::atomic<bool> refusing_{false};   // Set before Close ends what is open; Begin counts itself first.
  std::atomic<bool> signalled_{false};  // fd_ is readable, or about to be. Cleared after fd_ is read, before polls.
};

}  // namespace terrace
