// What could go wrong here: a short read taken for the end of a file, an existing file overwritten where the name must
// be new, a link that replaces, an error without its errno, its path or the right code, a directory made where only a
// mount point stands, a hang on a FIFO.
#include "io/file_io.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>

namespace terrace {
namespace {

std::span<const std::byte> Bytes(std::string_view text) { return std::as_bytes(std::span(text)); }

class FileIoTest : public testing::Test {
 protected:
  FileIoTest() {
    std::string pattern = testing::TempDir() + "/file_io_XXXXXX";
    dir_ = mkdtemp(pattern.data());
  }
  ~FileIoTest() override { std::filesystem::remove_all(dir_); }

  std::string Path(const std::string& name) const { return dir_ + "/" + name; }
  void Write(const std::string& name, std::string_view text) {
    auto file = io_->Open(Path(name), OpenMode::kCreateNew);
    ASSERT_TRUE(file) << file.error().what;
    ASSERT_TRUE((*file)->WriteAt(0, Bytes(text)));
    ASSERT_TRUE((*file)->Close());
  }
  std::string Read(const std::string& name) {
    auto file = io_->Open(Path(name), OpenMode::kRead);
    if (!file) return file.error().what;
    std::string text(1000, '?');
    auto n = (*file)->ReadAt(0, std::as_writable_bytes(std::span(text)));
    if (!n) return n.error().what;
    text.resize(*n);
    return text;
  }

