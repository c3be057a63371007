// Would catch: hashes that differ from the published algorithms (frames and keys of other processes unreadable),
// segments cut at the wrong place, a fused copy that hashes or copies something else than it should.
#include "base/hash.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace terrace {
namespace {

std::vector<std::byte> RandomBytes(size_t size, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<std::byte> bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

// FIPS 180-2, appendix B.
TEST(Hash, Sha256AgreesWithTheStandard) {
  const Digest abc = Sha256Of("abc");
  const uint8_t expected[] = {0xba, 0x78, 0x16, 0xbf, 0x8f, 0x01, 0xcf, 0xea, 0x41, 0x41, 0x40,
                              0xde, 0x5d, 0xae, 0x22, 0x23, 0xb0, 0x03, 0x61, 0xa3, 0x96, 0x17,
                              0x7a, 0x9c, 0xb4, 0x10, 0xff, 0x61, 0xf2, 0x00, 0x15, 0xad};
  EXPECT_TRUE(std::equal(abc.bytes.begin(), abc.bytes.end(), std::begin(expected)));
}

// RFC 4231, test case 2.
TEST(Hash, HmacAgreesWithTheStandard) {
  const Digest mac = HmacSha256("Jefe", "what do ya want for nothing?");
  const uint8_t begin[] = {0x5b, 0xdc, 0xc1, 0x46, 0xbf, 0x60, 0x75, 0x4e};
  EXPECT_TRUE(std::equal(std::begin(begin), std::end(begin), mac.bytes.begin()));
  EXPECT_NE(HmacSha256("Jefe", ""), HmacSha256("", "Jefe"));
}

TEST(Hash, Sha256InPiecesIsSha256OfTheWhole) {
  Sha256 hash;
  hash.Update(std::string_view("a"));
  hash.Update(std::span<const std::byte>());
  hash.Update(std::string_view("bc"));
  EXPECT_EQ(hash.Finish(), Sha256Of("abc"));
}

// From the specification of xxHash: the empty input, seed 0.
TEST(Hash, Xxh3AgreesWithTheSpecification) {
  EXPECT_EQ(Xxh3_64({}), 0x2d06800538d394c2u);
  const Hash128 empty{.low = 0x6001c324468d497f, .high = 0x99aa06d3014798d8};
  EXPECT_EQ(Xxh3_128({}), empty);
}

TEST(Hash, Xxh3InPiecesIsXxh3OfTheWholeAndTheNextOneBeginsAnew) {
  const std::vector<std::byte> bytes = RandomBytes(700001, 3);
  const std::span<const std::byte> all(bytes);
  Xxh3Stream stream;
  EXPECT_EQ(stream.Finish(), Xxh3_64({}));
  for (const size_t piece : {size_t{1000}, size_t{65536}, size_t{262144}, bytes.size()}) {
    for (size_t at = 0; at < all.size(); at += piece) stream.Update(all.subspan(at, std::min(piece, all.size() - at)));
    EXPECT_EQ(stream.Finish(), Xxh3_64(all)) << piece;
  }
}

TEST(Hash, SegmentsAreOfOneMebibyteAndTheLastMayBeShorter) {
  const std::vector<std::byte> bytes = RandomBytes(2 * kSegmentBytes + 5, 1);
  const SegmentHashes hashes = HashSegments(bytes);
  ASSERT_EQ(hashes.size(), 3u);
  const std::span<const std::byte> all(bytes);
  EXPECT_EQ(hashes[0], Xxh3_64(all.first(kSegmentBytes)));
  EXPECT_EQ(hashes[1], Xxh3_64(all.subspan(kSegmentBytes, kSegmentBytes)));
  EXPECT_EQ(hashes[2], Xxh3_64(all.last(5)));
  EXPECT_EQ(HashSegments(all.first(kSegmentBytes)).size(), 1u);
  EXPECT_TRUE(HashSegments({}).empty());
}

TEST(Hash, CopyAndHashIsACopyAndTheHashesOfIt) {
  // Round block and segment bounds, and odd sizes between.
  for (const size_t size : {size_t{0}, size_t{1}, size_t{16383}, size_t{16384}, size_t{16385}, kSegmentBytes - 1,
                            kSegmentBytes, kSegmentBytes + 1, 3 * kSegmentBytes + 12345}) {
    const std::vector<std::byte> from = RandomBytes(size, 2);
    std::vector<std::byte> to(size);
    EXPECT_EQ(CopyAndHash(from, to), HashSegments(from)) << size;
    EXPECT_EQ(to, from) << size;
  }
}

TEST(Hash, PiecesChangeNeitherTheCopyNorItsHashes) {
  const std::vector<std::byte> from = RandomBytes(2 * kSegmentBytes + 777, 4);
  for (const size_t piece : {size_t{1000}, size_t{196'608}, kSegmentBytes, from.size()}) {
    std::vector<std::byte> to(from.size());
    std::vector<std::span<std::byte>> pieces(1);  // An empty one does no harm.
    for (size_t at = 0; at < to.size(); at += piece) {
      pieces.push_back(std::span(to).subspan(at, std::min(piece, to.size() - at)));
    }
    EXPECT_EQ(CopyAndHash(from, pieces), HashSegments(from)) << piece;
    EXPECT_EQ(to, from) << piece;
  }
}

}  // namespace
}  // namespace terrace
