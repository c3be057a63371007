#include "node/server.h"

#include <fcntl.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "base/log.h"
#include "client/gate.h"
#include "client/pins.h"
#include "client/wire.h"
#include "node/segment_lender.h"
#include "node/session.h"

namespace terrace {
namespace {

using wire::Header;
using wire::Kind;
using wire::Message;

constexpr uint64_t kOutboxBytesMax = 32 << 20;          // To a client that does not read. Beyond: it is cut.
constexpr std::chrono::milliseconds kWelcomeMax{5000};  // From connect to hello.
constexpr uint64_t kTimeMaxMs = 24ull * 3600 * 1000;

TimePoint After(uint64_t ms) {
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(std::min(ms, kTimeMaxMs));
}

class NodeServerImpl final : public NodeServer {
 public:
  NodeServerImpl(const NodeServerOptions& options, Fd listener, Store& store, Metrics& metrics)
      : options_(options),
        listener_(std::move(listener)),
        store_(store),
        epoll_(epoll_create1(EPOLL_CLOEXEC)),
        wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
        sessions_gauge_(metrics.GetGauge("terrace_node_sessions", "Clients that are connected.")),
        leased_gauge_(metrics.GetGauge("terrace_node_leased_bytes", "Bytes of RAM lent to clients for reading.")),
        segments_gauge_(metrics.GetGauge("terrace_node_segment_bytes", "Bytes lent to clients for writing.")),
        refused_(metrics.GetCounter("terrace_node_sessions_refused_total",
                                    "Clients turned away: too many, of another group, or of another release.")),
        leases_refused_(metrics.GetCounter("terrace_node_leases_refused_total",
                                           "Chunks not lent: the session, or all of them, hold what they may.")),
        segments_({.bytes_max = options.segments_bytes_max,
                   .segment_bytes_max = options.segment_bytes_max,
                   .segments_max = options.segments_max},
                  instance_ << 16),  // A handle of another node's is none here.
        saver_("terrace-save", 1),
        pins_(store.ram_stats().bytes_max / 4, saver_),
        follower_(store) {
    if (options_.leased_bytes_max == 0) options_.leased_bytes_max = store.ram_stats().bytes_max / 2;
  }
  ~NodeServerImpl() override { Stop(std::chrono::steady_clock::now()); }

  Result<void> Begin() {
    // Clients get a descriptor that can't be made writable, of a file that can't change its size. F_SEAL_FUTURE_WRITE
    // would keep the node itself from giving pages back (a hole can't be punched any more).
    const std::string memory = "/proc/self/fd/" + std::to_string(store_.ram_memory().fd);
    arena_ = std::make_shared<const Fd>(open(memory.c_str(), O_RDONLY | O_CLOEXEC));
    if (!*arena_) return Fail(Code::kIo, std::string("reopen the memory of RAM: ") + std::strerror(errno), errno);
    if (fcntl(listener_.get(), F_SETFL, O_NONBLOCK) != 0 || !Watch(listener_.get(), kListener, EPOLLIN) ||
        !Watch(wake_.get(), kWake, EPOLLIN)) {
      return Fail(Code::kIo, std::string("epoll: ") + std::strerror(errno), errno);
    }
    spare_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
    thread_ = std::thread([this] { Run(); });
    return {};
  }

  Report Stop(TimePoint deadline) override {
    if (!thread_.joinable()) return report_;
    stop_deadline_ = deadline;
    stopping_.store(true);
    Wake();
    thread_.join();
    follower_.Close();
    gate_->Close();
    saver_.Stop();
    return report_;
  }

 private:
  static constexpr uint64_t kListener = 0, kWake = 1, kFirstSession = 2;

  // What other threads have for the loop.
  struct Arrived {
    uint64_t session = 0, call = 0;
    Kind kind = Kind::kLoad;
    bool in_turn = false;
    size_t index = 0;
    bool last = false;  // Of its call.
    size_t items = 1;   // Of the call, that have ended with this.
    LoadJob::Item item;
    LoadFollower::Handle load;
    std::chrono::milliseconds lifetime{0};
    PrefixHit prefix;
    wire::SavedItem saved;
  };

