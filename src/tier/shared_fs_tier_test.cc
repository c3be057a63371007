// What could go wrong here: part of a frame, or bytes that are not the ones saved, handed out; a frame visible before
// it is whole or lost after it was promised; trouble of the storage that leaves something behind, takes good frames
// away, never heals or turns into an endless retry; frames of one node that others never find; a lookup that touches
// the directory; a directory, queue or quarantine that grows without bound; a share that is missing, read-only or
// somebody else's and is not refused by name.
//
// Most tests run on one thread: jobs run where they are posted, the background (scan, journals) when the test steps the
// clock.
#include "tier/shared_fs_tier.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "base/hash.h"
#include "chunk/frame.h"
#include "tests/support/faulty_file_io.h"
#include "tier/shared_fs_dir.h"
#include "tier/shared_fs_journal.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using Io = FaultyFileIo;
using Verdict = FaultyFileIo::Verdict;

const Digest kSpace = Sha256Of("space");

// No test waits longer; none depends on how long it takes.
TimePoint Soon() { return std::chrono::steady_clock::now() + std::chrono::seconds(60); }

struct TestFrame {
  FrameInfo info;
  std::vector<std::byte> payload;
};

TestFrame MakeFrame(uint64_t n, uint64_t payload_bytes = 10000) {
  TestFrame frame{.info = {.space = kSpace,
                           .key = Sha256Of("key " + std::to_string(n)),
                           .parent = Sha256Of("key " + std::to_string(n - 1)),
                           .first_token = static_cast<uint32_t>(n * 256),
                           .token_count = 256,
                           .payload_bytes = payload_bytes},
                  .payload = {}};
  std::mt19937_64 random(n);
  std::vector<uint64_t> words(payload_bytes / 8 + 1);
  for (uint64_t& word : words) word = random();
  frame.payload.resize(payload_bytes);
  std::memcpy(frame.payload.data(), words.data(), payload_bytes);
  return frame;
}

std::string FramePath(const std::string& directory, const Digest& key) {
  return directory + "/frames/" + key.Hex().substr(0, 3) + "/" + key.Hex() + ".kvf";
}

// ---- One thread's world

class ManualClock final : public Clock {
 public:
  TimePoint Now() const override { return now_; }
  uint64_t WallNs() const override { return 1; }
  void Advance(milliseconds by) { now_ += by; }

 private:
  TimePoint now_ = TimePoint(std::chrono::hours(1000));
};

class InlineExecutor final : public Executor {
 public:
  bool Post(Task task) override {
    task();
    return true;
  }
  bool PostAfter(milliseconds, Task) override { return false; }
};

class StepExecutor final : public Executor {
 public:
  explicit StepExecutor(const Clock& clock) : clock_(clock) {}
  bool Post(Task task) override { return PostAfter(milliseconds(0), std::move(task)); }
  bool PostAfter(milliseconds delay, Task task) override {
    tasks_.emplace(clock_.Now() + delay, std::move(task));
    return true;
  }
  // One that is due. False if there is none.
  bool RunOne() {
    if (tasks_.empty() || tasks_.begin()->first > clock_.Now()) return false;
    Task task = std::move(tasks_.begin()->second);
    tasks_.erase(tasks_.begin());
    task();
    return true;
  }
  void RunDue() {
    while (RunOne()) {
    }
  }

 private:
  const Clock& clock_;
  std::multimap<TimePoint, Task> tasks_;
};

// A process with its tier.
struct Node {
  Node(const std::string& directory, FileIo& io, ManualClock& clock_in, SharedFsOptions options = {})
      : clock(clock_in), background(clock_in) {
    options.directory = directory;
    auto opened = OpenSharedFsTier(options, {.io = io,
                                             .clock = clock,
                                             .metrics = metrics,
                                             .load = &foreground,
                                             .save = &foreground,
                                             .background = &background});
    if (opened) {
      tier = *std::move(opened);
    } else {
      error = opened.error();
    }
  }

  SaveResult Save(const TestFrame& frame) {
    auto done = std::make_shared<SaveBatch>(1);
    tier->Save({{.info = frame.info, .payload = frame.payload}}, done);
    return *done->Wait(0, Soon());
  }
  void MustSave(const TestFrame& frame) {
    const SaveResult result = Save(frame);
    ASSERT_EQ(result.outcome, Outcome::kHit) << (result.error ? result.error->what : ReasonName(result.reason));
  }
  LoadResult Load(const TestFrame& frame) { return Load(frame.info.key, frame.info.space, frame.info.payload_bytes); }
  LoadResult Load(const Digest& key, const Digest& space, uint64_t payload_bytes) {
    loaded.assign(payload_bytes, std::byte{0xee});
    auto done = std::make_shared<LoadBatch>(1);
    tier->Load({{.key = key, .space = space, .into = loaded}}, TimePoint::max(), done);
    return *done->Wait(0, Soon());
  }
  void ExpectHit(const TestFrame& frame) {
    const LoadResult result = Load(frame);
    ASSERT_EQ(result.outcome, Outcome::kHit)
        << ReasonName(result.reason) << (result.error ? ", " + result.error->what : "");
    EXPECT_TRUE(loaded == frame.payload);
    EXPECT_EQ(result.info, frame.info);
    EXPECT_EQ(*result.hashes, HashSegments(frame.payload));
  }
  void ExpectMiss(const TestFrame& frame, Reason reason) {
    const LoadResult result = Load(frame);
    EXPECT_EQ(result.outcome, Outcome::kMiss);
    EXPECT_EQ(result.reason, reason) << ReasonName(result.reason);
  }
  bool Has(const TestFrame& frame) {
    uint8_t present = 0;
    tier->Contains({&frame.info.key, 1}, {&present, 1});
    return present != 0;
  }
  uint64_t failures(const std::string& operation) {
    return metrics.GetCounter("terrace_tier_failures_total", "", {{"tier", "shared_fs"}, {"operation", operation}})
        .value();
  }
  // Lets the background work as if `by` passed.
  void Step(milliseconds by = milliseconds(500)) {
    clock.Advance(by);
    background.RunDue();
  }

  ManualClock& clock;
  Metrics metrics;
  InlineExecutor foreground;
  StepExecutor background;
  std::unique_ptr<Tier> tier;
  std::optional<Error> error;
  std::vector<std::byte> loaded;
};

class SharedFsTier : public testing::Test {
 protected:
  SharedFsTier() {
    std::string pattern = testing::TempDir() + "/shared_fs_XXXXXX";
    home_ = mkdtemp(pattern.data());
    dir_ = home_ + "/share";
    fs::create_directory(dir_);
  }
  ~SharedFsTier() override {
    umount2(dir_.c_str(), MNT_DETACH);
    fs::remove_all(home_);
  }

