// What could go wrong here: part of a frame, or other bytes than those saved, handed out; bytes beyond the caller's
// memory touched; a save that settled and is lost when the process is killed; temporaries, damaged frames or erased
// ones that stay and count for ever; more on the disk than the cap allows, now or after the cap was lowered; a parent
// evicted before its child, what was just used before what was not; a recovery that serves nobody, or takes away what
// belongs to others; two processes in one directory; a disk that fails or is full and takes reads with it or never
// heals.
#include "tier/disk_tier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <thread>
#include <variant>

#include "base/hash.h"
#include "base/log.h"
#include "chunk/frame.h"
#include "tests/support/disk_kinds.h"
#include "tests/support/faulty_disk_io.h"
#include "tests/support/faulty_file_io.h"

extern char** environ;

namespace terrace {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Bytes = std::vector<std::byte>;
using What = FaultyDiskIo::What;
using Verdict = FaultyDiskIo::Verdict;

const Digest kSpace = Sha256Of("space");
constexpr uint64_t kMiB = 1 << 20;
constexpr uint64_t kPlenty = 4ull << 30;

// No test waits longer; none depends on how long it takes.
TimePoint Soon() { return std::chrono::steady_clock::now() + seconds(60); }

template <class Condition>
bool Eventually(const Condition& condition) {
  const TimePoint deadline = Soon();
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::yield();
  }
  return true;
}

Digest Key(uint64_t n) { return Sha256Of("key " + std::to_string(n)); }

struct TestFrame {
  FrameInfo info;
  Bytes payload;
};

TestFrame MakeFrame(uint64_t n, uint64_t payload_bytes, std::optional<uint64_t> parent = std::nullopt) {
  TestFrame frame{.info = {.space = kSpace,
                           .key = Key(n),
                           .parent = parent ? Key(*parent) : kSpace,
                           .first_token = static_cast<uint32_t>(n * 256),
                           .token_count = 256,
                           .payload_bytes = payload_bytes},
                  .payload = Bytes((payload_bytes + 7) / 8 * 8)};
  uint64_t word = n * 0x9e3779b97f4a7c15 + 1;  // Cheap in a debug build, and no two frames or places are alike.
  for (size_t at = 0; at < frame.payload.size(); at += 8) {
    word ^= word << 13;
    word ^= word >> 7;
    word ^= word << 17;
    std::memcpy(frame.payload.data() + at, &word, 8);
  }
  frame.payload.resize(payload_bytes);
  return frame;
}

// Memory that begins `shift` bytes after a multiple of 4 KiB, with a fence on both sides.
struct Buffer {
  Buffer(size_t bytes, size_t shift)
      : begin(shift + kFenceBytes),
        size(bytes),
        memory(static_cast<std::byte*>(std::aligned_alloc(4096, (begin + bytes + kFenceBytes + 4095) / 4096 * 4096))) {
    std::memset(memory, static_cast<int>(kFence), begin + bytes + kFenceBytes);
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { std::free(memory); }
  std::span<std::byte> bytes() { return {memory + begin, size}; }
  bool FencesAreWhole() const {
    const auto whole = [](std::byte b) { return b == kFence; };
    return std::all_of(memory, memory + begin, whole) &&
           std::all_of(memory + begin + size, memory + begin + size + kFenceBytes, whole);
  }
  static constexpr size_t kFenceBytes = 4096;
  static constexpr std::byte kFence{0xa5};
  const size_t begin;
  const size_t size;
  std::byte* const memory;
};

std::shared_ptr<SaveBatch> StartSave(Tier& tier, const TestFrame& frame) {
  auto buffer = std::make_shared<Buffer>(frame.payload.size(), 0);
  std::memcpy(buffer->bytes().data(), frame.payload.data(), frame.payload.size());
  auto done = std::make_shared<SaveBatch>(1);
  tier.Save({{.info = frame.info, .payload = buffer->bytes(), .owner = buffer}}, done);
  return done;
}
SaveResult Save(Tier& tier, const TestFrame& frame) {
  const auto done = StartSave(tier, frame);
  const SaveResult* result = done->Wait(0, Soon());
  EXPECT_NE(result, nullptr) << "never settled";
  return result ? *result : SaveResult{};
}

struct Loaded {
  std::shared_ptr<Buffer> buffer;
  std::shared_ptr<LoadBatch> done;
};
Loaded StartLoad(Tier& tier, const FrameInfo& info, size_t shift = 0) {
  Loaded loaded{std::make_shared<Buffer>(info.payload_bytes, shift), std::make_shared<LoadBatch>(1)};
  tier.Load({{.key = info.key, .space = info.space, .into = loaded.buffer->bytes(), .owner = loaded.buffer}}, Soon(),
            loaded.done);
  return loaded;
}
LoadResult Load(Tier& tier, const TestFrame& frame, size_t shift = 0) {
  const Loaded loaded = StartLoad(tier, frame.info, shift);
  const LoadResult* result = loaded.done->Wait(0, Soon());
  EXPECT_NE(result, nullptr) << "never settled";
  if (!result) return {};
  EXPECT_TRUE(loaded.buffer->FencesAreWhole());
  if (result->outcome == Outcome::kHit) {
    EXPECT_EQ(std::memcmp(loaded.buffer->bytes().data(), frame.payload.data(), frame.payload.size()), 0);
    EXPECT_EQ(result->info, frame.info);
    EXPECT_EQ(*result->hashes, HashSegments(frame.payload));
  }
  return *result;
}
void ExpectHit(Tier& tier, const TestFrame& frame) {
  const LoadResult result = Load(tier, frame);
  EXPECT_EQ(result.outcome, Outcome::kHit)
      << ReasonName(result.reason) << " " << (result.error ? result.error->what : "");
}

bool Has(Tier& tier, uint64_t n) {
  const Digest key = Key(n);
  uint8_t present = 0;
  tier.Contains({&key, 1}, {&present, 1});
  return present == 1;
}

// What each file takes on the disk, by the file system's own account. Small ones are not frames.
std::map<std::string, uint64_t> FilesOnDisk(const std::string& directory) {
  std::map<std::string, uint64_t> files;
  std::error_code gone;
  for (auto it = fs::recursive_directory_iterator(directory, gone); it != fs::recursive_directory_iterator();
       it.increment(gone)) {
    if (gone) break;
    struct stat st;
    if (lstat(it->path().c_str(), &st) == 0 && S_ISREG(st.st_mode) && st.st_size >= 8192) {
      files[it->path()] = static_cast<uint64_t>(st.st_blocks) * 512;
    }
  }
  return files;
}
uint64_t BytesOnDisk(const std::string& directory) {
  uint64_t bytes = 0;
  for (const auto& [path, size] : FilesOnDisk(directory)) bytes += size;
  return bytes;
}
// While files come and go: the sum of those that were there at one and the same time.
uint64_t BytesTogetherOnDisk(const std::string& directory) {
  uint64_t bytes = 0;
  for (const auto& [path, size] : FilesOnDisk(directory)) {
    if (access(path.c_str(), F_OK) == 0) bytes += size;
  }
  return bytes;
}

class DiskTierTest : public testing::TestWithParam<DiskIoKind> {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "terrace-disk-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
  }
  void TearDown() override {
    tier_.reset();
    log::SetSink(nullptr);
    umount2(directory_.c_str(), MNT_DETACH);
    fs::remove_all(directory_);
  }