  bool Watch(int fd, uint64_t id, uint32_t events, int how = EPOLL_CTL_ADD) {
    epoll_event event{.events = events, .data = {.u64 = id}};
    return epoll_ctl(epoll_.get(), how, fd, &event) == 0;
  }
  void Wake() {
    const uint64_t one = 1;
    [[maybe_unused]] const ssize_t written = write(wake_.get(), &one, sizeof one);
  }
  void Arrive(Arrived arrived) {
    bool first = false;
    {
      std::lock_guard lock(mutex_);
      first = arrived_.empty();
      arrived_.push_back(std::move(arrived));
    }
    if (first) Wake();
  }

  void Run() {
    std::vector<epoll_event> events(64);
    while (!Finished()) {
      const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()), WaitMs());
      for (int i = 0; i < count; ++i) Handle(events[i]);
      TakeArrived();
      EndTheSilent();
    }
    // What is lent stays lent until the server is gone: saves under way still write to RAM.
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      Session& session = *(it++)->second;
      if (session.cut) continue;
      ++report_.sessions;
      Cut(session, "");
    }
  }

  // While stopping, ends when nothing is under way, or the time is over.
  bool Finished() {
    if (!stopping_.load()) return false;
    if (listener_) {
      epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
      listener_ = Fd();
    }
    size_t calls = 0;
    for (const auto& [id, session] : sessions_) calls += session->cut ? 0 : session->calls + session->outbox.size();
    report_.calls_cut = calls;
    return calls == 0 || std::chrono::steady_clock::now() >= stop_deadline_;
  }
  int WaitMs() const {
    if (stopping_.load() || silent_ > 0) return 50;
    // Until somebody may be due to be cut, with as much to spare.
    return in_turn_bytes_ > 0 ? static_cast<int>(std::min<int64_t>(options_.copy_max.count(), kTimeMaxMs)) : -1;
  }

  void Handle(const epoll_event& event) {
    if (event.data.u64 == kListener) return Accept();
    if (event.data.u64 == kWake) {
      uint64_t count = 0;
      [[maybe_unused]] const ssize_t got = read(wake_.get(), &count, sizeof count);
      return;
    }
    const auto it = sessions_.find(event.data.u64);
    if (it == sessions_.end()) return;  // Ended by an event before.
    Session& session = *it->second;
    if (session.cut) {
      if ((event.events & (EPOLLHUP | EPOLLERR)) != 0) EndSession(session);
      return;
    }
    if ((event.events & EPOLLOUT) != 0 && !Flush(session)) return;
    if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0) Receive(session);
  }

  void Accept() {
    while (listener_) {
      Fd fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      const bool exhausted = !fd && (errno == EMFILE || errno == ENFILE);
      if (!fd && !exhausted) return;
      if (exhausted) {
        // Who waits would keep the listener readable for ever: the spare descriptor lets it in, to be turned away.
        spare_ = Fd();
        fd = Fd(accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      }
      const char* why = exhausted                                   ? "out of file descriptors (ulimit -n)"
                        : !PeerIsOurs(fd.get())                     ? "not of our user or group"
                        : sessions_.size() >= options_.sessions_max ? "too many sessions (--sessions-max)"
                                                                    : nullptr;
      if (why != nullptr) {
        refused_.Add();
        log::Warn("node_session_refused", {{"why", why}});
        fd = Fd();
        if (exhausted) spare_ = Fd(open("/dev/null", O_RDONLY | O_CLOEXEC));
        if (exhausted && !spare_) return;  // Somebody was faster. They come again.
        continue;
      }
      auto session = std::make_unique<Session>();
      session->fd = std::move(fd);
      session->id = next_session_++;
      if (!Watch(session->fd.get(), session->id, EPOLLIN)) continue;
      ++silent_;
      sessions_.emplace(session->id, std::move(session));
      sessions_gauge_.Set(static_cast<int64_t>(sessions_.size()));
    }
  }

  // Who connects and says nothing takes up a session; who stops in the middle of copying, RAM.
  void EndTheSilent() {
    if (silent_ == 0 && in_turn_bytes_ == 0) return;
    const TimePoint now = std::chrono::steady_clock::now();
    for (auto it = sessions_.begin(); it != sessions_.end();) {
      Session& session = *(it++)->second;
      if (!session.welcomed && session.since < now - kWelcomeMax) {
        Cut(session, "no hello");
      } else if (session.in_turn_bytes > 0 && session.copies_since <= now - options_.copy_max) {
        Cut(session, "it hangs: of what it copies from RAM it gave nothing back for " +
                         std::to_string(options_.copy_max.count() / 1000) + " s");
        // If it ever goes on, it finds that other bytes are there. What it holds without copying stays its own.
        for (LeaseTable::Lent& lent : session.leases.TakeInTurn()) GiveBack(session, lent);
        SetGauges();
      }
    }
  }

  // Hangs up. `why`: what it did wrong, or "". What it was lent it may still be reading, until it hangs up, too.
  void Cut(Session& session, const std::string& why) {
    if (!why.empty()) {
      refused_.Add();
      log::Warn("node_session_ended", {{"why", why}});
    }
    session.cut = true;
    for (const auto& [call, load] : std::exchange(session.loads, {})) load.End(Reason::kCancelled);
    session.outbox.clear();
    if (!session.welcomed) return EndSession(session);
    shutdown(session.fd.get(), SHUT_WR);
    Watch(session.fd.get(), session.id, 0, EPOLL_CTL_MOD);  // Hanging up is told anyway.
  }

  void EndSession(Session& session) {
    if (!session.welcomed) --silent_;
    held_bytes_ -= session.held_bytes;
    in_turn_bytes_ -= session.in_turn_bytes;
    segments_.TakeBack(session);
    sessions_.erase(session.id);
    SetGauges();
  }

  void SetGauges() {
    sessions_gauge_.Set(static_cast<int64_t>(sessions_.size()));
    leased_gauge_.Set(static_cast<int64_t>(held_bytes_ + in_turn_bytes_));
    segments_gauge_.Set(static_cast<int64_t>(segments_.bytes()));
  }

  void Receive(Session& session) {
    const uint64_t id = session.id;
    // Some at a time: others wait, too.
    for (int i = 0; i < 16; ++i) {
      Fd passed;
      switch (ReceiveMessage(session.fd.get(), buffer_, passed)) {
        case Received::kNothing: return;
        case Received::kBroken: return Cut(session, "");
        case Received::kMessage: break;
      }
      const auto version = wire::VersionOf(buffer_);
      if (version && *version != wire::kVersion) {
        SendMessage(session.fd.get(), wire::Encode(Header{.kind = Kind::kHello}));
        return Cut(session, "it speaks version " + std::to_string(*version) + " of the protocol, this node version " +
                                std::to_string(wire::kVersion) + "; use one release for both");
      }
      Result<Message> message = wire::Decode(buffer_);
      const bool known = message && message->header.kind < Kind::kWelcome &&
                         session.welcomed != (message->header.kind == Kind::kHello);
      if (!known) return Cut(session, message ? "a message out of turn" : message.error().what);
      Answer(session, *std::move(message));
      if (const auto it = sessions_.find(id); it == sessions_.end() || it->second->cut) return;
    }
  }

  // False: the session is cut.
  bool Send(Session& session, std::vector<std::byte> message, std::shared_ptr<const Fd> passed = {}) {
    session.outbox_bytes += message.size();
    session.outbox.push_back({std::move(message), std::move(passed)});
    if (!Flush(session)) return false;
    if (session.outbox_bytes <= kOutboxBytesMax) return true;
    Cut(session, "it does not read its answers");
    return false;
  }

  bool Flush(Session& session) {
    while (!session.outbox.empty()) {
      const auto& [message, passed] = session.outbox.front();
      const Sent sent = SendMessage(session.fd.get(), message, passed ? passed->get() : -1);
      if (sent == Sent::kBroken) {
        Cut(session, "");
        return false;
      }
      if (sent == Sent::kLater) break;
      session.outbox_bytes -= message.size();
      session.outbox.pop_front();
    }
    const bool wants_out = !session.outbox.empty();
    if (wants_out != session.wants_out) {
      session.wants_out = wants_out;
      Watch(session.fd.get(), session.id, wants_out ? EPOLLIN | EPOLLOUT : EPOLLIN, EPOLL_CTL_MOD);
    }
    return true;
  }

  void Answer(Session& session, Message message) {
    Header answer{.call = message.header.call};
    switch (message.header.kind) {
      case Kind::kHello: return stopping_.load() ? Cut(session, "") : Welcome(session, answer);
      case Kind::kLookup: return SendPrefix(session, answer.call, store_.Lookup(message.Items<Digest>()));
      case Kind::kProbe: return Probe(session, message);
      case Kind::kLoad:
      case Kind::kPrefetch:
      case Kind::kPin: return Load(session, message);
      case Kind::kUnpin: return pins_.Unpin(message.Items<Digest>());
      case Kind::kCancel: {
        const auto it = session.loads.find(answer.call);
        if (it != session.loads.end()) LoadFollower::Handle(it->second).End(Reason::kCancelled);
        return;
      }
      case Kind::kRelease:
        for (const uint64_t handle : message.Items<uint64_t>()) Release(session, handle);
        return;
      case Kind::kNeeds: {
        answer.kind = Kind::kNeeded;
        std::vector<uint8_t> needed;
        for (const Digest& key : message.Items<Digest>()) needed.push_back(store_.Needs(key) ? 1 : 0);
        Send(session, wire::Encode<uint8_t>(answer, needed));
        return;
      }
      case Kind::kSegment: return GrantSegment(session, message);
      case Kind::kCommit: return Commit(session, message);
      case Kind::kStats: return SendStatistics(session, answer);
      default: return Cut(session, "a message out of turn");
    }
  }

  void Welcome(Session& session, Header answer) {
    session.welcomed = true;
    --silent_;
    answer.kind = Kind::kWelcome;
    answer.numbers = {instance_, store_.ram_memory().bytes.size()};
    std::vector<wire::TierName> names;
    for (const std::string& name : store_.tier_names()) wire::SetText(names.emplace_back(), name);
    Send(session, wire::Encode<wire::TierName>(answer, names), arena_);
  }

  void SendPrefix(Session& session, uint64_t call, const PrefixHit& hit) {
    const Header answer{
        .kind = Kind::kPrefix, .call = call, .numbers = {hit.chunks, static_cast<uint64_t>(hit.miss_reason)}};
    Send(session, wire::Encode<uint8_t>(answer, hit.tier));
  }

  // Of one more call, with so many items.
  Reason WhyRefused(const Session& session, size_t items) const {
    if (stopping_.load()) return Reason::kUnavailable;
    const bool fits = session.calls < options_.calls_max && session.items + items <= options_.items_max;
    return fits ? Reason::kNone : Reason::kFull;
  }

  void Probe(Session& session, const Message& message) {
    const auto keys = std::make_shared<const std::vector<Digest>>(message.Items<Digest>());
    if (const Reason why = WhyRefused(session, keys->size()); why != Reason::kNone) {
      return SendPrefix(session, message.header.call, {.miss_reason = why});
    }
    ++session.calls;
    session.items += keys->size();
    store_.Probe(*keys, After(message.header.numbers[0]),
                 [gate = gate_, this, keys, id = session.id, call = message.header.call] {
                   const Gate::Pass pass(gate);
                   if (!pass) return;
                   Arrive({.session = id,
                           .call = call,
                           .kind = Kind::kProbe,
                           .last = true,
                           .items = keys->size(),
                           .prefix = store_.Lookup(*keys)});
                 });
  }

  void Load(Session& session, const Message& message) {
    const Header& header = message.header;
    std::vector<Digest> keys = message.Items<Digest>();
    const uint64_t call = header.call;
    Reason why = WhyRefused(session, keys.size());
    if (header.payload_bytes == 0 || session.loads.contains(call)) why = Reason::kForeign;
    if (why != Reason::kNone) {
      std::vector<wire::LoadedItem> items;
      for (size_t i = 0; i < keys.size(); ++i) {
        items.push_back({.index = static_cast<uint32_t>(i), .reason = why});
        if (items.size() == wire::kItemsMax && !SendLoaded(session, call, items)) return;
      }
      SendLoaded(session, call, items);
      return;
    }
    if (keys.empty()) return;
    ++session.calls;
    session.items += keys.size();
    const bool in_turn = (header.numbers[1] & wire::kInTurn) != 0 && header.kind == Kind::kLoad;
    // All loads of a client together, so that those of all clients have room at once: what does not fit would be a
    // miss.
    if (in_turn) session.window->SetMax(CopiedBytesMax() / (sessions_.size() + 1));
    const auto handle = std::make_shared<LoadFollower::Handle>();
    const size_t count = keys.size();
    const auto seen = std::make_shared<std::atomic<size_t>>(0);
    const std::chrono::milliseconds lifetime(std::min(header.numbers[2], kTimeMaxMs));
    follower_.Begin({.space = header.space,
                     .keys = std::move(keys),
                     .payload_bytes = header.payload_bytes,
                     .deadline = After(header.numbers[0]),
                     .stop_at_miss = (header.numbers[1] & wire::kStopAtMiss) != 0,
                     .window = in_turn ? session.window : nullptr,
                     .on_item =
                         [this, id = session.id, call, kind = header.kind, in_turn, handle, seen, count, lifetime](
                             size_t i, LoadJob::Item item) {
                           Arrive({.session = id,
                                   .call = call,
                                   .kind = kind,
                                   .in_turn = in_turn,
                                   .index = i,
                                   .last = seen->fetch_add(1) + 1 == count,
                                   .item = std::move(item),
                                   .load = *handle,
                                   .lifetime = lifetime});
                         }},
                    [&](const LoadFollower::Handle& load) {
                      *handle = load;
                      session.loads[call] = load;
                    });
  }

  bool SendLoaded(Session& session, uint64_t call, std::vector<wire::LoadedItem>& items) {
    if (items.empty()) return true;
    const bool sent = Send(session, wire::Encode<wire::LoadedItem>({.kind = Kind::kLoaded, .call = call}, items));
    items.clear();
    return sent;
  }

  void TakeArrived() {
    std::vector<Arrived> arrived;
    {
      std::lock_guard lock(mutex_);
      arrived.swap(arrived_);
    }
    std::vector<wire::LoadedItem> items;
    for (size_t i = 0; i < arrived.size(); ++i) {
      Arrived& one = arrived[i];
      const auto it = sessions_.find(one.session);
      if (it == sessions_.end() || it->second->cut) {
        const bool hit = one.item.outcome == Outcome::kHit;
        one.item = {};
        if (hit) one.load.Consumed();
        continue;
      }
      Session& session = *it->second;
      session.items -= one.items;
      if (one.last) {
        --session.calls;
        if (IsLoad(one.kind)) session.loads.erase(one.call);
      }
      if (one.kind == Kind::kProbe) {
        SendPrefix(session, one.call, one.prefix);
      } else if (one.kind == Kind::kCommit) {
        Send(session, wire::Encode<wire::SavedItem>({.kind = Kind::kSaved, .call = one.call}, {&one.saved, 1}));
      } else {
        items.push_back(Lend(session, one));
        const bool goes_on = i + 1 < arrived.size() && arrived[i + 1].session == one.session &&
                             arrived[i + 1].call == one.call && IsLoad(arrived[i + 1].kind) &&
                             items.size() < wire::kItemsMax;
        if (!goes_on) SendLoaded(session, one.call, items);
      }
    }
    SetGauges();
  }
  static bool IsLoad(Kind kind) { return kind != Kind::kProbe && kind != Kind::kCommit; }

  wire::LoadedItem Lend(Session& session, Arrived& one) {
    wire::LoadedItem item{.index = static_cast<uint32_t>(one.index),
                          .outcome = one.item.outcome,
                          .reason = one.item.reason,
                          .tier = one.item.tier};
    if (item.outcome != Outcome::kHit) return item;
    Lease& lease = one.item.lease;
    item.info = lease.info;
    const auto miss = [&] { return wire::LoadedItem{.index = item.index, .reason = Reason::kFull}; };
    if (one.kind == Kind::kPin && !pins_.Pin(lease, std::chrono::steady_clock::now() + one.lifetime)) return miss();
    if (one.kind != Kind::kLoad) return item;
    const uint64_t bytes = lease.bytes.size();
    if (!MayLend(session, bytes, one.in_turn)) {
      leases_refused_.Add();
      lease = {};
      one.load.Consumed();
      return miss();
    }
    item.offset = static_cast<uint64_t>(lease.bytes.data() - store_.ram_memory().bytes.data());
    item.hash = wire::HashOf(*lease.hashes);
    if (one.in_turn && session.in_turn_bytes == 0) session.copies_since = std::chrono::steady_clock::now();
    (one.in_turn ? session.in_turn_bytes : session.held_bytes) += bytes;
    (one.in_turn ? in_turn_bytes_ : held_bytes_) += bytes;
    item.lease = session.leases.Add({std::move(lease), one.load, one.in_turn});
    return item;
  }
  // Of all sessions together, beside what they hold.
  uint64_t CopiedBytesMax() const { return options_.leased_bytes_max / 4; }
  bool MayLend(const Session& session, uint64_t bytes, bool in_turn) const {
    if (session.leases.size() >= options_.leases_max) return false;
    if (held_bytes_ + in_turn_bytes_ + bytes > options_.leased_bytes_max) return false;
    if (in_turn) return true;  // The session's window has been asked before.
    const uint64_t held_max = options_.leased_bytes_max - CopiedBytesMax();
    // One session alone gets two thirds of it, any number of equals share nearly all.
    return held_bytes_ + bytes <= held_max && session.held_bytes + bytes <= 2 * (held_max - held_bytes_);
  }

  void Release(Session& session, uint64_t handle) {
    std::optional<LeaseTable::Lent> lent = session.leases.Take(handle);
    if (!lent) return;
    GiveBack(session, *lent);
  }
  void GiveBack(Session& session, LeaseTable::Lent& lent) {
    if (lent.in_turn) session.copies_since = std::chrono::steady_clock::now();
    (lent.in_turn ? session.in_turn_bytes : session.held_bytes) -= lent.lease.bytes.size();
    (lent.in_turn ? in_turn_bytes_ : held_bytes_) -= lent.lease.bytes.size();
    lent.lease = {};
    lent.load.Consumed();
  }

  void GrantSegment(Session& session, const Message& message) {
    const auto& numbers = message.header.numbers;
    SegmentLender::Granted granted;
    if (!stopping_.load()) granted = segments_.Lend(session, numbers[0], numbers[1]);
    SetGauges();
    Send(session,
         wire::Encode(
             Header{.kind = Kind::kGranted, .call = message.header.call, .numbers = {granted.handle, granted.bytes}}),
         granted.memory);
  }

  void Commit(Session& session, const Message& message) {
    const auto items = message.Items<wire::CommitItem>();
    const bool has_room = session.calls + items.size() <= options_.calls_max;
    for (size_t i = 0; i < items.size(); ++i) {
      const wire::CommitItem& item = items[i];
      const auto filled = SegmentLender::Find(session, item);
      Arrived done{.session = session.id, .call = message.header.call, .kind = Kind::kCommit, .last = true};
      done.saved.index = static_cast<uint32_t>(i);
      done.saved.reason = stopping_.load() ? Reason::kUnavailable
                          : !has_room      ? Reason::kFull
                          : !filled        ? Reason::kForeign
                                           : Reason::kNone;
      ++session.calls;
      ++session.items;
      if (done.saved.reason == Reason::kNone) {
        saver_.Post([this, done, filled, info = item.info] { Save(done, filled->bytes, info); });
      } else {
        Arrive(std::move(done));
      }
    }
  }

  void Save(Arrived done, std::span<const std::byte> from, const FrameInfo& info) {
    if (!store_.Needs(info.key)) {  // Another client was first.
      done.saved.outcome = Outcome::kHit;
      return Arrive(std::move(done));
    }
    Result<SaveSlot> slot = store_.BeginSave(info);
    if (!slot) {
      done.saved.reason = slot.error().code == Code::kFull ? Reason::kFull : Reason::kUnavailable;
      return Arrive(std::move(done));
    }
    std::memcpy(slot->bytes.data(), from.data(), from.size());
    store_.Commit(*std::move(slot), [gate = gate_, this, done](bool visible) mutable {
      const Gate::Pass pass(gate);
      if (!pass) return;
      done.saved.outcome = visible ? Outcome::kHit : Outcome::kDeclined;
      done.saved.reason = visible ? Reason::kNone : Reason::kUnavailable;
      Arrive(std::move(done));
    });
  }

  void SendStatistics(Session& session, Header answer) {
    answer.kind = Kind::kStatistics;
    answer.numbers = {store_.pending_saves(), held_bytes_ + in_turn_bytes_, pins_.bytes(), sessions_.size()};
    std::vector<wire::TierItem> tiers;
    for (size_t t = 0; t < store_.tier_names().size(); ++t) {
      const TierStats stats = store_.tier_stats(t);
      wire::TierItem& item = tiers.emplace_back();
      wire::SetText(item.name, store_.tier_names()[t]);
      item.frames = stats.frames;
      item.bytes = stats.bytes;
      item.bytes_max = stats.bytes_max;
      item.pinned_bytes = stats.pinned_bytes;
      item.quarantined = stats.quarantined;
      item.index_ready = stats.index_ready ? 1 : 0;
      item.available = stats.available ? 1 : 0;
      wire::SetText(item.why, stats.why);
    }
    Send(session, wire::Encode<wire::TierItem>(answer, tiers));
  }

  NodeServerOptions options_;
  Fd listener_;
  Store& store_;
  const Fd epoll_;
  const Fd wake_;
  std::shared_ptr<const Fd> arena_;  // The memory of RAM, to be read.
  Gauge& sessions_gauge_;
  Gauge& leased_gauge_;
  Gauge& segments_gauge_;
  Counter& refused_;
  Counter& leases_refused_;
  const uint64_t instance_ = std::random_device()() | uint64_t{1} << 32;

  // Touched by the loop's thread alone.
  Fd spare_;  // Given up to turn somebody away when there are no more.
  std::map<uint64_t, std::unique_ptr<Session>> sessions_;
  uint64_t next_session_ = kFirstSession;
  size_t silent_ = 0;        // Sessions without hello.
  uint64_t held_bytes_ = 0;  // Of RAM, lent to all, by kind (see LeaseTable).
  uint64_t in_turn_bytes_ = 0;
  SegmentLender segments_;
  std::vector<std::byte> buffer_;
  Report report_;  // Read when the thread has ended.

  std::mutex mutex_;
  std::vector<Arrived> arrived_;  // Guarded by mutex_.
  TimePoint stop_deadline_;       // Set before stopping_.
  std::atomic<bool> stopping_{false};

  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();  // Commits and probes may end late.
  ThreadPool saver_;                                             // One thread: parents first. Ends pins, too.
  Pins pins_;
  LoadFollower follower_;
  std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<NodeServer>> NodeServer::Start(const NodeServerOptions& options, Fd listener, Store& store,
                                                      Metrics& metrics) {
  auto server = std::make_unique<NodeServerImpl>(options, std::move(listener), store, metrics);
  if (Result<void> begun = server->Begin(); !begun) return Fail(begun.error(), "node");
  return server;
}

}  // namespace terrace
