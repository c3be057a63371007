#include "client/node_client.h"

#include <algorithm>
#include <chrono>
#include <mutex>
#include <span>
#include <utility>

#include "base/executor.h"
#include "base/hash.h"
#include "base/log.h"
#include "client/calls.h"
#include "client/chunks.h"
#include "client/gate.h"
#include "client/node_saver.h"
#include "client/node_talker.h"
#include "client/wire.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using wire::Header;
using wire::Kind;
using wire::Message;

constexpr milliseconds kAnswerMax{5000};  // For what needs no storage: a node that takes longer hangs.
constexpr std::chrono::hours kProbeMax{24};

TimePoint Now() { return std::chrono::steady_clock::now(); }

uint64_t MsUntil(TimePoint deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Now()).count();
  return static_cast<uint64_t>(std::max<int64_t>(left, 0));
}

LoadedChunk Loaded(const wire::LoadedItem& item) {
  LoadedChunk chunk;
  chunk.outcome = item.outcome;
  chunk.reason = item.reason;
  chunk.tier = item.tier;
  chunk.info = item.info;
  return chunk;
}
LoadedChunk Damaged(const wire::LoadedItem& item) {
  log::Warn("node_chunk_damaged", {{"key", item.info.key.Hex()}});
  return Missed(Reason::kDamaged);
}

ClientStats StatsFrom(const Message& message) {
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

class NodeClient final : public Client {
 public:
  NodeClient(const LocalOptions& options, const std::string& socket)
      : setting_(options.setting),
        calls_(std::make_shared<Calls>(options.calls_max)),
        talker_(socket),
        saver_(talker_, *calls_, options.save_max),
        copiers_("terrace-copy", std::max<size_t>(options.copy_threads, 1)) {
    talker_.Start(saver_);
    talker_.WaitForFirstAttempt(Now() + options.node_wait);
  }
  ~NodeClient() override { Close(Now()); }

  std::vector<std::string> tier_names() const override { return talker_.tier_names(); }
  bool connected() const override { return talker_.link() != nullptr; }
  std::optional<std::string> Setting(std::string_view name) const override { return setting_(name); }
  int event_fd() const override { return calls_->fd(); }
  void ClearEvent() override { calls_->ClearEvent(); }

  std::shared_ptr<CallOf<PrefixHit>> Lookup(std::vector<Digest> keys) override {
    return AskPrefix({.kind = Kind::kLookup}, std::move(keys), Now() + kAnswerMax);
  }
  std::shared_ptr<CallOf<PrefixHit>> Probe(std::vector<Digest> keys, TimePoint deadline) override {
    return AskPrefix({.kind = Kind::kProbe, .numbers = {MsUntil(deadline)}}, std::move(keys),
                     std::min(deadline, Now() + kProbeMax) + kAnswerMax);
  }

  std::shared_ptr<CallOf<LoadedChunk>> Load(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    if (!Fits(request)) calls_->SettleAll(*call, Missed(Reason::kForeign));
    const auto into = std::make_shared<std::vector<Pieces>>(std::move(request.into));
    const auto owner = std::move(request.owner);
    AskLoad(call, request, Kind::kLoad, wire::kInTurn, {},
            [=, this](const LinkPtr& link, const wire::LoadedItem& item, std::span<const std::byte> bytes) {
              link->WillCopy();
              const bool posted = copiers_.Post([=, this, owner = owner]() mutable {
                LoadedChunk chunk = Loaded(item);
                if (CallAccess::Cancelled(*call)) {
                  chunk = Missed(Reason::kCancelled);
                } else if (wire::HashOf(CopyAndHash(bytes, (*into)[item.index])) != item.hash) {
                  chunk = Damaged(item);
                }
                owner.reset();  // Whoever sees the item settled may count on it.
                calls_->Settle(*call, item.index, std::move(chunk));
                link->ReleaseCopied(item.lease);
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
  void Unpin(std::vector<Digest> keys) override {
    for (std::span<const Digest> left = keys; !left.empty();) {
      const auto some = left.first(std::min(left.size(), wire::kKeysMax));
      talker_.Ask<Digest>({.kind = Kind::kUnpin}, some, Now(), {}, {});
      left = left.subspan(some.size());
    }
  }

  std::shared_ptr<CallOf<SavedChunk>> Save(std::vector<SaveChunk> chunks, std::shared_ptr<const void> owner) override {
    auto call = calls_->Begin<SavedChunk>(chunks.size(), Declined);
    if (!call->done()) saver_.Save(call, std::move(chunks), std::move(owner));
    return call;
  }
  std::shared_ptr<CallOf<SaveSegment>> BeginSave(std::vector<FrameInfo> chunks) override {
    auto call = calls_->Begin<SaveSegment>(chunks.size(), NoSegment);
    if (!call->done()) saver_.BeginSave(call, std::move(chunks));
    return call;
  }
  std::shared_ptr<CallOf<SavedChunk>> Commit(std::vector<SaveSegment> segments) override {
    auto call = calls_->Begin<SavedChunk>(segments.size(), Declined);
    if (!call->done()) saver_.Commit(call, std::move(segments));
    return call;
  }

  std::shared_ptr<CallOf<ClientStats>> Stats() override {
    const auto lost = [](Reason) { return ClientStats{.connected = false, .in_process = false}; };
    auto call = calls_->Begin<ClientStats>(1, lost);
    if (call->done()) return call;
    talker_.Ask<std::byte>(
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
    talker_.Close();
    gate_->Close();
    copiers_.Stop();
    saver_.Stop();
    return {};
  }

 private:
  std::shared_ptr<CallOf<PrefixHit>> AskPrefix(const Header& header, std::vector<Digest> keys, TimePoint deadline) {
    auto call = calls_->Begin<PrefixHit>(1, NoPrefix);
    if (keys.size() > wire::kKeysMax) calls_->Settle(*call, 0, NoPrefix(Reason::kFull));
    if (call->done()) return call;
    talker_.Ask<Digest>(
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
                                    static_cast<uint64_t>(std::max<int64_t>(lifetime.count(), 0))}};
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
    const uint64_t number = talker_.Ask<Digest>(
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
      if (pass) talker_.End(number, Reason::kCancelled);
    });
  }

  const std::function<std::optional<std::string>(std::string_view)> setting_;
  const std::shared_ptr<Calls> calls_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();  // Handles outlive their client.
  NodeTalker talker_;
  NodeSaver saver_;
  ThreadPool copiers_;
};

}  // namespace

std::unique_ptr<Client> NewNodeClient(const LocalOptions& options, const std::string& socket) {
  return std::make_unique<NodeClient>(options, socket);
}

}  // namespace terrace