  // With an io of its own that obeys the test's rules.
  Result<void> TryOpen(uint64_t bytes_max = kPlenty) {
    tier_.reset();
    if (!keep_io_) io_ = std::make_unique<FaultyDiskIo>(GetParam());
    keep_io_ = false;
    auto tier = OpenDiskTier({.directory = directory_, .bytes_max = bytes_max},
                             {.files = files_, .clock = clock_, .metrics = metrics_, .io = io_.get()});
    if (!tier) return tl::unexpected(tier.error());
    tier_ = *std::move(tier);
    return {};
  }
  void Open(uint64_t bytes_max = kPlenty) {
    const auto opened = TryOpen(bytes_max);
    ASSERT_TRUE(opened) << opened.error().what;
    ASSERT_TRUE(Eventually([&] { return tier_->stats().index_ready; }));
  }
  void Close() {
    ASSERT_TRUE(tier_->Close(Soon()).clean);
    tier_.reset();
  }
  void PrepareIo() {
    io_ = std::make_unique<FaultyDiskIo>(GetParam());
    keep_io_ = true;
  }

  std::string Path(const Digest& key) const {
    return directory_ + "/frames/" + key.Hex().substr(0, 2) + "/" + key.Hex() + ".kvf";
  }
  size_t TempFiles() const {
    return static_cast<size_t>(std::distance(fs::directory_iterator(directory_ + "/tmp"), fs::directory_iterator()));
  }
  uint64_t Failures(const char* operation) {
    return metrics_.GetCounter("terrace_tier_failures_total", "", {{"tier", "disk"}, {"operation", operation}}).value();
  }
  // Nothing else than these frames, in the index, on the disk, and in the accounts.
  void ExpectExactly(const std::vector<TestFrame>& frames) {
    uint64_t bytes = 0;
    for (const TestFrame& frame : frames) {
      ExpectHit(*tier_, frame);
      bytes += FrameBytes(frame.payload.size());
    }
    EXPECT_TRUE(Eventually([&] { return tier_->stats().bytes == bytes; }))
        << tier_->stats().bytes << " counted, not " << bytes;
    EXPECT_EQ(tier_->stats().frames, frames.size());
    EXPECT_EQ(BytesOnDisk(directory_), bytes);
    EXPECT_EQ(TempFiles(), 0u);
  }

  std::string directory_;
  FaultyFileIo files_;
  SystemClock clock_;
  Metrics metrics_;
  std::unique_ptr<FaultyDiskIo> io_;
  bool keep_io_ = false;
  std::unique_ptr<Tier> tier_;
};

// ---- Opening

TEST_P(DiskTierTest, OpenRefusesWhatItCannotUseAndSaysTheRemedy) {
  const std::string home = directory_;
  const auto error = [&] {
    const auto opened = TryOpen();
    EXPECT_FALSE(opened);
    return opened ? std::string() : opened.error().what;
  };
  directory_ = home + "/none";
  EXPECT_EQ(error(), "disk directory " + directory_ + " does not exist: create it, or mount the disk there");
  directory_ = home + "/file";
  std::ofstream(directory_) << "x";
  EXPECT_NE(error().find("is not a directory"), std::string::npos);
  directory_ = home + "/shared";
  fs::create_directory(directory_);
  std::ofstream(directory_ + "/terrace.format") << "terrace shared_fs\nversion 1\nid 1\n";
  EXPECT_NE(error().find("use another directory"), std::string::npos);
  EXPECT_FALSE(fs::exists(directory_ + "/frames")) << "it put files into the directory of others";
  std::ofstream(directory_ + "/terrace.format") << "terrace disk\nversion 7\n";
  EXPECT_NE(error().find("format version 7"), std::string::npos);
  directory_ = home;
  EXPECT_FALSE(TryOpen(0));
}

TEST_P(DiskTierTest, TheTierSaysSoWhenTheFileSystemHasNoDirectIo) {
  std::mutex mutex;
  std::string lines;
  log::SetSink([&](log::Level, std::string_view line) {
    std::lock_guard lock(mutex);
    lines += std::string(line) + "\n";
  });
  PrepareIo();
  io_->HaveNoDirect();
  Open();
  const TestFrame frame = MakeFrame(1, kMiB + 77);
  EXPECT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  ExpectExactly({frame});
  Close();
  log::SetSink(nullptr);
  EXPECT_NE(lines.find("event=disk_buffered"), std::string::npos) << lines;
}

TEST_P(DiskTierTest, ATmpfsWorks) {
  if (mount("none", directory_.c_str(), "tmpfs", 0, "size=64m") != 0) GTEST_SKIP() << "may not mount";
  Open();
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < 4; ++n) {
    frames.push_back(MakeFrame(n, 3 * kMiB + n));
    EXPECT_EQ(Save(*tier_, frames.back()).outcome, Outcome::kHit);
  }
  Close();
  Open();
  ExpectExactly(frames);
}

// ---- Bytes

TEST_P(DiskTierTest, AnySizeAtAnyAddressIsRightToTheByte) {
  Open();
  const uint64_t sizes[] = {1,    511,      4095,        4096,         4097,           8191,           kMiB - 1,
                            kMiB, kMiB + 1, kMiB + 4096, 2 * kMiB - 1, 3 * kMiB + 123, 9 * kMiB + 4095};
  uint64_t n = 0;
  for (const uint64_t size : sizes) {
    for (const size_t save_shift : {0, 1, 512}) {
      const TestFrame frame = MakeFrame(n++, size);
      auto from = std::make_shared<Buffer>(size, save_shift);
      std::memcpy(from->bytes().data(), frame.payload.data(), size);
      auto done = std::make_shared<SaveBatch>(1);
      SaveItem item{.info = frame.info, .payload = from->bytes(), .owner = from};
      if (n % 2 == 0) item.hashes = std::make_shared<const SegmentHashes>(HashSegments(frame.payload));
      tier_->Save({std::move(item)}, done);
      ASSERT_NE(done->Wait(0, Soon()), nullptr);
      ASSERT_EQ(done->Poll(0)->outcome, Outcome::kHit);
      EXPECT_TRUE(from->FencesAreWhole());
      EXPECT_EQ(fs::file_size(Path(frame.info.key)), FrameBytes(size));
      for (const size_t load_shift : {0, 8, 4095}) {
        ASSERT_EQ(Load(*tier_, frame, load_shift).outcome, Outcome::kHit) << size << " at " << load_shift;
      }
    }
  }
}

TEST_P(DiskTierTest, AFrameOnTheDiskIsAsTheFormatSays) {
  Open();
  const TestFrame frame = MakeFrame(1, 2 * kMiB + 5000);
  ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  std::ifstream in(Path(frame.info.key), std::ios::binary);
  std::string text((std::istreambuf_iterator<char>(in)), {});
  const auto bytes = std::as_bytes(std::span(text));
  const auto decoded = DecodeFrameHeader(bytes, bytes.size());
  ASSERT_TRUE(std::holds_alternative<Frame>(decoded));
  EXPECT_EQ(std::get<Frame>(decoded).info, frame.info);
  EXPECT_TRUE(std::ranges::equal(bytes.subspan(kFrameHeaderBytes, frame.payload.size()), frame.payload));
  EXPECT_TRUE(std::ranges::all_of(bytes.subspan(kFrameHeaderBytes + frame.payload.size()),
                                  [](std::byte b) { return b == std::byte{0}; }));
}

