// How the nodes on one shared directory tell each other what they publish: each appends records to journals of its own
// under nodes/, named <node>-<number>.log, and reads the new tails of all others. One writer a file, so nothing is ever
// locked.
//
// A record has a fixed size and proves itself by a checksum, so a reader can stop anywhere and go on later: it takes
// whole, right records up to the first that is not, and looks at that one again at the next poll (NFS may show a length
// before the bytes). A record is news, not truth: it may be late, twice or out of date; a load decides.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "io/file_io.h"
#include "terrace/key.h"
#include "terrace/result.h"

namespace terrace {

struct JournalRecord {
  enum class Kind : uint32_t {
    kPublished = 1,
    kRemoved = 2,  // Erased or set aside; the key alone, like the next two.
    kUsed = 3,     // Somebody loaded it, at time_ns.
    kEvicted = 4,  // A collector took it away.
    kNode =
        5,  // Of the node itself: what it claims (payload_bytes, see shared_fs_room.h), and the time of what follows.
  };
  Kind kind = Kind::kPublished;
  Digest space;
  Digest key;
  Digest parent;
  uint64_t payload_bytes = 0;
  uint32_t first_token = 0;
  uint32_t token_count = 0;
  // The file server's. A record of kPublished has none of its own: a reader gives it that of the kNode before it.
  int64_t time_ns = 0;
  bool operator==(const JournalRecord&) const = default;
};

inline constexpr size_t kJournalRecordBytes = 128;
using EncodedRecord = std::array<std::byte, kJournalRecordBytes>;
EncodedRecord EncodeJournalRecord(const JournalRecord& record);
// Nothing unless `bytes` (kJournalRecordBytes of them) are exactly what the encoder writes.
std::optional<JournalRecord> DecodeJournalRecord(std::span<const std::byte> bytes);

struct JournalName {
  std::string node;
  uint64_t number = 0;
};
std::string FormatJournalName(const JournalName& name);
std::optional<JournalName> ParseJournalName(std::string_view file_name);

// This node's journals. Used by one thread at a time.
class JournalWriter {
 public:
  struct Options {
    std::string directory;            // nodes/
    std::string node;                 // Unique among all processes, ever.
    uint64_t bytes_max = 4ull << 20;  // Of one journal; then the next is begun.
    uint64_t files_max = 4;           // Older ones of ours are removed: whoever polls has read them long ago.
    uint32_t permissions = 0640;
  };
  JournalWriter(Options options, FileIo& io) : options_(std::move(options)), io_(io) {}

  // Durable and visible to others when it returns. On failure some of the records may be visible: append them again,
  // they go to a new journal (what a failed append left behind is never followed by a record).
  Result<void> Append(std::span<const JournalRecord> records);
  // The next append begins a new journal.
  void Rotate();

 private:
  Result<void> AppendBytes(std::span<const std::byte> bytes);
  void KeepThisOne();

  const Options options_;
  FileIo& io_;
  uint64_t number_ = 0;
  uint64_t bytes_ = 0;         // In the current journal.
  std::deque<uint64_t> kept_;  // Numbers of those that hold records, as many as options_ allow.
};

// The journals of all other nodes. Used by one thread at a time.
class JournalReader {
 public:
  JournalReader(std::string directory, std::string own_node, FileIo& io)
      : directory_(std::move(directory)), own_node_(std::move(own_node)), io_(io) {}

  // Lists the directory and hands every record that was not seen before to `apply`. A journal that can't be read now is
  // left for the next poll; an error means that the directory can't be listed.
  Result<void> Poll(const std::function<void(const JournalRecord&)>& apply);
  // From the beginning of every journal again.
  void Reset() {
    tails_.clear();
    peers_.clear();
  }
  // The last Poll heard everything that any node had made durable before it began.
  bool heard_all() const { return heard_all_; }

  struct Peer {
    uint64_t claimed_bytes = 0;
    // Whole records read of its journals so far. A node that lives adds some; when, its reader knows by its own clock.
    uint64_t records = 0;
    int64_t written_ns = 0;  // Of its newest journal, by the server's clock or by that node's: see FileStat.
    bool gone = false;       // Forgotten, until it writes again.
  };
  // By node; those with a journal.
  const std::map<std::string, Peer>& peers() const { return peers_; }
  // It is dead, and what it left has been counted.
  void Forget(const std::string& node);

 private:
  struct Tail {
    uint64_t offset = 0;    // Everything before it was handed out.
    int bad_polls = 0;      // Polls that found the record at `offset` wrong.
    int64_t time_ns = 0;    // Of the last kNode record.
    bool complete = false;  // Read to its end after its node had begun the next one.
  };
  // False: the file is gone, or not yet as long as it is said to be.
  Result<bool> ReadTail(const std::string& path, Tail& tail, Peer& peer,
                        const std::function<void(const JournalRecord&)>& apply);

  const std::string directory_;
  const std::string own_node_;
  FileIo& io_;
  std::map<std::string, Tail> tails_;  // By file name; only what the last listing had.
  std::map<std::string, Peer> peers_;
  bool heard_all_ = false;
};

}  // namespace terrace