  std::unique_ptr<Node> Open(SharedFsOptions options = {}) {
    auto node = std::make_unique<Node>(dir_, io_, clock_, options);
    EXPECT_TRUE(node->tier) << node->error->what;
    node->background.RunDue();
    return node;
  }
  // Every opening but the ones that must fail.
  std::string Refusal(const std::string& directory) {
    Node node(directory, io_, clock_);
    EXPECT_FALSE(node.tier);
    return node.error ? node.error->what : "";
  }
  std::set<std::string> Names(const std::string& directory) const {
    std::set<std::string> names;
    for (const auto& entry : fs::directory_iterator(dir_ + "/" + directory)) names.insert(entry.path().filename());
    return names;
  }
  std::string Path(const TestFrame& frame) const { return FramePath(dir_, frame.info.key); }
  std::string ReadFile(const std::string& path) const {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  void WriteFile(const std::string& path, std::string_view bytes) const {
    fs::create_directories(fs::path(path).parent_path());
    fs::remove(path);  // Written over, ext4 would wait for the disk.
    std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  // Fails every call of `op` on a path that contains `where`.
  void Fail(Io::Op op, const std::string& where, int os_error) {
    io_.SetRule([=](const Io::Call& call) -> Verdict {
      return {.os_error = call.op == op && call.path.find(where) != std::string::npos ? os_error : 0};
    });
  }

  std::string home_, dir_;
  FaultyFileIo io_;
  ManualClock clock_;
};

// ---- Opening

TEST_F(SharedFsTier, LaysTheDirectoryOut) {
  auto node = Open();
  EXPECT_EQ(Names(""), (std::set<std::string>{"terrace.format", "frames", "tmp", "nodes", "quarantine"}));
  EXPECT_TRUE(Names("tmp").empty());
  EXPECT_TRUE(node->tier->stats().index_ready);
  EXPECT_TRUE(node->tier->info().shared);
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  EXPECT_TRUE(fs::exists(Path(frame)));
  EXPECT_EQ(fs::file_size(Path(frame)), FrameBytes(frame.payload.size()));
  EXPECT_EQ(node->tier->stats().bytes, FrameBytes(frame.payload.size()));
  EXPECT_TRUE(Names("tmp").empty());
}

TEST_F(SharedFsTier, RefusesWhatIsNoShareWithTheRemedyInOneLine) {
  EXPECT_EQ(Refusal(home_ + "/none"),
            "shared directory " + home_ + "/none does not exist: create it, or mount the share there");
  EXPECT_FALSE(fs::exists(home_ + "/none"));
  WriteFile(home_ + "/file", "text");
  const std::string file = Refusal(home_ + "/file");
  EXPECT_NE(file.find("is not a directory"), std::string::npos) << file;
  Fail(Io::kMakeDir, "/frames", EACCES);
  const std::string denied = Refusal(dir_);
  EXPECT_NE(denied.find("give it read, write and search permission"), std::string::npos) << denied;
}

TEST_F(SharedFsTier, RefusesAnotherFormatByName) {
  WriteFile(dir_ + "/terrace.format", "terrace shared_fs\nversion 7\nsomething new\n");
  const std::string newer = Refusal(dir_);
  EXPECT_NE(newer.find("format version 7"), std::string::npos) << newer;
  EXPECT_EQ(Names(""), (std::set<std::string>{"terrace.format"})) << "nothing is made there";
  for (const char* text : {"", "terrace shared_fs\n", "terrace shared_fs\nversion x\n", "somebody's file"}) {
    WriteFile(dir_ + "/terrace.format", text);
    const std::string strange = Refusal(dir_);
    EXPECT_NE(strange.find("use another directory"), std::string::npos) << strange;
  }
}

TEST_F(SharedFsTier, RefusesAReadOnlyMount) {
  for (const bool laid_out : {false, true}) {
    if (mount("none", dir_.c_str(), "tmpfs", 0, "size=1m") != 0) GTEST_SKIP() << "may not mount";
    if (laid_out) Open().reset();
    ASSERT_EQ(mount("none", dir_.c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr), 0);
    const std::string error = Refusal(dir_);
    EXPECT_NE(error.find("is mounted read-only"), std::string::npos) << error;
    EXPECT_NE(error.find("mount it read-write"), std::string::npos) << error;
    ASSERT_EQ(umount2(dir_.c_str(), MNT_DETACH), 0);
  }
}

TEST_F(SharedFsTier, OpenedLazilyItJoinsWhenTheDirectoryAppears) {
  const TestFrame frame = MakeFrame(1);
  Open()->MustSave(frame);
  fs::rename(dir_, home_ + "/away");
  auto node = Open({.open_lazily = true});
  EXPECT_FALSE(node->tier->stats().available);
  node->Step(std::chrono::seconds(12));
  const std::string why = node->tier->stats().why;
  EXPECT_NE(why.find("does not exist"), std::string::npos) << why;
  EXPECT_NE(why.find("since 12 s"), std::string::npos) << why;
  node->ExpectMiss(frame, Reason::kUnavailable);
  const SaveResult save = node->Save(MakeFrame(2));
  EXPECT_EQ(save.outcome, Outcome::kDeclined);
  EXPECT_EQ(save.reason, Reason::kUnavailable);
  EXPECT_FALSE(fs::exists(dir_)) << "never made by us";

  fs::rename(home_ + "/away", dir_);
  node->Step();
  EXPECT_TRUE(node->tier->stats().available);
  EXPECT_EQ(node->tier->stats().why, "");
  node->ExpectHit(frame);
  node->MustSave(MakeFrame(2));
}

// ---- D7, D28: what a file may turn out to be

struct Damage {
  const char* name;
  Reason reason;
  std::function<std::string(std::string)> apply;  // To the bytes of a right frame of 10000 bytes.
};

std::vector<Damage> Damages() {
  const auto flip = [](size_t at) {
    return [at](std::string bytes) {
      bytes[at] = static_cast<char>(bytes[at] ^ 1);
      return bytes;
    };
  };
  const auto cut = [](size_t to) { return [to](std::string bytes) { return bytes.substr(0, to); }; };
  return {
      {"Empty", Reason::kEmpty, cut(0)},
      {"PartOfAHeader", Reason::kTruncated, cut(100)},
      {"HeaderOnly", Reason::kTruncated, cut(4096)},
      {"OneByteLess", Reason::kTruncated, [](std::string bytes) { return bytes.substr(0, bytes.size() - 1); }},
      {"OneByteMore", Reason::kDamaged, [](std::string bytes) { return bytes + '\0'; }},
      {"Garbage", Reason::kDamaged, [](std::string bytes) { return std::string(bytes.size(), 'x'); }},
      {"FlippedHeaderBit", Reason::kDamaged, flip(70)},
      {"FlippedFirstPayloadBit", Reason::kDamaged, flip(4096)},
      {"FlippedLastPayloadBit", Reason::kDamaged, flip(4096 + 9999)},
      {"FlippedPadding", Reason::kDamaged, flip(4096 + 10000)},
      {"FlippedLastPadding", Reason::kDamaged, flip(4096 + 12287)},
  };
}

TEST_F(SharedFsTier, ADamagedFrameIsAMissOnceSetAsideAndWrittenAnew) {
  auto node = Open();
  uint64_t n = 0;
  for (const Damage& damage : Damages()) {
    SCOPED_TRACE(damage.name);
    const TestFrame frame = MakeFrame(++n);
    node->MustSave(frame);
    WriteFile(Path(frame), damage.apply(ReadFile(Path(frame))));
    ASSERT_TRUE(node->Has(frame));
    node->ExpectMiss(frame, damage.reason);
    EXPECT_FALSE(node->Has(frame));
    EXPECT_FALSE(fs::exists(Path(frame)));
    EXPECT_EQ(node->tier->stats().quarantined, n);
    EXPECT_TRUE(Names("quarantine").contains(frame.info.key.Hex() + "." + ReasonName(damage.reason)));
    node->ExpectMiss(frame, Reason::kNotFound);
    EXPECT_EQ(node->tier->stats().quarantined, n) << "counted once";
    const SaveResult anew = node->Save(frame);
    EXPECT_EQ(anew.outcome, Outcome::kHit);
    EXPECT_FALSE(anew.existed);
    node->ExpectHit(frame);
  }
  EXPECT_EQ(node->tier->stats().frames, n);
}

TEST_F(SharedFsTier, AFrameOfAnotherModelInItsPlaceIsForeignAndSetAside) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  const TestFrame other = MakeFrame(2);
  node->MustSave(frame);
  node->MustSave(other);
  WriteFile(Path(frame), ReadFile(Path(other)));
  node->ExpectMiss(frame, Reason::kForeign);
  EXPECT_FALSE(node->Has(frame));
  EXPECT_EQ(node->tier->stats().quarantined, 1u);
  node->MustSave(frame);
  node->ExpectHit(frame);
  node->ExpectHit(other);
}

TEST_F(SharedFsTier, ARightFrameAskedForWronglyIsForeignAndStays) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  EXPECT_EQ(node->Load(frame.info.key, Sha256Of("other space"), 10000).reason, Reason::kForeign);
  EXPECT_EQ(node->Load(frame.info.key, kSpace, 9999).reason, Reason::kForeign);
  EXPECT_EQ(node->Load(frame.info.key, kSpace, 10001).reason, Reason::kForeign);
  EXPECT_EQ(node->tier->stats().quarantined, 0u);
  node->ExpectHit(frame);
}

// What is no file, and what it is that makes it.
std::vector<std::pair<const char*, std::function<void(const std::string&)>>> NoFiles() {
  return {
      {"directory", [](const std::string& path) { fs::create_directory(path); }},
      {"full directory",
       [](const std::string& path) {
         fs::create_directory(path);
         std::ofstream(path + "/somebody's") << "x";
       }},
      {"pipe", [](const std::string& path) { ASSERT_EQ(mkfifo(path.c_str(), 0600), 0); }},
      {"socket", [](const std::string& path) { ASSERT_EQ(mknod(path.c_str(), S_IFSOCK | 0600, 0), 0); }},
      {"link to nothing", [](const std::string& path) { fs::create_symlink("/nowhere/at/all", path); }},
      {"link to itself", [](const std::string& path) { fs::create_symlink(path, path); }},
      {"link to a directory", [](const std::string& path) { fs::create_symlink("/", path); }},
  };
}
bool IsFile(const std::string& path) { return fs::is_regular_file(fs::symlink_status(path)); }

TEST_F(SharedFsTier, SomethingThatIsNoFileInAFramesPlaceIsSetAsideOnceAndWrittenAnew) {
  auto node = Open({.quarantine_files_max = 1000});
  uint64_t n = 0, set_aside = 0;
  for (const auto& [name, make] : NoFiles()) {
    for (int again = 0; again < 2; ++again) {
      SCOPED_TRACE(name);
      const TestFrame frame = MakeFrame(++n);
      node->MustSave(frame);
      fs::remove(Path(frame));
      make(Path(frame));
      node->ExpectMiss(frame, Reason::kDamaged);
      EXPECT_EQ(node->tier->stats().quarantined, ++set_aside);
      node->ExpectMiss(frame, Reason::kNotFound);
      node->MustSave(frame);
      node->ExpectHit(frame);
      // Where the index knows of nothing.
      node->tier->Erase({&frame.info.key, 1});
      make(Path(frame));
      const SaveResult save = node->Save(frame);
      EXPECT_EQ(save.outcome, Outcome::kHit) << (save.error ? save.error->what : "");
      EXPECT_FALSE(save.existed);
      EXPECT_EQ(node->tier->stats().quarantined, ++set_aside);
      EXPECT_TRUE(IsFile(Path(frame)));
      node->ExpectHit(frame);
    }
  }
  EXPECT_TRUE(Names("tmp").empty());
}

TEST_F(SharedFsTier, TheScanSetsAsideWhatIsNoFile) {
  uint64_t n = 0;
  {
    auto writer = Open();
    for (const auto& [name, make] : NoFiles()) {
      writer->MustSave(MakeFrame(++n));
      fs::remove(Path(MakeFrame(n)));
      make(Path(MakeFrame(n)));
    }
  }
  fs::remove_all(dir_ + "/nodes");
  auto node = Open({.quarantine_files_max = 1});  // A directory is moved away all the same.
  EXPECT_EQ(node->tier->stats().quarantined, n);
  EXPECT_EQ(node->tier->stats().frames, 0u);
  for (; n > 0; --n) EXPECT_FALSE(fs::exists(fs::symlink_status(Path(MakeFrame(n))))) << n;
}

