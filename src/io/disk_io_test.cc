// What could go wrong here: bytes that go to another place than asked or past the caller's memory; a short transfer
// taken for a whole one; an operation that ends twice or never, above all when everything is cancelled; writes that
// keep reads waiting; a lock that two hold; a kernel without io_uring that is an error instead of threads.
#include "io/disk_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <future>
#include <random>

#include "io/disk_queue.h"
#include "tests/support/disk_kinds.h"
#include "tests/support/refused_call.h"

namespace terrace {
namespace {

namespace fs = std::filesystem;
using Mode = DiskIo::OpenOptions::Mode;
using Kind = DiskOp::Kind;

constexpr std::byte kFence{0xa5};

// Memory for direct operations.
struct alignas(kDirectAlignment) Block {
  std::array<std::byte, kDirectAlignment> bytes{};
};
struct Memory {
  explicit Memory(size_t blocks, std::byte fill = std::byte{0}) : storage(blocks) { std::ranges::fill(all(), fill); }
  std::span<std::byte> all() { return {storage.data()->bytes.data(), storage.size() * kDirectAlignment}; }
  std::vector<Block> storage;
};

void FillRandom(std::span<std::byte> bytes, uint64_t seed) {
  std::mt19937_64 random(seed);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
}

class DiskIoTest : public testing::TestWithParam<DiskIoKind> {
 protected:
  void SetUp() override {
    std::string name = (fs::temp_directory_path() / "terrace-disk-io-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    directory_ = name;
    Open({.kind = GetParam()});
  }
  void TearDown() override {
    io_.reset();
    fs::remove_all(directory_);
  }
  void Open(const DiskIoOptions& options) {
    auto io = OpenDiskIo(options);
    ASSERT_TRUE(io) << io.error().what;
    io_ = *std::move(io);
  }
  std::string Path(const std::string& name) const { return directory_ + "/" + name; }

  std::shared_ptr<DiskFile> MustOpen(const std::string& name, const DiskIo::OpenOptions& options) {
    auto file = io_->Open(Path(name), options);
    EXPECT_TRUE(file) << file.error().what;
    return file ? *file : nullptr;
  }
  Result<size_t> Do(DiskOp op) {
    std::promise<Result<size_t>> ended;
    op.done = [&](Result<size_t> result) { ended.set_value(std::move(result)); };
    std::vector<DiskOp> ops;
    ops.push_back(std::move(op));
    io_->Submit(std::move(ops));
    return ended.get_future().get();
  }
  Result<size_t> Read(const std::shared_ptr<DiskFile>& file, uint64_t offset,
                      std::array<std::span<std::byte>, 3> parts) {
    return Do({.kind = Kind::kRead, .file = file, .offset = offset, .parts = parts});
  }
  Result<size_t> Write(const std::shared_ptr<DiskFile>& file, uint64_t offset,
                       std::array<std::span<std::byte>, 3> parts) {
    return Do({.kind = Kind::kWrite, .file = file, .offset = offset, .parts = parts});
  }

  std::string directory_;
  std::unique_ptr<DiskIo> io_;
};

TEST_P(DiskIoTest, WhatIsWrittenInPartsIsReadInOtherParts) {
  for (const bool direct : {true, false}) {
    Memory out(7);
    FillRandom(out.all(), 1);
    auto file = MustOpen("f" + std::to_string(direct), {.mode = Mode::kCreateNew, .direct = direct});
    ASSERT_EQ(file->direct(), direct) << "the tests' directory should be on a file system that has O_DIRECT";
    const auto all = out.all();
    ASSERT_EQ(*Write(file, 4096, {all.first(4096), {}, all.subspan(4096, 8192)}), 12288u);
    ASSERT_EQ(*Write(file, 0, {all.subspan(6 * 4096)}), 4096u);
    ASSERT_TRUE(Do({.kind = Kind::kSync, .file = file}));
    EXPECT_EQ(file->Stat()->bytes, 4u * 4096);

    Memory in(5, kFence);
    ASSERT_EQ(*Read(file, 0, {in.all().first(8192), in.all().subspan(8192, 8192)}), 16384u);
    EXPECT_TRUE(std::equal(in.all().begin(), in.all().begin() + 4096, all.begin() + 6 * 4096));
    EXPECT_TRUE(std::equal(in.all().begin() + 4096, in.all().begin() + 16384, all.begin()));
    EXPECT_TRUE(std::ranges::all_of(in.all().subspan(16384), [](std::byte b) { return b == kFence; }));
  }
}

TEST_P(DiskIoTest, AReadEndsWhereTheFileEnds) {
  for (const size_t bytes : {0, 1, 4095, 4096, 5000, 8192}) {
    const std::string name = "f" + std::to_string(bytes);
    std::vector<char> text(bytes, 'x');
    std::ofstream(Path(name), std::ios::binary).write(text.data(), static_cast<std::streamsize>(bytes));
    for (const bool direct : {true, false}) {
      const auto file = MustOpen(name, {.direct = direct});
      Memory in(4, kFence);
      const auto read = Read(file, 0, {in.all().first(4096), in.all().subspan(4096)});
      ASSERT_TRUE(read) << read.error().what;
      EXPECT_EQ(*read, bytes);
      const auto beyond = Read(file, 16384, {in.all().first(4096)});
      ASSERT_TRUE(beyond) << beyond.error().what;
      EXPECT_EQ(*beyond, 0u);
    }
  }
}

TEST_P(DiskIoTest, ManyAtOnceEndOnceEachInTheirPlaces) {
  constexpr size_t kOps = 200;
  const auto file = MustOpen("f", {.mode = Mode::kCreateNew, .direct = true, .preallocate_bytes = kOps * 4096});
  EXPECT_EQ(file->Stat()->bytes, kOps * 4096);
  Memory out(kOps);
  FillRandom(out.all(), 2);
  Memory in(kOps);
  for (const Kind kind : {Kind::kWrite, Kind::kRead}) {
    std::vector<std::atomic<int>> ended(kOps);
    std::promise<void> all_ended;
    std::atomic<size_t> left{kOps};
    std::vector<DiskOp> ops;
    for (size_t i = 0; i < kOps; ++i) {
      DiskOp op{.kind = kind, .file = file, .offset = i * 4096};
      op.parts[0] = (kind == Kind::kWrite ? out : in).all().subspan(i * 4096, 4096);
      op.done = [&, i](const Result<size_t>& result) {
        EXPECT_TRUE(result && *result == 4096);
        ended[i].fetch_add(1);
        if (left.fetch_sub(1) == 1) all_ended.set_value();
      };
      ops.push_back(std::move(op));
    }
    io_->Submit(std::move(ops));
    all_ended.get_future().wait();
    for (const auto& n : ended) EXPECT_EQ(n.load(), 1);
  }
  EXPECT_TRUE(std::ranges::equal(out.all(), in.all()));
}

TEST_P(DiskIoTest, AnOperationMaySubmitTheNext) {
  const auto file = MustOpen("f", {.mode = Mode::kCreateNew});
  std::promise<Result<size_t>> ended;
  Memory out(1);
  DiskOp write{.kind = Kind::kWrite, .file = file};
  write.parts[0] = out.all();
  write.done = [&](const Result<size_t>&) {
    std::vector<DiskOp> next;
    next.push_back({.kind = Kind::kSync, .file = file, .done = [&](Result<size_t> r) { ended.set_value(r); }});
    io_->Submit(std::move(next));
  };
  std::vector<DiskOp> ops;
  ops.push_back(std::move(write));
  io_->Submit(std::move(ops));
  EXPECT_TRUE(ended.get_future().get());
}

TEST_P(DiskIoTest, CancelEndsAllThatWaitsAndAllThatComes) {
  const auto file = MustOpen("f", {.mode = Mode::kCreateNew, .direct = true});
  constexpr size_t kOps = 100;
  Memory out(256);
  std::atomic<size_t> left{2 * kOps}, cancelled{0}, whole{0};
  std::promise<void> all_ended;
  // Each that ends asks for one more: also from the thread that cancels.
  const auto count = [&](const Result<size_t>& result) {
    (result ? whole : cancelled).fetch_add(1);
    EXPECT_TRUE(result || result.error().code == Code::kCancelled);
    if (left.fetch_sub(1) == 1) all_ended.set_value();
  };
  std::vector<DiskOp> ops;
  for (size_t i = 0; i < kOps; ++i) {
    DiskOp op{.kind = Kind::kWrite, .file = file, .offset = i << 20};
    op.parts[0] = out.all();
    op.done = [&, i](const Result<size_t>& result) {
      std::vector<DiskOp> next;
      DiskOp another{.kind = i % 2 == 0 ? Kind::kSync : Kind::kRead, .file = file, .done = count};
      if (i % 2 != 0) another.parts[0] = out.all();
      next.push_back(std::move(another));
      io_->Submit(std::move(next));
      count(result);
    };
    ops.push_back(std::move(op));
  }
  io_->Submit(std::move(ops));
  io_->CancelQueued();
  all_ended.get_future().wait();
  EXPECT_EQ(cancelled + whole, 2 * kOps);
  EXPECT_GT(cancelled, 0u);
  const auto later = Do({.kind = Kind::kSync, .file = file});
  ASSERT_FALSE(later);
  EXPECT_EQ(later.error().code, Code::kCancelled);
}

TEST_P(DiskIoTest, TheDestructorEndsEverything) {
  constexpr size_t kOps = 50;
  Memory out(256);
  std::atomic<size_t> ended{0};
  std::vector<DiskOp> ops;
  {
    const auto file = MustOpen("f", {.mode = Mode::kCreateNew, .direct = true});
    for (size_t i = 0; i < kOps; ++i) {
      DiskOp op{.kind = Kind::kWrite, .file = file, .offset = i << 20};
      op.parts[0] = out.all();
      op.done = [&](const Result<size_t>&) { ended.fetch_add(1); };
      ops.push_back(std::move(op));
    }
  }
  io_->Submit(std::move(ops));
  io_.reset();
  EXPECT_EQ(ended.load(), kOps);
}

TEST_P(DiskIoTest, ErrorsNameOperationFileAndReason) {
  const auto missing = io_->Open(Path("none"), {});
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().os_error, ENOENT);
  EXPECT_NE(missing.error().what.find("open " + Path("none") + ": ENOENT"), std::string::npos) << missing.error().what;
  MustOpen("f", {.mode = Mode::kCreateNew});
  const auto taken = io_->Open(Path("f"), {.mode = Mode::kCreateNew});
  ASSERT_FALSE(taken);
  EXPECT_EQ(taken.error().os_error, EEXIST);
  Memory out(1);
  const auto denied = Write(MustOpen("f", {}), 0, {out.all()});
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().os_error, EBADF);
  EXPECT_EQ(denied.error().what, "write " + Path("f") + ": EBADF");
}

TEST_P(DiskIoTest, SpaceThatIsNotThereIsRefusedBeforeAFileIsLeft) {
  const auto file = io_->Open(Path("f"), {.mode = Mode::kCreateNew, .preallocate_bytes = 1ull << 60});
  ASSERT_FALSE(file);
  EXPECT_TRUE(file.error().os_error == ENOSPC || file.error().os_error == EFBIG) << file.error().what;
  EXPECT_FALSE(fs::exists(Path("f")));
}

TEST_P(DiskIoTest, DirectoriesAreSynced) {
  const auto directory = MustOpen("", {.mode = Mode::kDirectory});
  EXPECT_TRUE(Do({.kind = Kind::kSync, .file = directory}));
  std::ofstream(Path("f")) << "x";
  EXPECT_EQ(io_->Open(Path("f"), {.mode = Mode::kDirectory}).error().os_error, ENOTDIR);
}

TEST_P(DiskIoTest, ATouchIsAModification) {
  const auto file = MustOpen("f", {.mode = Mode::kCreateNew});
  timespec old[2] = {{.tv_sec = 1000}, {.tv_sec = 1000}};
  ASSERT_EQ(utimensat(AT_FDCWD, Path("f").c_str(), old, 0), 0);
  ASSERT_EQ(file->Stat()->mtime_ns, 1000'000'000'000);
  file->Touch();
  EXPECT_GT(file->Stat()->mtime_ns, 1000'000'000'000);
}

TEST_P(DiskIoTest, ALockIsHeldByOneAndSaysByWhom) {
  auto lock = io_->Lock(Path("lock"));
  ASSERT_TRUE(lock) << lock.error().what;
  const auto second = io_->Lock(Path("lock"));
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().code, Code::kUnavailable);
  EXPECT_NE(second.error().what.find("process " + std::to_string(getpid())), std::string::npos) << second.error().what;
  *lock = nullptr;
  EXPECT_TRUE(io_->Lock(Path("lock")));
}

INSTANTIATE_TEST_SUITE_P(Kinds, DiskIoTest, testing::ValuesIn(DiskKinds()),
                         [](const auto& kind) { return DiskKindName(kind.param); });

TEST(DiskQueue, ReadsGoFirstAndWritesKeepAQuarter) {
  disk_io::Queue queue(8);
  const auto push = [&](Kind kind, uint64_t offset) { queue.Push({.kind = kind, .offset = offset}); };
  for (uint64_t i = 0; i < 4; ++i) push(Kind::kWrite, i);
  for (uint64_t i = 10; i < 14; ++i) push(Kind::kRead, i);
  EXPECT_EQ(queue.PopTransfer(0)->offset, 0u);
  EXPECT_EQ(queue.PopTransfer(1)->offset, 1u);
  EXPECT_EQ(queue.PopTransfer(2)->offset, 10u);
  EXPECT_EQ(queue.PopTransfer(2)->offset, 11u);
  EXPECT_EQ(queue.PopTransfer(1)->offset, 2u);
  EXPECT_EQ(queue.PopTransfer(2)->offset, 12u);
  EXPECT_EQ(queue.PopTransfer(2)->offset, 13u);
  EXPECT_EQ(queue.PopTransfer(7)->offset, 3u);
  EXPECT_FALSE(queue.PopTransfer(0));
}

// The kernel says EPERM to io_uring, as container runtimes let it.
TEST(DiskIoWithoutUring, FallsBackToThreads) {
  EXPECT_EQ(ResultWithout({.number = SYS_io_uring_setup, .error = EPERM},
                          [] {
                            const auto forced = OpenDiskIo({.kind = DiskIoKind::kUring});
                            if (forced || forced.error().code != Code::kUnavailable) return 1;
                            if (forced.error().os_error != EPERM) return 2;
                            const auto fallen_back = OpenDiskIo();
                            return fallen_back && std::string((*fallen_back)->name()) == "threads" ? 0 : 3;
                          }),
            0);
}

}  // namespace
}  // namespace terrace
