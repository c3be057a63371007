// What could go wrong here: a share that grows above its bound, by one node or by several that write at once; a bound
// that is met by taking what is in use, or a chunk before its children; a share that was too large already and stays
// so; a dead node whose claim or lease keeps the others from writing or collecting for ever; a collector that lists
// directories; a server's clock that was wrong for a while and keeps a lease or a frame for ever; nodes that keep each
// other from room; frames that vanish under a reader and are no clean miss; a chunk that two nodes write at once and
// nobody in the end; frames made by somebody so that nothing can be collected, and files that no frame names.
//
// Most tests run on one thread and a manual clock, which also stamps the files. D11 runs real processes.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <spawn.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <random>

#include "base/hash.h"
#include "base/log.h"
#include "tests/support/faulty_file_io.h"
#include "tests/support/step_executor.h"
#include "tier/shared_fs_journal.h"
#include "tier/shared_fs_room.h"
#include "tier/shared_fs_tier.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using std::chrono::milliseconds;
using std::chrono::minutes;
using std::chrono::seconds;
using Verdict = FaultyFileIo::Verdict;

const Digest kSpace = Sha256Of("space");
constexpr uint64_t kPayload = 12 << 10;
constexpr uint64_t kFile = kPayload + 4096;
constexpr uint64_t kMiB = 1 << 20;

struct TestFrame {
  FrameInfo info;
  std::vector<std::byte> payload;
};

Digest Key(const std::string& talk, uint64_t n) { return Sha256Of(talk + " " + std::to_string(n)); }

// Chunk n of a conversation.
TestFrame MakeFrame(const std::string& talk, uint64_t n, uint64_t payload_bytes = kPayload) {
  return {.info = {.space = kSpace,
                   .key = Key(talk, n),
                   .parent = n == 0 ? kSpace : Key(talk, n - 1),
                   .first_token = static_cast<uint32_t>(n * 256),
                   .token_count = 256,
                   .payload_bytes = payload_bytes},
          .payload = std::vector<std::byte>(payload_bytes, static_cast<std::byte>(n))};
}

std::string FramePath(const std::string& directory, const Digest& key) {
  return directory + "/frames/" + key.Hex().substr(0, 3) + "/" + key.Hex() + ".kvf";
}

// What counts for the bound, as somebody sees it who is no node.
uint64_t BytesThere(const std::string& directory) {
  uint64_t bytes = 0;
  for (const char* folder : {"frames", "tmp", "quarantine"}) {
    std::error_code error;
    for (fs::recursive_directory_iterator it(directory + "/" + folder, error), end; !error && it != end;
         it.increment(error)) {
      struct stat st;
      if (stat(it->path().c_str(), &st) == 0 && S_ISREG(st.st_mode)) bytes += static_cast<uint64_t>(st.st_size);
    }
  }
  return bytes;
}

// Files stamped by a clock that is ahead of the nodes'. Has as much free space as it says.
class ShareIo final : public FaultyFileIo {
 public:
  ShareIo(const Clock& clock, std::string directory) : clock_(clock), directory_(std::move(directory)) {}

  std::chrono::seconds ahead = std::chrono::hours(5);  // The server's clock; the node's, if it stamps its files.
  std::optional<uint64_t> capacity_bytes;              // Free is what frames and temporaries leave of it.

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode, uint32_t permissions) override {
    auto file = FaultyFileIo::Open(path, mode, permissions);
    if (!file || mode == OpenMode::kRead) return file;
    Stamp(path);
    return std::make_unique<Stamped>(*this, path, *std::move(file));
  }
  Result<Space> FreeSpace(const std::string& path) override {
    if (!capacity_bytes) return FaultyFileIo::FreeSpace(path);
    const uint64_t used = BytesThere(directory_);
    return Space{.free_bytes = *capacity_bytes - std::min(*capacity_bytes, used), .total_bytes = *capacity_bytes};
  }

  // As if it was written now.
  void Stamp(const std::string& path) const {
    const auto now = clock_.Now().time_since_epoch() + ahead;
    const auto whole = std::chrono::duration_cast<seconds>(now);
    const timespec at{.tv_sec = whole.count(), .tv_nsec = std::chrono::nanoseconds(now - whole).count()};
    const timespec times[] = {at, at};
    utimensat(AT_FDCWD, path.c_str(), times, 0);
  }

 private:
  class Stamped final : public File {
   public:
    Stamped(ShareIo& io, std::string path, std::unique_ptr<File> real)
        : io_(io), path_(std::move(path)), real_(std::move(real)) {}
    Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> into) override { return real_->ReadAt(offset, into); }
    Result<void> WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
      return real_->WriteAt(offset, bytes);
    }
    Result<void> Append(std::span<const std::byte> bytes) override { return real_->Append(bytes); }
    Result<void> Sync() override { return real_->Sync(); }
    Result<FileStat> Stat() override { return real_->Stat(); }
    Result<void> Close() override {
      Result<void> closed = real_->Close();
      io_.Stamp(path_);
      return closed;
    }

   private:
    ShareIo& io_;
    const std::string path_;
    const std::unique_ptr<File> real_;
  };

  const Clock& clock_;
  const std::string directory_;
};

