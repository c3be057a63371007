#include "client/node_talker.h"

#include <poll.h>

#include <algorithm>
#include <iterator>
#include <optional>

#include "base/log.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using wire::Header;
using wire::Kind;
using wire::Message;

constexpr milliseconds kJoinEvery{200};        // Between attempts to find the node, ...
constexpr milliseconds kJoinEveryMax{10'000};  // ... and, step by step, if somebody is there who won't have us.
constexpr milliseconds kWelcomeMax{2000};      // Then it is tried anew.
// A name without a file is a private node's, mostly, which its engine starts, and starts again, beside its clients.
constexpr std::chrono::seconds kStartMax{10};
constexpr milliseconds kSleepMax{60'000};
constexpr milliseconds kGuestEvery{500};  // Chunks that wait for room have a deadline, too.

TimePoint Now() { return std::chrono::steady_clock::now(); }

// The kind that answers a call.
Kind Answers(Kind kind) {
  switch (kind) {
    case Kind::kLookup:
    case Kind::kProbe: return Kind::kPrefix;
    case Kind::kNeeds: return Kind::kNeeded;
    case Kind::kSegment: return Kind::kGranted;
    case Kind::kCommit: return Kind::kSaved;
    case Kind::kStats: return Kind::kStatistics;
    default: return Kind::kLoaded;
  }
}

}  // namespace

// --- From any thread ---

void NodeTalker::Start(Guest& guest) {
  guest_ = &guest;
  thread_ = std::thread([this] { Talk(); });
}

void NodeTalker::WaitForFirstAttempt(TimePoint deadline) {
  std::unique_lock lock(mutex_);
  attempted_.wait_until(lock, deadline, [&] { return first_attempt_over_; });
}

void NodeTalker::Close() {
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(closing_, true)) return;
  }
  waker_->Wake();
  if (thread_.joinable()) thread_.join();
}

bool NodeTalker::closing() const {
  std::lock_guard lock(mutex_);
  return closing_;
}

LinkPtr NodeTalker::link() const {
  std::lock_guard lock(mutex_);
  return link_;
}

std::vector<std::string> NodeTalker::tier_names() const {
  std::lock_guard lock(mutex_);
  return tier_names_;
}

uint64_t NodeTalker::AskEncoded(Kind kind, std::vector<std::byte> message, TimePoint deadline, OnAnswer on_answer,
                                OnLost on_lost, const Link* over) {
  std::unique_lock lock(mutex_);
  if (!link_ || closing_ || (over != nullptr && over != link_.get())) {
    lock.unlock();
    if (on_lost) on_lost(Reason::kUnavailable);
    return 0;
  }
  const uint64_t number = next_call_++;
  wire::SetCall(message, number);
  if (on_answer) {
    deadlines_.emplace(deadline, number);
    asked_[number] = std::make_shared<const Asked>(Asked{kind, deadline, std::move(on_answer), std::move(on_lost)});
  }
  outbox_.push_back(std::move(message));
  lock.unlock();
  waker_->Wake();
  return number;
}

// The answers that still come are of no use any more.
void NodeTalker::End(uint64_t number, Reason reason) {
  const AskedPtr asked = Forget(number);
  if (!asked) return;
  {
    std::lock_guard lock(mutex_);
    outbox_.push_back(wire::Encode(Header{.kind = Kind::kCancel, .call = number}));
  }
  waker_->Wake();
  asked->on_lost(reason);
}

NodeTalker::AskedPtr NodeTalker::Forget(uint64_t number) {
  std::lock_guard lock(mutex_);
  const auto it = asked_.find(number);
  if (it == asked_.end()) return nullptr;
  const AskedPtr asked = std::move(it->second);
  asked_.erase(it);
  deadlines_.erase({asked->deadline, number});
  return asked;
}

// --- The thread ---

void NodeTalker::Talk() {
  std::vector<std::byte> buffer;
  while (!closing()) {
    if (!current_ && !Join()) {
      Sleep(-1, false, pause_);
      continue;
    }
    Expire();
    const bool guest_waits = guest_->GoOn(current_);
    if (std::exchange(leaving_, false) || !Flush()) {
      Lose(Reason::kUnavailable);
      continue;
    }
    Sleep(current_->fd.get(), !unsent_.empty(), Patience(guest_waits));
    if (!Receive(buffer)) Lose(Reason::kUnavailable);
  }
  Lose(Reason::kCancelled);
}

bool NodeTalker::Join() {
  const Joining joining = JoinNode(socket_, waker_, Now() + kWelcomeMax, [this] { return closing(); });
  current_ = joining.link;
  {
    std::lock_guard lock(mutex_);
    link_ = current_;
    if (current_) tier_names_ = current_->tier_names;
    if (!joining.silent) first_attempt_over_ = true;
  }
  attempted_.notify_all();
  pause_ = joining.refused ? std::clamp(2 * pause_, kJoinEvery, kJoinEveryMax) : kJoinEvery;
  Tell(joining);
  return current_ != nullptr;
}