TEST_F(SharedFsTier, WhereLinksAreRefusedWhatIsNoFileIsReplacedToo) {
  Fail(Io::kLink, "", EPERM);
  auto node = Open();
  uint64_t n = 0;
  for (const auto& [name, make] : NoFiles()) {
    SCOPED_TRACE(name);
    const TestFrame frame = MakeFrame(++n);
    node->MustSave(frame);
    node->tier->Erase({&frame.info.key, 1});
    make(Path(frame));
    node->MustSave(frame);
    node->ExpectHit(frame);
  }
}

// A right header, but of a version that only later releases know.
std::string OfVersion(std::string bytes, uint32_t version) {
  bytes[8] = static_cast<char>(version);
  std::fill_n(bytes.begin() + 16, 16, '\0');
  const Hash128 checksum = Xxh3_128(std::as_bytes(std::span(bytes).first(4096)));
  std::memcpy(bytes.data() + 16, &checksum.low, 8);
  std::memcpy(bytes.data() + 24, &checksum.high, 8);
  return bytes;
}

TEST_F(SharedFsTier, AFrameOfALaterVersionIsLeftAlone) {
  const TestFrame frame = MakeFrame(1);
  auto node = Open();
  node->MustSave(frame);
  const std::string later = OfVersion(ReadFile(Path(frame)), 2);
  WriteFile(Path(frame), later);
  node->ExpectMiss(frame, Reason::kVersion);
  EXPECT_FALSE(node->Has(frame));
  const SaveResult save = node->Save(frame);
  EXPECT_EQ(save.outcome, Outcome::kDeclined);
  EXPECT_EQ(save.reason, Reason::kVersion);
  EXPECT_FALSE(Open()->Has(frame)) << "nor does a scan take it";
  EXPECT_EQ(ReadFile(Path(frame)), later);
  EXPECT_EQ(node->tier->stats().quarantined, 0u);
  EXPECT_TRUE(Names("tmp").empty());
}

TEST_F(SharedFsTier, TheScanSetsDamagedFramesAside) {
  uint64_t expected = 0;
  {
    auto writer = Open();
    for (const Damage& damage : Damages()) {
      const TestFrame frame = MakeFrame(++expected);
      writer->MustSave(frame);
      WriteFile(Path(frame), damage.apply(ReadFile(Path(frame))));
    }
    writer->MustSave(MakeFrame(100));
  }
  fs::remove_all(dir_ + "/nodes");  // Only the scan finds them.
  auto node = Open();
  // The scan does not read payloads: four of them show only in a load.
  EXPECT_EQ(node->tier->stats().quarantined, expected - 4);
  EXPECT_EQ(node->tier->stats().frames, 5u);
  node->ExpectHit(MakeFrame(100));
  for (uint64_t n = 1; n <= expected; ++n) EXPECT_EQ(node->Load(MakeFrame(n)).outcome, Outcome::kMiss);
  EXPECT_EQ(node->tier->stats().quarantined, expected);
  EXPECT_EQ(node->tier->stats().frames, 1u);
}

TEST_F(SharedFsTier, ASaveReplacesADamagedFrameThatTheIndexDoesNotHave) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  WriteFile(Path(frame), "");  // What a crashed host may leave of somebody's frame.
  EXPECT_FALSE(node->Has(frame));
  const SaveResult save = node->Save(frame);
  EXPECT_EQ(save.outcome, Outcome::kHit);
  EXPECT_FALSE(save.existed);
  EXPECT_EQ(node->tier->stats().quarantined, 1u);
  node->ExpectHit(frame);
}

TEST_F(SharedFsTier, QuarantineIsBoundedInFilesAndBytes) {
  auto node = Open({.quarantine_files_max = 3, .quarantine_bytes_max = 40000});
  for (uint64_t n = 1; n <= 10; ++n) {
    const TestFrame frame = MakeFrame(n);
    node->MustSave(frame);
    std::string bytes = ReadFile(Path(frame));
    bytes[5000] = static_cast<char>(bytes[5000] ^ 1);
    WriteFile(Path(frame), bytes);
    node->ExpectMiss(frame, Reason::kDamaged);
    EXPECT_FALSE(fs::exists(Path(frame)));
  }
  EXPECT_EQ(Names("quarantine").size(), 2u) << "16 KiB each";
  EXPECT_EQ(node->tier->stats().quarantined, 10u);
  for (uint64_t n = 11; n <= 20; ++n) {
    const TestFrame frame = MakeFrame(n);
    node->MustSave(frame);
    WriteFile(Path(frame), "");
    node->ExpectMiss(frame, Reason::kEmpty);
  }
  EXPECT_EQ(Names("quarantine").size(), 3u);
}

TEST_F(SharedFsTier, ADamagedFrameThatCannotBeMovedIsAMissOnce) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  WriteFile(Path(frame), "");
  io_.SetRule([](const Io::Call& call) -> Verdict {
    return {.os_error = call.op == Io::kRename || call.op == Io::kUnlink ? EROFS : 0};
  });
  node->ExpectMiss(frame, Reason::kEmpty);
  node->ExpectMiss(frame, Reason::kNotFound);
  EXPECT_EQ(node->tier->stats().quarantined, 1u);
}

// ---- D9 and other trouble in a load

TEST_F(SharedFsTier, AFrameThatVanishedIsMissingAfterOneListingAndOneLook) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  ASSERT_TRUE(node->Has(frame));
  fs::remove(Path(frame));
  const int opens = io_.calls(Io::kOpen);
  const int lists = io_.calls(Io::kList);
  node->ExpectMiss(frame, Reason::kMissing);
  EXPECT_EQ(io_.calls(Io::kOpen) - opens, 1);
  EXPECT_EQ(io_.calls(Io::kList) - lists, 1);
  EXPECT_FALSE(node->Has(frame));
  const int all = io_.all_calls();
  node->ExpectMiss(frame, Reason::kNotFound);
  EXPECT_EQ(io_.all_calls(), all) << "a name that the index does not have is never probed";
}

// An NFS client that looked before the frame was published goes on saying so until the directory is listed.
TEST_F(SharedFsTier, ARememberedAbsenceIsCuredByTheListing) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  bool listed = false;
  io_.SetRule([&](const Io::Call& call) -> Verdict {
    if (call.op == Io::kList) listed = true;
    return {.os_error = call.op == Io::kOpen && call.path == Path(frame) && !listed ? ENOENT : 0};
  });
  node->ExpectHit(frame);
}

TEST_F(SharedFsTier, ARememberedAbsenceOfADirectoryIsCuredByListingTheOneAbove) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  bool cured = false;
  const std::string directory = "/frames/" + frame.info.key.Hex().substr(0, 3);
  io_.SetRule([&](const Io::Call& call) -> Verdict {
    if (call.op == Io::kList && call.path.ends_with("/frames")) cured = true;
    return {.os_error = call.path.find(directory) != std::string::npos && !cured ? ENOENT : 0};
  });
  node->ExpectHit(frame);
  EXPECT_TRUE(cured);
}

TEST_F(SharedFsTier, ASaveFindsTheFrameOfAnotherNodeThatItsClientBelievesAbsent) {
  auto one = Open();
  auto two = Open();
  const TestFrame frame = MakeFrame(1);
  one->MustSave(frame);
  bool listed = false;
  io_.SetRule([&](const Io::Call& call) -> Verdict {
    if (call.op == Io::kList) listed = true;
    return {.os_error = call.op == Io::kOpen && call.path == Path(frame) && !listed ? ENOENT : 0};
  });
  const SaveResult save = two->Save(frame);
  EXPECT_EQ(save.outcome, Outcome::kHit) << (save.error ? save.error->what : "");
  EXPECT_TRUE(save.existed);
  EXPECT_TRUE(listed);
}

// A client with a delegation reads terrace.format, and knows its directories, without the server.
TEST_F(SharedFsTier, AServerThatIsGoneIsNoticedThoughTheClientAnswersForIt) {
  auto node = Open();
  Fail(Io::kFreeSpace, "", EIO);
  node->Step();
  EXPECT_FALSE(node->tier->stats().available);
  io_.SetRule({});
  node->Step();
  EXPECT_TRUE(node->tier->stats().available);
}

TEST_F(SharedFsTier, AStaleHandleIsTriedOnceMore) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  for (const auto op : {Io::kOpen, Io::kFileStat, Io::kRead}) {
    int stale = 1;
    io_.SetRule(
        [&](const Io::Call& call) -> Verdict { return {.os_error = call.op == op && stale-- > 0 ? ESTALE : 0}; });
    node->ExpectHit(frame);
  }
  Fail(Io::kRead, ".kvf", ESTALE);
  const int opens = io_.calls(Io::kOpen);
  EXPECT_EQ(node->Load(frame).outcome, Outcome::kFailed);
  EXPECT_EQ(io_.calls(Io::kOpen) - opens, 2);
}

TEST_F(SharedFsTier, AnIoErrorFailsTheLoadAndKeepsTheFrame) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  uint64_t failures = 0;
  for (const auto op : {Io::kOpen, Io::kFileStat, Io::kRead}) {
    Fail(op, ".kvf", EIO);
    const LoadResult result = node->Load(frame);
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    EXPECT_EQ(result.reason, Reason::kUnavailable);
    ASSERT_TRUE(result.error);
    EXPECT_EQ(result.error->os_error, EIO);
    EXPECT_NE(result.error->what.find(frame.info.key.Hex()), std::string::npos);
    EXPECT_EQ(node->failures("load"), ++failures);
    EXPECT_TRUE(node->Has(frame));
  }
  io_.SetRule(nullptr);
  node->ExpectHit(frame);
  EXPECT_EQ(node->tier->stats().quarantined, 0u);
}

