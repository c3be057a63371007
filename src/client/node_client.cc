#include "client/node_client.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <utility>

#include "base/executor.h"
#include "base/hash.h"
#include "base/log.h"
#include "client/calls.h"
#include "client/chunks.h"
#include "client/gate.h"
#include "client/packet_socket.h"
#include "client/room.h"
#include "client/wire.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using wire::Header;
using wire::Kind;
using wire::Message;

constexpr milliseconds kJoinEvery{200};    // Between attempts to find the node.
constexpr milliseconds kWelcomeMax{2000};  // Then it is tried anew.
constexpr milliseconds kAnswerMax{5000};   // For what needs no storage: a node that takes longer hangs.
constexpr milliseconds kSaveMax{30'000};   // From asking to having been saved.
constexpr uint64_t kSegmentBytes = 64 << 20;
constexpr uint64_t kChunksASegment = 4;  // At least: one is filled while others are on their way.

TimePoint Now() { return std::chrono::steady_clock::now(); }

uint64_t MsUntil(TimePoint deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Now()).count();
  return static_cast<uint64_t>(std::max<int64_t>(left, 0));
}

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

// A part of the memory that the node lent us for writing.
struct Segment {
  Segment(uint64_t handle_given, std::shared_ptr<Mapping> given)
      : handle(handle_given), mapping(std::move(given)), room(mapping->bytes().size()) {}
  const uint64_t handle;
  const std::shared_ptr<Mapping> mapping;
  Room room;
};

// One connection. Leases share it, so that what they lend stays theirs until the last one is dropped, also when the
// client is gone: the node takes back what was lent when the socket closes.
struct Link {
  Link(Fd socket, std::shared_ptr<const Waker> to_wake) : fd(std::move(socket)), waker(std::move(to_wake)) {}

  void Release(uint64_t lease) {
    {
      std::lock_guard lock(mutex);
      released.push_back(lease);
    }
    waker->Wake();
  }

  const Fd fd;
  const std::shared_ptr<const Waker> waker;
  std::shared_ptr<Mapping> arena;  // Set with the welcome, before others see the link.
  std::mutex mutex;
  std::vector<uint64_t> released;  // Guarded by mutex.
};
using LinkPtr = std::shared_ptr<Link>;

// Room for one chunk in a segment; given back at the end.
struct Part {
  Part(LinkPtr over, std::shared_ptr<Segment> of, uint64_t at, uint64_t size, std::function<void()> then)
      : link(std::move(over)), segment(std::move(of)), offset(at), bytes(size), given_back(std::move(then)) {}
  ~Part() {
    segment->room.Give(offset, bytes);
    given_back();
  }
  Part(const Part&) = delete;
  Part& operator=(const Part&) = delete;
  std::span<std::byte> memory() const { return segment->mapping->bytes().subspan(offset, bytes); }

  const LinkPtr link;
  const std::shared_ptr<Segment> segment;
  const uint64_t offset, bytes;
  const std::function<void()> given_back;
};

class NodeClient final : public Client {
 public:
  NodeClient(const LocalOptions& options, std::string socket)
      : socket_(std::move(socket)),
        setting_(options.setting),
        calls_(std::make_shared<Calls>(options.calls_max)),
        copiers_("terrace-copy", std::max<size_t>(options.copy_threads, 1)),
        saver_("terrace-save", 1),
        talker_([this] { Talk(); }) {}
  ~NodeClient() override { Close(Now()); }

  std::vector<std::string> tier_names() const override {
    std::lock_guard lock(mutex_);
    return tier_names_;
  }
  bool connected() const override {
    std::lock_guard lock(mutex_);
    return link_ != nullptr;
  }
  std::optional<std::string> Setting(std::string_view name) const override { return setting_(name); }
  int event_fd() const override { return calls_->fd(); }
  void ClearEvent() override { calls_->ClearEvent(); }

  std::shared_ptr<CallOf<PrefixHit>> Lookup(std::vector<Digest> keys) override {
    return AskPrefix({.kind = Kind::kLookup}, std::move(keys), Now() + kAnswerMax);
  }
  std::shared_ptr<CallOf<PrefixHit>> Probe(std::vector<Digest> keys, TimePoint deadline) override {
    return AskPrefix({.kind = Kind::kProbe, .numbers = {MsUntil(deadline)}}, std::move(keys), deadline + kAnswerMax);
  }