// D7. Each is a miss with its reason, removed, and counted once; the next save writes it anew.
struct Damage {
  const char* name;
  Reason reason;
  std::function<void(const std::string& path)> make;
};
void Overwrite(const std::string& path, uint64_t offset, const std::string& bytes) {
  std::fstream file(path, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(static_cast<std::streamoff>(offset));
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  ASSERT_TRUE(file.good());
}
void Flip(const std::string& path, uint64_t offset) {
  std::ifstream in(path, std::ios::binary);
  in.seekg(static_cast<std::streamoff>(offset));
  const char was = static_cast<char>(in.get());
  Overwrite(path, offset, std::string(1, static_cast<char>(was ^ 4)));
}
constexpr uint64_t kDamagedBytes = kMiB + 1000;
std::vector<Damage> Damages() {
  const auto cut = [](uint64_t bytes) { return [bytes](const std::string& path) { fs::resize_file(path, bytes); }; };
  const uint64_t whole = FrameBytes(kDamagedBytes);
  return {
      {"empty", Reason::kEmpty, cut(0)},
      {"header_only", Reason::kTruncated, cut(4096)},
      {"a_byte_short", Reason::kTruncated, cut(whole - 1)},
      {"a_block_short", Reason::kTruncated, cut(whole - 4096)},
      {"a_block_long", Reason::kDamaged, cut(whole + 4096)},
      {"garbage", Reason::kDamaged,
       [=](const std::string& path) {
         std::string garbage(whole, '\0');
         std::mt19937 random(1);
         for (char& c : garbage) c = static_cast<char>(random());
         Overwrite(path, 0, garbage);
       }},
      {"header_bit", Reason::kDamaged, [](const std::string& path) { Flip(path, 100); }},
      {"first_segment_bit", Reason::kDamaged, [](const std::string& path) { Flip(path, 5000); }},
      {"last_segment_bit", Reason::kDamaged, [](const std::string& path) { Flip(path, 4096 + kMiB + 999); }},
      {"padding_bit", Reason::kDamaged, [](const std::string& path) { Flip(path, 4096 + kMiB + 1000); }},
      {"another_frame", Reason::kForeign,
       [](const std::string& path) {
         FrameInfo other = MakeFrame(77, 1).info;
         other.payload_bytes = kDamagedBytes;
         const Bytes payload(kDamagedBytes);
         const FrameHeader header = EncodeFrameHeader(other, 1, HashSegments(payload));
         Overwrite(path, 0, std::string(reinterpret_cast<const char*>(header.data()), header.size()));
       }},
  };
}

TEST_P(DiskTierTest, DamageWhileItRunsIsAMissOnceAndThenWrittenAnew) {
  Open();
  uint64_t n = 0;
  const TestFrame bystander = MakeFrame(1000, 5000);
  ASSERT_EQ(Save(*tier_, bystander).outcome, Outcome::kHit);
  for (const Damage& damage : Damages()) {
    SCOPED_TRACE(damage.name);
    const TestFrame frame = MakeFrame(++n, kDamagedBytes);
    ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
    damage.make(Path(frame.info.key));
    const LoadResult result = Load(*tier_, frame);
    EXPECT_EQ(result.outcome, Outcome::kMiss);
    EXPECT_EQ(result.reason, damage.reason) << ReasonName(result.reason);
    EXPECT_EQ(tier_->stats().quarantined, n);
    EXPECT_FALSE(Has(*tier_, n));
    EXPECT_EQ(Load(*tier_, frame).reason, Reason::kNotFound);
    EXPECT_EQ(tier_->stats().quarantined, n) << "counted once";
    const SaveResult anew = Save(*tier_, frame);
    EXPECT_EQ(anew.outcome, Outcome::kHit);
    EXPECT_FALSE(anew.existed);
    ExpectExactly({bystander, frame});
    tier_->Erase({{frame.info.key}});
  }
}

TEST_P(DiskTierTest, DamageFromBeforeTheStartIsRemovedByTheRecovery) {
  const auto damages = Damages();
  Open();
  for (uint64_t n = 0; n < damages.size(); ++n) {
    ASSERT_EQ(Save(*tier_, MakeFrame(n, kDamagedBytes)).outcome, Outcome::kHit);
  }
  const TestFrame whole = MakeFrame(1000, 5000);
  ASSERT_EQ(Save(*tier_, whole).outcome, Outcome::kHit);
  Close();
  for (uint64_t n = 0; n < damages.size(); ++n) damages[n].make(Path(Key(n)));
  Open();
  // The header does not tell of damage behind it; a load does.
  uint64_t hidden = 0;
  for (uint64_t n = 0; n < damages.size(); ++n) {
    if (!Has(*tier_, n)) continue;
    ++hidden;
    EXPECT_EQ(Load(*tier_, MakeFrame(n, kDamagedBytes)).reason, Reason::kDamaged) << damages[n].name;
  }
  EXPECT_EQ(hidden, 3u);
  EXPECT_EQ(tier_->stats().quarantined, damages.size());
  ExpectExactly({whole});
}

TEST_P(DiskTierTest, AFrameThatIsGoneIsMissingOnce) {
  Open();
  const TestFrame frame = MakeFrame(1, 5000);
  ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  fs::remove(Path(frame.info.key));
  EXPECT_EQ(Load(*tier_, frame).reason, Reason::kMissing);
  EXPECT_EQ(Load(*tier_, frame).reason, Reason::kNotFound);
  EXPECT_EQ(tier_->stats().quarantined, 0u);
  ExpectExactly({});
}

// In a frame's place, put there by hand.
TEST_P(DiskTierTest, SomethingThatIsNoFileIsAMissOnceAndThenWrittenAnew) {
  const std::vector<std::pair<const char*, std::function<void(const std::string&)>>> makers = {
      {"full directory",
       [](const std::string& path) {
         fs::create_directory(path);
         std::ofstream(path + "/somebody's") << "x";
       }},
      {"pipe", [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); }},
      {"socket", [](const std::string& path) { ASSERT_EQ(mknod(path.c_str(), S_IFSOCK | 0600, 0), 0); }},
      {"link to nothing", [](const std::string& path) { fs::create_symlink("/nowhere/at/all", path); }},
      {"link to itself", [](const std::string& path) { fs::create_symlink(path, path); }},
  };
  Open();
  std::vector<TestFrame> frames;
  for (const auto& [name, make] : makers) {
    SCOPED_TRACE(name);
    const TestFrame frame = MakeFrame(frames.size(), 10000);
    const std::string path = Path(frame.info.key);
    ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
    fs::remove(path);
    make(path);
    // A reader of a pipe that somebody holds open for writing waits for ever.
    const int writer = name == std::string("pipe") ? open(path.c_str(), O_RDWR | O_CLOEXEC) : -1;
    const LoadResult result = Load(*tier_, frame);
    EXPECT_EQ(result.outcome, Outcome::kMiss);
    EXPECT_EQ(Load(*tier_, frame).reason, Reason::kNotFound);
    if (writer >= 0) close(writer);
    const SaveResult anew = Save(*tier_, frame);
    EXPECT_EQ(anew.outcome, Outcome::kHit) << (anew.error ? anew.error->what : "");
    EXPECT_FALSE(anew.existed);
    frames.push_back(frame);
    ExpectExactly(frames);
  }
  // There at the start: no frames, and no hindrance.
  Close();
  for (size_t i = 0; i < frames.size(); ++i) {
    fs::remove(Path(frames[i].info.key));
    makers[i].second(Path(frames[i].info.key));
  }
  Open();
  EXPECT_EQ(tier_->stats().frames, 0u);
  for (const TestFrame& frame : frames) {
    const SaveResult anew = Save(*tier_, frame);
    EXPECT_EQ(anew.outcome, Outcome::kHit) << (anew.error ? anew.error->what : "");
  }
  ExpectExactly(frames);
}