TEST_F(SharedFsTier, AFrameThatCannotBeReadMakesWayForTheNextSave) {
  auto node = Open();
  uint64_t n = 0;
  for (const auto op : {Io::kOpen, Io::kRead}) {
    for (const uint64_t offset : {0, 4096}) {
      const TestFrame frame = MakeFrame(++n);
      node->MustSave(frame);
      const std::string bad = FramePath("", frame.info.key);
      io_.SetRule([=](const Io::Call& call) -> Verdict {
        const bool it = call.op == op && call.path.ends_with(bad) && (op == Io::kOpen || call.offset == offset);
        return {.os_error = it ? EIO : 0};
      });
      EXPECT_EQ(node->Load(frame).outcome, Outcome::kFailed);
      const SaveResult save = node->Save(frame);
      EXPECT_EQ(save.outcome, Outcome::kHit) << (save.error ? save.error->what : "");
      EXPECT_FALSE(save.existed);
      io_.SetRule(nullptr);
      EXPECT_EQ(node->tier->stats().quarantined, n);
      EXPECT_TRUE(Names("quarantine").contains(frame.info.key.Hex() + ".unavailable"));
      node->ExpectHit(frame);
      EXPECT_EQ(node->tier->stats().frames, n);
    }
  }
  // The scan could not read it either, so the index does not have it.
  const TestFrame frame = MakeFrame(1);
  Fail(Io::kRead, FramePath("", frame.info.key), EIO);
  fs::remove_all(dir_ + "/nodes");
  auto other = Open();
  EXPECT_FALSE(other->Has(frame));
  EXPECT_EQ(other->Save(frame).outcome, Outcome::kFailed) << "one error says little";
  const SaveResult save = other->Save(frame);
  EXPECT_EQ(save.outcome, Outcome::kHit) << (save.error ? save.error->what : "");
  EXPECT_FALSE(save.existed);
  io_.SetRule(nullptr);
  other->ExpectHit(frame);
}

TEST_F(SharedFsTier, AFrameThatCanBeReadAgainOrIsNotToBlameStays) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  Fail(Io::kRead, ".kvf", EIO);
  EXPECT_EQ(node->Load(frame).outcome, Outcome::kFailed);
  io_.SetRule(nullptr);
  const SaveResult again = node->Save(frame);
  EXPECT_EQ(again.outcome, Outcome::kHit);
  EXPECT_TRUE(again.existed);
  // Nothing works: what is there is not touched.
  io_.SetRule([](const Io::Call& call) -> Verdict {
    return {.os_error = call.op == Io::kRead || call.op == Io::kWrite ? EIO : 0};
  });
  EXPECT_EQ(node->Load(frame).outcome, Outcome::kFailed);
  EXPECT_EQ(node->Save(frame).outcome, Outcome::kFailed);
  io_.SetRule(nullptr);
  EXPECT_EQ(node->tier->stats().quarantined, 0u);
  node->ExpectHit(frame);
}

TEST_F(SharedFsTier, LargePayloadsAreVerifiedSegmentBySegment) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1, (5 << 20) + 17);
  node->MustSave(frame);
  node->ExpectHit(frame);
  for (const size_t at : {size_t{0}, size_t{1} << 20, (size_t{5} << 20) - 1, (size_t{5} << 20) + 16}) {
    std::string bytes = ReadFile(Path(frame));
    bytes[4096 + at] = static_cast<char>(bytes[4096 + at] ^ 0x80);
    WriteFile(Path(frame), bytes);
    node->ExpectMiss(frame, Reason::kDamaged);
    node->MustSave(frame);
  }
}

TEST_F(SharedFsTier, AnItemNotBegunByTheDeadlineOrCancelledIsNotRead) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  std::vector<std::byte> into(10000);
  const int all = io_.all_calls();
  auto late = std::make_shared<LoadBatch>(1);
  node->tier->Load({{.key = frame.info.key, .space = kSpace, .into = into}}, clock_.Now(), late);
  EXPECT_EQ(late->Poll(0)->reason, Reason::kTimeout);
  auto cancelled = std::make_shared<LoadBatch>(1);
  cancelled->Cancel();
  node->tier->Load({{.key = frame.info.key, .space = kSpace, .into = into}}, TimePoint::max(), cancelled);
  EXPECT_EQ(cancelled->Poll(0)->reason, Reason::kCancelled);
  EXPECT_EQ(io_.all_calls(), all);
}

// ---- D13: trouble in a save

TEST_F(SharedFsTier, AWriteThatFailsAtAnyByteLeavesNothing) {
  auto node = Open();
  const TestFrame good = MakeFrame(1);
  node->MustSave(good);
  uint64_t failures = 0;
  const uint64_t bytes = FrameBytes(10000);
  for (const int os_error : {ENOSPC, EDQUOT, EIO}) {
    for (const uint64_t n : {uint64_t{0}, uint64_t{1}, uint64_t{4096}, bytes / 2, bytes - 1}) {
      SCOPED_TRACE(std::to_string(os_error) + " at byte " + std::to_string(n));
      io_.SetRule([&](const Io::Call& call) -> Verdict {
        if (call.op != Io::kWrite || call.offset + call.bytes <= n) return {};
        return {os_error, n};
      });
      const TestFrame frame = MakeFrame(2);
      const SaveResult result = node->Save(frame);
      EXPECT_EQ(result.outcome, Outcome::kFailed);
      EXPECT_EQ(result.reason, os_error == EIO ? Reason::kUnavailable : Reason::kFull);
      EXPECT_EQ(result.error->os_error, os_error);
      EXPECT_EQ(node->failures("save"), ++failures);
      EXPECT_FALSE(node->Has(frame));
      EXPECT_FALSE(fs::exists(Path(frame)));
      EXPECT_TRUE(Names("tmp").empty());
      node->ExpectHit(good);
    }
  }
  io_.SetRule(nullptr);
  EXPECT_EQ(node->tier->stats().frames, 1u);
  node->MustSave(MakeFrame(2));
  node->ExpectHit(MakeFrame(2));
}

TEST_F(SharedFsTier, AnyOtherStepThatFailsLeavesNothing) {
  auto node = Open();
  uint64_t failures = 0;
  // fdatasync and close are where NFS says that the server is full.
  for (const auto op : {Io::kOpen, Io::kSync, Io::kClose, Io::kLink, Io::kMakeDir}) {
    SCOPED_TRACE(op);
    const TestFrame frame = MakeFrame(100 + op);
    io_.SetRule([&](const Io::Call& call) -> Verdict { return {.os_error = call.op == op ? ENOSPC : 0}; });
    const SaveResult result = node->Save(frame);
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    EXPECT_EQ(result.reason, Reason::kFull);
    EXPECT_EQ(node->failures("save"), ++failures);
    EXPECT_FALSE(node->Has(frame));
    EXPECT_FALSE(fs::exists(Path(frame)));
    EXPECT_TRUE(Names("tmp").empty());
    io_.SetRule(nullptr);
    node->MustSave(frame);
    node->ExpectHit(frame);
  }
}

TEST_F(SharedFsTier, WhereLinksAreRefusedFramesArePublishedByRename) {
  for (const int os_error : {EPERM, EOPNOTSUPP, ENOSYS}) {
    auto node = Open();
    io_.SetRule([&](const Io::Call& call) -> Verdict { return {.os_error = call.op == Io::kLink ? os_error : 0}; });
    const int links = io_.calls(Io::kLink);
    const TestFrame first = MakeFrame(10 * static_cast<uint64_t>(os_error));
    const TestFrame second = MakeFrame(10 * static_cast<uint64_t>(os_error) + 1);
    node->MustSave(first);
    node->MustSave(second);
    EXPECT_EQ(io_.calls(Io::kLink) - links, 1) << "remembered";
    node->ExpectHit(first);
    node->ExpectHit(second);
    EXPECT_TRUE(Names("tmp").empty());
    // Somebody else's frame, not in our index, is kept.
    auto other = Open();
    const TestFrame theirs = MakeFrame(10 * static_cast<uint64_t>(os_error) + 2);
    other->MustSave(theirs);
    const SaveResult result = node->Save(theirs);
    EXPECT_EQ(result.outcome, Outcome::kHit);
    EXPECT_TRUE(result.existed);
    EXPECT_TRUE(Names("tmp").empty());
    io_.SetRule(nullptr);
  }
}

TEST_F(SharedFsTier, ASaveOnAFullFileSystemFailsAndHealsWhenThereIsRoom) {
  if (mount("none", dir_.c_str(), "tmpfs", 0, "size=4m") != 0) GTEST_SKIP() << "may not mount";
  auto node = Open();
  std::vector<TestFrame> saved;
  for (uint64_t n = 1;; ++n) {
    ASSERT_LT(n, 10u) << "4 MiB hold no 10 of these";
    const TestFrame frame = MakeFrame(n, 1 << 20);
    const SaveResult result = node->Save(frame);
    if (result.outcome == Outcome::kHit) {
      saved.push_back(frame);
      continue;
    }
    EXPECT_EQ(result.outcome, Outcome::kFailed);
    EXPECT_EQ(result.reason, Reason::kFull);
    EXPECT_TRUE(Names("tmp").empty());
    break;
  }
  ASSERT_FALSE(saved.empty());
  for (const TestFrame& frame : saved) node->ExpectHit(frame);
  EXPECT_EQ(node->tier->stats().frames, saved.size());
  EXPECT_TRUE(Open()->Has(saved.front())) << "a full share can be read by those who come now";
  node->tier->Erase({&saved.front().info.key, 1});
  node->MustSave(MakeFrame(20, 1 << 20));
}

