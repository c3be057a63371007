// Asks a node and hands its answers out: one thread that has the socket, finds the node, and finds it again.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "client/node_link.h"
#include "client/wire.h"

namespace terrace {

class NodeTalker {
 public:
  // Answers run on the talker's thread, in the order in which they come. True: the call needs no more of them.
  using OnAnswer = std::function<bool(const LinkPtr&, const wire::Message&)>;
  // Instead of the last answer: kUnavailable, kTimeout, kCancelled. From any thread.
  using OnLost = std::function<void(Reason)>;

  // Who works on the talker's thread, too: the one that saves.
  class Guest {
   public:
    virtual ~Guest() = default;
    // Whenever the thread has woken and the node is there. False: nothing waits. True: come again soon anyway.
    virtual bool GoOn(const LinkPtr& link) = 0;
    // A segment, asked for or not.
    virtual void Granted(const wire::Header& header, const Fd& memory) = 0;
    virtual void Lost(Reason reason) = 0;  // The link.
  };

  explicit NodeTalker(std::string socket) : socket_(std::move(socket)) {}
  ~NodeTalker() { Close(); }
  NodeTalker(const NodeTalker&) = delete;
  NodeTalker& operator=(const NodeTalker&) = delete;

  void Start(Guest& guest);
  // Returns when the node is joined, or is not there; at the deadline at the latest.
  void WaitForFirstAttempt(TimePoint deadline);
  void Close();  // What is asked ends as kCancelled, what will be as kUnavailable. Idempotent.

  LinkPtr link() const;  // Null: the node is not there.
  std::vector<std::string> tier_names() const;

  // No on_answer: nothing is answered. Returns the number of the call; 0: `on_lost` has run. `over`: the link that the
  // message is about, if it must be no other.
  template <class T>
  uint64_t Ask(wire::Header header, std::span<const T> items, TimePoint deadline, OnAnswer on_answer, OnLost on_lost,
               const Link* over = nullptr) {
    return AskEncoded(header.kind, wire::Encode<T>(header, items), deadline, std::move(on_answer), std::move(on_lost),
                      over);
  }
  // Ends a call before its answer.
  void End(uint64_t number, Reason reason);
  // The node hangs: leaves it, and joins it anew. On the talker's thread.
  void Leave() { leaving_ = true; }

 private:
  struct Asked {
    wire::Kind kind = wire::Kind::kHello;
    TimePoint deadline;
    OnAnswer on_answer;
    OnLost on_lost;
  };
  using AskedPtr = std::shared_ptr<const Asked>;

  uint64_t AskEncoded(wire::Kind kind, std::vector<std::byte> message, TimePoint deadline, OnAnswer on_answer,
                      OnLost on_lost, const Link* over);
  AskedPtr Forget(uint64_t number);
  bool closing() const;

  // The thread's.
  void Talk();
  bool Join();
  void Tell(const Joining& joining);
  void Lose(Reason reason);
  void Expire();
  bool Flush();
  bool Receive(std::vector<std::byte>& buffer);
  void Take(const wire::Message& message, const Fd& passed);
  void Sleep(int fd, bool to_send, std::chrono::milliseconds at_most) const;
  std::chrono::milliseconds Patience(bool guest_waits) const;

  const std::string socket_;
  const std::shared_ptr<const Waker> waker_ = std::make_shared<const Waker>();

  mutable std::mutex mutex_;
  std::condition_variable attempted_;
  bool first_attempt_over_ = false;                     // Guarded by mutex_.
  LinkPtr link_;                                        // Guarded by mutex_.
  std::vector<std::string> tier_names_;                 // Guarded by mutex_. Of the node met last.
  bool closing_ = false;                                // Guarded by mutex_.
  uint64_t next_call_ = 1;                              // Guarded by mutex_.
  std::map<uint64_t, AskedPtr> asked_;                  // Guarded by mutex_.
  std::set<std::pair<TimePoint, uint64_t>> deadlines_;  // Guarded by mutex_. Of asked_.
  std::deque<std::vector<std::byte>> outbox_;           // Guarded by mutex_.

  // The thread's alone.
  Guest* guest_ = nullptr;
  LinkPtr current_;  // As link_.
  bool leaving_ = false;
  std::deque<std::vector<std::byte>> unsent_;
  std::string told_;       // Why it was not joined, as the log has it last.
  bool troubled_ = false;  // The log has it as gone, or not to be joined.
  TimePoint alone_since_ = std::chrono::steady_clock::now();
  std::chrono::milliseconds pause_{0};

  std::thread thread_;
};

}  // namespace terrace