// ---- Trouble

// D13, for each n.
TEST_P(DiskTierTest, AWriteThatFailsLeavesNothingAndIsCounted) {
  Open();
  constexpr uint64_t kBytes = 2 * kMiB + 500;
  const TestFrame before = MakeFrame(1, 5000);
  ASSERT_EQ(Save(*tier_, before).outcome, Outcome::kHit);
  uint64_t failures = 0;
  for (const int os_error : {EIO, ENOSPC}) {
    for (const uint64_t at : {uint64_t{0}, uint64_t{1}, FrameBytes(kBytes) / 2, FrameBytes(kBytes) - 1}) {
      SCOPED_TRACE(at);
      io_->SetRule([=](const FaultyDiskIo::Call& call) -> Verdict {
        const bool here = call.what == What::kWrite && call.offset <= at && at < call.offset + call.bytes;
        return {.os_error = here ? os_error : 0, .keep_bytes = at};
      });
      const TestFrame frame = MakeFrame(2, kBytes);
      const SaveResult result = Save(*tier_, frame);
      EXPECT_EQ(result.outcome, Outcome::kFailed);
      EXPECT_EQ(result.reason, os_error == ENOSPC ? Reason::kFull : Reason::kUnavailable);
      ASSERT_TRUE(result.error);
      EXPECT_EQ(result.error->os_error, os_error);
      EXPECT_FALSE(Has(*tier_, 2));
      EXPECT_EQ(Failures("save"), ++failures);
      ExpectExactly({before});
    }
  }
  io_->SetRule(nullptr);
  const TestFrame frame = MakeFrame(2, kBytes);
  EXPECT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  ExpectExactly({before, frame});
}

TEST_P(DiskTierTest, ASyncOrANameThatFailsLeavesNothing) {
  Open();
  const TestFrame frame = MakeFrame(1, kMiB);
  for (const bool of_directory : {false, true}) {
    io_->SetRule([=](const FaultyDiskIo::Call& call) -> Verdict {
      const bool directory = !call.path.ends_with(".tmp");
      return {.os_error = call.what == What::kSync && directory == of_directory ? EIO : 0};
    });
    EXPECT_EQ(Save(*tier_, frame).reason, Reason::kUnavailable);
    io_->SetRule(nullptr);
    ExpectExactly({});
  }
  files_.SetRule([](const FaultyFileIo::Call& call) -> FaultyFileIo::Verdict {
    return {.os_error = call.op == FaultyFileIo::kRename ? EIO : 0};
  });
  EXPECT_EQ(Save(*tier_, frame).reason, Reason::kUnavailable);
  files_.SetRule(nullptr);
  ExpectExactly({});
  EXPECT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  ExpectExactly({frame});
}

TEST_P(DiskTierTest, OneFailureInAGroupIsOnlyItsOwn) {
  Open();
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < 12; ++n) frames.push_back(MakeFrame(n, 64 << 10));
  std::atomic<int> syncs{0};
  io_->SetRule([&](const FaultyDiskIo::Call& call) -> Verdict {
    if (call.what != What::kSync || !call.path.ends_with(".tmp")) return {};
    return {.os_error = syncs.fetch_add(1) % 4 == 0 ? EIO : 0};
  });
  std::vector<std::shared_ptr<SaveBatch>> saves;
  for (const TestFrame& frame : frames) saves.push_back(StartSave(*tier_, frame));
  std::vector<TestFrame> saved;
  for (size_t i = 0; i < frames.size(); ++i) {
    ASSERT_NE(saves[i]->Wait(0, Soon()), nullptr);
    if (saves[i]->Poll(0)->outcome == Outcome::kHit) saved.push_back(frames[i]);
  }
  EXPECT_EQ(saved.size(), 9u);
  io_->SetRule(nullptr);
  ExpectExactly(saved);
}

TEST_P(DiskTierTest, AReadThatFailsIsUnavailableAndTheFrameStays) {
  Open();
  const TestFrame frame = MakeFrame(1, 3 * kMiB);
  ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  for (const uint64_t offset : {uint64_t{0}, 4096 + kMiB, 4096 + 2 * kMiB}) {
    io_->SetRule([=](const FaultyDiskIo::Call& call) -> Verdict {
      return {.os_error = call.what == What::kRead && call.offset == offset ? EIO : 0};
    });
    const LoadResult result = Load(*tier_, frame);
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    EXPECT_EQ(result.reason, Reason::kUnavailable);
    ASSERT_TRUE(result.error);
    EXPECT_EQ(result.error->os_error, EIO);
  }
  EXPECT_EQ(Failures("load"), 3u);
  io_->SetRule(nullptr);
  ExpectExactly({frame});
  EXPECT_EQ(tier_->stats().quarantined, 0u);
}

TEST_P(DiskTierTest, AFrameThatCannotBeReadMakesWayForTheNextSave) {
  Open();
  const TestFrame frame = MakeFrame(1, 2 * kMiB + 5);
  const TestFrame bystander = MakeFrame(2, 5000);
  ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  ASSERT_EQ(Save(*tier_, bystander).outcome, Outcome::kHit);
  io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict {
    return {.os_error = call.what == What::kRead && call.bytes > 100'000 ? EIO : 0};
  });
  EXPECT_EQ(Load(*tier_, frame).outcome, Outcome::kFailed);
  EXPECT_TRUE(Save(*tier_, bystander).existed);
  const SaveResult anew = Save(*tier_, frame);
  EXPECT_EQ(anew.outcome, Outcome::kHit);
  EXPECT_FALSE(anew.existed);
  EXPECT_TRUE(Save(*tier_, frame).existed);
  io_->SetRule(nullptr);
  EXPECT_EQ(tier_->stats().quarantined, 1u);
  ExpectExactly({frame, bystander});
}

TEST_P(DiskTierTest, AScanFailsWhileTheDiskDoesNotAnswer) {
  Open();
  ASSERT_EQ(Save(*tier_, MakeFrame(1, 5000)).outcome, Outcome::kHit);
  io_->SetRule(
      [](const FaultyDiskIo::Call& call) -> Verdict { return {.os_error = call.what == What::kRead ? EIO : 0}; });
  const auto failed = tier_->Scan("", 1);
  ASSERT_FALSE(failed);
  EXPECT_EQ(failed.error().os_error, EIO);
  io_->SetRule(nullptr);
  EXPECT_EQ(tier_->Scan("", 1)->frames.size(), 1u);
  EXPECT_FALSE(tier_->Scan("no cursor", 1));
}