// What the guard above asks while saves are stopped.
TEST_F(SharedFsTier, AProbeSaysWhetherASaveWouldBeTakenAndLeavesNothing) {
  if (mount("none", dir_.c_str(), "tmpfs", 0, "size=4m") != 0) GTEST_SKIP() << "may not mount";
  auto node = Open();
  EXPECT_TRUE(node->tier->ProbeSave(2 << 20));
  WriteFile(dir_ + "/filler", std::string(3 << 20, 'x'));
  const auto full = node->tier->ProbeSave(2 << 20);
  ASSERT_FALSE(full);
  EXPECT_EQ(full.error().code, Code::kFull);
  fs::remove(dir_ + "/filler");
  for (const auto op : {Io::kOpen, Io::kWrite, Io::kSync, Io::kFreeSpace}) {
    Fail(op, dir_, EIO);
    EXPECT_FALSE(node->tier->ProbeSave(2 << 20));
    io_.SetRule(nullptr);
    EXPECT_TRUE(node->tier->ProbeSave(2 << 20));
  }
  EXPECT_TRUE(Names("tmp").empty());
  Fail(Io::kFreeSpace, dir_, EIO);
  node->Step();
  io_.SetRule(nullptr);
  const auto away = node->tier->ProbeSave(2 << 20);
  ASSERT_FALSE(away) << "nothing is written to what may not be the share";
  EXPECT_EQ(away.error().code, Code::kUnavailable);
}

// ---- D8, D10: visibility and lookups

TEST_F(SharedFsTier, AReaderSeesASlowlyWrittenFrameWholeOrNotAtAll) {
  auto writer = Open();
  auto reader = Open();
  const TestFrame frame = MakeFrame(1, 64 << 20);
  int looks = 0;
  // At every step of the writer the reader polls and, if it finds the frame, loads it.
  io_.SetRule([&](const Io::Call& call) -> Verdict {
    if (call.op != Io::kWrite && call.op != Io::kSync && call.op != Io::kClose && call.op != Io::kLink) return {};
    if (call.path.find("/nodes/") != std::string::npos) return {};
    ++looks;
    reader->Step();
    EXPECT_FALSE(reader->Has(frame));
    EXPECT_FALSE(fs::exists(Path(frame)));
    reader->ExpectMiss(frame, Reason::kNotFound);
    return {};
  });
  writer->MustSave(frame);
  io_.SetRule(nullptr);
  EXPECT_GE(looks, 16 + 3) << "pieces of 4 MiB, header, fdatasync, link";
  writer->Step();
  reader->Step();
  reader->ExpectHit(frame);
}

// Frames as they would be on the medium, without 800 MB of files.
class ManyFramesFileIo final : public FaultyFileIo {
 public:
  explicit ManyFramesFileIo(uint64_t count) {
    for (uint64_t n = 0; n < count; ++n) {
      keys_.push_back(Sha256Of("key " + std::to_string(n)));
      directories_[keys_.back().Hex().substr(0, 3)].push_back(keys_.back());
    }
  }
  const std::map<std::string, std::vector<Digest>>& directories() const { return directories_; }
  const std::vector<Digest>& keys() const { return keys_; }

  Result<std::vector<std::string>> List(const std::string& path) override {
    if (path.ends_with("/frames")) {
      std::vector<std::string> names;
      for (const auto& [name, keys] : directories_) names.push_back(name);
      return names;
    }
    const size_t at = path.find("/frames/");
    if (at == std::string::npos) return FaultyFileIo::List(path);
    (void)Ask({kList, path});
    std::vector<std::string> names;
    for (const Digest& key : directories_.at(path.substr(at + 8))) names.push_back(key.Hex() + ".kvf");
    return names;
  }
  Result<void> Unlink(const std::string& path) override {
    const size_t at = path.find("/frames/");
    if (at == std::string::npos) return FaultyFileIo::Unlink(path);
    (void)Ask({kUnlink, path});
    unlinks_ += std::erase(directories_.at(path.substr(at + 8, 3)), *Digest::FromHex(path.substr(at + 12, 64)));
    return {};
  }
  size_t unlinks() const { return unlinks_; }
  Result<FileStat> Stat(const std::string& path) override {
    if (path.find("/frames/") == std::string::npos) return FaultyFileIo::Stat(path);
    return FileStat{.bytes = FrameBytes(100), .is_file = true};
  }
  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode, uint32_t permissions) override {
    if (path.find("/frames/") == std::string::npos) return FaultyFileIo::Open(path, mode, permissions);
    (void)Ask({kOpen, path, mode});
    return std::make_unique<Header>(*Digest::FromHex(path.substr(path.size() - 68, 64)));
  }

 private:
  struct Header final : public File {
    explicit Header(const Digest& key_in) : key(key_in) {}
    Result<size_t> ReadAt(uint64_t, std::span<std::byte> into) override {
      static constexpr uint64_t kHash = 0;
      const FrameHeader header = EncodeFrameHeader({.key = key, .payload_bytes = 100}, 0, std::span(&kHash, 1));
      std::memcpy(into.data(), header.data(), header.size());
      return header.size();
    }
    Result<void> WriteAt(uint64_t, std::span<const std::byte>) override { return Fail(Code::kIo, "no", EROFS); }
    Result<void> Append(std::span<const std::byte>) override { return Fail(Code::kIo, "no", EROFS); }
    Result<void> Sync() override { return {}; }
    Result<FileStat> Stat() override { return FileStat{.bytes = FrameBytes(100), .is_file = true}; }
    Result<void> Close() override { return {}; }
    Digest key;
  };
  std::map<std::string, std::vector<Digest>> directories_;
  std::vector<Digest> keys_;
  size_t unlinks_ = 0;  // Of frames that were there.
};

TEST_F(SharedFsTier, AHundredThousandFramesFanOutAndLookupsReadNoDirectory) {
  constexpr uint64_t kFrames = 100000;
  ManyFramesFileIo io(kFrames);
  EXPECT_LE(io.directories().size(), 4096u);
  for (const auto& [name, keys] : io.directories()) ASSERT_LE(keys.size(), 4096u) << name;

  Node node(dir_, io, clock_);
  node.background.RunDue();
  ASSERT_TRUE(node.tier->stats().index_ready);
  EXPECT_EQ(node.tier->stats().frames, kFrames);
  EXPECT_EQ(node.tier->stats().bytes, kFrames * FrameBytes(100));
  EXPECT_LE(io.calls(Io::kList), 4096 + 10) << "one directory at a time, each once";

  std::vector<Digest> keys = io.keys();
  for (uint64_t n = 0; n < kFrames; ++n) keys.push_back(Sha256Of("unknown " + std::to_string(n)));
  std::vector<uint8_t> present(keys.size());
  const int all = io.all_calls();
  node.tier->Contains(keys, present);
  EXPECT_EQ(io.all_calls(), all);
  EXPECT_EQ(std::count(present.begin(), present.begin() + kFrames, 1), kFrames);
  EXPECT_EQ(std::count(present.begin() + kFrames, present.end(), 1), 0);
}

TEST_F(SharedFsTier, AHundredThousandFramesAreHalvedInSmallStepsWithoutAListing) {
  constexpr uint64_t kFrames = 100000;
  ManyFramesFileIo io(kFrames);
  SharedFsOptions options;
  options.bounds.bytes_max = kFrames / 2 * FrameBytes(100);
  Node node(dir_, io, clock_, options);
  node.background.RunDue();
  ASSERT_TRUE(node.tier->stats().index_ready);
  EXPECT_EQ(node.tier->stats().frames, kFrames);
  const int listings = io.calls(Io::kList);
  int most_a_step = 0, polls = 0;
  const auto over = [&] { return node.tier->stats().bytes > node.tier->stats().bytes_max; };
  while (over() && ++polls < 10000) {
    clock_.Advance(milliseconds(10));
    const int before = io.calls(Io::kUnlink);
    // A step and whatever else is due: other work of this thread comes between two of them.
    if (node.background.RunOne()) most_a_step = std::max(most_a_step, io.calls(Io::kUnlink) - before);
  }
  EXPECT_FALSE(over());
  EXPECT_GT(io.unlinks(), kFrames / 2);
  EXPECT_LT(io.unlinks(), kFrames * 5 / 8) << "no more than needed";
  EXPECT_LE(most_a_step, 64 + 2) << "and a lease, a temporary";
  EXPECT_LE(io.calls(Io::kList), listings + 2 * polls) << "journals and temporaries, no frames";
}

// ---- Discovery

TEST_F(SharedFsTier, NodesFindEachOthersFramesWithinASecond) {
  auto a = Open();
  auto b = Open();
  a->MustSave(MakeFrame(1));
  b->MustSave(MakeFrame(2));
  const auto second = [&](Node& node) { node.Step(milliseconds(0)); };
  for (int i = 0; i < 10; ++i) {
    clock_.Advance(milliseconds(100));
    second(*a);
    second(*b);
  }
  a->ExpectHit(MakeFrame(2));
  b->ExpectHit(MakeFrame(1));
  EXPECT_EQ(a->tier->stats().frames, 2u);
  EXPECT_EQ(a->tier->stats().bytes, b->tier->stats().bytes);
}