class SharedFsBoundsTest : public testing::Test {
 protected:
  struct Node {
    Node(SharedFsBoundsTest& test, const SharedFsOptions& options) : io(test.clock_, test.directory_) {
      io.SetRule([this, &test](const FaultyFileIo::Call& call) {
        if (call.op == FaultyFileIo::kSync || call.op == FaultyFileIo::kLink) test.Measure();
        if (call.op == FaultyFileIo::kUnlink && call.path.ends_with(".kvf")) ++unlinks;
        if (call.op == FaultyFileIo::kList && call.path.find("/frames/") != std::string::npos) ++listings;
        return Verdict{dead ? EIO : 0};
      });
      tier = OpenSharedFsTier(options, {.io = io,
                                        .clock = test.clock_,
                                        .metrics = metrics,
                                        .load = &test.executor_,
                                        .save = &test.executor_,
                                        .background = &test.executor_})
                 .value();
    }
    uint64_t evicted(const char* reason) {
      return metrics.GetCounter("terrace_tier_evicted_total", "", {{"tier", "shared_fs"}, {"reason", reason}}).value();
    }
    bool Has(const TestFrame& frame) {
      uint8_t present = 0;
      tier->Contains({&frame.info.key, 1}, {&present, 1});
      return present != 0;
    }

    ShareIo io;
    Metrics metrics;
    bool dead = false;
    int unlinks = 0, listings = 0;  // Of frames.
    std::unique_ptr<Tier> tier;
  };

