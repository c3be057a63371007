// Saves to a node: chunks wait in order for room in the segment that the node lent, are copied into it, and committed.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "base/executor.h"
#include "client/calls.h"
#include "client/node_talker.h"

namespace terrace {

class NodeSaver final : public NodeTalker::Guest {
 public:
  // Both outlive it, and the talker has closed when Stop is called.
  NodeSaver(NodeTalker& talker, Calls& calls, std::chrono::milliseconds save_max)
      : talker_(talker), calls_(calls), save_max_(save_max), copier_("terrace-save", 1) {}
  void Stop() { copier_.Stop(); }

  // From any thread. `call` is not done.
  void Save(const std::shared_ptr<CallOf<SavedChunk>>& call, std::vector<SaveChunk> chunks,
            std::shared_ptr<const void> owner);
  void BeginSave(const std::shared_ptr<CallOf<SaveSegment>>& call, std::vector<FrameInfo> chunks);
  void Commit(const std::shared_ptr<CallOf<SavedChunk>>& call, std::vector<SaveSegment> segments);

  bool GoOn(const LinkPtr& link) override;
  void Granted(const wire::Header& header, const Fd& memory) override;
  void Lost(Reason reason) override;

 private:
  struct Saving {
    std::shared_ptr<CallOf<SavedChunk>> call;
    size_t index = 0;
    SaveChunk chunk;
    std::shared_ptr<const void> owner;
    TimePoint deadline;
  };

  void AskNeeds(std::vector<Digest> keys, std::function<void(const LinkPtr&, const std::vector<uint8_t>&)> then,
                const NodeTalker::OnLost& on_lost);
  void AskSegment(uint64_t bytes, std::function<void()> then);
  bool HasSegmentFor(uint64_t bytes) const { return segment_ && segment_->room.bytes() >= bytes; }
  std::shared_ptr<Part> TakePart(const LinkPtr& link, uint64_t bytes);
  SaveSegment Take(const LinkPtr& link, const Call& call, const FrameInfo& info);
  void DeclineFront(Reason reason);
  void CommitPart(const std::shared_ptr<CallOf<SavedChunk>>& call, size_t index, const std::shared_ptr<Part>& part,
                  const FrameInfo& info);

  NodeTalker& talker_;
  Calls& calls_;
  const std::chrono::milliseconds save_max_;

  // The talker's thread's alone.
  std::shared_ptr<Segment> segment_;
  std::deque<Saving> saves_;  // Chunks that wait for room.
  bool asking_segment_ = false;

  ThreadPool copier_;  // One thread: parents are committed first.
};

}  // namespace terrace