  std::string dir_;
  std::unique_ptr<FileIo> io_ = RealFileIo();
};

TEST_F(FileIoTest, ReadsWhatWasWrittenAtItsOffset) {
  auto file = io_->Open(Path("a"), OpenMode::kCreateNew, 0640);
  ASSERT_TRUE(file);
  ASSERT_TRUE((*file)->WriteAt(4, Bytes("efgh")));
  ASSERT_TRUE((*file)->WriteAt(0, Bytes("abcd")));
  ASSERT_TRUE((*file)->Sync());
  ASSERT_TRUE((*file)->Close());
  EXPECT_EQ(Read("a"), "abcdefgh");

  auto again = io_->Open(Path("a"), OpenMode::kRead);
  ASSERT_TRUE(again);
  std::string text(4, '?');
  EXPECT_EQ((*again)->ReadAt(6, std::as_writable_bytes(std::span(text))).value(), 2u);
  EXPECT_EQ(text, "gh??");
  EXPECT_EQ((*again)->ReadAt(100, std::as_writable_bytes(std::span(text))).value(), 0u);
}

TEST_F(FileIoTest, CreateNewRefusesANameThatIsTaken) {
  Write("a", "first");
  auto second = io_->Open(Path("a"), OpenMode::kCreateNew);
  ASSERT_FALSE(second);
  EXPECT_EQ(second.error().os_error, EEXIST);
  EXPECT_EQ(second.error().what, "create " + Path("a") + ": EEXIST");
  EXPECT_EQ(Read("a"), "first");
}

TEST_F(FileIoTest, AppendAddsAtTheEndAndCreates) {
  for (const char* text : {"one ", "two "}) {
    auto file = io_->Open(Path("log"), OpenMode::kAppend);
    ASSERT_TRUE(file);
    ASSERT_TRUE((*file)->Append(Bytes(text)));
    ASSERT_TRUE((*file)->Close());
  }
  EXPECT_EQ(Read("log"), "one two ");
}

TEST_F(FileIoTest, LinkKeepsWhatIsThereAndRenameReplacesIt) {
  Write("a", "old");
  Write("b", "new");
  auto linked = io_->Link(Path("b"), Path("a"));
  ASSERT_FALSE(linked);
  EXPECT_EQ(linked.error().os_error, EEXIST);
  EXPECT_EQ(Read("a"), "old");
  ASSERT_TRUE(io_->Link(Path("b"), Path("c")));
  EXPECT_EQ(io_->Stat(Path("b"))->links, 2u);
  EXPECT_EQ(io_->Stat(Path("b"))->inode, io_->Stat(Path("c"))->inode);
  ASSERT_TRUE(io_->Rename(Path("b"), Path("a")));
  EXPECT_EQ(Read("a"), "new");
}

TEST_F(FileIoTest, StatSaysWhatAThingIs) {
  Write("a", "12345");
  EXPECT_EQ(io_->Stat(Path("a"))->bytes, 5u);
  EXPECT_TRUE(io_->Stat(Path("a"))->is_file);
  EXPECT_TRUE(io_->Stat(dir_)->is_directory);
  EXPECT_FALSE(io_->Stat(dir_)->is_file);
  EXPECT_NE(io_->Stat(dir_)->device, io_->Stat("/proc")->device);
}

TEST_F(FileIoTest, MakeDirMakesOneLevelAndIsFineIfThere) {
  ASSERT_TRUE(io_->MakeDir(Path("d"), 0750));
  ASSERT_TRUE(io_->MakeDir(Path("d"), 0750));
  auto orphan = io_->MakeDir(Path("missing/e"), 0750);
  ASSERT_FALSE(orphan);
  EXPECT_EQ(orphan.error().os_error, ENOENT);
  Write("f", "");
  EXPECT_EQ(io_->MakeDir(Path("f"), 0750).error().os_error, ENOTDIR);
}

TEST_F(FileIoTest, PermissionsAreTheOnesAskedLessTheUmask) {
  const mode_t before = umask(0022);
  auto file = io_->Open(Path("a"), OpenMode::kCreateNew, 0640);
  auto made = io_->MakeDir(Path("d"), 0750);
  umask(before);
  ASSERT_TRUE(file && made);
  struct stat st;
  ASSERT_EQ(stat(Path("a").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0640u);
  ASSERT_EQ(stat(Path("d").c_str(), &st), 0);
  EXPECT_EQ(st.st_mode & 0777, 0750u);
}

TEST_F(FileIoTest, ListGivesEveryNameOnce) {
  for (int i = 0; i < 500; ++i) Write("n" + std::to_string(i), "");
  auto names = io_->List(dir_);
  ASSERT_TRUE(names);
  std::sort(names->begin(), names->end());
  EXPECT_EQ(names->size(), 500u);
  EXPECT_EQ(std::unique(names->begin(), names->end()), names->end());
  EXPECT_EQ(io_->List(Path("missing")).error().os_error, ENOENT);
}

TEST_F(FileIoTest, MissingFilesAreErrorsThatNameThePath) {
  EXPECT_EQ(Read("gone"), "open " + Path("gone") + ": ENOENT");
  EXPECT_EQ(io_->Unlink(Path("gone")).error().os_error, ENOENT);
  EXPECT_EQ(io_->Stat(Path("gone")).error().code, Code::kIo);
}

TEST_F(FileIoTest, AFifoInThePlaceOfAFileDoesNotHang) {
  ASSERT_EQ(mkfifo(Path("fifo").c_str(), 0600), 0);
  auto file = io_->Open(Path("fifo"), OpenMode::kRead);
  ASSERT_TRUE(file);
  EXPECT_FALSE((*file)->Stat()->is_file);
}

TEST_F(FileIoTest, AFullFileSystemIsFullAndAReadOnlyOneDenied) {
  ASSERT_TRUE(io_->MakeDir(Path("mount"), 0750));
  if (mount("none", Path("mount").c_str(), "tmpfs", 0, "size=64k") != 0) GTEST_SKIP() << "may not mount";
  auto file = io_->Open(Path("mount/a"), OpenMode::kCreateNew);
  ASSERT_TRUE(file);
  const std::vector<std::byte> bytes(1 << 20);
  const Result<void> written = (*file)->WriteAt(0, bytes);
  const Result<FileIo::Space> space = io_->FreeSpace(Path("mount"));
  file->reset();
  ASSERT_EQ(mount("none", Path("mount").c_str(), "tmpfs", MS_REMOUNT | MS_RDONLY, nullptr), 0);
  const auto denied = io_->Open(Path("mount/b"), OpenMode::kCreateNew);
  umount2(Path("mount").c_str(), MNT_DETACH);

  ASSERT_FALSE(written);
  EXPECT_EQ(written.error().code, Code::kFull);
  ASSERT_TRUE(space);
  EXPECT_EQ(space->total_bytes, 64u << 10);
  EXPECT_EQ(space->free_bytes, 0u);
  ASSERT_FALSE(denied);
  EXPECT_EQ(denied.error().code, Code::kDenied);
  EXPECT_EQ(denied.error().os_error, EROFS);
}

}  // namespace
}  // namespace terrace
