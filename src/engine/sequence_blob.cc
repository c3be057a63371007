#include "engine/sequence_blob.h"

#include <cstring>

namespace terrace::engine {
namespace {

constexpr uint32_t kMagic = 0xaf143cd8;
constexpr uint64_t kCellBytes = 4 + 4 + 4;
constexpr uint64_t kCacheHeadBytes = 4 + 4;         // Streams, cells.
constexpr uint64_t kDataHeadBytes = 4 + 4 + 4 + 4;  // V transposed, layers, rotations.
constexpr uint64_t kRowsHeadBytes = 4 + 8;          // Type, row bytes.
constexpr uint64_t kColumnsHeadBytes = 4 + 4 + 4;   // Type, element bytes, elements.
// Above any model, far below overflow when multiplied by cells and layers.
constexpr uint64_t kRowBytesMax = 16 << 20;
constexpr uint32_t kLayersMax = 4096;

class Reader {
 public:
  explicit Reader(std::span<const std::byte> bytes) : rest_(bytes) {}

  template <class T>
  bool Read(T* value) {
    if (rest_.size() < sizeof(T)) return false;
    std::memcpy(value, rest_.data(), sizeof(T));
    rest_ = rest_.subspan(sizeof(T));
    return true;
  }
  bool Skip(uint64_t bytes) {
    if (rest_.size() < bytes) return false;
    rest_ = rest_.subspan(bytes);
    return true;
  }
  bool done() const { return rest_.empty(); }

 private:
  std::span<const std::byte> rest_;
};

// Reads one cache whose shape is not known yet; false if these bytes are no such cache.
bool LearnCache(Reader& reader, bool has_v, uint32_t token_count, CacheShape* shape) {
  uint32_t streams = 0, cells = 0, transposed = 0, layers = 0;
  if (!reader.Read(&streams) || streams != 1 || !reader.Read(&cells) || cells != token_count) return false;
  if (!reader.Skip(cells * kCellBytes)) return false;
  if (!reader.Read(&transposed) || transposed > 1 || !reader.Read(&layers) || layers == 0 || layers > kLayersMax)
    return false;
  if (!reader.Read(&shape->k_rotation) || !reader.Read(&shape->v_rotation)) return false;
  shape->has_v = has_v;
  shape->v_transposed = transposed == 1;
  shape->layers.resize(layers);
  for (LayerShape& layer : shape->layers) {
    if (!reader.Read(&layer.k_type) || !reader.Read(&layer.k_row_bytes) || layer.k_row_bytes == 0 ||
        layer.k_row_bytes > kRowBytesMax) {
      return false;
    }
    if (!reader.Skip(cells * layer.k_row_bytes)) return false;
  }
  if (!has_v) return true;
  for (LayerShape& layer : shape->layers) {
    if (!reader.Read(&layer.v_type)) return false;
    if (shape->v_transposed) {
      uint32_t element_bytes = 0;
      if (!reader.Read(&element_bytes) || !reader.Read(&layer.v_elements)) return false;
      layer.v_row_bytes = uint64_t{element_bytes} * layer.v_elements;
    } else if (!reader.Read(&layer.v_row_bytes)) {
      return false;
    }
    if (layer.v_row_bytes == 0 || layer.v_row_bytes > kRowBytesMax || !reader.Skip(cells * layer.v_row_bytes))
      return false;
  }
  return true;
}

std::optional<SequenceShape> LearnWith(std::span<const std::byte> bytes, bool has_v, uint32_t token_count) {
  Reader reader(bytes);
  uint32_t magic = 0;
  int32_t sequence = 0;
  if (!reader.Read(&magic) || !reader.Read(&sequence)) return std::nullopt;
  SequenceShape shape;
  while (!reader.done()) {
    CacheShape cache;
    if (!LearnCache(reader, has_v, token_count, &cache)) return std::nullopt;
    shape.caches.push_back(std::move(cache));
  }
  return shape;
}

// Compares field after field with what they have to be, and remembers the first that is not.
class Checker {
 public:
  explicit Checker(std::span<const std::byte> bytes) : reader_(bytes) {}