  SharedFsBoundsTest() {
    std::string pattern = testing::TempDir() + "/bounds_XXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~SharedFsBoundsTest() override { fs::remove_all(directory_); }

  static SharedFsOptions Bounded(uint64_t bytes_max) {
    SharedFsOptions options;
    options.bounds.bytes_max = bytes_max;
    return options;
  }
  std::unique_ptr<Node> Open(SharedFsOptions options) {
    options.directory = directory_;
    auto node = std::make_unique<Node>(*this, options);
    executor_.Advance(seconds(1));  // Its scan, and a poll.
    return node;
  }
  std::vector<std::unique_ptr<Node>> OpenMany(int count, const SharedFsOptions& options) {
    std::vector<std::unique_ptr<Node>> nodes;
    for (int i = 0; i < count; ++i) nodes.push_back(Open(options));
    return nodes;
  }
  // As kill -9: whatever it would still do fails.
  static void Kill(std::unique_ptr<Node> node) { node->dead = true; }

  void Measure() { most_ = std::max(most_, BytesThere(directory_)); }

  std::shared_ptr<SaveBatch> Begin(Node& node, const TestFrame& frame) {
    auto done = std::make_shared<SaveBatch>(1);
    const auto owner = std::make_shared<TestFrame>(frame);
    node.tier->Save({{.info = frame.info, .payload = owner->payload, .owner = owner}}, done);
    return done;
  }
  // Runs the world until it has settled.
  SaveResult Settled(SaveBatch& batch, seconds longest = seconds(60)) {
    for (const TimePoint end = clock_.Now() + longest; !batch.Poll(0) && clock_.Now() < end;) {
      executor_.Advance(milliseconds(10));
    }
    EXPECT_NE(batch.Poll(0), nullptr) << "a save does not settle";
    return batch.Poll(0) ? *batch.Poll(0) : SaveResult{};
  }
  SaveResult Save(Node& node, const TestFrame& frame) { return Settled(*Begin(node, frame)); }
  void MustSave(Node& node, const TestFrame& frame) {
    const SaveResult result = Save(node, frame);
    ASSERT_EQ(result.outcome, Outcome::kHit) << ReasonName(result.reason) << (result.error ? result.error->what : "");
  }
  // So many conversations of one frame, given to the nodes in turn before any has settled.
  void MustSaveAtOnce(const std::vector<std::unique_ptr<Node>>& nodes, uint64_t count) {
    std::vector<std::shared_ptr<SaveBatch>> saves;
    for (uint64_t n = 0; n < count; ++n) {
      saves.push_back(Begin(*nodes[n % nodes.size()], MakeFrame("talk " + std::to_string(n), 0)));
    }
    for (const auto& save : saves) EXPECT_EQ(Settled(*save).outcome, Outcome::kHit);
  }
  LoadResult Load(Node& node, const TestFrame& frame) {
    auto done = std::make_shared<LoadBatch>(1);
    const auto into = std::make_shared<std::vector<std::byte>>(frame.info.payload_bytes);
    node.tier->Load({{.key = frame.info.key, .space = kSpace, .into = *into, .owner = into}}, TimePoint::max(), done);
    executor_.Run();
    const LoadResult result = done->Poll(0) ? *done->Poll(0) : LoadResult{};
    EXPECT_TRUE(result.outcome != Outcome::kHit || *into == frame.payload);
    return result;
  }
  bool OnShare(const TestFrame& frame) const { return fs::exists(FramePath(directory_, frame.info.key)); }
  // Chunks of a conversation that are there: from the first on without a hole, or a parent went before its child.
  uint64_t Prefix(const std::string& talk, uint64_t chunks) const {
    uint64_t n = 0;
    while (n < chunks && OnShare(MakeFrame(talk, n))) ++n;
    for (uint64_t m = n; m < chunks; ++m) {
      EXPECT_FALSE(OnShare(MakeFrame(talk, m))) << talk << ": chunk " << m << " is there without " << m - 1;
    }
    return n;
  }

  std::string directory_;
  ManualClock clock_;
  StepExecutor executor_{clock_};
  uint64_t most_ = 0;  // That was ever on the share.
};

// ---- Frames and files that are in the way

TEST_F(SharedFsBoundsTest, FramesThatAreEachOthersParentsGoLikeOthers) {
  constexpr uint64_t kCap = 64 * kFile;
  auto node = Open(Bounded(kCap));
  for (uint64_t n = 0; n < 48; ++n) {
    TestFrame frame = MakeFrame("circle", n);
    frame.info.parent = Key("circle", n % 3 == 2 ? n - 2 : n + 1);
    MustSave(*node, frame);
  }
  executor_.Advance(minutes(1));
  for (uint64_t n = 0; n < 50; ++n) MustSave(*node, MakeFrame("talk", n));
  EXPECT_EQ(Prefix("talk", 50), 50u);
  EXPECT_LE(most_, kCap);
}

TEST_F(SharedFsBoundsTest, WhatCanNotBeRemovedStopsNoCollection) {
  auto node = Open(Bounded(64 * kFile));
  const TestFrame stuck = MakeFrame("stuck", 0);
  MustSave(*node, stuck);
  const std::string path = FramePath(directory_, stuck.info.key);
  fs::remove(path);
  fs::create_directories(path + "/in the way");
  executor_.Advance(minutes(1));
  for (uint64_t n = 0; n < 100; ++n) MustSave(*node, MakeFrame("talk " + std::to_string(n), 0));
  EXPECT_GT(node->evicted("size"), 30u);
}

TEST_F(SharedFsBoundsTest, WhatClientsLeftOpenCountsAndGoesAfterAWhile) {
  constexpr uint64_t kCap = 64 * kFile;
  SharedFsOptions options = Bounded(kCap);
  options.scan_interval = minutes(1);
  options.stale_age = minutes(10);
  auto node = Open(options);
  std::vector<std::string> left;
  for (int n = 0; n < 32; ++n) {  // As the kernel names them, in directories of frames.
    const std::string directory = fs::path(FramePath(directory_, Key("left", static_cast<uint64_t>(n)))).parent_path();
    fs::create_directories(directory);
    left.push_back(directory + (n % 2 == 0 ? "/.nfs00000000000" : "/.fuse_hidden0000") + std::to_string(1000 + n));
    std::ofstream(left.back()) << std::string(kFile, 'x');
  }
  executor_.Advance(minutes(2));  // The next scan.
  for (uint64_t n = 0; n < 100; ++n) MustSave(*node, MakeFrame("talk " + std::to_string(n), 0));
  EXPECT_LE(BytesThere(directory_), kCap);
  for (const std::string& path : left) EXPECT_TRUE(fs::exists(path)) << "somebody may read it";
  executor_.Advance(minutes(12));
  for (const std::string& path : left) EXPECT_FALSE(fs::exists(path)) << path;
  for (uint64_t n = 0; n < 60; ++n) MustSave(*node, MakeFrame("later " + std::to_string(n), 0));
  EXPECT_GT(BytesThere(directory_), kCap * 3 / 4) << "and its room is free again";
}

// ---- Size

TEST_F(SharedFsBoundsTest, SavesGoOnAtTheCapAndTheConversationUnusedLongestGoesFromItsEnd) {
  constexpr uint64_t kCap = 64 * kFile;
  auto node = Open(Bounded(kCap));
  for (uint64_t n = 0; n < 20; ++n) MustSave(*node, MakeFrame("old", n));
  executor_.Advance(minutes(1));
  for (uint64_t n = 0; n < 20; ++n) MustSave(*node, MakeFrame("used", n));
  executor_.Advance(minutes(1));
  for (int talk = 0; talk < 10; ++talk) {
    // In use: its first half.
    for (uint64_t n = 0; n < 10; ++n) ASSERT_EQ(Load(*node, MakeFrame("used", n)).outcome, Outcome::kHit);
    for (uint64_t n = 0; n < 10; ++n) MustSave(*node, MakeFrame("new " + std::to_string(talk), n));
    executor_.Advance(minutes(1));
  }
  EXPECT_LE(most_, kCap);
  EXPECT_GT(most_, kCap * 7 / 8);
  EXPECT_EQ(Prefix("old", 20), 0u);
  EXPECT_GE(Prefix("used", 20), 10u);
  EXPECT_EQ(Prefix("new 9", 10), 10u);
  EXPECT_EQ(node->tier->stats().bytes, BytesThere(directory_));
  EXPECT_EQ(node->tier->stats().bytes_max, kCap);
  EXPECT_EQ(node->evicted("size"), static_cast<uint64_t>(node->unlinks));
}

TEST_F(SharedFsBoundsTest, SeveralNodesThatWriteAtOnceKeepToTheCapTogether) {
  constexpr uint64_t kCap = 40 * kFile;
  std::vector<std::unique_ptr<Node>> nodes;
  for (int i = 0; i < 3; ++i) nodes.push_back(Open(Bounded(kCap)));
  const uint64_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  std::vector<std::shared_ptr<SaveBatch>> saves;
  uint64_t declined = 0;
  for (uint64_t n = 0; n < 400; ++n) {
    saves.push_back(Begin(*nodes[random() % nodes.size()], MakeFrame("talk " + std::to_string(n / 4), n % 4)));
    executor_.Advance(milliseconds(random() % 60));
    Measure();
  }
  for (const auto& save : saves) declined += Settled(*save).outcome != Outcome::kHit;
  Measure();
  EXPECT_LE(most_, kCap);
  EXPECT_GT(most_, kCap / 2);
  EXPECT_EQ(declined, 0u) << "room is made in time";
  executor_.Advance(seconds(10));
  for (const auto& node : nodes) EXPECT_EQ(node->tier->stats().bytes, BytesThere(directory_));
}

// If each node claimed for all its saves that wait, no claim would fit, and what is there would go for nothing.
TEST_F(SharedFsBoundsTest, ABurstOfSavesLargerThanTheBoundFindsRoomInTurns) {
  constexpr uint64_t kCap = 40 * kFile;
  const auto nodes = OpenMany(3, Bounded(kCap));
  MustSaveAtOnce(nodes, 120);
  EXPECT_LE(most_, kCap);
  EXPECT_GT(BytesThere(directory_), kCap / 2);
}

TEST(SharedFsRoomTest, ComingFreeItIsForThoseWhoWaitLonger) {
  const TimePoint now{};
  SharedFsRoom room(1000);
  room.Grant(100, now, minutes(1));
  const uint64_t first = room.Want(80), second = room.Want(30);
  EXPECT_FALSE(room.Take(10, now)) << "one that has just come";
  EXPECT_FALSE(room.Take(30, now, second));
  EXPECT_TRUE(room.Take(80, now, first));
  room.Unwant(first);
  EXPECT_FALSE(room.Take(30, now, second));
  room.Grant(120, now, minutes(1));
  EXPECT_FALSE(room.Take(20, now));
  EXPECT_TRUE(room.Take(30, now, second));
  room.Unwant(second);
  EXPECT_TRUE(room.Take(10, now));
  EXPECT_FALSE(room.wanted());
}

// Each with more to save than fits: a 16th of the bound for each would be more than there is.
TEST_F(SharedFsBoundsTest, ManyNodesThatAlwaysHaveMoreToSaveFindRoomInTurns) {
  constexpr uint64_t kCap = 48 * kFile;
  const auto nodes = OpenMany(20, Bounded(kCap));
  MustSaveAtOnce(nodes, 200);
  EXPECT_LE(most_, kCap);
}

TEST_F(SharedFsBoundsTest, AShareThatWasTooLargeIsBelowTheCapWithinAMinute) {
  auto before = Open({});
  for (uint64_t n = 0; n < 100; ++n) MustSave(*before, MakeFrame("talk " + std::to_string(n / 10), n % 10));
  before.reset();
  auto node = Open(Bounded(50 * kFile));
  executor_.Advance(seconds(5));
  EXPECT_LE(BytesThere(directory_), 50 * kFile);
  EXPECT_GT(BytesThere(directory_), 40 * kFile) << "no more than needed";
  for (uint64_t n = 0; n < 10; ++n) Prefix("talk " + std::to_string(n), 10);
  EXPECT_EQ(Load(*node, MakeFrame("talk 9", 0)).outcome, Outcome::kHit);
}

TEST_F(SharedFsBoundsTest, WhatDoesNotFitAtAllIsDeclinedAtOnceAndWhatFindsNoRoomAfterAWhile) {
  auto node = Open(Bounded(4 * kFile));
  const TimePoint begun = clock_.Now();
  EXPECT_EQ(Save(*node, MakeFrame("large", 0, 5 * kFile)).reason, Reason::kFull);
  EXPECT_LE(clock_.Now(), begun + milliseconds(10));
  // Somebody holds all the room there is, and lives.
  SharedFsOptions slow = Bounded(4 * kFile);
  auto other = Open(slow);
  other->io.SetRule([](const FaultyFileIo::Call& call) {
    return Verdict{call.op == FaultyFileIo::kUnlink && call.path.ends_with(".kvf") ? EIO : 0};
  });
  node->io.SetRule([](const FaultyFileIo::Call& call) {
    return Verdict{call.op == FaultyFileIo::kUnlink && call.path.ends_with(".kvf") ? EIO : 0};
  });
  for (uint64_t n = 0; n < 3; ++n) MustSave(*other, MakeFrame("other", n));
  const SaveResult result = Save(*node, MakeFrame("mine", 0));
  EXPECT_EQ(result.outcome, Outcome::kDeclined);
  EXPECT_EQ(result.reason, Reason::kFull);
  EXPECT_GE(clock_.Now(), begun + seconds(10));
  EXPECT_LE(BytesThere(directory_), 4 * kFile);
}

TEST_F(SharedFsBoundsTest, TheClaimOfADeadNodeEndsWhenWhatItLeftHasBeenFound) {
  constexpr uint64_t kCap = 16 * kFile;
  auto dying = Open(Bounded(kCap));
  auto node = Open(Bounded(kCap));
  // It dies with a temporary and a claim, before its journal tells of what it published.
  for (uint64_t n = 0; n < 3; ++n) MustSave(*dying, MakeFrame("dying", n));
  bool dies = false;
  dying->io.SetRule([&](const FaultyFileIo::Call& call) {
    if (call.op == FaultyFileIo::kLink) dies = true;
    return Verdict{dies ? EIO : 0};
  });
  EXPECT_NE(Save(*dying, MakeFrame("dying", 3)).outcome, Outcome::kHit);
  Kill(std::move(dying));
  ASSERT_GT(BytesThere(directory_), 3 * kFile) << "a temporary is left";
  for (uint64_t n = 0; n < 60; ++n) {
    (void)Save(*node, MakeFrame("talk " + std::to_string(n), 0));  // The dead one had the lease: some find no room.
    executor_.Advance(seconds(2));
    Measure();
  }
  for (uint64_t n = 0; n < 20; ++n) MustSave(*node, MakeFrame("more " + std::to_string(n), 0));
  EXPECT_LE(most_, kCap);
  // All that is left of the dead node is its temporary.
  EXPECT_GT(node->tier->stats().bytes, kCap * 11 / 16);
}

TEST_F(SharedFsBoundsTest, AGrantEndsBeforeOthersTakeTheNodeForDead) {
  constexpr uint64_t kCap = 16 * kFile;
  auto sleeper = Open(Bounded(kCap));
  auto node = Open(Bounded(kCap));
  MustSave(*sleeper, MakeFrame("a", 0));  // Its claim has something to spare.
  // Its journal can't be written for long, so others forget its claim. Until it can, it writes nothing.
  sleeper->io.SetRule([](const FaultyFileIo::Call& call) {
    return Verdict{call.op == FaultyFileIo::kOpen && call.mode == OpenMode::kAppend ? EIO : 0};
  });
  executor_.Advance(seconds(40));
  const SaveResult result = Save(*sleeper, MakeFrame("a", 1));
  EXPECT_EQ(result.reason, Reason::kFull);
  sleeper->io.SetRule({});
  MustSave(*sleeper, MakeFrame("a", 1));
}

// Recent NFS clients stamp the files that they write by their own clock (delegated timestamps).
class SharedFsClocksTest : public SharedFsBoundsTest, public testing::WithParamInterface<seconds> {
 protected:
  static constexpr uint64_t kCap = 32 * kFile;

