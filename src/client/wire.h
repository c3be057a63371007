// Messages between a client and a node of the same host and release: one datagram each, a fixed header and `count`
// items of a fixed size. Both ends share the machine, so numbers and FrameInfo travel as they lie in memory.
//
// Decode is strict: magic, version, a known kind, the exact length, no more items than the kind allows, zero in
// whatever the kind does not use, and every item within its bounds. Nothing that passes it can make its reader index
// out of range by an enumerator; handles, offsets and sizes are the reader's to check. docs/internals/node.md says what
// is sent when.
//
// The first eight bytes, magic, version and kind, are the same in every version: a node answers what has another
// version with a hello of its own, so that the other side can say which one is there.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <type_traits>
#include <vector>

#include "terrace/result.h"
#include "terrace/tier.h"

namespace terrace::wire {

inline constexpr uint32_t kMagic = 0x444e5254;  // "TRND".
inline constexpr uint16_t kVersion = 1;         // Another one for every change of what follows.

enum class Kind : uint16_t {
  // To the node.                 numbers                               items
  kHello = 1,
  kLookup,    //                                       keys
  kProbe,     // time_ms                               keys
  kLoad,      // time_ms, flags                        keys
  kPrefetch,  // time_ms, flags                        keys
  kPin,       // time_ms, flags, lifetime_ms           keys
  kUnpin,     //                                       keys
  kCancel,    // (the call to be cancelled)
  kRelease,   //                                       handles of leases
  kNeeds,     //                                       keys
  kSegment,   // bytes wanted, bytes of a chunk
  kCommit,    //                                       CommitItem
  kStats,
  // From the node.
  kWelcome = 64,  // instance, bytes of the arena          TierName; with the arena's descriptor
  kPrefix,        // chunks, reason                        one byte each: tier
  kLoaded,        //                                       LoadedItem
  kNeeded,        //                                       one byte each: 0 or 1
  kGranted,       // handle (0: none), bytes               with the segment's descriptor
  kSaved,         //                                       SavedItem
  kStatistics,    // saves pending, bytes leased, bytes pinned, sessions   TierItem
};

// Flags of loads.
inline constexpr uint64_t kStopAtMiss = 1;
inline constexpr uint64_t kInTurn = 2;  // Leases come back soon: the node waits for them instead of filling RAM.

struct Header {
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  Kind kind = Kind::kHello;
  uint64_t call = 0;  // Chosen by the client; the answers bring it back.
  Digest space;
  uint64_t payload_bytes = 0;
  std::array<uint64_t, 4> numbers{};
  uint32_t reserved = 0;
  uint32_t count = 0;
};
struct CommitItem {
  uint64_t segment = 0;
  uint64_t offset = 0;
  FrameInfo info;
};
struct LoadedItem {
  uint32_t index = 0;
  Outcome outcome = Outcome::kMiss;
  Reason reason = Reason::kNone;
  uint8_t tier = 0;
  uint8_t reserved = 0;
  uint64_t lease = 0;   // 0: none.
  uint64_t offset = 0;  // In the arena.
  uint64_t hash = 0;    // HashOf the segment hashes of the bytes.
  FrameInfo info;
};
struct SavedItem {
  uint32_t index = 0;
  Outcome outcome = Outcome::kDeclined;
  Reason reason = Reason::kNone;
  uint16_t reserved = 0;
};
using TierName = std::array<char, 32>;  // Ends with a zero.
struct TierItem {
  TierName name{};
  uint64_t frames = 0, bytes = 0, bytes_max = 0, pinned_bytes = 0, quarantined = 0;
  uint8_t index_ready = 1, available = 1;
  std::array<uint8_t, 6> reserved{};
  std::array<char, 96> why{};  // Ends with a zero.
};
template <class T>
inline constexpr bool kFlat = std::has_unique_object_representations_v<T> && std::is_trivially_copyable_v<T>;
static_assert(sizeof(Header) == 96 && kFlat<Header>);
static_assert(sizeof(FrameInfo) == 128 && kReasonCount == 17);  // They travel, too: a change is another version.
static_assert(kFlat<FrameInfo> && kFlat<CommitItem> && kFlat<LoadedItem> && kFlat<SavedItem> && kFlat<TierItem>);

// A client splits what is longer, a node what it answers.
inline constexpr size_t kKeysMax = 4096;
inline constexpr size_t kItemsMax = 256;
inline constexpr size_t kMessageBytesMax = sizeof(Header) + kKeysMax * sizeof(Digest);

struct Message {
  Header header;
  std::vector<std::byte> bytes;  // Of the items.

  template <class T>
  std::vector<T> Items() const {
    std::vector<T> items(bytes.size() / sizeof(T));
    if (!items.empty()) std::memcpy(static_cast<void*>(items.data()), bytes.data(), items.size() * sizeof(T));
    return items;
  }
};

Result<Message> Decode(std::span<const std::byte> datagram);
// Nothing if it is no message of ours, of whatever version.
std::optional<uint16_t> VersionOf(std::span<const std::byte> datagram);

// Sets header.count.
template <class T>
std::vector<std::byte> Encode(Header header, std::span<const T> items) {
  header.count = static_cast<uint32_t>(items.size());
  std::vector<std::byte> bytes(sizeof header + items.size_bytes());
  std::memcpy(bytes.data(), &header, sizeof header);
  if (!items.empty()) std::memcpy(bytes.data() + sizeof header, items.data(), items.size_bytes());
  return bytes;
}
inline std::vector<std::byte> Encode(const Header& header) { return Encode<std::byte>(header, {}); }
// Numbers a message that was encoded before.
inline void SetCall(std::span<std::byte> message, uint64_t call) {
  std::memcpy(message.data() + offsetof(Header, call), &call, sizeof call);
}

// Stands for all of them in a LoadedItem.
uint64_t HashOf(const SegmentHashes& hashes);

// Cut to what fits.
template <size_t kSize>
void SetText(std::array<char, kSize>& field, const std::string& text) {
  field.fill(0);
  text.copy(field.data(), kSize - 1);
}
template <size_t kSize>
std::string Text(const std::array<char, kSize>& field) {
  return std::string(field.data(), strnlen(field.data(), kSize));
}

}  // namespace terrace::wire
