#include "client/local_client.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>

#include "base/apart.h"
#include "base/executor.h"
#include "base/hash.h"
#include "base/log.h"
#include "client/calls.h"
#include "client/chunks.h"
#include "client/gate.h"
#include "client/load_follower.h"
#include "client/pins.h"

namespace terrace {
namespace {

// What healthy storage needs for what it is at when the time is over.
constexpr std::chrono::seconds kCloseGrace{2};

TimePoint Now() { return std::chrono::steady_clock::now(); }

Reason WhyDeclined(const Error& error) { return error.code == Code::kFull ? Reason::kFull : Reason::kUnavailable; }

class LocalClient final : public Client {
 public:
  LocalClient(const LocalOptions& options, Store& store, std::shared_ptr<void> owner)
      : owner_(std::move(owner)),
        store_(store),
        setting_(options.setting),
        calls_(std::make_shared<Calls>(options.calls_max)),
        copiers_("terrace-copy", std::max<size_t>(options.copy_threads, 1)),
        saver_("terrace-save", 1),
        pins_(store.ram_stats().bytes_max / 4, saver_),
        follower_(store),
        copied_(std::make_shared<LoadFollower::Window>(store.ram_stats().bytes_max / 4)) {}
  ~LocalClient() override {
    if (!closing_) Close(Now());
    const Apart end([owner = std::move(owner_)]() mutable { owner.reset(); });
    if (closing_->EndsBy(Now())) end.EndsBy(Now() + kCloseGrace);  // Else it is the other's, which hangs already.
  }

  std::vector<std::string> tier_names() const override { return store_.tier_names(); }
  bool connected() const override { return true; }
  std::optional<std::string> Setting(std::string_view name) const override { return setting_(name); }
  int event_fd() const override { return calls_->fd(); }
  void ClearEvent() override { calls_->ClearEvent(); }

  std::shared_ptr<CallOf<PrefixHit>> Lookup(std::vector<Digest> keys) override {
    auto call = BeginPrefix();
    if (!call->done()) calls_->Settle(*call, 0, store_.Lookup(keys));
    return call;
  }

  std::shared_ptr<CallOf<PrefixHit>> Probe(std::vector<Digest> keys, TimePoint deadline) override {
    auto call = BeginPrefix();
    if (call->done()) return call;
    const auto asked = std::make_shared<const std::vector<Digest>>(std::move(keys));
    store_.Probe(*asked, deadline, [this, gate = gate_, calls = calls_, call, asked] {
      const Gate::Pass pass(gate);
      calls->Settle(*call, 0, pass ? store_.Lookup(*asked) : NoPrefix(Reason::kCancelled));
    });
    return call;
  }

  std::shared_ptr<CallOf<LoadedChunk>> Load(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    if (!Fits(request)) calls_->SettleAll(*call, Missed(Reason::kForeign));
    if (call->done()) return call;
    const auto into = std::make_shared<std::vector<Pieces>>(std::move(request.into));
    const auto handle = std::make_shared<LoadFollower::Handle>();
    const auto owner = std::move(request.owner);
    Follow(call, request, copied_, handle, [=, this](size_t i, LoadJob::Item item) {
      if (item.outcome != Outcome::kHit) return calls_->Settle(*call, i, Loaded(item));
      const bool posted = copiers_.Post([=, this, owner = owner, item = std::move(item)]() mutable {
        LoadedChunk chunk = Loaded(item);
        if (CallAccess::Cancelled(*call)) {
          chunk = Missed(Reason::kCancelled);
        } else if (CopyAndHash(item.lease.bytes, (*into)[i]) != *item.lease.hashes) {
          chunk = Missed(Reason::kDamaged);
        }
        item.lease = {};
        owner.reset();  // Whoever sees the item settled may count on it.
        calls_->Settle(*call, i, std::move(chunk));
        handle->Consumed();
      });
      if (!posted) calls_->Settle(*call, i, Missed(Reason::kCancelled));
    });
    return call;
  }

  std::shared_ptr<CallOf<LoadedChunk>> Lease(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    Follow(call, request, nullptr, nullptr, [calls = calls_, call](size_t i, LoadJob::Item item) {
      LoadedChunk chunk = Loaded(item);
      chunk.lease = std::move(item.lease);
      calls->Settle(*call, i, std::move(chunk));
    });
    return call;
  }