  std::shared_ptr<CallOf<LoadedChunk>> Load(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    if (!Fits(request)) calls_->SettleAll(*call, Missed(Reason::kForeign));
    const auto into = std::make_shared<std::vector<Pieces>>(std::move(request.into));
    const auto owner = std::move(request.owner);
    AskLoad(call, request, Kind::kLoad, wire::kInTurn, {},
            [=, this](const LinkPtr& link, const wire::LoadedItem& item, std::span<const std::byte> bytes) {
              const bool posted = copiers_.Post([=, this, owner = owner]() mutable {
                LoadedChunk chunk = Loaded(item);
                if (CallAccess::Cancelled(*call)) {
                  chunk = Missed(Reason::kCancelled);
                } else if (wire::HashOf(CopyAndHash(bytes, (*into)[item.index])) != item.hash) {
                  chunk = Damaged(item);
                }
                link->Release(item.lease);
                owner.reset();  // Whoever sees the item settled may count on it.
                calls_->Settle(*call, item.index, std::move(chunk));
              });
              if (!posted) calls_->Settle(*call, item.index, Missed(Reason::kCancelled));
            });
    return call;
  }

  std::shared_ptr<CallOf<LoadedChunk>> Lease(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    AskLoad(call, request, Kind::kLoad, 0, {},
            [=, this](const LinkPtr& link, const wire::LoadedItem& item, std::span<const std::byte> bytes) {
              // Released when nobody has it any more.
              std::shared_ptr<const void> pin(bytes.data(),
                                              [link, lease = item.lease](const void*) { link->Release(lease); });
              const bool posted = copiers_.Post([=, this, pin = std::move(pin)] {
                LoadedChunk chunk = Loaded(item);
                auto hashes = std::make_shared<const SegmentHashes>(HashSegments(bytes));
                if (wire::HashOf(*hashes) == item.hash) {
                  chunk.lease = {.bytes = bytes, .info = item.info, .pin = pin, .hashes = std::move(hashes)};
                } else {
                  chunk = Damaged(item);
                }
                calls_->Settle(*call, item.index, std::move(chunk));
              });
              if (!posted) calls_->Settle(*call, item.index, Missed(Reason::kCancelled));
            });
    return call;
  }

  std::shared_ptr<CallOf<LoadedChunk>> Prefetch(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    AskLoad(call, request, Kind::kPrefetch, 0, {}, {});
    return call;
  }
  std::shared_ptr<CallOf<LoadedChunk>> Pin(LoadRequest request, milliseconds lifetime) override {
    auto call = BeginLoad(request.keys.size());
    AskLoad(call, request, Kind::kPin, 0, lifetime, {});
    return call;
  }
  void Unpin(std::vector<Digest> keys) override { Submit<Digest>({.kind = Kind::kUnpin}, keys, Now(), {}, {}); }

  std::shared_ptr<CallOf<SavedChunk>> Save(std::vector<SaveChunk> chunks, std::shared_ptr<const void> owner) override {
    auto call = calls_->Begin<SavedChunk>(chunks.size(), Declined);
    if (call->done()) return call;
    std::vector<Digest> keys;
    for (const SaveChunk& chunk : chunks) keys.push_back(chunk.info.key);
    const TimePoint deadline = Now() + kSaveMax;
    AskNeeds(
        std::move(keys),
        [=, this, chunks = std::move(chunks), owner = std::move(owner)](const std::vector<uint8_t>& needed) {
          for (size_t i = 0; i < chunks.size(); ++i) {
            if (needed[i] == 0) {
              calls_->Settle(*call, i, {.outcome = Outcome::kHit, .existed = true});
            } else {
              saves_.push_back({call, i, chunks[i], owner, deadline});
            }
          }
        },
        [=, this](Reason reason) { calls_->SettleAll(*call, Declined(reason)); });
    return call;
  }