TEST_P(DiskTierTest, ADirectoryThatWasEmptiedIsLaidOutAnew) {
  Open();
  const TestFrame lost = MakeFrame(1, 5000);
  ASSERT_EQ(Save(*tier_, lost).outcome, Outcome::kHit);
  const auto empty = [this] {
    for (const char* name : {"frames", "tmp", "terrace.format"}) fs::remove_all(directory_ + "/" + name);
  };
  empty();
  EXPECT_EQ(Load(*tier_, lost).reason, Reason::kMissing);
  const TestFrame frame = MakeFrame(2, 5000);
  EXPECT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  ExpectExactly({frame});
  // What a guard asks is answered, before and after.
  EXPECT_TRUE(tier_->Scan("", 1));
  empty();
  EXPECT_TRUE(tier_->Scan("", 1));
  EXPECT_EQ(Load(*tier_, frame).reason, Reason::kMissing);
  Open();
  ExpectExactly({});
}

// A disk that its kernel has mounted read-only after an error.
TEST_P(DiskTierTest, ADiskThatCanBeReadAndNotWrittenLosesNoFrames) {
  constexpr uint64_t kFrames = 6;
  Open(kFrames * FrameBytes(kMiB));
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < kFrames; ++n) {
    frames.push_back(MakeFrame(n, kMiB));
    ASSERT_EQ(Save(*tier_, frames.back()).outcome, Outcome::kHit);
  }
  files_.SetRule([](const FaultyFileIo::Call& call) -> FaultyFileIo::Verdict {
    return {.os_error = call.op == FaultyFileIo::kUnlink ? EROFS : 0};
  });
  for (uint64_t n = 0; n < 3 * kFrames; ++n) {
    const SaveResult result = Save(*tier_, MakeFrame(100 + n, kMiB));
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    EXPECT_EQ(result.reason, Reason::kUnavailable);
  }
  ExpectExactly(frames);
  files_.SetRule(nullptr);
  EXPECT_EQ(Save(*tier_, MakeFrame(200, kMiB)).outcome, Outcome::kHit);
  EXPECT_EQ(tier_->stats().frames, kFrames);
  EXPECT_EQ(BytesOnDisk(directory_), tier_->stats().bytes);
}

TEST_P(DiskTierTest, AFullDiskGivesUpOldFramesForNewOnes) {
  if (mount("none", directory_.c_str(), "tmpfs", 0, "size=24m") != 0) GTEST_SKIP() << "may not mount";
  Open();
  for (uint64_t n = 0; n < 40; ++n) {
    const SaveResult result = Save(*tier_, MakeFrame(n, 2 * kMiB));
    EXPECT_EQ(result.outcome, Outcome::kHit) << n << ": " << (result.error ? result.error->what : "");
  }
  EXPECT_LT(tier_->stats().frames, 13u);
  EXPECT_GT(tier_->stats().frames, 8u);
  ExpectHit(*tier_, MakeFrame(39, 2 * kMiB));
  // Others take all there is: what is being read can't go.
  io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict { return {.hold = call.what == What::kRead}; });
  std::vector<Loaded> reading;
  for (uint64_t n = 0; n < 40; ++n) {
    if (Has(*tier_, n)) reading.push_back(StartLoad(*tier_, MakeFrame(n, 2 * kMiB).info));
  }
  // As many as may be under way, two pieces each; the rest waits.
  ASSERT_GE(io_->WaitForHeld(16), 16u);
  const TestFrame frame = MakeFrame(100, 22 * kMiB);
  EXPECT_EQ(Save(*tier_, frame).reason, Reason::kFull);
  EXPECT_EQ(Save(*tier_, frame).reason, Reason::kFull);
  io_->Release();
  size_t hits = 0;
  for (const Loaded& loaded : reading) {
    ASSERT_NE(loaded.done->Wait(0, Soon()), nullptr);
    if (loaded.done->Poll(0)->outcome == Outcome::kHit) ++hits;
  }
  EXPECT_GE(hits, 8u) << "reads go on while the disk is full";
  // It heals by itself.
  EXPECT_TRUE(Eventually([&] { return Save(*tier_, frame).outcome == Outcome::kHit; }));
  ExpectHit(*tier_, frame);
}

// What the guard above asks while saves are stopped.
TEST_P(DiskTierTest, AProbeSaysWhetherASaveWouldBeTakenAndLeavesNothing) {
  if (mount("none", directory_.c_str(), "tmpfs", 0, "size=8m") != 0) GTEST_SKIP() << "may not mount";
  Open();
  EXPECT_TRUE(tier_->ProbeSave(4 * kMiB));
  {
    std::ofstream filler(directory_ + "/frames/filler");
    filler << std::string(6 * kMiB, 'x');
  }
  const auto full = tier_->ProbeSave(4 * kMiB);
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, Code::kFull);
  EXPECT_TRUE(tier_->ProbeSave(kMiB));
  fs::remove(directory_ + "/frames/filler");
  EXPECT_TRUE(tier_->ProbeSave(4 * kMiB));
  // What is ours yields.
  for (uint64_t n = 0; n < 6; ++n) ASSERT_EQ(Save(*tier_, MakeFrame(n, kMiB)).outcome, Outcome::kHit);
  EXPECT_TRUE(tier_->ProbeSave(4 * kMiB));
  for (const auto op : {FaultyFileIo::kOpen, FaultyFileIo::kSync, FaultyFileIo::kFreeSpace}) {
    files_.SetRule(
        [=](const FaultyFileIo::Call& call) -> FaultyFileIo::Verdict { return {.os_error = call.op == op ? EIO : 0}; });
    EXPECT_FALSE(tier_->ProbeSave(kMiB));
    files_.SetRule(nullptr);
    EXPECT_TRUE(tier_->ProbeSave(kMiB));
  }
  std::ofstream(directory_ + "/tmp/probe.tmp") << "x";  // Of a process that was killed.
  EXPECT_TRUE(tier_->ProbeSave(kMiB));
  EXPECT_EQ(TempFiles(), 0u);
  EXPECT_EQ(tier_->stats().frames, 6u);
}

// ---- The cap