  std::shared_ptr<CallOf<LoadedChunk>> Prefetch(LoadRequest request) override {
    auto call = BeginLoad(request.keys.size());
    Follow(call, request, nullptr, nullptr,
           [calls = calls_, call](size_t i, const LoadJob::Item& item) { calls->Settle(*call, i, Loaded(item)); });
    return call;
  }

  std::shared_ptr<CallOf<LoadedChunk>> Pin(LoadRequest request, std::chrono::milliseconds lifetime) override {
    auto call = BeginLoad(request.keys.size());
    const TimePoint until = Now() + lifetime;
    Follow(call, request, nullptr, nullptr, [=, this](size_t i, LoadJob::Item item) {
      LoadedChunk chunk = Loaded(item);
      if (chunk.outcome == Outcome::kHit && !pins_.Pin(std::move(item.lease), until)) chunk = Missed(Reason::kFull);
      calls_->Settle(*call, i, std::move(chunk));
    });
    return call;
  }
  void Unpin(std::vector<Digest> keys) override { pins_.Unpin(keys); }

  std::shared_ptr<CallOf<SavedChunk>> Save(std::vector<SaveChunk> chunks, std::shared_ptr<const void> owner) override {
    auto call = calls_->Begin<SavedChunk>(chunks.size(), Declined);
    if (call->done()) return call;
    const bool posted = saver_.Post([this, call, chunks = std::move(chunks), owner = std::move(owner)] {
      for (size_t i = 0; i < chunks.size(); ++i) {
        SaveSegment segment = BytesOf(chunks[i].from) == chunks[i].info.payload_bytes ? Segment(*call, chunks[i].info)
                                                                                      : NoSegment(Reason::kForeign);
        size_t at = 0;
        for (const auto& piece : chunks[i].from) {
          if (!segment.bytes.empty()) std::memcpy(segment.bytes.data() + at, piece.data(), piece.size());
          at += piece.size();
        }
        CommitOne(call, i, std::move(segment));
      }
    });
    if (!posted) calls_->SettleAll(*call, Declined(Reason::kCancelled));
    return call;
  }

  std::shared_ptr<CallOf<SaveSegment>> BeginSave(std::vector<FrameInfo> chunks) override {
    auto call = calls_->Begin<SaveSegment>(chunks.size(), NoSegment);
    if (call->done()) return call;
    // Room may have to get its pages first.
    const bool posted = saver_.Post([this, call, chunks = std::move(chunks)] {
      for (size_t i = 0; i < chunks.size(); ++i) calls_->Settle(*call, i, Segment(*call, chunks[i]));
    });
    if (!posted) calls_->SettleAll(*call, NoSegment(Reason::kCancelled));
    return call;
  }

  std::shared_ptr<CallOf<SavedChunk>> Commit(std::vector<SaveSegment> segments) override {
    auto call = calls_->Begin<SavedChunk>(segments.size(), Declined);
    if (call->done()) return call;
    for (size_t i = 0; i < segments.size(); ++i) CommitOne(call, i, std::move(segments[i]));
    return call;
  }

  std::shared_ptr<CallOf<ClientStats>> Stats() override {
    auto call = calls_->Begin<ClientStats>(1, [](Reason) { return ClientStats{.connected = false}; });
    if (!call->done()) calls_->Settle(*call, 0, StatsOf(store_, pins_));
    return call;
  }

  CloseReport Close(TimePoint deadline) override {
    calls_->Refuse();
    follower_.Close();
    gate_->Close();
    copiers_.Stop();
    saver_.Stop();
    return CloseStore(std::max(deadline, Now()));
  }

 private:
  // Nothing above calls storage; from here on a call may hang. All who close wait for one close, each as long as it
  // likes.
  CloseReport CloseStore(TimePoint deadline) {
    const TimePoint now = Now();
    {
      std::lock_guard lock(close_mutex_);
      if (!closing_) {
        const TimePoint drained = deadline - std::min<TimePoint::duration>((deadline - now) / 4, kCloseGrace);
        closing_ = std::make_unique<Apart>([owner = owner_, &store = store_, drained, report = report_]() mutable {
          *report = store.Close(drained);
          owner.reset();  // Before the end is seen: then the client's own may be the last.
        });
      }
    }
    if (closing_->EndsBy(std::max(deadline, now + kCloseGrace))) return *report_;
    const uint64_t pending = store_.pending_saves();
    log::Warn("close_abandoned", {{"saves", pending}});
    return {.clean = false, .abandoned = pending};
  }