  std::shared_ptr<CallOf<SaveSegment>> BeginSave(std::vector<FrameInfo> chunks) override {
    auto call = calls_->Begin<SaveSegment>(chunks.size(), NoSegment);
    if (call->done()) return call;
    std::vector<Digest> keys;
    uint64_t largest = 0;
    for (const FrameInfo& info : chunks) {
      keys.push_back(info.key);
      largest = std::max(largest, info.payload_bytes);
    }
    const auto infos = std::make_shared<const std::vector<FrameInfo>>(std::move(chunks));
    AskNeeds(
        std::move(keys),
        [=, this](const std::vector<uint8_t>& needed) {
          // A refusal shows when room is taken.
          AskSegment(largest, [=, this] {
            for (size_t i = 0; i < infos->size(); ++i) {
              calls_->Settle(*call, i, needed[i] == 0 ? Existed((*infos)[i]) : Take(*call, (*infos)[i]));
            }
          });
        },
        [=, this](Reason reason) { calls_->SettleAll(*call, NoSegment(reason)); });
    return call;
  }

  std::shared_ptr<CallOf<SavedChunk>> Commit(std::vector<SaveSegment> segments) override {
    auto call = calls_->Begin<SavedChunk>(segments.size(), Declined);
    if (call->done()) return call;
    for (size_t i = 0; i < segments.size(); ++i) {
      if (segments[i].lease) {
        CommitPart(call, i, std::static_pointer_cast<Part>(segments[i].lease), segments[i].info, Now() + kSaveMax);
      } else {
        calls_->Settle(*call, i, {segments[i].outcome, segments[i].reason, segments[i].existed});
      }
    }
    return call;
  }

  std::shared_ptr<CallOf<ClientStats>> Stats() override {
    const auto lost = [](Reason) { return ClientStats{.connected = false, .in_process = false}; };
    auto call = calls_->Begin<ClientStats>(1, lost);
    if (call->done()) return call;
    Submit<std::byte>(
        {.kind = Kind::kStats}, {}, Now() + kAnswerMax,
        [=, this](const LinkPtr&, const Message& message) {
          calls_->Settle(*call, 0, StatsFrom(message));
          return true;
        },
        [=, this](Reason reason) { calls_->Settle(*call, 0, lost(reason)); });
    return call;
  }

  CloseReport Close(TimePoint) override {
    calls_->Refuse();
    {
      std::lock_guard lock(mutex_);
      if (std::exchange(closing_, true)) return {};
    }
    waker_->Wake();
    talker_.join();
    gate_->Close();
    copiers_.Stop();
    saver_.Stop();
    return {};
  }

 private:
  // True: the call needs no more answers.
  using OnAnswer = std::function<bool(const LinkPtr&, const Message&)>;
  using OnLost = std::function<void(Reason)>;
  struct Asked {
    Kind kind = Kind::kHello;
    TimePoint deadline;
    OnAnswer on_answer;
    OnLost on_lost;
  };
  using AskedPtr = std::shared_ptr<const Asked>;
  struct Saving {
    std::shared_ptr<CallOf<SavedChunk>> call;
    size_t index = 0;
    SaveChunk chunk;
    std::shared_ptr<const void> owner;
    TimePoint deadline;
  };

  // --- Asking, from any thread ---

  // No on_answer: nothing is answered. Returns the number of the call; 0: `on_lost` has run.
  template <class T>
  uint64_t Submit(Header header, std::span<const T> items, TimePoint deadline, OnAnswer on_answer, OnLost on_lost) {
    {
      std::unique_lock lock(mutex_);
      if (!link_ || closing_) {
        lock.unlock();
        if (on_lost) on_lost(Reason::kUnavailable);
        return 0;
      }
      header.call = next_call_++;
      if (on_answer) {
        deadlines_.emplace(deadline, header.call);
        asked_[header.call] =
            std::make_shared<const Asked>(Asked{header.kind, deadline, std::move(on_answer), std::move(on_lost)});
      }
      outbox_.push_back(wire::Encode<T>(header, items));
    }
    waker_->Wake();
    return header.call;
  }

