#include "client/node_saver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "client/chunks.h"

namespace terrace {
namespace {

using wire::Header;
using wire::Kind;
using wire::Message;

constexpr std::chrono::milliseconds kAnswerMax{5000};  // A node that takes longer hangs.
constexpr uint64_t kLentBytes = 64 << 20;
constexpr uint64_t kChunksASegment = 4;  // At least: one is filled while others are on their way.

TimePoint Now() { return std::chrono::steady_clock::now(); }

SaveSegment Existed(const FrameInfo& info) {
  return {.outcome = Outcome::kHit, .existed = true, .bytes = {}, .info = info};
}

Reason WhyNotSaved(const Call& call, const SaveChunk& chunk, TimePoint deadline) {
  if (chunk.info.payload_bytes == 0 || BytesOf(chunk.from) != chunk.info.payload_bytes) return Reason::kForeign;
  if (CallAccess::Cancelled(call)) return Reason::kCancelled;
  return Now() >= deadline ? Reason::kTimeout : Reason::kNone;
}

}  // namespace

void NodeSaver::Save(const std::shared_ptr<CallOf<SavedChunk>>& call, std::vector<SaveChunk> chunks,
                     std::shared_ptr<const void> owner) {
  std::vector<Digest> keys;
  for (const SaveChunk& chunk : chunks) keys.push_back(chunk.info.key);
  AskNeeds(
      std::move(keys),
      [=, this, chunks = std::move(chunks), owner = std::move(owner), deadline = Now() + save_max_](
          const LinkPtr&, const std::vector<uint8_t>& needed) {
        for (size_t i = 0; i < chunks.size(); ++i) {
          if (needed[i] == 0) {
            calls_.Settle(*call, i, {.outcome = Outcome::kHit, .existed = true});
          } else {
            saves_.push_back({call, i, chunks[i], owner, deadline});
          }
        }
      },
      [=, this](Reason reason) { calls_.SettleAll(*call, Declined(reason)); });
}

void NodeSaver::BeginSave(const std::shared_ptr<CallOf<SaveSegment>>& call, std::vector<FrameInfo> chunks) {
  std::vector<Digest> keys;
  uint64_t largest = 0;
  for (const FrameInfo& info : chunks) {
    keys.push_back(info.key);
    largest = std::max(largest, info.payload_bytes);
  }
  const auto infos = std::make_shared<const std::vector<FrameInfo>>(std::move(chunks));
  AskNeeds(
      std::move(keys),
      [=, this](const LinkPtr& link, const std::vector<uint8_t>& needed) {
        // A refusal shows when room is taken.
        AskSegment(largest, [=, this] {
          for (size_t i = 0; i < infos->size(); ++i) {
            calls_.Settle(*call, i, needed[i] == 0 ? Existed((*infos)[i]) : Take(link, *call, (*infos)[i]));
          }
        });
      },
      [=, this](Reason reason) { calls_.SettleAll(*call, NoSegment(reason)); });
}

void NodeSaver::Commit(const std::shared_ptr<CallOf<SavedChunk>>& call, std::vector<SaveSegment> segments) {
  for (size_t i = 0; i < segments.size(); ++i) {
    if (segments[i].lease) {
      CommitPart(call, i, std::static_pointer_cast<Part>(segments[i].lease), segments[i].info);
    } else {
      calls_.Settle(*call, i, {segments[i].outcome, segments[i].reason, segments[i].existed});
    }
  }
}

void NodeSaver::AskNeeds(std::vector<Digest> keys,
                         std::function<void(const LinkPtr&, const std::vector<uint8_t>&)> then,
                         const NodeTalker::OnLost& on_lost) {
  talker_.Ask<Digest>(
      {.kind = Kind::kNeeds}, keys, Now() + std::min(kAnswerMax, save_max_),
      [=, count = keys.size()](const LinkPtr& link, const Message& message) {
        if (message.header.count == count) {
          then(link, message.Items<uint8_t>());
        } else {
          on_lost(Reason::kUnavailable);
        }
        return true;
      },
      // A node that hangs is left: every save would wait that long, and with each the engine that needs its pages anew.
      [=, this](Reason reason) {
        if (reason == Reason::kTimeout) talker_.Leave();
        on_lost(reason);
      });
}

// Runs `then` when there is a segment for chunks of `bytes`, or there can't be one.
void NodeSaver::AskSegment(uint64_t bytes, std::function<void()> then) {
  if (HasSegmentFor(bytes)) return then();
  const uint64_t wanted = std::max(kLentBytes, kChunksASegment * bytes);
  talker_.Ask<std::byte>(
      {.kind = Kind::kSegment, .numbers = {wanted, bytes}}, {}, Now() + kAnswerMax,
      [=](const LinkPtr&, const Message&) {
        then();  // What came is in segment_.
        return true;
      },
      [=](Reason) { then(); });
}

void NodeSaver::Granted(const Header& header, const Fd& memory) {
  if (header.numbers[0] == 0 || !memory) return;
  if (auto mapping = Mapping::Map(memory.get(), header.numbers[1], true)) {
    segment_ = std::make_shared<Segment>(header.numbers[0], std::move(mapping));
  }
}

std::shared_ptr<Part> NodeSaver::TakePart(const LinkPtr& link, uint64_t bytes) {
  if (!HasSegmentFor(bytes) || bytes == 0) return nullptr;
  const std::optional<uint64_t> offset = segment_->room.Take(bytes);
  if (!offset) return nullptr;
  return std::make_shared<Part>(link, segment_, *offset, bytes);
}

SaveSegment NodeSaver::Take(const LinkPtr& link, const Call& call, const FrameInfo& info) {
  if (CallAccess::Cancelled(call)) return NoSegment(Reason::kCancelled);
  const std::shared_ptr<Part> part = TakePart(link, info.payload_bytes);
  if (!part) return NoSegment(Reason::kFull);
  return {.outcome = Outcome::kHit, .bytes = part->memory(), .info = info, .lease = part};
}

// In order: as long as the first that waits finds room, it is copied and committed.
bool NodeSaver::GoOn(const LinkPtr& link) {
  while (!saves_.empty() && !asking_segment_) {
    const Saving& first = saves_.front();
    const uint64_t bytes = first.chunk.info.payload_bytes;
    if (const Reason why = WhyNotSaved(*first.call, first.chunk, first.deadline); why != Reason::kNone) {
      DeclineFront(why);
    } else if (!HasSegmentFor(bytes)) {
      asking_segment_ = true;
      AskSegment(bytes, [this, bytes] {
        asking_segment_ = false;
        if (!HasSegmentFor(bytes)) DeclineFront(Reason::kFull);
      });
    } else if (const std::shared_ptr<Part> part = TakePart(link, bytes)) {
      copier_.Post([this, next = std::move(saves_.front()), part] {
        size_t at = 0;
        for (const auto& piece : next.chunk.from) {
          std::memcpy(part->memory().data() + at, piece.data(), piece.size());
          at += piece.size();
        }
        CommitPart(next.call, next.index, part, next.chunk.info);
      });
      saves_.pop_front();
    } else {
      break;  // A part that is given back wakes the talker.
    }
  }
  return !saves_.empty();
}

void NodeSaver::DeclineFront(Reason reason) {
  if (saves_.empty()) return;
  calls_.Settle(*saves_.front().call, saves_.front().index, Declined(reason));
  saves_.pop_front();
}

void NodeSaver::Lost(Reason reason) {
  segment_ = nullptr;
  while (!saves_.empty()) DeclineFront(reason);
}

void NodeSaver::CommitPart(const std::shared_ptr<CallOf<SavedChunk>>& call, size_t index,
                           const std::shared_ptr<Part>& part, const FrameInfo& info) {
  const wire::CommitItem item{.segment = part->segment->handle, .offset = part->offset, .info = info};
  // The part is the node's until it has answered: other bytes there would be saved under this key. So a node that does
  // not answer is left with all that it lent.
  talker_.Ask<wire::CommitItem>(
      {.kind = Kind::kCommit}, {&item, 1}, Now() + save_max_,
      [=, this](const LinkPtr&, const Message& message) {
        static_cast<void>(part);
        for (const auto& saved : message.Items<wire::SavedItem>()) {
          calls_.Settle(*call, index, {saved.outcome, saved.reason, false});
        }
        return true;
      },
      [=, this](Reason reason) {
        if (reason == Reason::kTimeout) {
          segment_ = nullptr;
          talker_.Leave();
        }
        calls_.Settle(*call, index, Declined(reason));
      },
      part->link.get());
}

}  // namespace terrace
