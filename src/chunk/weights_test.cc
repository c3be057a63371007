// Would catch: a digest that misses a change anywhere in the file, a cached digest used for other bytes, a start that
// waits for the hash.
#include "chunk/weights.h"

#include <gtest/gtest.h>
#include <sys/vfs.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "base/hash.h"

namespace terrace {
namespace {

class Weights : public testing::Test {
 protected:
  Weights() : dir_(std::filesystem::temp_directory_path() / ("weights_test." + std::to_string(getpid()))) {
    std::filesystem::create_directories(dir_);
  }
  ~Weights() override { std::filesystem::remove_all(dir_); }
  std::string Path(const std::string& name) const { return dir_ / name; }
  static void Write(const std::string& path, const std::string& bytes) {
    std::ofstream(path, std::ios::binary) << bytes;
  }

  const std::filesystem::path dir_;
};

TEST_F(Weights, DigestIsThatOfAllBytes) {
  const std::string bytes(9 << 20, 'w');
  Write(Path("m.gguf"), bytes);
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), "")->Wait().value(), Sha256Of(bytes));
}

TEST_F(Weights, SecondStartTakesTheCacheAndAChangedFileDoesNot) {
  Write(Path("m.gguf"), "first");
  const std::string cache = Path("cache");
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), cache)->Wait().value(), Sha256Of("first"));
  struct statfs tests{};
  ASSERT_EQ(statfs(Path("m.gguf").c_str(), &tests), 0);
  if (tests.f_type == 0x65735546) {  // The tests' folder is on FUSE, where nothing is kept.
    EXPECT_FALSE(std::filesystem::exists(cache));
    return;
  }
  // Make the cached value recognisable: the second start must show it.
  ASSERT_EQ(std::distance(std::filesystem::directory_iterator(cache), {}), 1);
  const Digest marker = Sha256Of("marker");
  Write(std::filesystem::directory_iterator(cache)->path(), marker.Hex() + "\n");
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), cache)->Wait().value(), marker);

  Write(Path("m.gguf"), "secnd");  // Same size, same inode: times tell.
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), cache)->Wait().value(), Sha256Of("secnd"));
}

TEST_F(Weights, ATornCacheEntryIsComputedAnew) {
  Write(Path("m.gguf"), "bytes");
  const std::string cache = Path("cache");
  WeightsDigest::Start(Path("m.gguf"), cache)->Wait().value();
  Write(std::filesystem::directory_iterator(cache)->path(), Sha256Of("bytes").Hex().substr(0, 30));
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), cache)->Wait().value(), Sha256Of("bytes"));
}

TEST_F(Weights, CacheThatCannotBeWrittenCostsNothingButTime) {
  Write(Path("m.gguf"), "bytes");
  Write(Path("file"), "");
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), Path("file") + "/cache")->Wait().value(), Sha256Of("bytes"));
}

TEST_F(Weights, MissingFileIsAnErrorThatNamesIt) {
  const auto digest = WeightsDigest::Start(Path("none.gguf"), "");
  const auto result = digest->Wait();
  ASSERT_FALSE(result);
  EXPECT_NE(result.error().what.find("none.gguf"), std::string::npos);
  EXPECT_EQ(digest->Get(), std::nullopt);
}

TEST_F(Weights, AFileThatChangesIsNotNamedAnyMore) {
  Write(Path("m.gguf"), "bytes");
  const auto digest = WeightsDigest::Start(Path("m.gguf"), "");
  ASSERT_EQ(digest->Wait().value(), Sha256Of("bytes"));
  EXPECT_TRUE(digest->Intact());
  EXPECT_TRUE(digest->Get());
  Write(Path("m.gguf"), "other");
  // Time stamps are as coarse as the kernel's clock, and the test is quicker.
  std::filesystem::last_write_time(Path("m.gguf"),
                                   std::filesystem::file_time_type::clock::now() + std::chrono::hours(1));
  EXPECT_FALSE(digest->Get()) << "the same size, in place";
  EXPECT_FALSE(digest->Intact());
  EXPECT_EQ(WeightsDigest::Start(Path("m.gguf"), "")->Wait().value(), Sha256Of("other"));
}

TEST_F(Weights, AFileThatIsReplacedIsNotNamedAnyMore) {
  Write(Path("m.gguf"), "bytes");
  const auto digest = WeightsDigest::Start(Path("m.gguf"), "");
  ASSERT_TRUE(digest->Wait());
  Write(Path("n.gguf"), "bytes");
  std::filesystem::rename(Path("n.gguf"), Path("m.gguf"));
  EXPECT_FALSE(digest->Intact()) << "its content is not known";
}

TEST(LastingIdentity, IsNotTrustedWhereInodesOrTimesAreMadeUp) {
  struct stat st{};
  EXPECT_FALSE(LastingIdentity(st, 0xEF53));  // ext4, whole seconds.
  st.st_ctim.tv_nsec = 1;
  EXPECT_TRUE(LastingIdentity(st, 0xEF53));
  EXPECT_TRUE(LastingIdentity(st, 0x6969));  // NFS.
  EXPECT_FALSE(LastingIdentity(st, 0x65735546));
}

}  // namespace
}  // namespace terrace