  std::shared_ptr<CallOf<PrefixHit>> AskPrefix(const Header& header, std::vector<Digest> keys, TimePoint deadline) {
    auto call = calls_->Begin<PrefixHit>(1, NoPrefix);
    if (keys.size() > wire::kKeysMax) calls_->Settle(*call, 0, NoPrefix(Reason::kFull));
    if (call->done()) return call;
    Submit<Digest>(
        header, keys, deadline,
        [=, this](const LinkPtr&, const Message& message) {
          const auto& numbers = message.header.numbers;
          calls_->Settle(*call, 0,
                         PrefixHit{.chunks = numbers[0],
                                   .tier = message.Items<uint8_t>(),
                                   .miss_reason = static_cast<Reason>(numbers[1])});
          return true;
        },
        [=, this](Reason reason) { calls_->Settle(*call, 0, NoPrefix(reason)); });
    return call;
  }

  void AskNeeds(std::vector<Digest> keys, std::function<void(const std::vector<uint8_t>&)> then, OnLost on_lost) {
    Submit<Digest>(
        {.kind = Kind::kNeeds}, keys, Now() + kAnswerMax,
        [=, count = keys.size()](const LinkPtr&, const Message& message) {
          if (message.header.count == count) {
            then(message.Items<uint8_t>());
          } else {
            on_lost(Reason::kUnavailable);
          }
          return true;
        },
        on_lost);
  }

  std::shared_ptr<CallOf<LoadedChunk>> BeginLoad(size_t size) { return calls_->Begin<LoadedChunk>(size, Missed); }

  // `take` gets each hit that is lent, and settles it; all else is settled here.
  using Taken = std::function<void(const LinkPtr&, const wire::LoadedItem&, std::span<const std::byte>)>;
  void AskLoad(const std::shared_ptr<CallOf<LoadedChunk>>& call, const LoadRequest& request, Kind kind, uint64_t flags,
               milliseconds lifetime, const Taken& take) {
    if (call->done()) return;
    if (request.payload_bytes == 0) return calls_->SettleAll(*call, Missed(Reason::kForeign));
    const Header header{.kind = kind,
                        .space = request.space,
                        .payload_bytes = request.payload_bytes,
                        .numbers = {MsUntil(request.deadline), flags | (request.stop_at_miss ? wire::kStopAtMiss : 0),
                                    static_cast<uint64_t>(lifetime.count())}};
    // Each is answered once. What was handed to a thread of ours is settled there, whatever becomes of the node.
    struct State {
      std::mutex mutex;  // The end of a call and an answer to it may come at once.
      std::vector<bool> answered;
      size_t left = 0;
    };
    const auto state = std::make_shared<State>();
    state->answered.resize(call->size());
    state->left = call->size();
    const auto lost = [=, this](Reason reason) {
      std::lock_guard lock(state->mutex);
      for (size_t i = 0; i < call->size(); ++i) {
        if (!state->answered[i]) calls_->Settle(*call, i, Missed(reason));
        state->answered[i] = true;
      }
    };
    const uint64_t number = Submit<Digest>(
        header, request.keys, request.deadline,
        [=, this, keys = request.keys, bytes = request.payload_bytes](const LinkPtr& link, const Message& message) {
          std::lock_guard lock(state->mutex);
          for (const wire::LoadedItem& item : message.Items<wire::LoadedItem>()) {
            const uint64_t arena = link->arena->bytes().size();
            const bool asked = item.index < state->answered.size() && !state->answered[item.index];
            const bool hit = item.outcome == Outcome::kHit;
            const bool sound =
                !hit || (asked && item.info.key == keys[item.index] && item.info.payload_bytes == bytes &&
                         item.offset <= arena && bytes <= arena - item.offset);
            const bool taken = asked && hit && sound && take;
            if (asked) {
              state->answered[item.index] = true;
              --state->left;
            }
            if (taken) {
              take(link, item, link->arena->bytes().subspan(item.offset, bytes));
            } else if (asked) {
              calls_->Settle(*call, item.index, sound ? Loaded(item) : Missed(Reason::kForeign));
            }
            if (!taken && item.lease != 0) link->Release(item.lease);
          }
          return state->left == 0;
        },
        lost);
    if (number == 0) return;
    CallAccess::OnCancel(*call, [gate = gate_, this, number] {
      const Gate::Pass pass(gate);
      if (pass) End(number, Reason::kCancelled);
    });
  }

