#include "tier/shared_fs_journal.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "base/assert.h"
#include "base/hash.h"

namespace terrace {
namespace {

// Offsets in a record; numbers are little-endian. docs/internals/shared_fs.md is this table for people.
constexpr char kMagic[4] = {'T', 'J', 'R', '1'};  // The digit is the format's version.
constexpr size_t kAtKind = 4;
constexpr size_t kAtSpace = 8;
constexpr size_t kAtKey = 40;
constexpr size_t kAtParent = 72;
constexpr size_t kAtPayloadBytes = 104;
constexpr size_t kAtFirstToken = 112;
constexpr size_t kAtTokenCount = 116;
constexpr size_t kAtTime = 112;      // In place of the two, if the record is none of a frame.
constexpr size_t kAtChecksum = 120;  // XXH3-64 of all before it.

constexpr std::string_view kSuffix = ".log";

// A record that stays wrong for so many polls, with whole records behind it, is damage and not a write under way: step
// over it.
constexpr int kBadPollsMax = 10;

constexpr size_t kReadRecords = 1024;  // 128 KiB a read.

template <class T>
void Put(EncodedRecord& r, size_t at, T v) {
  for (size_t i = 0; i < sizeof v; ++i) r[at + i] = static_cast<std::byte>(static_cast<uint64_t>(v) >> (8 * i));
}
template <class T>
T Get(std::span<const std::byte> r, size_t at) {
  uint64_t v = 0;
  for (size_t i = 0; i < sizeof(T); ++i) v |= static_cast<uint64_t>(r[at + i]) << (8 * i);
  return static_cast<T>(v);
}

uint64_t Checksum(std::span<const std::byte> record) { return Xxh3_64(record.first(kAtChecksum)); }

}  // namespace

EncodedRecord EncodeJournalRecord(const JournalRecord& record) {
  EncodedRecord r{};
  std::memcpy(r.data(), kMagic, sizeof kMagic);
  Put(r, kAtKind, static_cast<uint32_t>(record.kind));
  std::memcpy(r.data() + kAtSpace, record.space.bytes.data(), 32);
  std::memcpy(r.data() + kAtKey, record.key.bytes.data(), 32);
  std::memcpy(r.data() + kAtParent, record.parent.bytes.data(), 32);
  Put(r, kAtPayloadBytes, record.payload_bytes);
  if (record.kind == JournalRecord::Kind::kPublished) {
    Put(r, kAtFirstToken, record.first_token);
    Put(r, kAtTokenCount, record.token_count);
  } else {
    Put(r, kAtTime, record.time_ns);
  }
  Put(r, kAtChecksum, Checksum(r));
  return r;
}

std::optional<JournalRecord> DecodeJournalRecord(std::span<const std::byte> bytes) {
  TERRACE_ASSERT(bytes.size() == kJournalRecordBytes);
  if (std::memcmp(bytes.data(), kMagic, sizeof kMagic) != 0) return std::nullopt;
  if (Get<uint64_t>(bytes, kAtChecksum) != Checksum(bytes)) return std::nullopt;
  JournalRecord record;
  const auto kind = Get<uint32_t>(bytes, kAtKind);
  if (kind < 1 || kind > 5) return std::nullopt;
  record.kind = static_cast<JournalRecord::Kind>(kind);
  std::memcpy(record.space.bytes.data(), bytes.data() + kAtSpace, 32);
  std::memcpy(record.key.bytes.data(), bytes.data() + kAtKey, 32);
  std::memcpy(record.parent.bytes.data(), bytes.data() + kAtParent, 32);
  record.payload_bytes = Get<uint64_t>(bytes, kAtPayloadBytes);
  if (record.kind == JournalRecord::Kind::kPublished) {
    record.first_token = Get<uint32_t>(bytes, kAtFirstToken);
    record.token_count = Get<uint32_t>(bytes, kAtTokenCount);
  } else {
    record.time_ns = Get<int64_t>(bytes, kAtTime);
  }
  return record;
}

std::string FormatJournalName(const JournalName& name) {
  char number[24];
  std::snprintf(number, sizeof number, "%06llu", static_cast<unsigned long long>(name.number));
  return name.node + "-" + number + std::string(kSuffix);
}

std::optional<JournalName> ParseJournalName(std::string_view file_name) {
  if (!file_name.ends_with(kSuffix)) return std::nullopt;
  const std::string_view stem = file_name.substr(0, file_name.size() - kSuffix.size());
  const size_t dash = stem.rfind('-');
  if (dash == std::string_view::npos || dash == 0) return std::nullopt;
  JournalName name{.node = std::string(stem.substr(0, dash))};
  const char* end = stem.data() + stem.size();
  const auto [stopped, problem] = std::from_chars(stem.data() + dash + 1, end, name.number);
  if (problem != std::errc{} || stopped != end || FormatJournalName(name) != file_name) return std::nullopt;
  return name;
}

Result<void> JournalWriter::Append(std::span<const JournalRecord> records) {
  std::vector<std::byte> bytes;
  bytes.reserve(records.size() * kJournalRecordBytes);
  for (const JournalRecord& record : records) {
    const EncodedRecord encoded = EncodeJournalRecord(record);
    bytes.insert(bytes.end(), encoded.begin(), encoded.end());
  }
  if (bytes_ > 0 && bytes_ + bytes.size() > options_.bytes_max) Rotate();
  // The second try is for a journal that was removed because we were silent for long, and for a passing error.
  Result<void> appended;
  for (int i = 0; i < 2; ++i) {
    appended = AppendBytes(bytes);
    if (appended) break;
    Rotate();
  }
  return appended;
}

Result<void> JournalWriter::AppendBytes(std::span<const std::byte> bytes) {
  // Opened anew each time: NFS shows others what was written before a close to whoever opens after it.
  const std::string path = options_.directory + "/" + FormatJournalName({options_.node, number_});
  auto file = io_.Open(path, OpenMode::kAppend, options_.permissions);
  if (!file) return Fail(file.error(), "journal");
  Result<void> done;
  if (const auto stat = (*file)->Stat(); !stat) {
    done = tl::unexpected(stat.error());
  } else if (stat->bytes != bytes_) {
    done = Fail(Code::kIo, path + " is not as this node left it");
  } else {
    done = (*file)->Append(bytes);
  }
  if (done) done = (*file)->Sync();
  const Result<void> closed = (*file)->Close();
  if (done) done = closed;
  if (!done) {
    if (bytes_ == 0) (void)io_.Unlink(path);  // Holds nothing that will not be appended again.
    return Fail(done.error(), "journal");
  }
  if (bytes_ == 0) KeepThisOne();
  bytes_ += bytes.size();
  return {};
}

void JournalWriter::Rotate() {
  ++number_;
  bytes_ = 0;
}

// Old ones go only for new ones that hold something: while appends fail, nobody is in a hurry to read.
void JournalWriter::KeepThisOne() {
  kept_.push_back(number_);
  if (kept_.size() <= options_.files_max) return;
  // If it can't be removed, or is gone, whoever cleans up by age sees to it.
  (void)io_.Unlink(options_.directory + "/" + FormatJournalName({options_.node, kept_.front()}));
  kept_.pop_front();
}

Result<void> JournalReader::Poll(const std::function<void(const JournalRecord&)>& apply) {
  heard_all_ = false;
  auto names = io_.List(directory_);
  if (!names) return Fail(names.error(), "journals");
  std::map<std::string, uint64_t> newest;  // By node.
  std::vector<std::pair<std::string, JournalName>> journals;
  for (std::string& name : *names) {
    std::optional<JournalName> parsed = ParseJournalName(name);
    if (!parsed || parsed->node == own_node_) continue;
    uint64_t& number = newest[parsed->node];
    number = std::max(number, parsed->number);
    journals.emplace_back(std::move(name), *std::move(parsed));
  }
  // In the order written, so that of a frame published and removed again the removal comes last.
  std::sort(journals.begin(), journals.end(), [](const auto& a, const auto& b) {
    return std::pair(a.second.node, a.second.number) < std::pair(b.second.node, b.second.number);
  });
  heard_all_ = true;
  std::erase_if(peers_, [&](const auto& peer) { return !newest.contains(peer.first); });
  std::map<std::string, Tail> kept;
  for (const auto& [name, parsed] : journals) {
    Tail& tail = kept[name] = tails_[name];
    if (tail.complete) continue;
    const uint64_t before = tail.offset;
    const Result<bool> read = ReadTail(directory_ + "/" + name, tail, peers_[parsed.node], apply);
    if (!read) {
      heard_all_ = false;
      // This journal, or the server? From a dead one each of many journals would take its time to fail.
      if (const auto there = io_.List(directory_); !there) {
        kept.merge(tails_);
        tails_ = std::move(kept);
        return Fail(there.error(), "journals");
      }
    }
    if (tail.bad_polls > 0) heard_all_ = false;  // What is behind the wrong record was there before.
    // The listing that showed its successor came before this read: nothing was appended since.
    tail.complete =
        read && *read && parsed.number < newest[parsed.node] && tail.offset == before && tail.bad_polls == 0;
  }
  tails_ = std::move(kept);
  return {};
}

void JournalReader::Forget(const std::string& node) {
  const auto peer = peers_.find(node);
  if (peer != peers_.end())
    peer->second = {.records = peer->second.records, .written_ns = peer->second.written_ns, .gone = true};
}

Result<bool> JournalReader::ReadTail(const std::string& path, Tail& tail, Peer& peer,
                                     const std::function<void(const JournalRecord&)>& apply) {
  auto file = io_.Open(path, OpenMode::kRead);
  if (!file && file.error().os_error == ENOENT) return false;  // Removed since the listing.
  if (!file) return tl::unexpected(file.error());
  const auto stat = (*file)->Stat();
  if (!stat) return tl::unexpected(stat.error());
  if (!stat->is_file) return true;  // A stranger's.
  peer.written_ns = std::max(peer.written_ns, stat->mtime_ns);
  if (stat->bytes < tail.offset) return false;  // Old attributes.
  std::vector<std::byte> buffer;
  while (stat->bytes - tail.offset >= kJournalRecordBytes) {
    const uint64_t records = std::min<uint64_t>(kReadRecords, (stat->bytes - tail.offset) / kJournalRecordBytes);
    buffer.resize(records * kJournalRecordBytes);
    const auto read = (*file)->ReadAt(tail.offset, buffer);
    if (!read) return tl::unexpected(read.error());
    for (size_t at = 0; at + kJournalRecordBytes <= *read; at += kJournalRecordBytes) {
      auto record = DecodeJournalRecord(std::span(buffer).subspan(at, kJournalRecordBytes));
      if (!record) {
        const bool followed = stat->bytes - tail.offset >= 2 * kJournalRecordBytes;
        if (!followed || ++tail.bad_polls < kBadPollsMax) return true;
      } else if (record->kind == JournalRecord::Kind::kNode) {
        peer.claimed_bytes = record->payload_bytes;
        peer.gone = false;
        tail.time_ns = record->time_ns;
      } else {
        if (record->kind == JournalRecord::Kind::kPublished) record->time_ns = tail.time_ns;
        apply(*record);
      }
      if (record) ++peer.records;
      tail.bad_polls = 0;
      tail.offset += kJournalRecordBytes;
    }
    if (*read < buffer.size()) return false;
  }
  return true;
}

}  // namespace terrace