// D11.
TEST_P(DiskTierTest, WhileFourWriteMuchMoreThanTheCapTheDiskNeverHoldsMore) {
  constexpr uint64_t kCap = 100 * kMiB;
  constexpr uint64_t kChunk = 2 * kMiB + 100;
  Open(kCap);
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> most_on_disk{0}, most_counted{0};
  std::thread watcher([&] {
    while (!stop) {
      most_on_disk = std::max(most_on_disk.load(), BytesTogetherOnDisk(directory_));
      most_counted = std::max(most_counted.load(), tier_->stats().bytes);
    }
  });
  std::atomic<uint64_t> written{0}, read_back{0};
  std::vector<std::thread> writers;
  for (uint64_t w = 0; w < 4; ++w) {
    writers.emplace_back([&, w] {
      // A conversation each, begun anew every 8 chunks, and read back as it grows. What all four use last has room; but
      // who gets no core for a second finds that the others have filled the disk.
      for (uint64_t i = 0; i < 60; ++i) {
        const uint64_t n = w * 1000 + i;
        const TestFrame frame = MakeFrame(n, kChunk, i % 8 == 0 ? std::nullopt : std::optional(n - 1));
        const SaveResult result = Save(*tier_, frame);
        EXPECT_EQ(result.outcome, Outcome::kHit) << (result.error ? result.error->what : ReasonName(result.reason));
        if (result.outcome == Outcome::kHit) written += kChunk;
        if (i % 5 != 0) continue;
        const LoadResult back = Load(*tier_, frame);
        EXPECT_TRUE(back.outcome == Outcome::kHit || back.reason == Reason::kNotFound) << ReasonName(back.reason);
        read_back += back.outcome == Outcome::kHit;
      }
    });
  }
  for (std::thread& t : writers) t.join();
  stop = true;
  watcher.join();
  EXPECT_GT(read_back, 0u);
  EXPECT_GE(written, 480 * kMiB);
  EXPECT_LE(most_counted, kCap);
  EXPECT_LE(most_on_disk, kCap + 2 * FrameBytes(kChunk));
  EXPECT_GT(tier_->stats().bytes, kCap - 3 * FrameBytes(kChunk)) << "the room is used";
  EXPECT_EQ(BytesOnDisk(directory_), tier_->stats().bytes);
}

TEST_P(DiskTierTest, ACapLoweredBetweenStartsHoldsSoonAndLeavesWholeChains) {
  constexpr uint64_t kChunk = 512 << 10;
  constexpr uint64_t kChains = 20, kLength = 20;  // 200 MiB and some.
  Open();
  std::vector<std::shared_ptr<SaveBatch>> saves;
  std::map<uint64_t, TestFrame> frames;
  for (uint64_t i = 0; i < kLength; ++i) {
    for (uint64_t c = 0; c < kChains; ++c) {
      const uint64_t n = c * 100 + i;
      frames[n] = MakeFrame(n, kChunk, i == 0 ? std::nullopt : std::optional(n - 1));
      saves.push_back(StartSave(*tier_, frames[n]));
    }
  }
  for (const auto& save : saves) {
    ASSERT_NE(save->Wait(0, Soon()), nullptr);
    ASSERT_EQ(save->Poll(0)->outcome, Outcome::kHit);
  }
  ASSERT_GE(tier_->stats().bytes, 200 * kMiB);
  Close();

  constexpr uint64_t kCap = 100 * kMiB;
  ASSERT_TRUE(TryOpen(kCap));
  EXPECT_TRUE(Eventually([&] { return tier_->stats().index_ready && tier_->stats().bytes <= kCap; }));
  EXPECT_LE(BytesOnDisk(directory_), kCap);
  EXPECT_GT(tier_->stats().bytes, kCap - 2 * FrameBytes(kChunk)) << "no more than needed";
  uint64_t present = 0;
  for (const auto& [n, frame] : frames) {
    if (!Has(*tier_, n)) continue;
    ++present;
    EXPECT_TRUE(n % 100 == 0 || Has(*tier_, n - 1)) << "a chunk without its parent";
    ExpectHit(*tier_, frame);
  }
  EXPECT_EQ(tier_->stats().frames, present);
  // And saves go on.
  EXPECT_EQ(Save(*tier_, MakeFrame(5000, kChunk)).outcome, Outcome::kHit);
}

TEST_P(DiskTierTest, SavesThatNeedRoomWaitForTheIndexAndOthersDoNot) {
  Open(10 * kMiB);
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < 4; ++n) {
    frames.push_back(MakeFrame(n, 2 * kMiB, n == 0 ? std::nullopt : std::optional(n - 1)));
    ASSERT_EQ(Save(*tier_, frames.back()).outcome, Outcome::kHit);
  }
  Close();
  PrepareIo();
  io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict {
    return {.hold = call.what == What::kRead && call.bytes == 4096 && call.path.ends_with(".kvf")};
  });
  ASSERT_TRUE(TryOpen(10 * kMiB));
  ASSERT_EQ(io_->WaitForHeld(4), 4u);
  EXPECT_FALSE(tier_->stats().index_ready);
  EXPECT_EQ(tier_->stats().frames, 4u);
  for (const TestFrame& frame : frames) ExpectHit(*tier_, frame);
  EXPECT_EQ(Load(*tier_, MakeFrame(50, 5000)).reason, Reason::kNotFound);
  EXPECT_EQ(Save(*tier_, MakeFrame(10, kMiB)).outcome, Outcome::kHit) << "there is room";
  const auto waits = StartSave(*tier_, MakeFrame(11, 2 * kMiB));
  EXPECT_EQ(waits->Wait(0, std::chrono::steady_clock::now() + milliseconds(50)), nullptr);
  io_->Release();
  ASSERT_NE(waits->Wait(0, Soon()), nullptr);
  EXPECT_EQ(waits->Poll(0)->outcome, Outcome::kHit);
  EXPECT_TRUE(Eventually([&] { return tier_->stats().index_ready; }));
  EXPECT_TRUE(Has(*tier_, 0) && Has(*tier_, 1) && Has(*tier_, 2));
}

TEST_P(DiskTierTest, WhenEverythingIsBeingReadASaveIsDeclinedAsFull) {
  Open(6 * kMiB);
  std::vector<Loaded> reading;
  for (uint64_t n = 0; n < 2; ++n) ASSERT_EQ(Save(*tier_, MakeFrame(n, 2 * kMiB)).outcome, Outcome::kHit);
  io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict { return {.hold = call.what == What::kRead}; });
  for (uint64_t n = 0; n < 2; ++n) reading.push_back(StartLoad(*tier_, MakeFrame(n, 2 * kMiB).info));
  ASSERT_EQ(io_->WaitForHeld(4), 4u);
  const SaveResult result = Save(*tier_, MakeFrame(2, 2 * kMiB));
  EXPECT_EQ(result.outcome, Outcome::kDeclined);
  EXPECT_EQ(result.reason, Reason::kFull);
  io_->Release();
  for (const Loaded& loaded : reading) {
    ASSERT_NE(loaded.done->Wait(0, Soon()), nullptr);
    EXPECT_EQ(loaded.done->Poll(0)->outcome, Outcome::kHit);
  }
  EXPECT_TRUE(Eventually([&] { return Save(*tier_, MakeFrame(2, 2 * kMiB)).outcome == Outcome::kHit; }));
  const SaveResult too_large = Save(*tier_, MakeFrame(3, 6 * kMiB));
  EXPECT_EQ(too_large.outcome, Outcome::kDeclined);
  EXPECT_EQ(too_large.reason, Reason::kFull);
}

// More is begun as soon as a part of a large frame has been moved, or the disk would run dry at the end of each.
TEST_P(DiskTierTest, TheNextLoadBeginsBeforeALargeOneIsRead) {
  Open();
  const TestFrame large = MakeFrame(0, 20 * kMiB), small = MakeFrame(1, kMiB);
  for (const TestFrame* frame : {&large, &small}) ASSERT_EQ(Save(*tier_, *frame).outcome, Outcome::kHit);
  io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict {
    return {.hold = call.what == What::kRead && call.offset >= 10 * kMiB};
  });
  const Loaded held = StartLoad(*tier_, large.info);
  ASSERT_EQ(io_->WaitForHeld(10), 10u);
  ExpectHit(*tier_, small);
  EXPECT_EQ(held.done->Poll(0), nullptr);
  io_->Release();
  ASSERT_NE(held.done->Wait(0, Soon()), nullptr);
  EXPECT_EQ(held.done->Poll(0)->outcome, Outcome::kHit);
}