  SharedFsClocksTest() {
    log::SetSink([this](log::Level, std::string_view line) {
      gone_ += line.find("event=shared_fs_node_gone") != std::string_view::npos;
    });
    node_ = Open(Bounded(kCap));
    other_ = Open(Bounded(kCap));
    other_->io.ahead += GetParam();
    executor_.Advance(minutes(11));  // So that it has learnt the time from a file of its own.
  }
  ~SharedFsClocksTest() override { log::SetSink(nullptr); }

  // By both in turn, more than there is room for.
  void SaveMuch() {
    for (int n = 0; n < 60; ++n) MustSave(n % 2 == 0 ? *node_ : *other_, MakeFrame("talk " + std::to_string(n_++), 0));
  }

  std::unique_ptr<Node> node_, other_;
  int n_ = 0;     // Of the next frame.
  int gone_ = 0;  // How often a node was held for dead.
};

TEST_P(SharedFsClocksTest, ANodeThatWritesIsAlive) {
  SaveMuch();
  executor_.Advance(minutes(2));
  SaveMuch();
  EXPECT_EQ(gone_, 0);
  EXPECT_LE(most_, kCap);
}

TEST_P(SharedFsClocksTest, TheClaimOfADeadNodeEnds) {
  MustSave(*other_, MakeFrame("dying", 0));
  Kill(std::move(other_));  // Before it has given its claim back.
  executor_.Advance(minutes(2));
  EXPECT_EQ(gone_, 1);
}

TEST_P(SharedFsClocksTest, OneNodeCollectsAndTheOtherWhenItIsGone) {
  SaveMuch();
  EXPECT_GT(node_->unlinks, 10);
  EXPECT_EQ(other_->unlinks, 0);
  Kill(std::move(node_));
  executor_.Advance(seconds(100));
  for (int n = 0; n < 60; ++n) MustSave(*other_, MakeFrame("more " + std::to_string(n), 0));
  EXPECT_GT(other_->unlinks, 10);
}

INSTANTIATE_TEST_SUITE_P(Clocks, SharedFsClocksTest, testing::Values(seconds(-600), seconds(0), seconds(600)),
                         [](const auto& difference) {
                           const auto s = difference.param.count();
                           return s < 0 ? "Behind" : s == 0 ? "TheSame" : "Ahead";
                         });

// ---- Time and free space

TEST_F(SharedFsBoundsTest, FramesUnusedForLongGoAndWhatAnotherNodeUsesStays) {
  SharedFsOptions options;
  options.bounds.ttl = minutes(60);
  auto collector = Open(options);
  auto user = Open(options);
  for (uint64_t n = 0; n < 3; ++n) MustSave(*collector, MakeFrame("used", n));
  for (uint64_t n = 0; n < 3; ++n) MustSave(*collector, MakeFrame("unused", n));
  executor_.Advance(minutes(40));
  EXPECT_EQ(Load(*user, MakeFrame("used", 1)).outcome, Outcome::kHit);
  executor_.Advance(minutes(19));
  EXPECT_EQ(Prefix("unused", 3), 3u);
  executor_.Advance(minutes(20));
  EXPECT_EQ(Prefix("unused", 3), 0u);
  EXPECT_EQ(Prefix("used", 3), 2u) << "the chunk that was loaded and all before it";
  EXPECT_EQ(collector->evicted("ttl") + user->evicted("ttl"), 4u);
  executor_.Advance(minutes(30));
  EXPECT_EQ(Prefix("used", 3), 0u);
}

TEST_F(SharedFsBoundsTest, ANodeThatStartsKnowsAgesFromTheServer) {
  SharedFsOptions options;
  options.bounds.ttl = minutes(60);
  auto first = Open(options);
  MustSave(*first, MakeFrame("a", 0));
  executor_.Advance(minutes(30));
  MustSave(*first, MakeFrame("b", 0));
  first.reset();
  // Once from journals, once from the files.
  auto second = Open(options);
  executor_.Advance(minutes(40));
  EXPECT_FALSE(OnShare(MakeFrame("a", 0)));
  EXPECT_TRUE(OnShare(MakeFrame("b", 0)));
  second.reset();
  fs::remove_all(directory_ + "/nodes");
  auto third = Open(options);
  executor_.Advance(minutes(10));
  EXPECT_TRUE(OnShare(MakeFrame("b", 0)));
  executor_.Advance(minutes(20));
  EXPECT_FALSE(OnShare(MakeFrame("b", 0)));
}

// The answer to what time it is comes after five minutes, and is not of now.
TEST_F(SharedFsBoundsTest, ASlowAnswerOfTheServerMakesNoFrameOld) {
  SharedFsOptions options;
  options.bounds.ttl = minutes(10);
  const TimePoint asked_again = clock_.Now() + minutes(10);
  auto node = Open(options);
  executor_.Advance(minutes(8));
  MustSave(*node, MakeFrame("a", 0));
  bool hang = true;
  node->io.SetRule([&](const FaultyFileIo::Call& call) {
    if (call.op != FaultyFileIo::kOpen || call.mode != OpenMode::kCreateNew || clock_.Now() < asked_again)
      return Verdict{};
    const bool hangs = std::exchange(hang, false);
    if (hangs) clock_.Set(clock_.Now() + minutes(5));
    return Verdict{};
  });
  executor_.Advance(minutes(8));
  EXPECT_FALSE(hang);
  EXPECT_TRUE(OnShare(MakeFrame("a", 0)));
  executor_.Advance(minutes(5));
  EXPECT_FALSE(OnShare(MakeFrame("a", 0)));
}

// What was written and used then is of a time to come.
TEST_F(SharedFsBoundsTest, AServerWhoseClockWasAheadForAWhileKeepsNothingForEver) {
  SharedFsOptions options;
  options.bounds.ttl = minutes(60);
  auto node = Open(options);
  executor_.Advance(minutes(1));
  node->io.ahead = std::chrono::hours(500);
  executor_.Advance(minutes(11));
  MustSave(*node, MakeFrame("a", 0));
  MustSave(*node, MakeFrame("b", 0));
  node->io.ahead = std::chrono::hours(5);
  executor_.Advance(minutes(30));
  ASSERT_EQ(Load(*node, MakeFrame("b", 0)).outcome, Outcome::kHit);
  executor_.Advance(minutes(50));
  EXPECT_FALSE(OnShare(MakeFrame("a", 0)));
  EXPECT_TRUE(OnShare(MakeFrame("b", 0)));
  // One that begins now knows it from journals, or from the file.
  node.reset();
  auto second = Open(options);
  executor_.Advance(minutes(20));
  EXPECT_TRUE(OnShare(MakeFrame("b", 0)));
  second.reset();
  fs::remove_all(directory_ + "/nodes");
  auto third = Open(options);
  executor_.Advance(minutes(80));
  EXPECT_FALSE(OnShare(MakeFrame("b", 0)));
}

TEST_F(SharedFsBoundsTest, FreeSpaceOfTheMountIsKept) {
  SharedFsOptions options;
  options.bounds.free_bytes_min = 20 * kFile;
  auto node = Open(options);
  node->io.capacity_bytes = 60 * kFile;
  for (uint64_t n = 0; n < 100; ++n) {
    MustSave(*node, MakeFrame("talk " + std::to_string(n / 5), n % 5));
    executor_.Advance(milliseconds(100));
  }
  EXPECT_LE(most_, 40 * kFile);
  EXPECT_GT(most_, 30 * kFile);
  EXPECT_GT(node->evicted("free_space"), 50u);
  // Others fill the disk: everything of ours goes, and saves wait for what they leave.
  node->io.capacity_bytes = 10 * kFile;
  executor_.Advance(minutes(1));
  EXPECT_EQ(BytesThere(directory_), 0u);
  EXPECT_EQ(Save(*node, MakeFrame("more", 0)).reason, Reason::kFull);
}

// ---- The collector

TEST_F(SharedFsBoundsTest, OneNodeCollectsAndAnotherWhenItIsGone) {
  constexpr uint64_t kCap = 16 * kFile;
  auto a = Open(Bounded(kCap));
  auto b = Open(Bounded(kCap));
  uint64_t n = 0;
  const auto fill = [&](Node& node) {
    for (int i = 0; i < 30; ++i) MustSave(node, MakeFrame("talk " + std::to_string(n++), 0));
  };
  fill(*b);
  EXPECT_GT(a->unlinks, 10);
  EXPECT_EQ(b->unlinks, 0);
  executor_.Advance(minutes(5));  // It renews.
  fill(*b);
  EXPECT_EQ(b->unlinks, 0);
  Kill(std::move(a));
  executor_.Advance(seconds(50));
  fill(*b);
  EXPECT_GT(b->unlinks, 10);
  auto c = Open(Bounded(kCap));
  fill(*c);
  EXPECT_EQ(c->unlinks, 0);
  b.reset();  // Leaves its lease.
  executor_.Advance(seconds(11));
  fill(*c);
  EXPECT_GT(c->unlinks, 10);
  EXPECT_LE(most_, kCap);
}

TEST_F(SharedFsBoundsTest, ALeaseFromATimeToComeHoldsNobody) {
  constexpr uint64_t kCap = 16 * kFile;
  ShareIo io(clock_, directory_);
  io.ahead = std::chrono::hours(500);
  std::ofstream(directory_ + "/collector.lease").close();
  io.Stamp(directory_ + "/collector.lease");
  auto node = Open(Bounded(kCap));
  for (uint64_t n = 0; n < 40; ++n) MustSave(*node, MakeFrame("talk " + std::to_string(n), 0));
  EXPECT_LE(most_, kCap);
}

TEST_F(SharedFsBoundsTest, TwoCollectorsAtOnceDoNoHarmAndTheLaterOneStays) {
  constexpr uint64_t kCap = 32 * kFile;
  auto before = Open({});
  for (uint64_t n = 0; n < 100; ++n) MustSave(*before, MakeFrame("talk " + std::to_string(n / 10), n % 10));
  before.reset();
  auto a = Open(Bounded(kCap));
  fs::remove(directory_ + "/collector.lease");
  auto b = Open(Bounded(kCap));
  executor_.Advance(seconds(30));
  EXPECT_LE(BytesThere(directory_), kCap);
  EXPECT_GT(BytesThere(directory_), kCap / 2);
  for (uint64_t n = 0; n < 10; ++n) Prefix("talk " + std::to_string(n), 10);
  const int by_a = a->unlinks;
  for (uint64_t n = 0; n < 30; ++n) MustSave(*a, MakeFrame("more " + std::to_string(n), 0));
  EXPECT_EQ(a->unlinks, by_a) << "it has lost its lease";
  EXPECT_GT(b->unlinks, 10);
  executor_.Advance(seconds(5));
  EXPECT_EQ(a->tier->stats().bytes, b->tier->stats().bytes);
}

TEST_F(SharedFsBoundsTest, AFrameThatGoesUnderAReaderIsACleanMiss) {
  auto node = Open(Bounded(16 * kFile));
  auto reader = Open(Bounded(16 * kFile));
  const TestFrame frame = MakeFrame("a", 0);
  MustSave(*node, frame);
  executor_.Advance(seconds(1));
  ASSERT_TRUE(reader->Has(frame));
  fs::remove(FramePath(directory_, frame.info.key));  // As a collector does.
  const LoadResult gone = Load(*reader, frame);
  EXPECT_EQ(gone.outcome, Outcome::kMiss);
  EXPECT_EQ(gone.reason, Reason::kMissing);
  EXPECT_EQ(Load(*reader, frame).reason, Reason::kNotFound);
  EXPECT_EQ(reader->tier->stats().quarantined, 0u);
}

TEST_F(SharedFsBoundsTest, OthersHearOfEvictionsWithoutAListing) {
  constexpr uint64_t kCap = 32 * kFile;
  auto a = Open(Bounded(kCap));
  auto b = Open(Bounded(kCap));
  for (uint64_t n = 0; n < 29; ++n) MustSave(*b, MakeFrame("talk " + std::to_string(n), 0));
  executor_.Advance(minutes(2));
  const int listings = a->listings + b->listings;
  for (uint64_t n = 0; n < 20; ++n) MustSave(*b, MakeFrame("more " + std::to_string(n), 0));
  executor_.Advance(seconds(2));
  EXPECT_GT(a->unlinks, 10);
  EXPECT_EQ(a->listings + b->listings, listings);
  EXPECT_EQ(b->tier->stats().bytes, BytesThere(directory_));
}

// Two others: one wrote a frame, the second took it away. Whose journal is read first is chance.
TEST_F(SharedFsBoundsTest, AnEvictionHeardOfBeforeTheFrameItselfLeavesNoBeliefInIt) {
  auto node = Open(Bounded(32 * kFile));
  auto writer = Open(Bounded(32 * kFile));
  const TestFrame gone = MakeFrame("gone", 0), anew = MakeFrame("anew", 0);
  const auto tell = [&](const char* who, JournalRecord::Kind kind, const FrameInfo& info) {
    JournalWriter journal({.directory = directory_ + "/nodes", .node = who}, node->io);
    ASSERT_TRUE(journal.Append({{{.kind = kind,
                                  .space = info.space,
                                  .key = info.key,
                                  .parent = info.parent,
                                  .payload_bytes = info.payload_bytes,
                                  .token_count = info.token_count}}}));
  };
  tell("a-1-00000000", JournalRecord::Kind::kEvicted, {.key = gone.info.key});
  tell("a-2-00000000", JournalRecord::Kind::kEvicted, {.key = anew.info.key});
  executor_.Advance(seconds(2));
  tell("b-1-00000000", JournalRecord::Kind::kPublished, gone.info);
  MustSave(*writer, anew);  // After it was taken away.
  executor_.Advance(seconds(2));
  EXPECT_FALSE(node->Has(gone));
  EXPECT_TRUE(node->Has(anew));
  EXPECT_EQ(node->tier->stats().bytes, BytesThere(directory_));
}

// ---- Single flight across nodes

class SharedFsSingleFlight : public SharedFsBoundsTest {
 protected:
  static constexpr uint64_t kLarge = 9 * kMiB;
  // Another process that is at the same frame.
  std::string Plant(const TestFrame& frame) const {
    return directory_ + "/tmp/host-1-00000000-7." + frame.info.key.Hex().substr(0, 32) + ".tmp";
  }
};

TEST_F(SharedFsSingleFlight, ASaveWaitsForAnotherNodeThatWritesTheSameFrame) {
  auto node = Open({});
  auto other = Open({});
  const TestFrame frame = MakeFrame("a", 0, kLarge);
  std::ofstream(Plant(frame)) << "half";
  const auto save = Begin(*node, frame);
  executor_.Advance(milliseconds(500));
  EXPECT_EQ(save->Poll(0), nullptr);
  MustSave(*node, MakeFrame("b", 0));  // Nothing else waits.
  // It gets there.
  fs::remove(Plant(frame));
  MustSave(*other, frame);
  const int writes = node->io.calls(FaultyFileIo::kWrite);
  const SaveResult result = Settled(*save);
  EXPECT_EQ(result.outcome, Outcome::kHit);
  EXPECT_TRUE(result.existed);
  EXPECT_LE(node->io.calls(FaultyFileIo::kWrite), writes + 1) << "but a record of the journal";
  EXPECT_EQ(Load(*node, frame).outcome, Outcome::kHit);
}

TEST_F(SharedFsSingleFlight, WhatTheOtherNodeDoesNotFinishIsWritten) {
  auto node = Open({});
  const TestFrame frame = MakeFrame("a", 0, kLarge);
  std::ofstream(Plant(frame)) << "half";  // Its writer is dead.
  const TimePoint begun = clock_.Now();
  const SaveResult result = Save(*node, frame);
  EXPECT_EQ(result.outcome, Outcome::kHit);
  EXPECT_FALSE(result.existed);
  EXPECT_LE(clock_.Now(), begun + seconds(3));
  EXPECT_EQ(Load(*node, frame).outcome, Outcome::kHit);
}

// ---- D11: two processes

constexpr uint64_t kD11Cap = 100 * kMiB;
constexpr uint64_t kD11Frame = 2 * kMiB;

SharedFsOptions D11Options(const std::string& directory) {
  SharedFsOptions options;
  options.directory = directory;
  options.bounds.bytes_max = kD11Cap;
  options.poll_interval = milliseconds(20);
  options.flush_interval = milliseconds(10);
  return options;
}

// A child: saves conversations of ten chunks, four saves at a time, until `bytes` are accepted. Exits with 0, or 3 if
// too much was declined.
[[noreturn]] void WriteMuch(const std::string& directory, const std::string& name, uint64_t bytes) {
  const auto io = RealFileIo();
  const SystemClock clock;
  Metrics metrics;
  auto tier = OpenSharedFsTier(D11Options(directory), {.io = *io, .clock = clock, .metrics = metrics}).value();
  uint64_t accepted = 0, declined = 0;
  for (uint64_t talk = 0; accepted < bytes && declined < 100; ++talk) {
    std::vector<std::shared_ptr<SaveBatch>> saves;
    std::vector<TestFrame> frames;
    for (uint64_t n = 0; n < 10; ++n) {
      frames.push_back(MakeFrame(name + std::to_string(talk), n, kD11Frame - 4096));
    }
    for (const TestFrame& frame : frames) {
      saves.push_back(std::make_shared<SaveBatch>(1));
      tier->Save({{.info = frame.info, .payload = frame.payload}}, saves.back());
      if (saves.size() >= 4) saves[saves.size() - 4]->WaitAll(TimePoint::max());
    }
    for (const auto& save : saves) {
      const bool hit = save->Wait(0, TimePoint::max())->outcome == Outcome::kHit;
      hit ? accepted += kD11Frame : ++declined;
    }
  }
  tier.reset();
  _exit(accepted >= bytes ? 0 : 3);
}

pid_t Spawn(const std::string& directory, const std::string& name, uint64_t bytes) {
  std::string program = "/proc/self/exe", mode = "--write-much", to = directory, who = name,
              much = std::to_string(bytes);
  char* args[] = {program.data(), mode.data(), to.data(), who.data(), much.data(), nullptr};
  pid_t child = 0;
  EXPECT_EQ(posix_spawn(&child, program.c_str(), nullptr, nullptr, args, environ), 0);
  return child;
}

TEST(SharedFsD11, TwoProcessesThatWriteFiveTimesTheCapNeverExceedIt) {
  std::string pattern = testing::TempDir() + "/d11_XXXXXX";
  const std::string directory = mkdtemp(pattern.data());
  std::vector<pid_t> children;
  for (const char* name : {"a", "b"}) children.push_back(Spawn(directory, name, 250 * kMiB));
  uint64_t most = 0, looks = 0;
  for (size_t ended = 0; ended < children.size();) {
    most = std::max(most, BytesThere(directory));
    ++looks;
    int status = 0;
    const pid_t child = waitpid(-1, &status, WNOHANG);
    if (child <= 0) continue;
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
    ++ended;
  }
  EXPECT_LE(most, kD11Cap + 2 * kD11Frame);
  EXPECT_GT(most, kD11Cap / 2);
  EXPECT_GT(looks, 100u);
  fs::remove_all(directory);
}

}  // namespace
}  // namespace terrace

// Also the program that D11 starts twice.
int main(int argc, char** argv) {
  if (argc == 5 && std::string(argv[1]) == "--write-much") {
    terrace::WriteMuch(argv[2], argv[3], std::strtoull(argv[4], nullptr, 10));
  }
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
