#include "tests/sim/oracle.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <variant>

#include "chunk/frame.h"
#include "tests/sim/random.h"

namespace terrace::sim {
namespace {

// Setting a frame aside takes a few operations, each of which may be slow or wait for the server.
constexpr std::chrono::seconds kRepairTime{60};

std::vector<std::byte> PayloadOf(const Digest& key, uint64_t bytes) {
  uint64_t seed;
  std::memcpy(&seed, key.bytes.data() + 16, sizeof seed);
  Random random(seed);
  std::vector<std::byte> payload(bytes);
  for (size_t at = 0; at < payload.size(); at += 8) {
    const uint64_t word = random.Next();
    std::memcpy(payload.data() + at, &word, std::min<size_t>(8, payload.size() - at));
  }
  return payload;
}

}  // namespace

Oracle::Oracle(SimDisk& disk, const Scheduler& scheduler) : disk_(disk), scheduler_(scheduler) {
  disk_.on_name = [this](const SimDisk::NameChange& change) { OnName(change); };
}

void Oracle::AddChunk(const FrameInfo& info) {
  if (chunks_.contains(info.key)) return;
  chunks_[info.key] = {.info = info, .payload = PayloadOf(info.key, info.payload_bytes)};
}

std::optional<Digest> Oracle::FrameKey(const std::string& path) {
  constexpr std::string_view kFolder = "frames/";
  constexpr std::string_view kSuffix = ".kvf";
  if (!path.starts_with(kFolder) || !path.ends_with(kSuffix)) return std::nullopt;
  const size_t slash = path.rfind('/');
  return Digest::FromHex(std::string_view(path).substr(slash + 1, path.size() - slash - 1 - kSuffix.size()));
}

std::string Oracle::FramePath(const Digest& key) {
  const std::string hex = key.Hex();
  return "frames/" + hex.substr(0, 3) + "/" + hex + ".kvf";
}

bool Oracle::IsFrame(const Digest& key, std::span<const std::byte> bytes) const {
  const auto it = chunks_.find(key);
  if (it == chunks_.end()) return false;
  const std::vector<std::byte>& payload = it->second.payload;
  if (bytes.size() != FrameBytes(payload.size())) return false;
  const auto frame = DecodeFrameHeader(bytes.first(kFrameHeaderBytes), bytes.size());
  if (!std::holds_alternative<Frame>(frame) || std::get<Frame>(frame).info != it->second.info) return false;
  const auto body = bytes.subspan(kFrameHeaderBytes);
  return std::memcmp(payload.data(), body.data(), payload.size()) == 0 &&
         std::all_of(body.begin() + static_cast<ptrdiff_t>(payload.size()), body.end(),
                     [](std::byte b) { return b == std::byte{0}; });
}

void Oracle::CheckDelivered(const std::string& who, const Digest& key, const FrameInfo& info,
                            std::span<const std::byte> bytes) {
  const auto it = chunks_.find(key);
  if (it == chunks_.end() || info != it->second.info) {
    Contradiction(who + " delivers " + key.Hex() + " with the description of another chunk");
  } else if (bytes.size() != it->second.payload.size() ||
             std::memcmp(bytes.data(), it->second.payload.data(), bytes.size()) != 0) {
    Contradiction(who + " delivers wrong bytes for " + key.Hex());
  }
}

std::set<Digest> Oracle::Present() const {
  std::set<Digest> present;
  for (const auto& [key, chunk] : chunks_) {
    const InodePtr inode = disk_.Find(FramePath(key));
    if (inode && IsFrame(key, inode->content)) present.insert(key);
  }
  return present;
}

void Oracle::OnName(const SimDisk::NameChange& change) {
  if (on_change) on_change();
  const bool by_server = change.who == "server";
  const std::optional<Digest> key = FrameKey(change.path);
  if (!key) return;
  const auto it = chunks_.find(*key);
  if (it == chunks_.end()) return;
  Chunk& chunk = it->second;

  const bool removes_right_one = change.before && change.before->damage.empty() &&
                                 IsFrame(*key, change.before->content) &&
                                 !(change.after && IsFrame(*key, change.after->content));
  const bool by_saboteur = change.after && !change.after->damage.empty();
  if (change.before && !change.before->damage.empty()) chunk.damaged_at = scheduler_.Now();
  // Between a node's last look at a damaged frame and its taking it away, another may have put a right one there: no
  // file system has a call for both. It is a hit lost, no more.
  const bool races_with_repair = chunk.damaged_at + kRepairTime > scheduler_.Now();
  if (removes_right_one && !by_server && !by_saboteur && !races_with_repair && !(may_go && may_go(change))) {
    const auto allowed = removals_.find({change.who, *key});
    if (allowed == removals_.end() || allowed->second == 0) {
      Contradiction(change.who + " removes a right frame that nobody erased: " + change.path);
    } else {
      --allowed->second;
    }
  }

  if (!change.after) return;
  if (!by_server && !by_saboteur) {
    // Whoever gives the name has made the bytes durable, and its parent was there before.
    if (!IsFrame(*key, change.after->durable)) {
      Contradiction(change.who + " publishes what is not durable and whole: " + change.path);
    }
    if (chunk.info.parent != chunk.info.space && !chunks_.at(chunk.info.parent).ever_named) {
      Contradiction(change.who + " publishes a chunk before its parent: " + change.path);
    }
  }
  chunk.ever_named = true;
}

}  // namespace terrace::sim