TEST_P(DiskTierTest, TheNextSaveBeginsBeforeALargeOneIsWritten) {
  Open();
  io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict {
    return {.hold = call.what == What::kWrite && call.offset >= 10 * kMiB};
  });
  const auto held = StartSave(*tier_, MakeFrame(0, 20 * kMiB));
  ASSERT_EQ(io_->WaitForHeld(10), 10u);
  EXPECT_EQ(Save(*tier_, MakeFrame(1, kMiB)).outcome, Outcome::kHit);
  EXPECT_EQ(held->Poll(0), nullptr);
  io_->Release();
  ASSERT_NE(held->Wait(0, Soon()), nullptr);
  EXPECT_EQ(held->Poll(0)->outcome, Outcome::kHit);
}

TEST_P(DiskTierTest, WhatWasUsedLastStaysAlsoAfterARestart) {
  Open();
  for (uint64_t n = 0; n < 8; ++n) ASSERT_EQ(Save(*tier_, MakeFrame(n, kMiB)).outcome, Outcome::kHit);
  Close();
  // Long ago, the last ones first.
  for (uint64_t n = 0; n < 8; ++n) {
    const timespec then{.tv_sec = static_cast<time_t>(1'000'000'000 + 100 * (8 - n))};
    const timespec times[2] = {then, then};
    ASSERT_EQ(utimensat(AT_FDCWD, Path(Key(n)).c_str(), times, 0), 0);
  }
  Open();
  ExpectHit(*tier_, MakeFrame(7, kMiB));
  Close();
  Open(4 * (kMiB + 4096));
  EXPECT_TRUE(Eventually([&] { return tier_->stats().frames == 4; }));
  for (const uint64_t n : {7, 0, 1, 2}) EXPECT_TRUE(Has(*tier_, n)) << n;
}

// ---- Recovery

TEST_P(DiskTierTest, WhatOthersPutThereIsLeftAloneAndToldOnce) {
  Open();
  const TestFrame frame = MakeFrame(1, 5000);
  ASSERT_EQ(Save(*tier_, frame).outcome, Outcome::kHit);
  Close();
  const std::string shard = directory_ + "/frames/" + frame.info.key.Hex().substr(0, 2);
  std::vector<std::string> foreign = {directory_ + "/notes.txt", directory_ + "/frames/readme", shard + "/core.1234",
                                      shard + "/" + std::string(64, 'g') + ".kvf", directory_ + "/tmp/mine"};
  for (const std::string& path : foreign) std::ofstream(path) << "x";
  // A frame of another key's directory.
  const std::string wrong =
      shard + "/" + std::string(frame.info.key.bytes[0] == 0 ? "11" : "00") + frame.info.key.Hex().substr(2) + ".kvf";
  fs::copy_file(Path(frame.info.key), wrong);
  foreign.push_back(wrong);
  std::ofstream(directory_ + "/tmp/7.tmp") << std::string(10000, 'x');

  std::mutex mutex;
  std::vector<std::string> lines;
  log::SetSink([&](log::Level, std::string_view line) {
    std::lock_guard lock(mutex);
    if (line.find("disk_foreign_files") != std::string_view::npos) lines.emplace_back(line);
  });
  Open();
  ExpectHit(*tier_, frame);
  Close();
  log::SetSink(nullptr);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_NE(lines[0].find("count=6"), std::string::npos) << lines[0];
  for (const std::string& path : foreign) EXPECT_TRUE(fs::exists(path)) << path;
  EXPECT_FALSE(fs::exists(directory_ + "/tmp/7.tmp")) << "left by a process that was killed";
}

TEST_P(DiskTierTest, ClosingDuringTheRecoveryTakesNothingAway) {
  Open();
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < 50; ++n) {
    frames.push_back(MakeFrame(n, 5000));
    StartSave(*tier_, frames.back());
  }
  Close();
  for (int round = 0; round < 5; ++round) {
    PrepareIo();
    io_->SetRule([](const FaultyDiskIo::Call& call) -> Verdict { return {.hold = call.what == What::kRead}; });
    ASSERT_TRUE(TryOpen());
    if (round % 2 == 0) {
      EXPECT_GT(io_->WaitForHeld(1), 0u);
    }
    tier_->Close(clock_.Now());
  }
  Open();
  ExpectExactly(frames);
}

// A save, erasure or load at any time of the recovery.
TEST_P(DiskTierTest, TheRecoveryDoesNotMindWhatHappensMeanwhile) {
  constexpr uint64_t kFrames = 200;
  Open();
  std::vector<std::shared_ptr<SaveBatch>> saves;
  for (uint64_t n = 0; n < kFrames; ++n) saves.push_back(StartSave(*tier_, MakeFrame(n, 4096)));
  for (const auto& save : saves) ASSERT_TRUE(save->WaitAll(Soon()));
  for (int round = 0; round < 5; ++round) {
    Close();
    ASSERT_TRUE(TryOpen());
    std::mt19937 random(static_cast<unsigned>(round));
    std::vector<std::thread> threads;
    for (int t = 0; t < 2; ++t) {
      threads.emplace_back([&, seed = random()] {
        std::mt19937 mine(seed);
        for (int i = 0; i < 200; ++i) {
          const uint64_t n = mine() % kFrames;
          switch (mine() % 3) {
            case 0: tier_->Erase({{Key(n)}}); break;
            case 1: EXPECT_EQ(Save(*tier_, MakeFrame(n, 4096)).outcome, Outcome::kHit); break;
            case 2: {
              const LoadResult result = Load(*tier_, MakeFrame(n, 4096));
              EXPECT_TRUE(result.outcome == Outcome::kHit || result.reason == Reason::kNotFound ||
                          result.reason == Reason::kMissing || result.reason == Reason::kIndexLoading)
                  << ReasonName(result.reason);
              break;
            }
          }
        }
      });
    }
    for (std::thread& t : threads) t.join();
    ASSERT_TRUE(Eventually([&] { return tier_->stats().index_ready; }));
    for (uint64_t n = 0; n < kFrames; ++n) ASSERT_EQ(Save(*tier_, MakeFrame(n, 4096)).outcome, Outcome::kHit);
    EXPECT_EQ(tier_->stats().quarantined, 0u);
    EXPECT_TRUE(Eventually([&] { return tier_->stats().bytes == kFrames * FrameBytes(4096); }));
    EXPECT_EQ(BytesOnDisk(directory_), tier_->stats().bytes);
  }
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < kFrames; ++n) frames.push_back(MakeFrame(n, 4096));
  ExpectExactly(frames);
}

