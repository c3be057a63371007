// What must be true, whoever crashed when. It knows every chunk that can exist (key -> bytes), watches every change of
// a name on the simulated server as it happens, and is told what was asked of whom; the first contradiction ends the
// run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "terrace/tier.h"
#include "tests/sim/sim_file_io.h"

namespace terrace::sim {

struct Chunk {
  FrameInfo info;
  std::vector<std::byte> payload;
  // On the server:
  bool ever_named = false;  // Its frame had its name at some time.
  TimePoint damaged_at;     // Last time that something wrong stood there.
};

// A conversation: chunks from the first token on. Conversations share prefixes.
struct Conversation {
  Digest space;
  std::vector<Digest> keys;
};

class Oracle {
 public:
  explicit Oracle(SimDisk& disk, const Scheduler& scheduler);

  void AddChunk(const FrameInfo& info);
  const std::map<Digest, Chunk>& chunks() const { return chunks_; }
  const Chunk& chunk(const Digest& key) const { return chunks_.at(key); }

  // The first contradiction. Later ones may only follow from it.
  void Contradiction(const std::string& text) {
    if (contradiction_.empty()) contradiction_ = text;
  }
  const std::string& contradiction() const { return contradiction_; }

  // `who` was asked to erase the key, or could not read its frame, so it may take a right one away, once.
  void AllowRemoval(const std::string& who, const Digest& key) { ++removals_[{who, key}]; }

  // Is it right that a node takes this frame away though nobody erased it? Null: never.
  std::function<bool(const SimDisk::NameChange&)> may_go;

  // After every change of a name. May be null.
  std::function<void()> on_change;

  // Somebody lied that the frame is there: nodes may act on it.
  void Believe(const Digest& key) { chunks_.at(key).ever_named = true; }

  // Exactly the frame of this chunk, byte for byte.
  bool IsFrame(const Digest& key, std::span<const std::byte> bytes) const;
  // Delivered as `info` and `bytes` for the key.
  void CheckDelivered(const std::string& who, const Digest& key, const FrameInfo& info,
                      std::span<const std::byte> bytes);

  // The key, if the path (below the share's root) is the name of a frame.
  static std::optional<Digest> FrameKey(const std::string& path);
  static std::string FramePath(const Digest& key);

  // Chunks whose right frame is on the server now.
  std::set<Digest> Present() const;

 private:
  void OnName(const SimDisk::NameChange& change);

  SimDisk& disk_;
  const Scheduler& scheduler_;
  std::map<Digest, Chunk> chunks_;
  std::map<std::pair<std::string, Digest>, int> removals_;
  std::string contradiction_;
};

}  // namespace terrace::sim
