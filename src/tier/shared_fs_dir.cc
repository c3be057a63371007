#include "tier/shared_fs_dir.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <string_view>
#include <utility>

#include "base/hash.h"
#include "base/log.h"

namespace terrace {
namespace {

constexpr std::string_view kLeaseFile = "collector.lease";
constexpr std::string_view kFormatFile = "terrace.format";
constexpr std::string_view kFormatHead = "terrace shared_fs\nversion ";
constexpr uint32_t kFormatVersion = 1;
constexpr std::string_view kFrameSuffix = ".kvf";
constexpr std::string_view kTempSuffix = ".tmp";
constexpr std::string_view kJournalSuffix = ".log";

// A payload is written in pieces of this size, and `stop` asked between them: 16 ms at 256 MB/s.
constexpr size_t kWriteBytes = 4 << 20;

// A payload is read in pieces of this size, each hashed at once, while it is in the second-level cache: 0.87 of plain
// pread with the page cache warm, against 0.78 with whole segments of 1 MiB (one thread).
constexpr size_t kReadBytes = 256 << 10;

// EEXIST with a damaged file, ENOENT with a missing directory, and both once more because others work here too.
constexpr int kPublishTries = 4;

std::string RandomHex(int words) {
  std::random_device random;
  std::string hex;
  for (int i = 0; i < words; ++i) {
    char word[9];
    std::snprintf(word, sizeof word, "%08x", random());
    hex += word;
  }
  return hex;
}

// Half a key says enough, and the name stays short.
std::string TempTail(const Digest& key) { return "." + key.Hex().substr(0, 32) + std::string(kTempSuffix); }

bool LinksRefused(int os_error) { return os_error == EPERM || os_error == EOPNOTSUPP || os_error == ENOSYS; }

bool SameFile(const FileStat& a, const FileStat& b) {
  // Not the inode alone: it may have been given to the file that took the place.
  return a.device == b.device && a.inode == b.inode && a.mtime_ns == b.mtime_ns && a.bytes == b.bytes;
}

// Errors that one file may have while the others of its volume have none.
bool MayBeTheFilesOwn(int os_error) {
  return os_error == EIO || os_error == EACCES || os_error == EPERM || os_error == ENODATA || os_error == EBADMSG ||
         os_error == EUCLEAN;
}

// What clients of NFS and FUSE call a file that is removed while it is open.
bool IsLeftOpen(std::string_view name) { return name.starts_with(".nfs") || name.starts_with(".fuse_hidden"); }

// `seen`: the file is there.
FrameProof NotKnown(Error error, const FileStat* seen = nullptr) {
  FrameProof proof{.reason = Reason::kUnavailable};
  proof.unreadable = seen != nullptr && MayBeTheFilesOwn(error.os_error);
  if (seen) proof.stat = *seen;
  proof.error = std::move(error);
  return proof;
}
FrameProof Defect(Reason reason) { return {.reason = reason, .set_aside = true}; }

// A payload on its way from its file to a buffer, by as many threads as take part. Who comes when nothing is left
// touches neither.
class PayloadRead {
 public:
  PayloadRead(std::unique_ptr<File> file, const Frame& frame, std::span<std::byte> into, std::function<bool()> stop)
      : segments_(frame.segments),
        segment_bytes_(frame.segment_bytes),
        into_(into),
        stop_(std::move(stop)),
        file_(std::move(file)) {}

  // Reads and verifies segments until none is left or one has failed.
  void Work() {
    Xxh3Stream hash;
    std::unique_lock lock(mutex_);
    while (next_ < segments_.size() && failure_.reason == Reason::kNone) {
      const size_t segment = next_++;
      ++active_;
      lock.unlock();
      FrameProof result = ReadSegment(segment, hash);
      lock.lock();
      if (result.reason != Reason::kNone && failure_.reason == Reason::kNone) failure_ = std::move(result);
      --active_;
    }
    if (active_ == 0) idle_.notify_all();
  }