TEST_F(SharedFsTier, TheFirstRecordGoesOutAtOnceAndTheRestInBatches) {
  auto node = Open();
  const auto journal_writes = [&] {
    node->Step(milliseconds(0));
    uint64_t bytes = 0;
    for (const std::string& name : Names("nodes")) bytes += fs::file_size(dir_ + "/nodes/" + name);
    return bytes / kJournalRecordBytes;
  };
  node->Step();
  node->MustSave(MakeFrame(1));
  EXPECT_EQ(journal_writes(), 1u);
  node->MustSave(MakeFrame(2));
  node->MustSave(MakeFrame(3));
  EXPECT_EQ(journal_writes(), 1u);
  clock_.Advance(milliseconds(200));
  EXPECT_EQ(journal_writes(), 3u);
}

TEST_F(SharedFsTier, NodesForgetWhatAnotherTookAway) {
  auto a = Open();
  auto b = Open();
  for (uint64_t n = 1; n <= 2; ++n) a->MustSave(MakeFrame(n));
  a->Step();
  b->Step();
  ASSERT_TRUE(b->Has(MakeFrame(1)) && b->Has(MakeFrame(2)));
  const Digest erased = MakeFrame(1).info.key;
  a->tier->Erase({&erased, 1});
  WriteFile(Path(MakeFrame(2)), "");
  a->ExpectMiss(MakeFrame(2), Reason::kEmpty);
  a->Step();
  b->Step();
  EXPECT_FALSE(b->Has(MakeFrame(1)));
  EXPECT_FALSE(b->Has(MakeFrame(2)));
}

// `rm -r frames/*` under a living instance: what RAM has is written there again once the tier knows.
TEST_F(SharedFsTier, FramesRemovedByHandAreNoticedLongBeforeTheNextScan) {
  auto node = Open({.scan_interval = std::chrono::hours(1)});
  for (uint64_t n = 1; n <= 20; ++n) node->MustSave(MakeFrame(n));
  node->Step(std::chrono::minutes(2));
  for (uint64_t n = 1; n <= 20; ++n) ASSERT_TRUE(node->Has(MakeFrame(n)));
  for (const auto& entry : fs::directory_iterator(dir_ + "/frames")) fs::remove_all(entry.path());
  for (int i = 0; i < 24; ++i) node->Step();
  EXPECT_EQ(node->tier->stats().frames, 0u);
  node->MustSave(MakeFrame(1));
  node->ExpectHit(MakeFrame(1));
}

TEST_F(SharedFsTier, WhoMissesAFrameTellsTheOthersThatItIsGone) {
  auto has_it_in_ram = Open();
  auto asks = Open();
  const TestFrame frame = MakeFrame(1);
  has_it_in_ram->MustSave(frame);
  has_it_in_ram->Step();
  asks->Step();
  ASSERT_TRUE(asks->Has(frame));
  fs::remove(Path(frame));
  asks->ExpectMiss(frame, Reason::kMissing);
  asks->Step();
  has_it_in_ram->Step();
  EXPECT_FALSE(has_it_in_ram->Has(frame));
  const SaveResult save = has_it_in_ram->Save(frame);
  EXPECT_EQ(save.outcome, Outcome::kHit);
  EXPECT_FALSE(save.existed);
  has_it_in_ram->Step();
  asks->Step();
  asks->ExpectHit(frame);
}

TEST_F(SharedFsTier, ALateWordOfARemovalDoesNotHideAFrameWrittenAnew) {
  auto one = Open();
  auto two = Open();
  const TestFrame frame = MakeFrame(1);
  one->MustSave(frame);
  one->Step();
  two->Step();
  Fail(Io::kWrite, "/nodes/", EIO);  // What it removes, nobody hears of for now.
  one->tier->Erase({&frame.info.key, 1});
  two->ExpectMiss(frame, Reason::kMissing);
  two->MustSave(frame);
  io_.SetRule({});
  one->Step();
  two->Step();
  EXPECT_TRUE(two->Has(frame));
  two->ExpectHit(frame);
}

TEST_F(SharedFsTier, CloseFlushesTheJournal) {
  auto reader = Open();
  auto writer = Open();
  writer->Step();
  writer->MustSave(MakeFrame(1));
  writer->MustSave(MakeFrame(2));
  EXPECT_TRUE(writer->tier->Close(TimePoint::max()).clean);
  reader->Step();
  EXPECT_TRUE(reader->Has(MakeFrame(1)));
  EXPECT_TRUE(reader->Has(MakeFrame(2)));
}

TEST_F(SharedFsTier, FramesOfAWriterThatDiedBeforeItsJournalAreFoundByTheScanAndByASave) {
  auto node = Open();
  {
    auto writer = Open();
    Fail(Io::kOpen, "/nodes/", EIO);
    writer->MustSave(MakeFrame(1));
    writer->Step();
    writer.reset();
    io_.SetRule(nullptr);
  }
  node->Step();
  EXPECT_FALSE(node->Has(MakeFrame(1)));
  EXPECT_TRUE(Open()->Has(MakeFrame(1)));
  const SaveResult save = node->Save(MakeFrame(1));
  EXPECT_EQ(save.outcome, Outcome::kHit);
  EXPECT_TRUE(save.existed);
  node->ExpectHit(MakeFrame(1));
}

TEST_F(SharedFsTier, ALaterScanFindsWhatNoJournalToldOfAndWhatCouldNotBeRead) {
  auto node = Open();
  {
    auto writer = Open();
    Fail(Io::kOpen, "/nodes/", EIO);
    for (uint64_t n = 1; n <= 3; ++n) writer->MustSave(MakeFrame(n));
    writer.reset();
  }
  const std::string second = MakeFrame(2).info.key.Hex();
  Fail(Io::kOpen, second, EIO);
  auto late = Open();
  Fail(Io::kList, "/frames/" + MakeFrame(3).info.key.Hex().substr(0, 3), EIO);
  late->Step(std::chrono::minutes(11));
  EXPECT_TRUE(late->Has(MakeFrame(2)));
  io_.SetRule(nullptr);
  node->Step(std::chrono::minutes(11));
  for (uint64_t n = 1; n <= 3; ++n) node->ExpectHit(MakeFrame(n));
  EXPECT_EQ(node->tier->stats().frames, 3u);
}

TEST_F(SharedFsTier, WhatIsPublishedDuringTheScanIsNotLost) {
  {
    auto before = Open();
    for (uint64_t n = 0; n < 40; ++n) before->MustSave(MakeFrame(n, 10));
  }
  fs::remove_all(dir_ + "/nodes");
  auto writer = Open();
  Node node(dir_, io_, clock_);
  uint64_t n = 1000;
  // The scan in single steps; between any two the writer publishes.
  while (!node.tier->stats().index_ready) {
    ASSERT_TRUE(node.background.RunOne());
    node.ExpectMiss(MakeFrame(5000), node.tier->stats().index_ready ? Reason::kNotFound : Reason::kIndexLoading);
    writer->MustSave(MakeFrame(++n, 10));
  }
  writer->Step();
  node.Step();
  EXPECT_GT(n, 1010u);
  EXPECT_EQ(node.tier->stats().frames, 40 + n - 1000);
  for (uint64_t i = 1001; i <= n; ++i) EXPECT_TRUE(node.Has(MakeFrame(i, 10))) << i;
}

TEST_F(SharedFsTier, WhatJournalsTellOfAndIsNotThereIsDroppedByTheScan) {
  {
    auto before = Open();
    for (uint64_t n = 0; n < 10; ++n) before->MustSave(MakeFrame(n));
    before->Step();
  }
  fs::remove(Path(MakeFrame(3)));
  fs::remove_all(fs::path(Path(MakeFrame(4))).parent_path());
  auto node = Open();
  EXPECT_FALSE(node->Has(MakeFrame(3)));
  EXPECT_FALSE(node->Has(MakeFrame(4)));
  EXPECT_EQ(node->tier->stats().frames, 8u);
}

TEST_F(SharedFsTier, ADirectoryThatCannotBeListedIsLeftOutOfTheScan) {
  {
    auto before = Open();
    for (uint64_t n = 0; n < 10; ++n) before->MustSave(MakeFrame(n));
  }
  fs::remove_all(dir_ + "/nodes");
  Fail(Io::kList, "/frames/" + MakeFrame(3).info.key.Hex().substr(0, 3), EIO);
  auto node = Open();
  EXPECT_TRUE(node->tier->stats().index_ready);
  EXPECT_EQ(node->tier->stats().frames, 9u);
}

TEST_F(SharedFsTier, WhatDeadNodesLeftIsRemovedByTheServersClock) {
  auto node = Open();
  const auto leave = [&](const std::string& name, int seconds_old) {
    WriteFile(dir_ + "/" + name, "x");
    const timespec at{.tv_sec = time(nullptr) - seconds_old};
    const timespec times[2] = {at, at};
    ASSERT_EQ(utimensat(AT_FDCWD, (dir_ + "/" + name).c_str(), times, 0), 0);
  };
  leave("tmp/dead-1-aa-0.tmp", 3700);
  leave("tmp/live-1-aa-0.tmp", 3000);
  leave("tmp/notes.txt", 4000);  // None of ours.
  leave("nodes/dead-1-aa-000000.log", 3700);
  leave("nodes/live-1-aa-000000.log", 3000);
  node->Step(std::chrono::minutes(11));
  EXPECT_EQ(Names("tmp"), (std::set<std::string>{"live-1-aa-0.tmp", "notes.txt"}));
  EXPECT_EQ(Names("nodes"), (std::set<std::string>{"live-1-aa-000000.log"}));
  // One that is another user's keeps no other.
  for (const char* name : {"tmp/a-1-aa-0.tmp", "tmp/dead-2-aa-0.tmp", "tmp/z-1-aa-0.tmp"}) leave(name, 3700);
  leave("nodes/dead-2-aa-000000.log", 3700);
  Fail(Io::kUnlink, "dead-2-aa-0.tmp", EPERM);
  node->Step(std::chrono::minutes(11));
  EXPECT_EQ(Names("tmp"), (std::set<std::string>{"dead-2-aa-0.tmp", "live-1-aa-0.tmp", "notes.txt"}));
  EXPECT_EQ(Names("nodes"), (std::set<std::string>{"live-1-aa-000000.log"}));
}