  // `where` and `what` are put together only on failure: this runs on the model thread.
  template <class T>
  bool Expect(T expected, const char* what) {
    T value{};
    if (!reader_.Read(&value)) return Fail(std::string("ends before ") + what);
    if (value == expected) return true;
    return Fail(std::string(what) + " is " + std::to_string(value) + ", not " + std::to_string(expected));
  }
  bool Skip(uint64_t bytes, const char* what) {
    return reader_.Skip(bytes) || Fail(std::string("ends inside ") + what);
  }
  bool End() { return reader_.done() || Fail("has bytes after its end"); }
  bool Fail(std::string why) {
    why_ = std::move(why);
    return false;
  }
  const std::string& why() const { return why_; }

 private:
  Reader reader_;
  std::string why_;
};

bool CheckCache(Checker& check, const CacheShape& shape, uint32_t first_token, uint32_t token_count) {
  if (!check.Expect<uint32_t>(1, "stream count") || !check.Expect(token_count, "cell count")) return false;
  for (uint32_t i = 0; i < token_count; ++i) {
    if (!check.Expect(static_cast<int32_t>(first_token + i), "position of a cell") ||
        !check.Expect<uint32_t>(1, "sequence count of a cell") ||
        !check.Expect(kScratchSequence, "sequence of a cell")) {
      return false;
    }
  }
  if (!check.Expect<uint32_t>(shape.v_transposed ? 1 : 0, "V transposition") ||
      !check.Expect(static_cast<uint32_t>(shape.layers.size()), "layer count") ||
      !check.Expect(shape.k_rotation, "K rotation") || !check.Expect(shape.v_rotation, "V rotation")) {
    return false;
  }
  for (const LayerShape& layer : shape.layers) {
    if (!check.Expect(layer.k_type, "K type") || !check.Expect(layer.k_row_bytes, "K row bytes") ||
        !check.Skip(token_count * layer.k_row_bytes, "K rows")) {
      return false;
    }
  }
  if (!shape.has_v) return true;
  for (const LayerShape& layer : shape.layers) {
    if (!check.Expect(layer.v_type, "V type")) return false;
    if (shape.v_transposed) {
      const auto element_bytes = static_cast<uint32_t>(layer.v_row_bytes / layer.v_elements);
      if (!check.Expect(element_bytes, "V element bytes") || !check.Expect(layer.v_elements, "V elements"))
        return false;
    } else if (!check.Expect(layer.v_row_bytes, "V row bytes")) {
      return false;
    }
    if (!check.Skip(token_count * layer.v_row_bytes, "V rows")) return false;
  }
  return true;
}

}  // namespace

std::optional<SequenceShape> LearnSequenceShape(std::span<const std::byte> bytes, uint32_t first_token,
                                                uint32_t token_count) {
  for (const bool has_v : {true, false}) {
    std::optional<SequenceShape> shape = LearnWith(bytes, has_v, token_count);
    if (shape && !shape->caches.empty() && CheckSequenceBlob(bytes, *shape, first_token, token_count)) return shape;
  }
  return std::nullopt;
}

uint64_t SequenceBlobBytes(const SequenceShape& shape, uint32_t token_count) {
  uint64_t bytes = 4 + 4;
  for (const CacheShape& cache : shape.caches) {
    bytes += kCacheHeadBytes + token_count * kCellBytes + kDataHeadBytes;
    for (const LayerShape& layer : cache.layers) {
      bytes += kRowsHeadBytes + token_count * layer.k_row_bytes;
      if (cache.has_v)
        bytes += (cache.v_transposed ? kColumnsHeadBytes : kRowsHeadBytes) + token_count * layer.v_row_bytes;
    }
  }
  return bytes;
}

Result<void> CheckSequenceBlob(std::span<const std::byte> bytes, const SequenceShape& shape, uint32_t first_token,
                               uint32_t token_count) {
  Checker check(bytes);
  bool good = check.Expect(kMagic, "magic") && check.Expect(kScratchSequence, "sequence");
  for (size_t i = 0; good && i < shape.caches.size(); ++i)
    good = CheckCache(check, shape.caches[i], first_token, token_count);
  if (good && check.End()) return {};
  return Fail(Code::kCorrupt, "sequence blob of tokens " + std::to_string(first_token) + "+" +
                                  std::to_string(token_count) + ": " + check.why());
}

}  // namespace terrace::engine