  std::shared_ptr<CallOf<PrefixHit>> BeginPrefix() { return calls_->Begin<PrefixHit>(1, NoPrefix); }
  std::shared_ptr<CallOf<LoadedChunk>> BeginLoad(size_t size) { return calls_->Begin<LoadedChunk>(size, Missed); }

  static LoadedChunk Loaded(const LoadJob::Item& item) {
    LoadedChunk chunk;
    chunk.outcome = item.outcome;
    chunk.reason = item.reason;
    chunk.tier = item.tier;
    chunk.info = item.lease.info;
    return chunk;
  }

  // `handle`, if given, is set before the first item comes.
  void Follow(const std::shared_ptr<CallOf<LoadedChunk>>& call, LoadRequest& request,
              const std::shared_ptr<LoadFollower::Window>& window, const std::shared_ptr<LoadFollower::Handle>& handle,
              std::function<void(size_t, LoadJob::Item)> on_item) {
    if (call->done()) return;
    if (request.payload_bytes == 0) return calls_->SettleAll(*call, Missed(Reason::kForeign));
    follower_.Begin({.space = request.space,
                     .keys = std::move(request.keys),
                     .payload_bytes = request.payload_bytes,
                     .deadline = request.deadline,
                     .stop_at_miss = request.stop_at_miss,
                     .window = window,
                     .on_item = std::move(on_item)},
                    [&](const LoadFollower::Handle& follow) {
                      if (handle) *handle = follow;
                      CallAccess::OnCancel(*call, [follow] { follow.End(Reason::kCancelled); });
                    });
  }

  SaveSegment Segment(const Call& call, const FrameInfo& info) {
    if (CallAccess::Cancelled(call)) return NoSegment(Reason::kCancelled);
    SaveSegment segment;
    segment.info = info;
    segment.existed = !store_.Needs(info.key);
    if (!segment.existed) {
      Result<SaveSlot> slot = store_.BeginSave(info);
      if (!slot) return NoSegment(WhyDeclined(slot.error()));
      segment.bytes = slot->bytes;
      segment.lease = std::make_shared<SaveSlot>(*std::move(slot));
    }
    segment.outcome = Outcome::kHit;
    return segment;
  }

  void CommitOne(const std::shared_ptr<CallOf<SavedChunk>>& call, size_t i, SaveSegment segment) {
    if (!segment.lease) {
      return calls_->Settle(*call, i, {segment.outcome, segment.reason, segment.existed});
    }
    store_.Commit(
        std::move(*std::static_pointer_cast<SaveSlot>(segment.lease)), [calls = calls_, call, i](bool visible) {
          calls->Settle(*call, i, visible ? SavedChunk{.outcome = Outcome::kHit} : Declined(Reason::kUnavailable));
        });
  }

  std::shared_ptr<void> owner_;  // Shared with the threads that close the store.
  Store& store_;
  const std::function<std::optional<std::string>(std::string_view)> setting_;
  const std::shared_ptr<Calls> calls_;
  const std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();  // Probes may end late.
  ThreadPool copiers_;
  ThreadPool saver_;  // One thread: parents are committed first. Ends pins, too.
  Pins pins_;
  LoadFollower follower_;
  // On their way from RAM to callers' buffers: what is lent can't make room.
  const std::shared_ptr<LoadFollower::Window> copied_;
  std::mutex close_mutex_;
  const std::shared_ptr<CloseReport> report_ = std::make_shared<CloseReport>();  // Read when closing_ has ended.
  std::unique_ptr<Apart> closing_;                                               // Set once, with close_mutex_.
};

}  // namespace

ClientStats StatsOf(const Store& store, const Pins& pins) {
  ClientStats stats;
  stats.degraded = store.health().why;
  for (size_t t = 0; t < store.tier_names().size(); ++t) {
    stats.tiers.emplace_back(store.tier_names()[t], store.tier_stats(t));
  }
  stats.pending_saves = store.pending_saves();
  stats.pinned_bytes = pins.bytes();
  stats.leased_bytes = stats.tiers[0].second.pinned_bytes - std::min(stats.tiers[0].second.pinned_bytes, pins.bytes());
  return stats;
}

std::unique_ptr<Client> NewLocalClient(const LocalOptions& options, Store& store, std::shared_ptr<void> owner) {
  return std::make_unique<LocalClient>(options, store, std::move(owner));
}

}  // namespace terrace
