#include "tests/sim/bucket_proof.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <vector>

#include "chunk/frame.h"

namespace terrace::sim {
namespace {

using std::chrono::seconds;

// Two times that are cut to whole seconds are compared.
constexpr seconds kRounding{2};
// After the ttl: uses are told, the bucket is listed, frames are looked at and removed.
constexpr seconds kCollected{15};
// A use is told, and heard of.
constexpr seconds kTold{3};

// Whatever has the name of a frame counts.
bool IsCounted(const std::string& path) {
  const std::optional<Digest> key = Oracle::FrameKey(path);
  return key && Oracle::FramePath(*key) == path;
}

uint64_t BytesOf(const SimDisk& disk) {
  uint64_t bytes = 0;
  disk.Walk([&](const std::string& path, const InodePtr& inode) {
    if (IsCounted(path)) bytes += inode->content.size();
  });
  return bytes;
}

// The last key of the longest chain that is there, with those before it.
std::set<Digest> LongestChain(const Oracle& oracle) {
  const std::set<Digest> present = oracle.Present();
  std::set<Digest> longest;
  for (const Digest& last : present) {
    std::set<Digest> chain;
    Digest key = last;
    while (present.contains(key)) {
      chain.insert(key);
      key = oracle.chunk(key).info.parent;
    }
    if (key == oracle.chunk(last).info.space && chain.size() > longest.size()) longest = chain;
  }
  return longest;
}

}  // namespace

bool MayBeCollected(const World& world, const SimDisk::NameChange& change) {
  const Plan& plan = world.plan;
  const seconds age(
      std::chrono::duration_cast<seconds>(std::chrono::nanoseconds(world.disk.ServerNs() - change.before->mtime_ns)));
  if (plan.bucket_ttl.count() > 0 && age + kRounding >= plan.bucket_ttl) return true;
  // It has lost its name by now.
  return plan.bucket_bytes > 0 && BytesOf(world.disk) + change.before->content.size() > plan.bucket_bytes / 2;
}

void ProveSize(World& world, const std::string& when) {
  const uint64_t bytes = BytesOf(world.disk);
  if (world.plan.bucket_bytes == 0 || bytes <= world.plan.bucket_bytes) return;
  world.oracle.Contradiction("the bucket has " + std::to_string(bytes) + " bytes " + when + ", above its bound of " +
                             std::to_string(world.plan.bucket_bytes));
}

void ProveTtl(World& world, SimNode& user) {
  const auto is_there = [&](const Digest& key) { return world.disk.Find(Oracle::FramePath(key)) != nullptr; };
  std::set<Digest> used;
  const auto use = [&] {
    const Digest last = *std::ranges::max_element(
        used, {}, [&](const Digest& key) { return world.oracle.chunk(key).info.first_token; });
    const FrameInfo& info = world.oracle.chunk(last).info;
    // Past the store: RAM would answer.
    auto buffer = std::make_shared<std::vector<std::byte>>(info.payload_bytes);
    auto done = std::make_shared<LoadBatch>(1);
    user.probes()[0]->Load({{.key = last, .space = info.space, .into = *buffer, .owner = buffer}},
                           world.scheduler.Now() + seconds(10), done);
    world.scheduler.Sleep(std::max(kTold, world.plan.bucket_ttl / 5));
    return done->Poll(0) && done->Poll(0)->outcome == Outcome::kHit;
  };
  // One whose time is over may go before anybody hears that it is used again.
  do {
    used = LongestChain(world.oracle);
    if (used.empty()) return;
    use();
  } while (!std::ranges::all_of(used, is_there));
  const TimePoint end = world.scheduler.Now() + 2 * world.plan.bucket_ttl + kCollected;
  while (world.scheduler.Now() < end) {
    if (!use()) return world.oracle.Contradiction(user.name() + " can't load what it uses all the time");
  }
  for (const Digest& key : used) {
    if (!is_there(key)) {
      return world.oracle.Contradiction("a chunk is gone, though one behind it is used: " + key.Hex());
    }
  }
  world.disk.Walk([&](const std::string& path, const InodePtr&) {
    if (IsCounted(path) && !used.contains(*Oracle::FrameKey(path))) {
      world.oracle.Contradiction("nobody has used it for twice the ttl, and it is there: " + path);
    }
  });
}

}  // namespace terrace::sim
