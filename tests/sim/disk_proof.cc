#include "tests/sim/disk_proof.h"

#include <chrono>
#include <memory>
#include <string>
#include <vector>

namespace terrace::sim {

std::set<Digest> RightFrames(const World& world, const LocalDisk& disk) {
  std::set<Digest> right;
  disk.files.Walk([&](const std::string& path, const InodePtr& inode) {
    const std::optional<Digest> key = Oracle::FrameKey(path);
    if (key && world.oracle.IsFrame(*key, inode->content)) right.insert(*key);
  });
  return right;
}

void ProveDisk(World& world, SimNode& node, const std::set<Digest>& before) {
  const auto wrong = [&](const std::string& text) { world.oracle.Contradiction(node.name() + "'s disk " + text); };
  const LocalDisk& disk = world.Local(node.name());
  const std::set<Digest> now = RightFrames(world, disk);
  for (const Digest& key : before) {
    if (!now.contains(key)) return wrong("lost a frame: " + key.Hex());
  }
  for (const Digest& key : now) {
    if (!before.contains(key)) return wrong("has a frame that was gone: " + key.Hex());
  }
  uint64_t frames = 0, bytes = 0;
  disk.files.Walk([&](const std::string& path, const InodePtr& inode) {
    if (path.starts_with("tmp/")) wrong("has a temporary left: " + path);
    if (!Oracle::FrameKey(path)) return;
    ++frames;
    bytes += inode->content.size();
  });
  ProbeTier& tier = *node.disk_probe();
  const TierStats stats = tier.stats();
  if (!stats.available || !stats.index_ready) return wrong("is not ready: " + stats.why);
  if (stats.frames != frames || stats.bytes != bytes) {
    wrong("has " + std::to_string(frames) + " frames of " + std::to_string(bytes) + " bytes, and the tier counts " +
          std::to_string(stats.frames) + " of " + std::to_string(stats.bytes));
  }
  if (bytes > stats.bytes_max) wrong("holds " + std::to_string(bytes) + " bytes, more than its cap");
  for (const Digest& key : before) {
    const FrameInfo& info = world.oracle.chunk(key).info;
    uint8_t present = 0;
    tier.Contains(std::span(&key, 1), std::span(&present, 1));
    if (!present) return wrong("has a frame that the tier does not find: " + key.Hex());
    auto buffer = std::make_shared<std::vector<std::byte>>(info.payload_bytes);
    const auto done = std::make_shared<LoadBatch>(1);
    const TimePoint deadline = world.scheduler.Now() + std::chrono::seconds(30);
    tier.Load({{.key = key, .space = info.space, .into = *buffer, .owner = buffer}}, deadline, done);
    const LoadResult* result = done->Wait(0, deadline + std::chrono::seconds(1));
    if (!result || result->outcome != Outcome::kHit) {
      return wrong("has a frame that can't be loaded: " + key.Hex() + ", " +
                   (result ? ReasonName(result->reason) : "no answer"));
    }
  }
}

}  // namespace terrace::sim