// Once for each reason.
void NodeTalker::Tell(const Joining& joining) {
  if (joining.link) {
    // Whoever has read that it is gone reads that it is back.
    if (std::exchange(troubled_, false)) {
      log::Warn("node_joined", {{"socket", socket_}});
    } else {
      log::Info("node_joined", {{"socket", socket_}});
    }
    told_.clear();
    return;
  }
  const bool starting = !joining.refused && socket_.starts_with('@') && Now() < alone_since_ + kStartMax;
  if (joining.why.empty() || joining.why == told_ || starting) return;
  if (joining.refused) {
    log::Warn("node_refused", {{"socket", socket_}, {"why", joining.why}});
  } else {
    log::Warn("node_missing", {{"socket", socket_}, {"why", joining.why}});
  }
  troubled_ = true;
  told_ = joining.why;
}

void NodeTalker::Lose(Reason reason) {
  std::map<uint64_t, AskedPtr> lost;
  {
    std::lock_guard lock(mutex_);
    link_ = nullptr;
    outbox_.clear();
    deadlines_.clear();
    lost.swap(asked_);
  }
  unsent_.clear();
  if (current_ && reason != Reason::kCancelled) {
    log::Warn("node_lost", {{"socket", socket_}});
    troubled_ = true;
    alone_since_ = Now();
  }
  current_ = nullptr;
  guest_->Lost(reason);
  for (const auto& [number, asked] : lost) asked->on_lost(reason);
}

void NodeTalker::Expire() {
  for (;;) {
    uint64_t number = 0;
    {
      std::lock_guard lock(mutex_);
      if (deadlines_.empty() || deadlines_.begin()->first > Now()) return;
      number = deadlines_.begin()->second;
    }
    End(number, Reason::kTimeout);
  }
}

bool NodeTalker::Flush() {
  {
    std::lock_guard lock(mutex_);
    std::ranges::move(outbox_, std::back_inserter(unsent_));
    outbox_.clear();
  }
  std::vector<uint64_t> released;
  {
    std::lock_guard lock(current_->mutex);
    released.swap(current_->released);
  }
  for (std::span<const uint64_t> left = released; !left.empty();) {
    const auto some = left.first(std::min(left.size(), wire::kKeysMax));
    unsent_.push_back(wire::Encode<uint64_t>({.kind = Kind::kRelease}, some));
    left = left.subspan(some.size());
  }
  while (!unsent_.empty()) {
    switch (SendMessage(current_->fd.get(), unsent_.front())) {
      case Sent::kYes: unsent_.pop_front(); break;
      case Sent::kLater: return true;
      case Sent::kBroken: return false;
    }
  }
  return true;
}

bool NodeTalker::Receive(std::vector<std::byte>& buffer) {
  for (;;) {
    Fd passed;
    switch (ReceiveMessage(current_->fd.get(), buffer, passed)) {
      case Received::kNothing: return true;
      case Received::kBroken: return false;
      case Received::kMessage: break;
    }
    const Result<Message> message = wire::Decode(buffer);
    if (!message || message->header.kind <= Kind::kWelcome) return false;
    Take(*message, passed);
  }
}

void NodeTalker::Take(const Message& message, const Fd& passed) {
  const Header& header = message.header;
  if (header.kind == Kind::kGranted) guest_->Granted(header, passed);
  AskedPtr asked;
  {
    std::lock_guard lock(mutex_);
    const auto it = asked_.find(header.call);
    if (it != asked_.end() && Answers(it->second->kind) == header.kind) asked = it->second;
  }
  if (asked) {
    if (asked->on_answer(current_, message)) Forget(header.call);
  } else if (header.kind == Kind::kLoaded) {
    for (const auto& item : message.Items<wire::LoadedItem>()) {
      if (item.lease != 0) current_->Release(item.lease);
    }
  }
}

void NodeTalker::Sleep(int fd, bool to_send, milliseconds at_most) const {
  pollfd fds[] = {{.fd = waker_->fd.get(), .events = POLLIN, .revents = 0},
                  {.fd = fd, .events = static_cast<short>(to_send ? POLLIN | POLLOUT : POLLIN), .revents = 0}};
  poll(fds, 2, static_cast<int>(at_most.count()));
  if (fds[0].revents != 0) waker_->Clear();
}

milliseconds NodeTalker::Patience(bool guest_waits) const {
  std::lock_guard lock(mutex_);
  if (!outbox_.empty()) return milliseconds(0);
  const TimePoint at_most = Now() + (guest_waits ? kGuestEvery : kSleepMax);
  const TimePoint first = deadlines_.empty() ? at_most : std::min(at_most, deadlines_.begin()->first);
  return std::max(std::chrono::ceil<milliseconds>(first - Now()), milliseconds(0));
}

}  // namespace terrace