TEST_F(SharedFsTier, AScanPagesThroughAllDirectories) {
  auto node = Open();
  std::map<Digest, FrameInfo> expected;
  for (uint64_t n = 0; n < 20; ++n) {
    const TestFrame frame = MakeFrame(n, 100 + n);
    node->MustSave(frame);
    expected.emplace(frame.info.key, frame.info);
  }
  WriteFile(Path(MakeFrame(99)), "");  // Damaged: not a frame, and not the scan's to judge.
  for (const size_t limit : {1, 7, 1000}) {
    std::map<Digest, FrameInfo> found;
    std::string cursor;
    do {
      const auto page = node->tier->Scan(cursor, limit);
      ASSERT_TRUE(page) << page.error().what;
      EXPECT_LE(page->frames.size(), limit);
      for (const FrameInfo& info : page->frames) EXPECT_TRUE(found.emplace(info.key, info).second);
      cursor = page->next;
    } while (!cursor.empty());
    EXPECT_EQ(found, expected);
  }
  EXPECT_FALSE(node->tier->Scan("not a cursor", 10));
}

// ---- The directory comes and goes

// A guard probes with a scan of one frame: no frame and no error would tell it that all is well.
TEST_F(SharedFsTier, AScanOfWhatCannotBeReadFails) {
  auto node = Open();
  for (uint64_t n = 0; n < 40; ++n) node->MustSave(MakeFrame(n));
  const auto fail = [&](std::set<std::string> names, bool stat_too) {
    io_.SetRule([=](const Io::Call& call) -> Verdict {
      const bool hit = call.op == Io::kOpen || (stat_too && call.op == Io::kStat);
      const bool frame = call.path.ends_with(".kvf") && (names.empty() || names.contains(call.path));
      return {.os_error = hit && frame ? EIO : 0};
    });
  };
  fail({}, true);  // The server does not answer for files.
  EXPECT_EQ(node->tier->Scan("", 1).error().os_error, EIO);
  fail({}, false);
  EXPECT_EQ(node->tier->Scan("", 1).error().os_error, EIO);
  fail({Path(MakeFrame(3)), Path(MakeFrame(5))}, false);
  EXPECT_EQ(node->tier->Scan("", 100)->frames.size(), 38u);
  EXPECT_EQ(node->tier->Scan("", 1)->frames.size(), 1u);
}

TEST_F(SharedFsTier, ADirectoryThatVanishesIsUnavailableAndHeals) {
  auto node = Open();
  const TestFrame frame = MakeFrame(1);
  node->MustSave(frame);
  node->Step();
  fs::rename(dir_, home_ + "/away");
  // Before the poll notices.
  EXPECT_EQ(node->Load(frame).reason, Reason::kUnavailable);
  EXPECT_EQ(node->Save(MakeFrame(2)).outcome, Outcome::kFailed);
  EXPECT_TRUE(node->Has(frame)) << "nothing is known about the frame";
  node->Step();
  EXPECT_FALSE(node->tier->stats().available);
  EXPECT_FALSE(node->Has(frame));
  node->ExpectMiss(frame, Reason::kUnavailable);
  EXPECT_EQ(node->Save(MakeFrame(2)).outcome, Outcome::kDeclined);
  EXPECT_FALSE(fs::exists(dir_)) << "never made by us";
  fs::rename(home_ + "/away", dir_);
  const int lists = io_.calls(Io::kList);
  node->Step();
  EXPECT_TRUE(node->tier->stats().available);
  EXPECT_TRUE(node->tier->stats().index_ready);
  EXPECT_LE(io_.calls(Io::kList) - lists, 1) << "the same volume is not scanned again";
  node->ExpectHit(frame);
  node->MustSave(MakeFrame(2));
}

TEST_F(SharedFsTier, AnEmptiedDirectoryIsLaidOutAnew) {
  auto node = Open();
  node->MustSave(MakeFrame(1));
  for (const std::string& name : Names("")) fs::remove_all(dir_ + "/" + name);
  node->Step();
  EXPECT_TRUE(node->tier->stats().available);
  EXPECT_EQ(node->tier->stats().frames, 0u);
  node->MustSave(MakeFrame(1));
  node->ExpectHit(MakeFrame(1));
  auto other = Open();
  EXPECT_TRUE(other->Has(MakeFrame(1)));
  // Only a part of it.
  fs::remove_all(dir_ + "/frames");
  fs::remove_all(dir_ + "/tmp");
  node->ExpectMiss(MakeFrame(1), Reason::kMissing);
  node->Step();
  node->MustSave(MakeFrame(1));
  node->ExpectHit(MakeFrame(1));
}

TEST_F(SharedFsTier, AnotherVolumeInItsPlaceIsReadAnew) {
  const std::string other = home_ + "/other";
  fs::create_directory(other);
  Node(other, io_, clock_).MustSave(MakeFrame(2));
  auto node = Open();
  node->MustSave(MakeFrame(1));
  fs::rename(dir_, home_ + "/away");
  fs::rename(other, dir_);
  node->Step();
  EXPECT_FALSE(node->Has(MakeFrame(1)));
  node->ExpectHit(MakeFrame(2));
  EXPECT_EQ(node->tier->stats().frames, 1u);
  // Its own journal is there too.
  node->MustSave(MakeFrame(3));
  node->Step();
  EXPECT_TRUE(Open()->Has(MakeFrame(3)));
}

TEST_F(SharedFsTier, AnUnmountedShareIsNotLaidOutOnTheDiskBelowIt) {
  if (mount("none", dir_.c_str(), "tmpfs", 0, "size=4m") != 0) GTEST_SKIP() << "may not mount";
  auto node = Open();
  ASSERT_EQ(umount2(dir_.c_str(), MNT_DETACH), 0);
  node->Step();
  EXPECT_FALSE(node->tier->stats().available);
  EXPECT_NE(node->tier->stats().why.find("mount the share there"), std::string::npos) << node->tier->stats().why;
  EXPECT_TRUE(Names("").empty());
}

// ---- Bounds and closing

// Holds what it is given until told.
class HoldingExecutor final : public Executor {
 public:
  bool Post(Task task) override {
    tasks.push_back(std::move(task));
    return true;
  }
  bool PostAfter(milliseconds, Task task) override { return Post(std::move(task)); }
  std::vector<Task> tasks;
};

TEST_F(SharedFsTier, QueuesAreBoundedAndCloseSettlesWhatWaits) {
  HoldingExecutor held;
  Metrics metrics;
  auto tier = OpenSharedFsTier(
      {.directory = dir_, .load_queue_items_max = 3, .save_queue_items_max = 2},
      {.io = io_, .clock = clock_, .metrics = metrics, .load = &held, .save = &held, .background = &held});
  ASSERT_TRUE(tier);
  const TestFrame frame = MakeFrame(1);
  std::vector<std::byte> into(10000);
  auto loads = std::make_shared<LoadBatch>(5);
  (*tier)->Load(std::vector<LoadItem>(5, {.key = frame.info.key, .space = kSpace, .into = into}), TimePoint::max(),
                loads);
  auto saves = std::make_shared<SaveBatch>(4);
  (*tier)->Save(std::vector<SaveItem>(4, {.info = frame.info, .payload = frame.payload}), saves);
  EXPECT_EQ(loads->Poll(2), nullptr);
  EXPECT_EQ(loads->Poll(3)->reason, Reason::kFull);
  EXPECT_EQ(saves->Poll(1), nullptr);
  EXPECT_EQ(saves->Poll(2)->outcome, Outcome::kDeclined);
  EXPECT_EQ(saves->Poll(2)->reason, Reason::kFull);
  const CloseReport report = (*tier)->Close(std::chrono::steady_clock::now());
  EXPECT_FALSE(report.clean);
  EXPECT_EQ(report.abandoned, 5u);
  EXPECT_EQ(loads->Poll(0)->reason, Reason::kCancelled);
  EXPECT_EQ(saves->Poll(0)->reason, Reason::kCancelled);
  EXPECT_TRUE(Names("frames").empty());
}

// ---- Threads and processes

// A tier with threads of its own.
std::unique_ptr<Tier> OpenThreaded(const std::string& directory, FileIo* files = nullptr) {
  static const std::unique_ptr<FileIo> io = RealFileIo();
  static SystemClock clock;
  static Metrics metrics;
  auto tier =
      OpenSharedFsTier({.directory = directory, .poll_interval = milliseconds(5), .flush_interval = milliseconds(2)},
                       {.io = files ? *files : *io, .clock = clock, .metrics = metrics});
  if (!tier) std::abort();
  return *std::move(tier);
}

std::shared_ptr<SaveBatch> StartSave(Tier& tier, const TestFrame& frame, SaveBatch::Settled on_settled = {}) {
  auto done = std::make_shared<SaveBatch>(1, std::move(on_settled));
  auto owner = std::make_shared<TestFrame>(frame);
  tier.Save({{.info = owner->info, .payload = owner->payload, .owner = owner}}, done);
  return done;
}

LoadResult LoadNow(Tier& tier, const TestFrame& frame, std::vector<std::byte>& into) {
  into.assign(frame.payload.size(), std::byte{0});
  auto done = std::make_shared<LoadBatch>(1);
  tier.Load({{.key = frame.info.key, .space = kSpace, .into = into}}, TimePoint::max(), done);
  const LoadResult* result = done->Wait(0, Soon());
  return result ? *result : LoadResult{};
}