TEST_P(DiskTierTest, ARandomSequenceOverManyLivesEqualsAMap) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  Open();
  std::map<uint64_t, TestFrame> model;
  for (int step = 0; step < 1000; ++step) {
    const uint64_t n = random() % 16;
    switch (random() % 8) {
      case 0:
      case 1: {
        const TestFrame frame = MakeFrame(n, 1 + random() % 30000);
        const SaveResult result = Save(*tier_, frame);
        ASSERT_EQ(result.outcome, Outcome::kHit);
        ASSERT_EQ(result.existed, model.contains(n));
        model.emplace(n, frame);
        break;
      }
      case 2:
        tier_->Erase({{Key(n)}});
        model.erase(n);
        break;
      case 3:
        if (!model.contains(n)) break;
        Flip(Path(Key(n)), 4096 + random() % model.at(n).payload.size());
        ASSERT_EQ(Load(*tier_, model.at(n)).reason, Reason::kDamaged);
        model.erase(n);
        break;
      case 4:
        if (random() % 8 != 0) break;
        Close();
        Open();
        break;
      default:
        if (model.contains(n)) {
          ASSERT_EQ(Load(*tier_, model.at(n), random() % 2 * 8).outcome, Outcome::kHit) << "step " << step;
        } else {
          ASSERT_EQ(Load(*tier_, MakeFrame(n, 4096)).reason, Reason::kNotFound);
        }
    }
    ASSERT_EQ(Has(*tier_, n), model.contains(n)) << "step " << step;
    ASSERT_EQ(tier_->stats().frames, model.size()) << "step " << step;
  }
  std::vector<TestFrame> frames;
  for (auto& [n, frame] : model) frames.push_back(std::move(frame));
  ExpectExactly(frames);
}

// ---- Other processes: this program again, with one test and its part in the environment.

constexpr const char* kChildDirectory = "TERRACE_DISK_TEST_DIRECTORY";
constexpr const char* kChildFirst = "TERRACE_DISK_TEST_FIRST";
constexpr const char* kChildKind = "TERRACE_DISK_TEST_KIND";

TestFrame LoopFrame(uint64_t n) {
  return MakeFrame(n, 1 + n * 77777 % (2 * kMiB), n % 10 == 0 ? std::nullopt : std::optional(n - 1));
}

// Saves frames for ever, eight at a time, and writes the number of each to stdout once it has settled.
TEST(DiskTierChild, SavesUntilKilled) {
  const char* directory = std::getenv(kChildDirectory);
  if (!directory) return;  // Not a child: the tests below start it.
  const auto files = RealFileIo();
  const SystemClock clock;
  Metrics metrics;
  auto tier = OpenDiskTier({.directory = directory,
                            .bytes_max = kPlenty,
                            .io = {.kind = static_cast<DiskIoKind>(std::strtol(std::getenv(kChildKind), nullptr, 10))}},
                           {.files = *files, .clock = clock, .metrics = metrics})
                  .value();
  std::deque<std::pair<uint64_t, std::shared_ptr<SaveBatch>>> saves;
  for (uint64_t n = std::strtoull(std::getenv(kChildFirst), nullptr, 10);; ++n) {
    saves.emplace_back(n, StartSave(*tier, LoopFrame(n)));
    if (saves.size() < 8) continue;
    const auto& [number, save] = saves.front();
    if (!save->WaitAll(Soon()) || save->Poll(0)->outcome != Outcome::kHit) std::_Exit(9);
    if (write(3, &number, sizeof number) != sizeof number) std::_Exit(8);
    saves.pop_front();
  }
}

struct Child {
  pid_t pid = -1;
  int from = -1;
};
Child Spawn(const std::string& directory, uint64_t first, DiskIoKind kind) {
  int ends[2];
  EXPECT_EQ(pipe2(ends, O_CLOEXEC), 0);
  std::vector<std::string> text = {std::string(kChildDirectory) + "=" + directory,
                                   std::string(kChildFirst) + "=" + std::to_string(first),
                                   std::string(kChildKind) + "=" + std::to_string(static_cast<int>(kind))};
  std::vector<char*> environment;
  for (char** e = environ; *e; ++e) environment.push_back(*e);
  for (std::string& t : text) environment.push_back(t.data());
  environment.push_back(nullptr);
  std::string program = fs::read_symlink("/proc/self/exe").string();
  std::string filter = "--gtest_filter=DiskTierChild.*";
  char* arguments[] = {program.data(), filter.data(), nullptr};
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, 1, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
  Child child;
  EXPECT_EQ(posix_spawn(&child.pid, program.c_str(), &actions, nullptr, arguments, environment.data()), 0);
  posix_spawn_file_actions_destroy(&actions);
  close(ends[1]);
  child.from = ends[0];
  return child;
}
// Numbers that it wrote until now, at least `count`.
std::vector<uint64_t> ReadNumbers(const Child& child, size_t count) {
  std::vector<uint64_t> numbers;
  uint64_t number;
  while (numbers.size() < count && read(child.from, &number, sizeof number) == sizeof number) numbers.push_back(number);
  return numbers;
}
std::vector<uint64_t> Kill(Child& child) {
  EXPECT_EQ(kill(child.pid, SIGKILL), 0);
  int status = 0;
  EXPECT_EQ(waitpid(child.pid, &status, 0), child.pid);
  EXPECT_TRUE(WIFSIGNALED(status)) << "it ended by itself: " << WEXITSTATUS(status);
  const auto rest = ReadNumbers(child, ~size_t{0});
  close(child.from);
  return rest;
}

TEST_P(DiskTierTest, WhatSettledSurvivesKillAndNothingElseIsLeft) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::set<uint64_t> settled;
  uint64_t first = 0;
  for (int round = 0; round < 5; ++round) {
    Child child = Spawn(directory_, first, GetParam());
    for (const uint64_t n : ReadNumbers(child, 1 + random() % 40)) settled.insert(n);
    for (const uint64_t n : Kill(child)) settled.insert(n);
    ASSERT_FALSE(settled.empty());
    Open();
    EXPECT_EQ(TempFiles(), 0u);
    uint64_t visible = 0;
    uint64_t bytes = 0;
    const uint64_t last = *settled.rbegin() + 8;
    for (uint64_t n = 0; n <= last; ++n) {
      if (!Has(*tier_, n)) {
        EXPECT_FALSE(settled.contains(n)) << "frame " << n << " was promised and is lost";
        continue;
      }
      ++visible;
      const TestFrame frame = LoopFrame(n);
      bytes += FrameBytes(frame.payload.size());
      ExpectHit(*tier_, frame);
    }
    EXPECT_EQ(tier_->stats().frames, visible);
    EXPECT_EQ(tier_->stats().bytes, bytes);
    EXPECT_EQ(tier_->stats().quarantined, 0u);
    Close();
    first = last + 1;
  }
}

TEST_P(DiskTierTest, ASecondProcessIsToldWhoHasTheDirectory) {
  Child child = Spawn(directory_, 0, GetParam());
  ASSERT_EQ(ReadNumbers(child, 1).size(), 1u);
  const auto opened = TryOpen();
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, Code::kUnavailable);
  EXPECT_NE(opened.error().what.find("process " + std::to_string(child.pid)), std::string::npos) << opened.error().what;
  Kill(child);
  EXPECT_TRUE(TryOpen()) << "its death frees the directory";
}

INSTANTIATE_TEST_SUITE_P(Kinds, DiskTierTest, testing::ValuesIn(DiskKinds()),
                         [](const auto& kind) { return DiskKindName(kind.param); });

}  // namespace
}  // namespace terrace