  // The answers that still come are of no use any more.
  void End(uint64_t number, Reason reason) {
    const AskedPtr asked = Forget(number);
    if (!asked) return;
    {
      std::lock_guard lock(mutex_);
      outbox_.push_back(wire::Encode(Header{.kind = Kind::kCancel, .call = number}));
    }
    waker_->Wake();
    asked->on_lost(reason);
  }

  AskedPtr Forget(uint64_t number) {
    std::lock_guard lock(mutex_);
    const auto it = asked_.find(number);
    if (it == asked_.end()) return nullptr;
    const AskedPtr asked = std::move(it->second);
    asked_.erase(it);
    deadlines_.erase({asked->deadline, number});
    return asked;
  }

  // --- Saving, all on the talker but the copies ---

  bool HasSegmentFor(uint64_t bytes) const { return segment_ && segment_->room.bytes() >= bytes; }

  // Runs `then` when there is a segment for chunks of `bytes`, or there can't be one.
  void AskSegment(uint64_t bytes, std::function<void()> then) {
    if (HasSegmentFor(bytes)) return then();
    const uint64_t wanted = std::max(kSegmentBytes, kChunksASegment * bytes);
    Submit<std::byte>(
        {.kind = Kind::kSegment, .numbers = {wanted, bytes}}, {}, Now() + kAnswerMax,
        [=](const LinkPtr&, const Message&) {
          then();  // What came is in segment_.
          return true;
        },
        [=](Reason) { then(); });
  }

  std::shared_ptr<Part> TakePart(uint64_t bytes) {
    if (!HasSegmentFor(bytes) || bytes == 0) return nullptr;
    const std::optional<uint64_t> offset = segment_->room.Take(bytes);
    if (!offset) return nullptr;
    return std::make_shared<Part>(current_, segment_, *offset, bytes, [waker = waker_] { waker->Wake(); });
  }

  static SaveSegment Existed(const FrameInfo& info) {
    return {.outcome = Outcome::kHit, .existed = true, .bytes = {}, .info = info};
  }
  SaveSegment Take(const Call& call, const FrameInfo& info) {
    if (CallAccess::Cancelled(call)) return NoSegment(Reason::kCancelled);
    const std::shared_ptr<Part> part = TakePart(info.payload_bytes);
    if (!part) return NoSegment(current_ ? Reason::kFull : Reason::kUnavailable);
    return {.outcome = Outcome::kHit, .bytes = part->memory(), .info = info, .lease = part};
  }

  // In order: as long as the first that waits finds room, it is copied and committed.
  void GoOnSaving() {
    while (!saves_.empty() && !asking_segment_) {
      const uint64_t bytes = saves_.front().chunk.info.payload_bytes;
      if (const Reason why = WhyNotSaved(saves_.front()); why != Reason::kNone) {
        DeclineFront(why);
      } else if (!HasSegmentFor(bytes)) {
        asking_segment_ = true;
        AskSegment(bytes, [this, bytes] {
          asking_segment_ = false;
          if (!HasSegmentFor(bytes)) DeclineFront(Reason::kFull);
        });
      } else if (const std::shared_ptr<Part> part = TakePart(bytes)) {
        saver_.Post([this, next = std::move(saves_.front()), part] {
          size_t at = 0;
          for (const auto& piece : next.chunk.from) {
            std::memcpy(part->memory().data() + at, piece.data(), piece.size());
            at += piece.size();
          }
          CommitPart(next.call, next.index, part, next.chunk.info, next.deadline);
        });
        saves_.pop_front();
      } else {
        return;  // A part that is given back wakes the talker.
      }
    }
  }
  Reason WhyNotSaved(const Saving& saving) const {
    const uint64_t bytes = saving.chunk.info.payload_bytes;
    if (!current_) return Reason::kUnavailable;
    if (bytes == 0 || BytesOf(saving.chunk.from) != bytes) return Reason::kForeign;
    if (CallAccess::Cancelled(*saving.call)) return Reason::kCancelled;
    return Now() >= saving.deadline ? Reason::kTimeout : Reason::kNone;
  }
  void DeclineFront(Reason reason) {
    if (saves_.empty()) return;
    calls_->Settle(*saves_.front().call, saves_.front().index, Declined(reason));
    saves_.pop_front();
  }