bool Contains(Tier& tier, const TestFrame& frame) {
  uint8_t present = 0;
  tier.Contains({&frame.info.key, 1}, {&present, 1});
  return present != 0;
}

// Until `holds`, or for a minute.
template <class Condition>
bool Eventually(Condition holds) {
  for (const TimePoint deadline = Soon(); std::chrono::steady_clock::now() < deadline; std::this_thread::yield()) {
    if (holds()) return true;
  }
  return false;
}

TEST_F(SharedFsTier, ManyWritersOfTheSameKeysLeaveEachFrameOnceAndRight) {
  constexpr uint64_t kKeys = 40;
  std::vector<std::unique_ptr<Tier>> tiers;
  for (int i = 0; i < 3; ++i) tiers.push_back(OpenThreaded(dir_));
  std::vector<TestFrame> frames;
  for (uint64_t n = 0; n < kKeys; ++n) frames.push_back(MakeFrame(n, 20000 + n));
  std::vector<std::shared_ptr<SaveBatch>> saves;
  for (const TestFrame& frame : frames) {
    for (const auto& tier : tiers) saves.push_back(StartSave(*tier, frame));
  }
  for (const auto& save : saves) {
    ASSERT_NE(save->Wait(0, Soon()), nullptr);
    EXPECT_EQ(save->Poll(0)->outcome, Outcome::kHit);
  }
  std::vector<std::byte> into;
  for (const auto& tier : tiers) {
    EXPECT_TRUE(Eventually([&] { return tier->stats().frames == kKeys; }));
    EXPECT_EQ(tier->stats().quarantined, 0u);
    for (const TestFrame& frame : frames) {
      ASSERT_EQ(LoadNow(*tier, frame, into).outcome, Outcome::kHit);
      EXPECT_TRUE(into == frame.payload);
    }
  }
  size_t files = 0;
  for (const auto& entry : fs::recursive_directory_iterator(dir_ + "/frames")) files += entry.is_regular_file();
  EXPECT_EQ(files, kKeys);
  EXPECT_TRUE(Names("tmp").empty());
}

// A hard mount whose server is gone.
TEST_F(SharedFsTier, OpenedLazilyItWaitsForNoAnswer) {
  std::promise<void> back;
  io_.SetRule([answers = back.get_future().share()](const Io::Call&) -> Verdict {
    answers.wait();
    return {};
  });
  const SystemClock clock;
  Metrics metrics;
  auto opening = std::async(std::launch::async, [&] {
    SharedFsOptions options{.open_lazily = true};
    options.directory = dir_;
    return OpenSharedFsTier(options, {.io = io_, .clock = clock, .metrics = metrics});
  });
  const bool opened = opening.wait_until(Soon()) == std::future_status::ready;
  EXPECT_TRUE(opened);
  if (!opened) back.set_value();
  const std::unique_ptr<Tier> tier = opening.get().value();
  if (!opened) return;
  EXPECT_FALSE(tier->stats().available);
  EXPECT_NE(tier->stats().why.find(dir_ + ": no answer yet, since"), std::string::npos) << tier->stats().why;
  back.set_value();
  EXPECT_TRUE(Eventually([&] { return tier->stats().available; }));
}

TEST_F(SharedFsTier, TwoTiersWithThreadsFindEachOthersFrames) {
  auto a = OpenThreaded(dir_);
  auto b = OpenThreaded(dir_);
  std::vector<std::byte> into;
  for (uint64_t n = 0; n < 20; ++n) {
    const TestFrame frame = MakeFrame(n);
    Tier& writer = n % 2 ? *a : *b;
    Tier& reader = n % 2 ? *b : *a;
    ASSERT_EQ(StartSave(writer, frame)->Wait(0, Soon())->outcome, Outcome::kHit);
    ASSERT_TRUE(Eventually([&] { return Contains(reader, frame); }));
    ASSERT_EQ(LoadNow(reader, frame, into).outcome, Outcome::kHit);
    EXPECT_TRUE(into == frame.payload);
  }
}

TEST_F(SharedFsTier, IdleThreadsHelpToReadALargePayload) {
  auto tier = OpenThreaded(dir_, &io_);
  const TestFrame frame = MakeFrame(1, (6 << 20) + 17);
  ASSERT_EQ(StartSave(*tier, frame)->Wait(0, Soon())->outcome, Outcome::kHit);
  std::mutex mutex;
  std::condition_variable came;
  std::set<std::thread::id> readers;  // Guarded by mutex.
  // Nobody gets on with the payload before a second thread reads it, too.
  io_.SetRule([&](const Io::Call& call) -> Verdict {
    if (call.op != Io::kRead || call.offset < 4096 || !call.path.ends_with(".kvf")) return {};
    std::unique_lock lock(mutex);
    readers.insert(std::this_thread::get_id());
    came.notify_all();
    came.wait_until(lock, Soon(), [&] { return readers.size() > 1; });
    return {};
  });
  std::vector<std::byte> into;
  EXPECT_EQ(LoadNow(*tier, frame, into).outcome, Outcome::kHit);
  EXPECT_TRUE(into == frame.payload);
  io_.SetRule(nullptr);
  tier.reset();
  EXPECT_GT(readers.size(), 1u);
}

TEST_F(SharedFsTier, DamageFoundBySeveralThreadsIsAMissAndTheBufferIsLeftAlone) {
  auto tier = OpenThreaded(dir_);
  const TestFrame frame = MakeFrame(1, (6 << 20) + 17);
  for (size_t at = 0; at < frame.payload.size(); at += 999983) {
    ASSERT_EQ(StartSave(*tier, frame)->Wait(0, Soon())->outcome, Outcome::kHit);
    std::string bytes = ReadFile(Path(frame));
    bytes[4096 + at] = static_cast<char>(bytes[4096 + at] ^ 1);
    WriteFile(Path(frame), bytes);
    auto into = std::make_unique<std::vector<std::byte>>();
    const LoadResult result = LoadNow(*tier, frame, *into);
    into.reset();  // Whoever still wrote there would be found by the sanitizers.
    EXPECT_EQ(result.outcome, Outcome::kMiss);
    EXPECT_EQ(result.reason, Reason::kDamaged) << at;
  }
}

// Sizes around the pieces in which frames are written.
TestFrame LoopFrame(uint64_t n) { return MakeFrame(n, 1 + n * 7919 % 300000); }

// The child: saves one frame after another for ever and tells the number of each that settled as hit.
[[noreturn]] void SaveLoop(const std::string& directory, uint64_t first) {
  auto tier = OpenThreaded(directory);
  std::deque<std::shared_ptr<SaveBatch>> running;
  for (uint64_t n = first;; ++n) {
    running.push_back(StartSave(*tier, LoopFrame(n), [n](size_t, const SaveResult& result) {
      if (result.outcome == Outcome::kHit && write(STDOUT_FILENO, &n, sizeof n) != sizeof n) _exit(1);
    }));
    if (running.size() > 4) {
      running.front()->Wait(0, TimePoint::max());
      running.pop_front();
    }
  }
}

TEST_F(SharedFsTier, KilledInTheMiddleOfSavesItLosesNoFrameAndShowsNoDamagedOne) {
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::set<uint64_t> committed;
  uint64_t first = 0;
  for (int round = 0; round < 6; ++round) {
    int out[2];
    ASSERT_EQ(pipe(out), 0);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, out[1], STDOUT_FILENO);
    posix_spawn_file_actions_addclose(&actions, out[0]);
    std::string program = "/proc/self/exe", mode = "--save-loop", from = std::to_string(first);
    char* args[] = {program.data(), mode.data(), dir_.data(), from.data(), nullptr};
    pid_t child = 0;
    ASSERT_EQ(posix_spawn(&child, program.c_str(), &actions, nullptr, args, environ), 0);
    posix_spawn_file_actions_destroy(&actions);
    close(out[1]);
    // Killed at whatever moment the child is in after it told of so many.
    const uint64_t until = 5 + random() % 40;
    uint64_t n = 0;
    for (uint64_t told = 0; told < until && read(out[0], &n, sizeof n) == sizeof n; ++told) committed.insert(n);
    kill(child, SIGKILL);
    while (read(out[0], &n, sizeof n) == sizeof n) committed.insert(n);
    close(out[0]);
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ended by itself";

    auto tier = OpenThreaded(dir_);
    ASSERT_TRUE(Eventually([&] { return tier->stats().index_ready; }));
    std::vector<std::byte> into;
    ASSERT_FALSE(committed.empty());
    const uint64_t last = *committed.rbegin() + 10;
    uint64_t visible = 0;
    for (uint64_t i = 0; i <= last; ++i) {
      const TestFrame frame = LoopFrame(i);
      if (!Contains(*tier, frame)) {
        EXPECT_FALSE(committed.contains(i)) << "frame " << i << " was promised and is lost";
        continue;
      }
      ++visible;
      ASSERT_EQ(LoadNow(*tier, frame, into).outcome, Outcome::kHit) << "frame " << i;
      EXPECT_TRUE(into == frame.payload);
    }
    EXPECT_EQ(tier->stats().frames, visible);
    EXPECT_EQ(tier->stats().quarantined, 0u);
    first = last + 1;
  }
}

}  // namespace
}  // namespace terrace

// Also the program that the last test kills.
int main(int argc, char** argv) {
  if (argc == 4 && std::string(argv[1]) == "--save-loop") {
    terrace::SaveLoop(argv[2], std::strtoull(argv[3], nullptr, 10));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