  // Works, then waits for those who are still at a segment. The first failure, or kNone.
  FrameProof Finish() {
    Work();
    std::unique_lock lock(mutex_);
    idle_.wait(lock, [&] { return active_ == 0; });
    if (failure_.reason == Reason::kNone) failure_ = CheckPadding();
    next_ = segments_.size();
    file_.reset();  // Not when the last who was asked to help has come.
    return failure_;
  }

 private:
  FrameProof ReadSegment(size_t segment, Xxh3Stream& hash) const {
    if (stop_()) return {.reason = Reason::kCancelled, .error = Error{Code::kCancelled, "stopped"}};
    const uint64_t begin = segment * segment_bytes_;
    const uint64_t end = std::min<uint64_t>(begin + segment_bytes_, into_.size());
    for (uint64_t at = begin; at < end; at += kReadBytes) {
      const auto piece = into_.subspan(at, std::min<uint64_t>(kReadBytes, end - at));
      const auto read = file_->ReadAt(kFrameHeaderBytes + at, piece);
      if (!read) return NotKnown(read.error());
      if (*read < piece.size()) return Defect(Reason::kTruncated);
      hash.Update(piece);
    }
    return hash.Finish() == segments_[segment] ? FrameProof{} : Defect(Reason::kDamaged);
  }

  FrameProof CheckPadding() const {
    std::array<std::byte, 4096> padding;
    const auto tail = std::span(padding).first(PaddedBytes(into_.size()) - into_.size());
    if (tail.empty()) return {};
    const auto read = file_->ReadAt(kFrameHeaderBytes + into_.size(), tail);
    if (!read) return NotKnown(read.error());
    if (*read < tail.size()) return Defect(Reason::kTruncated);
    const bool zero = std::all_of(tail.begin(), tail.end(), [](std::byte b) { return b == std::byte{0}; });
    return zero ? FrameProof{} : Defect(Reason::kDamaged);
  }