  void CommitPart(const std::shared_ptr<CallOf<SavedChunk>>& call, size_t index, std::shared_ptr<Part> part,
                  const FrameInfo& info, TimePoint deadline) {
    const wire::CommitItem item{.segment = part->segment->handle, .offset = part->offset, .info = info};
    const auto on_lost = [=, this](Reason reason) { calls_->Settle(*call, index, Declined(reason)); };
    {
      std::lock_guard lock(mutex_);
      if (link_ != part->link) part.reset();  // Of a node that is gone: this one has other segments.
    }
    if (!part) return on_lost(Reason::kUnavailable);
    // The part is the node's until it has answered: bytes that change meanwhile would be saved as they are then.
    Submit<wire::CommitItem>(
        {.kind = Kind::kCommit}, {&item, 1}, deadline,
        [=, this](const LinkPtr&, const Message& message) {
          static_cast<void>(part);
          for (const auto& saved : message.Items<wire::SavedItem>()) {
            calls_->Settle(*call, index, {saved.outcome, saved.reason, false});
          }
          return true;
        },
        on_lost);
  }

  // --- Answers ---

  static LoadedChunk Loaded(const wire::LoadedItem& item) {
    LoadedChunk chunk;
    chunk.outcome = item.outcome;
    chunk.reason = item.reason;
    chunk.tier = item.tier;
    chunk.info = item.info;
    return chunk;
  }
  static LoadedChunk Damaged(const wire::LoadedItem& item) {
    log::Warn("node_chunk_damaged", {{"key", item.info.key.Hex()}});
    return Missed(Reason::kDamaged);
  }

  static ClientStats StatsFrom(const Message& message) {
    ClientStats stats;
    stats.in_process = false;
    stats.pending_saves = message.header.numbers[0];
    stats.leased_bytes = message.header.numbers[1];
    stats.pinned_bytes = message.header.numbers[2];
    stats.sessions = message.header.numbers[3];
    for (const wire::TierItem& item : message.Items<wire::TierItem>()) {
      auto& [name, tier] = stats.tiers.emplace_back(wire::Text(item.name), TierStats{});
      tier.frames = item.frames;
      tier.bytes = item.bytes;
      tier.bytes_max = item.bytes_max;
      tier.pinned_bytes = item.pinned_bytes;
      tier.quarantined = item.quarantined;
      tier.index_ready = item.index_ready != 0;
      tier.available = item.available != 0;
      tier.why = wire::Text(item.why);
      if (!tier.why.empty()) stats.degraded += (stats.degraded.empty() ? "" : "; ") + name + ": " + tier.why;
    }
    return stats;
  }

  // --- The thread that talks ---

  void Talk() {
    std::vector<std::byte> buffer;
    while (!closing()) {
      if (!current_ && !Join(buffer)) {
        Sleep(-1, false, kJoinEvery);
        continue;
      }
      Expire();
      GoOnSaving();
      if (!Flush()) {
        Lose(Reason::kUnavailable);
        continue;
      }
      Sleep(current_->fd.get(), !unsent_.empty(), Patience());
      if (!Receive(buffer)) Lose(Reason::kUnavailable);
    }
    Lose(Reason::kCancelled);
  }

  bool closing() const {
    std::lock_guard lock(mutex_);
    return closing_;
  }

  void Sleep(int fd, bool to_send, milliseconds at_most) const {
    pollfd fds[] = {{.fd = waker_->fd.get(), .events = POLLIN, .revents = 0},
                    {.fd = fd, .events = static_cast<short>(to_send ? POLLIN | POLLOUT : POLLIN), .revents = 0}};
    poll(fds, 2, static_cast<int>(at_most.count()));
    if (fds[0].revents != 0) waker_->Clear();
  }

