// Would catch: bytes that would steer llama.cpp's reader elsewhere than the space says (another count, position, type,
// row size, length) passing the check; a good blob being refused; a shape learned wrongly.
#include "engine/sequence_blob.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "engine/test_blob.h"

namespace terrace::engine {
namespace {

std::vector<SequenceShape> Shapes() {
  std::vector<SequenceShape> shapes = {SmallShape(true), SmallShape(false)};
  SequenceShape windowed = SmallShape(true);  // Two caches, as with sliding windows.
  windowed.caches.push_back(windowed.caches[0]);
  windowed.caches[1].layers.pop_back();
  shapes.push_back(windowed);
  SequenceShape latent = SmallShape(false);  // No V.
  latent.caches[0].has_v = false;
  for (LayerShape& layer : latent.caches[0].layers) layer.v_type = 0, layer.v_row_bytes = 0;
  shapes.push_back(latent);
  return shapes;
}

TEST(SequenceBlob, LearnsTheShapeItWasWrittenWith) {
  for (const SequenceShape& shape : Shapes()) {
    const auto learned = LearnSequenceShape(MakeBlob(shape, 0, 1), 0, 1);
    ASSERT_TRUE(learned.has_value());
    EXPECT_EQ(*learned, shape);
  }
}

TEST(SequenceBlob, GoodBlobsPassAndHaveTheLengthForetold) {
  for (const SequenceShape& shape : Shapes()) {
    const auto blob = MakeBlob(shape, 512, 64);
    EXPECT_EQ(blob.size(), SequenceBlobBytes(shape, 64));
    const auto checked = CheckSequenceBlob(blob, shape, 512, 64);
    EXPECT_TRUE(checked) << checked.error().what;
  }
}

TEST(SequenceBlob, AnotherLengthIsRefused) {
  const SequenceShape shape = SmallShape(true);
  auto blob = MakeBlob(shape, 0, 64);
  for (size_t size = 0; size < blob.size(); size += 7) {
    EXPECT_FALSE(CheckSequenceBlob(std::span(blob).first(size), shape, 0, 64)) << size;
  }
  blob.push_back(std::byte{0});
  EXPECT_FALSE(CheckSequenceBlob(blob, shape, 0, 64));
}

TEST(SequenceBlob, AnotherPlaceCountOrShapeIsRefused) {
  const SequenceShape shape = SmallShape(true);
  const auto blob = MakeBlob(shape, 256, 64);
  EXPECT_FALSE(CheckSequenceBlob(blob, shape, 0, 64));
  EXPECT_FALSE(CheckSequenceBlob(blob, shape, 256, 128));
  EXPECT_FALSE(CheckSequenceBlob(blob, SmallShape(false), 256, 64));
  SequenceShape wider = shape;
  wider.caches[0].layers[1].k_row_bytes *= 2;
  EXPECT_FALSE(CheckSequenceBlob(blob, wider, 256, 64));
  SequenceShape other_type = shape;
  other_type.caches[0].layers[1].v_type = 30;
  EXPECT_FALSE(CheckSequenceBlob(blob, other_type, 256, 64));
}

TEST(SequenceBlob, ErrorNamesTheField) {
  const SequenceShape shape = SmallShape(true);
  auto blob = MakeBlob(shape, 0, 64);
  blob[0] ^= std::byte{1};
  EXPECT_NE(CheckSequenceBlob(blob, shape, 0, 64).error().what.find("magic"), std::string::npos);
  EXPECT_EQ(CheckSequenceBlob(blob, shape, 0, 64).error().code, Code::kCorrupt);
}

// Every byte that is not a KV value steers the reader: no bit of them may differ.
TEST(SequenceBlob, EveryStructureBitIsChecked) {
  for (const SequenceShape& shape : Shapes()) {
    const auto blob = MakeBlob(shape, 0, 4);
    size_t values = 0;
    for (const CacheShape& cache : shape.caches) {
      for (const LayerShape& layer : cache.layers) values += 4 * (layer.k_row_bytes + layer.v_row_bytes);
    }
    size_t free_bytes = 0;
    for (size_t i = 0; i < blob.size(); ++i) {
      bool all_free = true;
      for (int bit = 0; bit < 8; ++bit) {
        auto flipped = blob;
        flipped[i] ^= static_cast<std::byte>(1 << bit);
        all_free = CheckSequenceBlob(flipped, shape, 0, 4).has_value() && all_free;
      }
      free_bytes += all_free;
    }
    EXPECT_EQ(free_bytes, values);
  }
}

TEST(SequenceBlob, RandomBytesAreNeverLearnedOutOfBounds) {
  const uint32_t seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 random(seed);
  const auto blob = MakeBlob(SmallShape(true), 0, 1);
  for (int round = 0; round < 20'000; ++round) {
    auto mutated = blob;
    for (int i = 0; i < 3; ++i) mutated[random() % mutated.size()] = static_cast<std::byte>(random());
    mutated.resize(mutated.size() - random() % 5);
    const auto learned = LearnSequenceShape(mutated, 0, 1);
    if (learned) {
      ASSERT_TRUE(CheckSequenceBlob(mutated, *learned, 0, 1));
    }
  }
}

}  // namespace
}  // namespace terrace::engine
