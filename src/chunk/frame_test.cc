// Would catch: a header that decodes after any bit of it changed, a frame cut or padded anywhere that still passes, a
// format drift that old files would not survive, an unknown version taken for damage (and thrown away).
#include "chunk/frame.h"

#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <iterator>
#include <random>

#include "base/hash.h"

namespace terrace {
namespace {

FrameInfo Info(uint64_t payload_bytes) {
  FrameInfo info;
  for (size_t i = 0; i < 32; ++i) {
    info.space.bytes[i] = static_cast<uint8_t>(i);
    info.key.bytes[i] = static_cast<uint8_t>(100 + i);
    info.parent.bytes[i] = static_cast<uint8_t>(200 + i);
  }
  info.first_token = 512;
  info.token_count = 256;
  info.tp_rank = 1, info.pp_rank = 2, info.kv_group = 3;
  info.payload_kind = static_cast<uint32_t>(PayloadKind::kLlamaSequence);
  info.payload_bytes = payload_bytes;
  return info;
}

std::vector<std::byte> Payload(size_t bytes) {
  std::mt19937_64 random(bytes);
  std::vector<std::byte> payload(bytes);
  for (std::byte& b : payload) b = static_cast<std::byte>(random());
  return payload;
}

std::vector<std::byte> FrameFile(size_t payload_bytes) {
  const auto payload = Payload(payload_bytes);
  const FrameHeader header = EncodeFrameHeader(Info(payload_bytes), 1234567890, HashSegments(payload));
  std::vector<std::byte> file(FrameBytes(payload_bytes));
  std::memcpy(file.data(), header.data(), header.size());
  std::memcpy(file.data() + header.size(), payload.data(), payload.size());
  return file;
}

TEST(Frame, DecodesToWhatWasEncoded) {
  for (const size_t bytes :
       {size_t{1}, size_t{4095}, size_t{4096}, size_t{4097}, kSegmentBytes, kSegmentBytes + 1, 6 * kSegmentBytes}) {
    const auto file = FrameFile(bytes);
    EXPECT_EQ(file.size() % 4096, 0u);
    const auto decoded = DecodeFrameHeader(file, file.size());
    ASSERT_TRUE(std::holds_alternative<Frame>(decoded)) << bytes;
    const Frame& frame = std::get<Frame>(decoded);
    EXPECT_EQ(frame.info, Info(bytes));
    EXPECT_EQ(frame.created_ns, 1234567890u);
    EXPECT_EQ(frame.segments.size(), (bytes + kSegmentBytes - 1) / kSegmentBytes);
    for (size_t i = 0; i < frame.segments.size(); ++i) {
      const size_t begin = i * kSegmentBytes;
      const auto segment = std::span(file).subspan(kFrameHeaderBytes + begin, std::min(kSegmentBytes, bytes - begin));
      EXPECT_TRUE(SegmentMatches(frame, i, segment));
      EXPECT_FALSE(SegmentMatches(frame, i + 1, segment));
      EXPECT_FALSE(SegmentMatches(frame, i, segment.first(segment.size() - 1)));
    }
  }
}

TEST(Frame, AnyFlippedBitOfTheHeaderIsDamage) {
  auto file = FrameFile(3 * kSegmentBytes);
  for (size_t bit = 0; bit < kFrameHeaderBytes * 8; ++bit) {
    file[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
    const auto decoded = DecodeFrameHeader(file, file.size());
    ASSERT_TRUE(std::holds_alternative<Reason>(decoded)) << "bit " << bit;
    ASSERT_EQ(std::get<Reason>(decoded), Reason::kDamaged) << "bit " << bit;
    file[bit / 8] ^= static_cast<std::byte>(1 << bit % 8);
  }
}

TEST(Frame, LengthsThatDisagreeHaveTheirReason) {
  const auto file = FrameFile(10000);
  const auto reason = [&](size_t bytes) {
    return std::get<Reason>(DecodeFrameHeader(std::span(file).first(bytes), bytes));
  };
  EXPECT_EQ(reason(0), Reason::kEmpty);
  EXPECT_EQ(reason(1), Reason::kTruncated);
  EXPECT_EQ(reason(kFrameHeaderBytes - 1), Reason::kTruncated);
  EXPECT_EQ(reason(kFrameHeaderBytes), Reason::kTruncated);
  EXPECT_EQ(reason(file.size() - 1), Reason::kTruncated);
  EXPECT_EQ(std::get<Reason>(DecodeFrameHeader(file, file.size() + 1)), Reason::kDamaged);
}

TEST(Frame, GarbageOfTheRightSizeIsDamage) {
  const auto garbage = Payload(FrameBytes(10000));
  EXPECT_EQ(std::get<Reason>(DecodeFrameHeader(garbage, garbage.size())), Reason::kDamaged);
}

// Rewrites a field and makes the checksum right again, as a buggy or later writer would.
std::vector<std::byte> WithField(size_t at, uint32_t value) {
  auto file = FrameFile(10000);
  for (size_t i = 0; i < 4; ++i) file[at + i] = static_cast<std::byte>(value >> (8 * i));
  std::memset(file.data() + 16, 0, 16);
  const Hash128 checksum = Xxh3_128(std::span(file).first(kFrameHeaderBytes));
  std::memcpy(file.data() + 16, &checksum.low, 8);
  std::memcpy(file.data() + 24, &checksum.high, 8);
  return file;
}

TEST(Frame, AnUnknownVersionIsRefusedByName) {
  const auto file = WithField(8, 2);
  EXPECT_EQ(std::get<Reason>(DecodeFrameHeader(file, file.size())), Reason::kVersion);
}

TEST(Frame, FieldsThatNoEncoderWritesAreDamageEvenWithARightChecksum) {
  for (const size_t at : {12, 152, 156, 160, 164, 168, 176, 192, 300, 508, 512 + 8, 4092}) {
    const auto file = WithField(at, 0x01020304);
    EXPECT_EQ(std::get<Reason>(DecodeFrameHeader(file, file.size())), Reason::kDamaged) << "offset " << at;
  }
  const auto zero = WithField(160, 0);
  EXPECT_EQ(std::get<Reason>(DecodeFrameHeader(zero, zero.size())), Reason::kDamaged);
}

TEST(Frame, LargePayloadsUseLargerSegments) {
  EXPECT_EQ(FrameSegmentBytes(1), kSegmentBytes);
  EXPECT_EQ(FrameSegmentBytes(448ull << 20), kSegmentBytes);
  EXPECT_EQ(FrameSegmentBytes((448ull << 20) + 1), 2 * kSegmentBytes);
  EXPECT_EQ(FrameSegmentBytes(kFramePayloadBytesMax), 256 * kSegmentBytes);
  const uint64_t payload = 900ull << 20;
  const std::vector<uint64_t> hashes(450, 7);
  EXPECT_EQ(FrameSegmentBytes(payload), 4 * kSegmentBytes);
  const auto header = EncodeFrameHeader(Info(payload), 1, std::span(hashes).first(225));
  const auto decoded = DecodeFrameHeader(header, FrameBytes(payload));
  ASSERT_TRUE(std::holds_alternative<Frame>(decoded));
  EXPECT_EQ(std::get<Frame>(decoded).segment_bytes, 4 * kSegmentBytes);
}

// The file stays in the tree for ever: what format version 1 wrote must be read, or refused by name, by every later
// release.
TEST(Frame, ReadsTheSampleFileOfVersion1) {
  std::ifstream in(std::string(TERRACE_TEST_DATA) + "/frame-v1.bin", std::ios::binary);
  ASSERT_TRUE(in) << "tests/data/frame-v1.bin is missing";
  const std::vector<char> bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const auto file = std::as_bytes(std::span(bytes));
  const auto decoded = DecodeFrameHeader(file, file.size());
  ASSERT_TRUE(std::holds_alternative<Frame>(decoded));
  const Frame& frame = std::get<Frame>(decoded);
  EXPECT_EQ(frame.info, Info(5000));
  EXPECT_TRUE(SegmentMatches(frame, 0, file.subspan(kFrameHeaderBytes, 5000)));
  const auto written_now = FrameFile(5000);
  EXPECT_TRUE(std::equal(file.begin(), file.end(), written_now.begin(), written_now.end()))
      << "the encoder changed: new version needed";
}

}  // namespace
}  // namespace terrace
