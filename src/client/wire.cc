#include "client/wire.h"

#include <algorithm>

#include "base/hash.h"

namespace terrace::wire {
namespace {

struct Rule {
  Kind kind;
  size_t item_bytes = 0;
  size_t items_max = 0;
  size_t numbers = 0;    // Used, from the first on.
  bool is_load = false;  // Uses space and payload_bytes.
};

constexpr Rule kRules[] = {
    {Kind::kHello},
    {Kind::kLookup, sizeof(Digest), kKeysMax},
    {Kind::kProbe, sizeof(Digest), kKeysMax, 1},
    {Kind::kLoad, sizeof(Digest), kKeysMax, 2, true},
    {Kind::kPrefetch, sizeof(Digest), kKeysMax, 2, true},
    {Kind::kPin, sizeof(Digest), kKeysMax, 3, true},
    {Kind::kUnpin, sizeof(Digest), kKeysMax},
    {Kind::kCancel},
    {Kind::kRelease, sizeof(uint64_t), kKeysMax},
    {Kind::kNeeds, sizeof(Digest), kKeysMax},
    {Kind::kSegment, 0, 0, 2},
    {Kind::kCommit, sizeof(CommitItem), kItemsMax},
    {Kind::kStats},
    {Kind::kWelcome, sizeof(TierName), kItemsMax, 2},
    {Kind::kPrefix, 1, kKeysMax, 2},
    {Kind::kLoaded, sizeof(LoadedItem), kItemsMax},
    {Kind::kNeeded, 1, kKeysMax},
    {Kind::kGranted, 0, 0, 2},
    {Kind::kSaved, sizeof(SavedItem), kItemsMax},
    {Kind::kStatistics, sizeof(TierItem), kItemsMax, 4},
};

bool IsReason(Reason reason) { return static_cast<int>(reason) < kReasonCount; }
bool IsOutcome(Outcome outcome) { return outcome <= Outcome::kFailed; }
template <size_t kSize>
bool EndsWithZero(const std::array<char, kSize>& text) {
  return text.back() == 0;
}

bool ItemsAreSound(const Message& message) {
  switch (message.header.kind) {
    case Kind::kPrefix:
      return message.header.numbers[0] == message.bytes.size() && message.header.numbers[1] < kReasonCount;
    case Kind::kNeeded: return std::ranges::all_of(message.bytes, [](std::byte b) { return b <= std::byte{1}; });
    case Kind::kLoaded:
      return std::ranges::all_of(message.Items<LoadedItem>(), [](const LoadedItem& item) {
        return IsOutcome(item.outcome) && IsReason(item.reason) && item.reserved == 0 && item.index < kKeysMax;
      });
    case Kind::kSaved:
      return std::ranges::all_of(message.Items<SavedItem>(), [](const SavedItem& item) {
        return IsOutcome(item.outcome) && IsReason(item.reason) && item.reserved == 0 && item.index < kKeysMax;
      });
    case Kind::kWelcome: return std::ranges::all_of(message.Items<TierName>(), EndsWithZero<32>);
    case Kind::kStatistics:
      return std::ranges::all_of(message.Items<TierItem>(), [](const TierItem& item) {
        return EndsWithZero(item.name) && EndsWithZero(item.why) && item.index_ready <= 1 && item.available <= 1 &&
               item.reserved == std::array<uint8_t, 6>{};
      });
    default: return true;
  }
}

}  // namespace

Result<Message> Decode(std::span<const std::byte> datagram) {
  const auto refuse = [](const std::string& why) { return Fail(Code::kInvalid, "message: " + why); };
  Message message;
  Header& header = message.header;
  if (datagram.size() < sizeof header) return refuse("shorter than its header");
  std::memcpy(&header, datagram.data(), sizeof header);
  if (header.magic != kMagic) return refuse("no message of Terrace's");
  if (header.version != kVersion) {
    return refuse("version " + std::to_string(header.version) + ", this program speaks " + std::to_string(kVersion));
  }
  const auto* rule = std::ranges::find(kRules, header.kind, &Rule::kind);
  if (rule == std::end(kRules)) return refuse("unknown kind " + std::to_string(static_cast<int>(header.kind)));
  if (header.count > rule->items_max || datagram.size() != sizeof header + header.count * rule->item_bytes) {
    return refuse("length and number of items disagree");
  }
  const bool unused_is_zero =
      header.reserved == 0 &&
      std::all_of(header.numbers.begin() + rule->numbers, header.numbers.end(), [](uint64_t n) { return n == 0; }) &&
      (rule->is_load || (header.space == Digest{} && header.payload_bytes == 0));
  if (!unused_is_zero) return refuse("a field that its kind does not use");
  message.bytes.assign(datagram.begin() + sizeof header, datagram.end());
  if (!ItemsAreSound(message)) return refuse("an item out of its bounds");
  return message;
}

std::optional<uint16_t> VersionOf(std::span<const std::byte> datagram) {
  uint32_t magic = 0;
  uint16_t version = 0;
  if (datagram.size() < offsetof(Header, call)) return std::nullopt;
  std::memcpy(&magic, datagram.data() + offsetof(Header, magic), sizeof magic);
  std::memcpy(&version, datagram.data() + offsetof(Header, version), sizeof version);
  if (magic != kMagic) return std::nullopt;
  return version;
}

uint64_t HashOf(const SegmentHashes& hashes) { return Xxh3_64(std::as_bytes(std::span(hashes))); }

}  // namespace terrace::wire
