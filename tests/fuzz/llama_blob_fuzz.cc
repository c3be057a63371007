// Any bytes as a sequence blob. The first byte chooses the shape and place; what passes the check must be exactly as
// long as foretold, and what is learned must describe the bytes it was learned from.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "engine/sequence_blob.h"
#include "engine/test_blob.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace terrace::engine;
  if (size == 0) return 0;
  const std::span bytes(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  const SequenceShape shape = SmallShape((data[0] & 1) != 0);
  const uint32_t first = (data[0] & 2) != 0 ? 4 : 0;
  if (CheckSequenceBlob(bytes, shape, first, 4) && bytes.size() != MakeBlob(shape, first, 4).size()) std::abort();
  const auto learned = LearnSequenceShape(bytes, 0, 1);
  if (learned && (SequenceBlobBytes(*learned, 1) != bytes.size() || !CheckSequenceBlob(bytes, *learned, 0, 1)))
    std::abort();
  return 0;
}
