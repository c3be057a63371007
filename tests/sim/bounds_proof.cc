#include "tests/sim/bounds_proof.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <set>
#include <vector>

#include "chunk/frame.h"

namespace terrace::sim {
namespace {

using std::chrono::seconds;

// In a bucket two times that are cut to whole seconds are compared. In a directory a node may know a frame by an older
// writing, and not of the one that came within 10 s.
constexpr seconds kAgeInBucket{2}, kAgeInDirectory{12};
// After the ttl: uses are told, the bucket is listed, frames are looked at and removed.
constexpr seconds kCollected{15};
// A use is told, and heard of; in a directory with an append that is made anyway, or 5 s later.
constexpr seconds kToldInBucket{3}, kToldInDirectory{7};

// In a bucket whatever has the name of a frame counts. Of what others put into a directory nodes learn when they meet
// it.
bool IsFrame(const World& world, const std::string& path, const Inode& inode) {
  const std::optional<Digest> key = Oracle::FrameKey(path);
  return key && Oracle::FramePath(*key) == path && (world.plan.on_bucket || inode.damage.empty());
}

uint64_t BytesOf(const World& world) {
  uint64_t bytes = 0;
  std::set<uint64_t> counted;  // A frame that is just published has two names.
  world.disk.Walk([&](const std::string& path, const InodePtr& inode) {
    const bool on_its_way =
        !world.plan.on_bucket && inode->damage.empty() && (path.starts_with("tmp/") || path.starts_with("quarantine/"));
    if (!IsFrame(world, path, *inode) && !on_its_way) return;
    if (counted.insert(inode->id).second) bytes += inode->content.size();
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
  const seconds off = plan.on_bucket ? kAgeInBucket : kAgeInDirectory;
  if (plan.bound_ttl.count() > 0 && age + off >= plan.bound_ttl) return true;
  if (plan.bound_bytes == 0) return false;
  // It has lost its name by now.
  return !plan.on_bucket || BytesOf(world) + change.before->content.size() > plan.bound_bytes / 2;
}

void ProveSize(World& world, const std::string& when) {
  if (world.plan.bound_bytes == 0) return;
  const uint64_t bytes = BytesOf(world);
  if (bytes <= world.plan.bound_bytes) return;
  world.oracle.Contradiction("the share has " + std::to_string(bytes) + " bytes " + when + ", above its bound of " +
                             std::to_string(world.plan.bound_bytes));
}

void ProveTtl(World& world, SimNode& user) {
  const auto is_there = [&](const Digest& key) { return world.disk.Find(Oracle::FramePath(key)) != nullptr; };
  const seconds told = world.plan.on_bucket ? kToldInBucket : kToldInDirectory;
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
    world.scheduler.Sleep(std::max(told, world.plan.bound_ttl / 5));
    return done->Poll(0) && done->Poll(0)->outcome == Outcome::kHit;
  };
  // One whose time is over may go before anybody hears that it is used again.
  do {
    used = LongestChain(world.oracle);
    if (used.empty()) return;
    use();
  } while (!std::ranges::all_of(used, is_there));
  const TimePoint end = world.scheduler.Now() + 2 * world.plan.bound_ttl + kCollected;
  while (world.scheduler.Now() < end) {
    if (!use()) return world.oracle.Contradiction(user.name() + " can't load what it uses all the time");
  }
  for (const Digest& key : used) {
    if (!is_there(key)) {
      return world.oracle.Contradiction("a chunk is gone, though one behind it is used: " + key.Hex());
    }
  }
  world.disk.Walk([&](const std::string& path, const InodePtr& inode) {
    if (IsFrame(world, path, *inode) && !used.contains(*Oracle::FrameKey(path))) {
      world.oracle.Contradiction("nobody has used it for twice the ttl, and it is there: " + path);
    }
  });
}

}  // namespace terrace::sim