  milliseconds Patience() const {
    std::lock_guard lock(mutex_);
    if (!outbox_.empty()) return milliseconds(0);
    // Chunks that wait for room have a deadline, too.
    const TimePoint at_most = Now() + (saves_.empty() ? milliseconds(60'000) : milliseconds(500));
    const TimePoint first = deadlines_.empty() ? at_most : std::min(at_most, deadlines_.begin()->first);
    return milliseconds(static_cast<int64_t>(MsUntil(first)));
  }

  // One attempt. What the node says first must be a welcome.
  bool Join(std::vector<std::byte>& buffer) {
    Result<Fd> fd = ConnectTo(socket_);
    if (!fd) return false;
    const auto link = std::make_shared<Link>(*std::move(fd), waker_);
    if (SendMessage(link->fd.get(), wire::Encode(Header{.kind = Kind::kHello})) != Sent::kYes) return false;
    const TimePoint deadline = Now() + kWelcomeMax;
    Fd arena;
    for (;;) {
      const Received received = ReceiveMessage(link->fd.get(), buffer, arena);
      if (received == Received::kMessage) break;
      if (received == Received::kBroken || Now() >= deadline || closing()) return false;
      Sleep(link->fd.get(), false, milliseconds(static_cast<int64_t>(MsUntil(deadline))));
    }
    const Result<Message> welcome = wire::Decode(buffer);
    if (!welcome || welcome->header.kind != Kind::kWelcome || !arena) return false;
    link->arena = Mapping::Map(arena.get(), welcome->header.numbers[1], false);
    if (!link->arena) return false;
    current_ = link;
    std::lock_guard lock(mutex_);
    link_ = link;
    tier_names_.clear();
    for (const wire::TierName& name : welcome->Items<wire::TierName>()) tier_names_.push_back(wire::Text(name));
    log::Info("node_joined", {{"socket", socket_}});
    return true;
  }

  void Lose(Reason reason) {
    std::map<uint64_t, AskedPtr> lost;
    {
      std::lock_guard lock(mutex_);
      link_ = nullptr;
      outbox_.clear();
      deadlines_.clear();
      lost.swap(asked_);
    }
    unsent_.clear();
    if (current_ && reason != Reason::kCancelled) log::Warn("node_lost", {{"socket", socket_}});
    current_ = nullptr;
    segment_ = nullptr;
    while (!saves_.empty()) DeclineFront(reason);
    for (const auto& [number, asked] : lost) asked->on_lost(reason);
  }

  void Expire() {
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

  bool Flush() {
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

  bool Receive(std::vector<std::byte>& buffer) {
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

  void Take(const Message& message, const Fd& passed) {
    const Header& header = message.header;
    if (header.kind == Kind::kGranted && header.numbers[0] != 0 && passed) {
      if (auto mapping = Mapping::Map(passed.get(), header.numbers[1], true)) {
        segment_ = std::make_shared<Segment>(header.numbers[0], std::move(mapping));
      }
    }
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

  static Kind Answers(Kind kind) {
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

  const std::string socket_;
  const std::function<std::optional<std::string>(std::string_view)> setting_;
  const std::shared_ptr<Calls> calls_;
  const std::shared_ptr<const Waker> waker_ = std::make_shared<const Waker>();

  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();  // Handles outlive their client.

  mutable std::mutex mutex_;
  LinkPtr link_;                                        // Guarded by mutex_. Null: the node is not there.
  std::vector<std::string> tier_names_;                 // Guarded by mutex_.
  bool closing_ = false;                                // Guarded by mutex_.
  uint64_t next_call_ = 1;                              // Guarded by mutex_.
  std::map<uint64_t, AskedPtr> asked_;                  // Guarded by mutex_.
  std::set<std::pair<TimePoint, uint64_t>> deadlines_;  // Guarded by mutex_. Of asked_.
  std::deque<std::vector<std::byte>> outbox_;           // Guarded by mutex_.

  // The talker's alone.
  LinkPtr current_;  // As link_.
  std::shared_ptr<Segment> segment_;
  std::deque<Saving> saves_;  // Chunks that wait for room.
  bool asking_segment_ = false;
  std::deque<std::vector<std::byte>> unsent_;

  ThreadPool copiers_;
  ThreadPool saver_;  // One thread: parents are committed first.
  std::thread talker_;
};

}  // namespace

std::unique_ptr<Client> NewNodeClient(const LocalOptions& options, const std::string& socket) {
  return std::make_unique<NodeClient>(options, socket);
}

}  // namespace terrace