  const SegmentHashes segments_;
  const uint64_t segment_bytes_;
  const std::span<std::byte> into_;
  const std::function<bool()> stop_;
  std::unique_ptr<File>
      file_;  // Set until Finish ends; before that used without the lock by those who are at a segment.
  std::mutex mutex_;
  std::condition_variable idle_;
  size_t next_ = 0;     // Guarded by mutex_. The first segment that nobody has taken.
  size_t active_ = 0;   // Guarded by mutex_. Threads at a segment.
  FrameProof failure_;  // Guarded by mutex_. The first one.
};

}  // namespace

bool IsTheNamesOwn(int os_error) {
  return os_error == EPERM || os_error == EACCES || os_error == EISDIR || os_error == ENOTDIR || os_error == ELOOP ||
         os_error == EBUSY;
}

SharedFsDir::SharedFsDir(Options options, FileIo& io, const Clock& clock, Metrics& metrics)
    : options_(std::move(options)), io_(io), clock_(clock), metrics_(metrics) {}

std::string SharedFsDir::FanOutPath(size_t fan_out) const {
  char name[8];
  std::snprintf(name, sizeof name, "%03zx", fan_out);
  return Path("frames/") + name;
}

std::string SharedFsDir::FramePath(const Digest& key) const {
  return FanOutPath(FanOutOf(key)) + "/" + key.Hex() + std::string(kFrameSuffix);
}

std::string SharedFsDir::NewTempPath(const Digest* key) {
  const uint64_t n = temp_count_.fetch_add(1, std::memory_order_relaxed);
  return Path("tmp/") + options_.node + "-" + std::to_string(n) + (key ? TempTail(*key) : std::string(kTempSuffix));
}

tl::unexpected<Error> SharedFsDir::Refuse(Error error) const {
  const std::string dir = "shared directory " + options_.root;
  switch (error.os_error) {
    case ENOENT: return Fail(Code::kInvalid, dir + " does not exist: create it, or mount the share there", ENOENT);
    case ENOTDIR:
      return Fail(Code::kInvalid, dir + " is not a directory (" + error.what + "): name the directory itself", ENOTDIR);
    case EROFS:
      return Fail(Code::kDenied, dir + " is mounted read-only (" + error.what + "): mount it read-write", EROFS);
    case EACCES:
    case EPERM:
      return Fail(Code::kDenied,
                  dir + " refuses this user (" + error.what + "): give it read, write and search permission there",
                  error.os_error);
    default: return Fail(std::move(error), dir);
  }
}

Result<std::string> SharedFsDir::Join() {
  const auto root = io_.Stat(options_.root);
  if (!root) return Refuse(root.error());
  if (!root->is_directory) return Refuse({Code::kInvalid, options_.root, ENOTDIR});
  Result<std::string> id = ReadVolumeId();
  if (!id && id.error().os_error != ENOENT) return Refuse(id.error());
  if (const auto made = MakeLayout(); !made) return Refuse(made.error());
  if (id) {
    // May we write here? What others left can be read on a full volume too, so that is no reason to stay away.
    const auto written = WriteAny();
    if (!written && written.error().code != Code::kFull) return Refuse(written.error());
  } else {
    id = MakeVolumeId();
    if (!id) return Refuse(id.error());
  }
  joined_device_ = root->device;
  return id;
}

Result<void> SharedFsDir::WriteAny() {
  const std::byte any{0};
  const auto temp = WriteWhole([&](File& file) { return file.WriteAt(0, std::span(&any, 1)); });
  if (!temp) return tl::unexpected(temp.error());
  DropTemp(*temp);
  return {};
}

Result<void> SharedFsDir::ProbeSave(uint64_t bytes) {
  const auto space = io_.FreeSpace(options_.root);
  if (!space) return tl::unexpected(space.error());
  if (space->free_bytes < bytes) {
    return Fail(Code::kFull, options_.root + ": " + std::to_string(space->free_bytes) + " bytes free: ENOSPC", ENOSPC);
  }
  return WriteAny();
}

Result<std::string> SharedFsDir::Revisit() {
  if (!joined_device_) return Join();
  Result<std::string> id = ReadVolumeId();
  if (id) {
    // An NFS client that holds a delegation reads the file without its server. This question it passes on.
    if (const auto space = io_.FreeSpace(options_.root); !space) return Refuse(space.error());
    const auto made = MakeLayout();
    return made ? id : Refuse(made.error());
  }
  if (id.error().os_error != ENOENT) return Refuse(id.error());
  const auto root = io_.Stat(options_.root);
  if (!root) return Refuse(root.error());
  if (root->device != *joined_device_) {
    return Fail(Code::kUnavailable, "shared directory " + options_.root +
                                        " is on another file system than before, and empty: mount the share there, or "
                                        "restart to use it as it is");
  }
  return Join();
}

Result<void> SharedFsDir::MakeLayout() {
  for (const char* name : {"frames", "tmp", "nodes", "quarantine"}) {
    Result<void> made = io_.MakeDir(Path(name), options_.directory_permissions);
    if (!made) return made;
  }
  return {};
}

Result<std::string> SharedFsDir::ReadVolumeId() {
  auto file = io_.Open(Path(std::string(kFormatFile)), OpenMode::kRead);
  if (!file) return Fail(file.error(), "format file");
  std::string text(kFrameHeaderBytes, '\0');
  const auto read = (*file)->ReadAt(0, std::as_writable_bytes(std::span(text)));
  if (!read) return Fail(read.error(), "format file");
  text.resize(*read);
  uint32_t version = 0;
  if (text.starts_with(kFormatHead)) {
    std::from_chars(text.data() + kFormatHead.size(), text.data() + text.size(), version);
  }
  if (version == 0) {
    return Fail(Code::kInvalid, std::string(kFormatFile) + " there is not one of terrace's: use another directory");
  }
  if (version != kFormatVersion) {
    return Fail(Code::kInvalid, "it has format version " + std::to_string(version) + " and this release knows " +
                                    std::to_string(kFormatVersion) + ": upgrade terrace, or use another directory");
  }
  return text;  // As a whole: version 1 has one more line, the random id.
}

Result<std::string> SharedFsDir::MakeVolumeId() {
  const std::string text = std::string(kFormatHead) + std::to_string(kFormatVersion) + "\nid " + RandomHex(4) + "\n";
  const auto temp = WriteWhole([&](File& file) { return file.WriteAt(0, std::as_bytes(std::span(text))); });
  if (!temp) return Fail(temp.error(), "format file");
  const auto named = GiveName(*temp, Path(std::string(kFormatFile)));
  DropTemp(*temp);
  if (!named && named.error().os_error != EEXIST) return Fail(named.error(), "format file");
  return ReadVolumeId();  // Another node may have been faster: its id holds.
}

Result<std::string> SharedFsDir::WriteWhole(const std::function<Result<void>(File&)>& write, const FrameInfo* info,
                                            bool* left) {
  std::string path = NewTempPath(info ? &info->key : nullptr);
  auto file = io_.Open(path, OpenMode::kCreateNew, options_.file_permissions);
  if (!file) return tl::unexpected(file.error());
  Result<void> done = write(**file);
  if (done) done = (*file)->Sync();
  const Result<void> closed = (*file)->Close();
  if (done) done = closed;
  if (done) return path;
  const bool gone = DropTemp(path, info ? FrameBytes(info->payload_bytes) : 0);
  if (left) *left = !gone;
  return tl::unexpected(done.error());
}

bool SharedFsDir::DropTemp(const std::string& path, uint64_t bytes) {
  const Result<void> removed = io_.Unlink(path);
  if (removed || removed.error().os_error == ENOENT) return true;
  log::Warn("shared_fs_temp_left", {{"error", removed.error().what}});
  std::lock_guard lock(left_mutex_);
  left_.emplace(path, bytes);
  return false;
}

uint64_t SharedFsDir::RemoveLeft() {
  std::map<std::string, uint64_t> left;
  {
    std::lock_guard lock(left_mutex_);
    left.swap(left_);
  }
  uint64_t bytes = 0;
  for (const auto& [path, frame_bytes] : left) {
    if (DropTemp(path, frame_bytes)) bytes += frame_bytes;
  }
  return bytes;
}

Result<std::string> SharedFsDir::WriteTemp(const FrameInfo& info, std::span<const std::byte> payload,
                                           const SegmentHashes* hashes, const std::function<bool()>& stop, bool& left) {
  const FrameHeader header = EncodeFrameHeader(info, clock_.WallNs(), payload, hashes);
  return WriteWhole(
      [&](File& file) -> Result<void> {
        if (!BeginCopy(stop)) return Fail(Code::kCancelled, "stopped");
        const std::unique_ptr<SharedFsDir, void (*)(SharedFsDir*)> turn(this, [](SharedFsDir* dir) { dir->EndCopy(); });
        Result<void> done = file.WriteAt(0, header);
        for (size_t at = 0; done && at < payload.size(); at += kWriteBytes) {
          if (stop()) return Fail(Code::kCancelled, "stopped");
          done = file.WriteAt(kFrameHeaderBytes + at, payload.subspan(at, std::min(kWriteBytes, payload.size() - at)));
        }
        static constexpr std::array<std::byte, 4096> kZeros{};
        const size_t padding = PaddedBytes(payload.size()) - payload.size();
        if (done && padding > 0) {
          done = file.WriteAt(kFrameHeaderBytes + payload.size(), std::span(kZeros).first(padding));
        }
        return done;
      },
      &info, &left);
}

bool SharedFsDir::BeginCopy(const std::function<bool()>& stop) {
  std::unique_lock lock(copies_mutex_);
  while (copies_ >= options_.copies_max) {
    if (stop()) return false;
    copies_changed_.wait_for(lock, std::chrono::milliseconds(100));
  }
  ++copies_;
  return true;
}

void SharedFsDir::EndCopy() {
  {
    std::lock_guard lock(copies_mutex_);
    --copies_;
  }
  copies_changed_.notify_one();
}

Result<void> SharedFsDir::GiveName(const std::string& temp, const std::string& name) {
  if (!links_refused_.load(std::memory_order_relaxed)) {
    Result<void> linked = io_.Link(temp, name);
    if (linked || !LinksRefused(linked.error().os_error)) return linked;
    links_refused_.store(true, std::memory_order_relaxed);
  }
  // Rename replaces, so look first. Two nodes may both look and both rename: then the same chunk takes the place of
  // itself.
  const auto taken = io_.Open(name, OpenMode::kRead);
  if (taken || taken.error().os_error != ENOENT) return Fail(Code::kIo, "rename " + name + ": EEXIST", EEXIST);
  return io_.Rename(temp, name);
}

Result<SharedFsDir::Published> SharedFsDir::Publish(const std::string& temp, const FrameInfo& info, bool& left) {
  const Digest& key = info.key;
  const std::string name = FramePath(key);
  Result<Published> result = Fail(Code::kIo, "publish " + name + ": others change it all the time");
  for (int i = 0; i < kPublishTries; ++i) {
    const Result<void> named = GiveName(temp, name);
    if (named) {
      result = Published::kNew;
      break;
    }
    if (named.error().os_error == ENOENT) {
      // The first frame of its directory.
      Result<void> made = io_.MakeDir(FanOutPath(FanOutOf(key)), options_.directory_permissions);
      if (made) continue;
      result = tl::unexpected(made.error());
      break;
    }
    if (named.error().os_error != EEXIST) {
      result = tl::unexpected(named.error());
      break;
    }
    const FrameProof there = Prove(key);
    if (there.set_aside) {
      SetAside(key, there.reason, there.stat);
    } else if (there.reason == Reason::kNone) {
      result = Published::kExisted;
      break;
    } else if (there.reason == Reason::kVersion) {
      result = Published::kOtherVersion;
      break;
    } else if (there.error) {
      result = tl::unexpected(*there.error);
      break;
    } else {
      // Removed since, or this NFS client remembers that it was not there, and a listing makes it look again.
      (void)ListFrames(FanOutOf(key));
    }
  }
  // By its other name it is the frame.
  const bool is_frame = result && *result == Published::kNew;
  left = !DropTemp(temp, is_frame ? 0 : FrameBytes(info.payload_bytes));
  return result;
}

SharedFsDir::OpenFrame SharedFsDir::OpenAndProve(const Digest& key) {
  OpenFrame open;
  FrameProof& proof = open.proof;
  auto file = io_.Open(FramePath(key), OpenMode::kRead);
  if (!file) {
    // A socket, a device, a link to nothing: there, and can't be opened, or not even be found.
    const auto name = io_.StatName(FramePath(key));
    if (name && !name->is_file) {
      proof = Defect(Reason::kDamaged);
      proof.stat = *name;
    } else if (file.error().os_error != ENOENT) {
      proof = NotKnown(file.error(), name ? &*name : nullptr);
    } else {
      proof.reason = Reason::kMissing;
    }
    return open;
  }
  const auto stat = (*file)->Stat();
  if (!stat) return {.proof = NotKnown(stat.error())};
  proof.stat = *stat;
  if (!stat->is_file) {
    proof.reason = Reason::kDamaged;
    proof.set_aside = true;
    return open;
  }
  FrameHeader header;
  const auto read = (*file)->ReadAt(0, header);
  if (!read) return {.proof = NotKnown(read.error(), &*stat)};
  auto decoded = DecodeFrameHeader(std::span(header).first(*read), stat->bytes);
  if (const Reason* reason = std::get_if<Reason>(&decoded)) {
    proof.reason = *reason;
    proof.set_aside = *reason != Reason::kVersion;  // A newer release can read it.
    return open;
  }
  proof.frame = std::get<Frame>(std::move(decoded));
  if (proof.frame.info.key != key) {
    proof.reason = Reason::kForeign;
    proof.set_aside = true;
    return open;
  }
  open.file = *std::move(file);
  return open;
}

FrameProof SharedFsDir::Prove(const Digest& key) {
  FrameProof proof = OpenAndProve(key).proof;
  if (proof.error && proof.error->os_error == ESTALE) proof = OpenAndProve(key).proof;
  return proof;
}

bool SharedFsDir::IsGone(const Digest& key) {
  const auto file = io_.Open(FramePath(key), OpenMode::kRead);
  return !file && file.error().os_error == ENOENT;
}

FrameProof SharedFsDir::ReadOnce(const Digest& key, const Digest& space, std::span<std::byte> into,
                                 const std::function<bool()>& stop, const Help& help) {
  OpenFrame open = OpenAndProve(key);
  FrameProof& proof = open.proof;
  if (proof.reason != Reason::kNone) return proof;
  const Frame& frame = proof.frame;
  if (frame.info.space != space || frame.info.payload_bytes != into.size()) {
    // Right by its own name, so it serves whoever asks right: it stays.
    proof.reason = Reason::kForeign;
    return proof;
  }
  const auto payload = std::make_shared<PayloadRead>(std::move(open.file), frame, into, stop);
  if (help && frame.segments.size() > 1) help(frame.segments.size(), [payload] { payload->Work(); });
  FrameProof failure = payload->Finish();
  if (failure.reason == Reason::kNone) return proof;
  if (failure.reason == Reason::kUnavailable) return NotKnown(*failure.error, &proof.stat);
  failure.stat = proof.stat;
  return failure;
}

FrameProof SharedFsDir::Read(const Digest& key, const Digest& space, std::span<std::byte> into,
                             const std::function<bool()>& stop, const Help& help) {
  FrameProof proof = ReadOnce(key, space, into, stop, help);
  if (proof.error && proof.error->os_error == ESTALE) proof = ReadOnce(key, space, into, stop, help);
  if (proof.reason != Reason::kMissing) return proof;
  // An NFS client remembers that a name was not there for tens of seconds. A listing shows what is, and makes it look
  // again.
  const auto listed = ListFrames(FanOutOf(key));
  if (listed) {
    const bool there = std::binary_search(listed->begin(), listed->end(), key);
    return there ? ReadOnce(key, space, into, stop, help) : proof;
  }
  if (listed.error().os_error != ENOENT) return NotKnown(listed.error());
  // The directory is gone: with everything else (then nothing is known), or alone.
  const auto id = ReadVolumeId();
  return id ? proof : NotKnown(id.error());
}

bool SharedFsDir::SetAside(const Digest& key, Reason reason, const FileStat& seen) {
  std::lock_guard lock(quarantine_mutex_);
  const std::string path = FramePath(key);
  {
    // Somebody may have set it aside meanwhile and written a right one.
    auto file = io_.Open(path, OpenMode::kRead);
    const auto now = file ? (*file)->Stat() : io_.StatName(path);
    if (!now || !SameFile(*now, seen)) return false;
  }
  bool room = seen.is_directory;  // It can't be removed, with what others may have put into it.
  if (const auto names = io_.List(Path("quarantine"));
      !room && names && names->size() < options_.quarantine_files_max) {
    uint64_t bytes = seen.bytes;
    for (const std::string& name : *names) {
      const auto stat = io_.Stat(Path("quarantine/") + name);
      if (stat) bytes += stat->bytes;
    }
    room = bytes <= options_.quarantine_bytes_max;
  }
  std::string kept = Path("quarantine/") + key.Hex() + "." + ReasonName(reason);
  if (seen.is_directory) kept += "." + RandomHex(1);  // Nothing takes the place of a directory.
  const bool moved = room && io_.Rename(path, kept);
  const Result<void> removed = moved ? Result<void>{} : io_.Unlink(path);
  quarantined_.fetch_add(1, std::memory_order_relaxed);
  metrics_
      .GetCounter("terrace_tier_quarantined_total", "Frames that disagreed with their name or checksums.",
                  {{"tier", "shared_fs"}, {"reason", ReasonName(reason)}})
      .Add();
  log::Warn("frame_quarantined", {{"tier", "shared_fs"},
                                  {"key", key.Hex()},
                                  {"reason", ReasonName(reason)},
                                  {"action", moved     ? kept
                                             : removed ? std::string("removed")
                                                       : removed.error().what}});
  return true;
}

Result<void> SharedFsDir::Remove(const Digest& key) {
  Result<void> removed = io_.Unlink(FramePath(key));
  if (!removed && removed.error().os_error == ENOENT) return {};
  return removed;
}

Result<std::optional<int64_t>> SharedFsDir::WrittenNs(const Digest& key) {
  const auto stat = io_.Stat(FramePath(key));
  if (!stat && stat.error().os_error == ENOENT) return std::nullopt;
  if (!stat) return tl::unexpected(stat.error());
  return stat->mtime_ns;
}

Result<std::vector<size_t>> SharedFsDir::ListFanOut() {
  const auto names = io_.List(Path("frames"));
  if (!names) return tl::unexpected(names.error());
  std::vector<size_t> found;
  for (const std::string& name : *names) {
    size_t n = kFanOut;
    std::from_chars(name.data(), name.data() + name.size(), n, 16);
    if (n < kFanOut && FanOutPath(n) == Path("frames/") + name) found.push_back(n);
  }
  std::sort(found.begin(), found.end());
  return found;
}

Result<std::vector<Digest>> SharedFsDir::ListFrames(size_t fan_out, std::vector<std::string>* left_open) {
  auto names = io_.List(FanOutPath(fan_out));
  if (!names && names.error().os_error == ENOENT) {
    // An NFS client remembers for a while that a directory was not there, too. A listing of the one above cures it.
    const auto there = ListFanOut();
    if (there && std::binary_search(there->begin(), there->end(), fan_out)) names = io_.List(FanOutPath(fan_out));
  }
  if (!names) return tl::unexpected(names.error());
  std::vector<Digest> found;
  for (const std::string_view name : *names) {
    if (left_open && IsLeftOpen(name)) left_open->push_back(FanOutPath(fan_out) + "/" + std::string(name));
    if (!name.ends_with(kFrameSuffix)) continue;
    const auto key = Digest::FromHex(name.substr(0, name.size() - kFrameSuffix.size()));
    if (key && FanOutOf(*key) == fan_out) found.push_back(*key);
  }
  std::sort(found.begin(), found.end());
  return found;
}

Result<uint64_t> SharedFsDir::LeftOpenBytes(const std::string& path, bool remove) {
  const Result<void> removed = remove ? io_.Unlink(path) : Result<void>{};
  if (!removed && removed.error().os_error != ENOENT) {
    log::Warn("shared_fs_clean_failed", {{"error", removed.error().what}});
  } else if (remove) {
    return 0;
  }
  const auto stat = io_.StatName(path);
  if (!stat && stat.error().os_error == ENOENT) return 0;
  if (!stat) return tl::unexpected(stat.error());
  return stat->bytes;
}

Result<int64_t> SharedFsDir::ServerNow() {
  const auto temp = WriteWhole([](File&) { return Result<void>{}; });  // A full server tells the time, too.
  if (!temp) return tl::unexpected(temp.error());
  const auto stat = io_.Stat(*temp);
  DropTemp(*temp);
  if (!stat) return tl::unexpected(stat.error());
  return stat->mtime_ns;
}

Result<void> SharedFsDir::RemoveStale(std::chrono::seconds age) {
  const auto now = ServerNow();
  if (!now) return tl::unexpected(now.error());
  const int64_t oldest = *now - std::chrono::nanoseconds(age).count();
  const Result<void> temps = RemoveOlder(Path("tmp"), kTempSuffix, oldest);
  const Result<void> journals = RemoveOlder(Path("nodes"), kJournalSuffix, oldest);
  return temps ? journals : temps;
}

Result<void> SharedFsDir::RemoveOlder(const std::string& directory, std::string_view suffix, int64_t mtime_ns) {
  const auto names = io_.List(directory);
  if (!names) return tl::unexpected(names.error());
  Result<void> result;
  for (const std::string& name : *names) {
    if (!name.ends_with(suffix) && !IsLeftOpen(name)) continue;
    const std::string path = directory + "/" + name;
    const auto stat = io_.Stat(path);
    // A server that is away would take its time for each.
    if (!stat && stat.error().os_error != ENOENT) return tl::unexpected(stat.error());
    if (!stat || stat->mtime_ns >= mtime_ns) continue;
    const auto removed = io_.Unlink(path);
    if (removed || removed.error().os_error == ENOENT) continue;  // Another node may clean up too.
    result = removed;
    if (!IsTheNamesOwn(removed.error().os_error)) break;
  }
  return result;
}

bool SharedFsDir::OthersWrite(const Digest& key) {
  const auto names = io_.List(Path("tmp"));
  if (!names) return false;
  const std::string own = options_.node + "-";
  const std::string tail = TempTail(key);
  return std::any_of(names->begin(), names->end(),
                     [&](const std::string& name) { return name.ends_with(tail) && !name.starts_with(own); });
}

Result<uint64_t> SharedFsDir::TempBytes(const std::function<bool(std::string_view node)>& counts) {
  const auto names = io_.List(Path("tmp"));
  if (!names) return tl::unexpected(names.error());
  uint64_t bytes = 0;
  for (const std::string& name : *names) {
    if (!counts(std::string_view(name).substr(0, name.rfind('-')))) continue;
    const auto stat = io_.Stat(Path("tmp/") + name);
    if (!stat && stat.error().os_error != ENOENT) return tl::unexpected(stat.error());
    if (stat) bytes += stat->bytes;
  }
  return bytes;
}

// Opened, since an NFS client remembers what a name stood for.
Result<std::optional<FileStat>> SharedFsDir::LookAtLease() {
  const auto file = io_.Open(Path(std::string(kLeaseFile)), OpenMode::kRead);
  if (!file && file.error().os_error == ENOENT) return std::nullopt;
  if (!file) return tl::unexpected(file.error());
  const auto stat = (*file)->Stat();
  if (!stat) return tl::unexpected(stat.error());
  return *stat;
}

// An empty file, so that a full server grants it, too: whose it is says its identity. Each renewal is a new file in its
// place, so one that stays is of a node that died.
Result<bool> SharedFsDir::HoldLease(int64_t now_ns, std::chrono::milliseconds life) {
  const std::string path = Path(std::string(kLeaseFile));
  const auto there = LookAtLease();
  if (!there) return tl::unexpected(there.error());
  const bool ours = *there && lease_ && SameFile(**there, *lease_);
  if (*there && !ours) {
    const TimePoint now = clock_.Now();
    if (!others_lease_ || !SameFile(**there, *others_lease_)) {
      const bool free = !others_lease_ && LeftBehind((*there)->mtime_ns, now_ns);
      others_lease_ = **there;
      others_since_ = free ? now - life : now;
    }
    if (now - others_since_ < life) return false;
  }
  const auto temp = WriteWhole([](File&) { return Result<void>{}; });
  if (!temp) return tl::unexpected(temp.error());
  const auto made = io_.Stat(*temp);
  Result<void> named = made ? Result<void>{} : tl::unexpected(made.error());
  if (made) named = *there ? io_.Rename(*temp, path) : GiveName(*temp, path);
  if (!named || !*there) DropTemp(*temp);
  if (!named && named.error().os_error == EEXIST) return false;
  if (!named) return tl::unexpected(named.error());
  lease_ = *made;
  if (ours) return true;
  // Of two that found it free or old at once, the later one has it.
  const auto now = LookAtLease();
  if (!now) return tl::unexpected(now.error());
  return *now && SameFile(**now, *lease_);
}

void SharedFsDir::LeaveLease() {
  const auto there = LookAtLease();
  if (there && *there && lease_ && SameFile(**there, *lease_)) (void)io_.Unlink(Path(std::string(kLeaseFile)));
  lease_.reset();
}

}  // namespace terrace
