#include "doctor/gguf.h"

#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

namespace terrace::doctor {
namespace {

static_assert(std::endian::native == std::endian::little);

constexpr uint64_t kPairsMax = 65'536;
constexpr uint64_t kTextMax = 16 << 20;  // Chat templates are some KB.
constexpr uint64_t kElementsMax = 64ull << 20;
constexpr uint64_t kKeptElementsMax = 4096;

enum Type : uint32_t { kU8, kI8, kU16, kI16, kU32, kI32, kF32, kBool, kText, kArray, kU64, kI64, kF64 };
// Bytes of a value; 0: no such type, or none of a fixed size.
constexpr std::array<uint64_t, 13> kSizes = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};

class Reader {
 public:
  explicit Reader(std::istream& file) : file_(file) {}

  template <class T>
  T Take() {
    T value{};
    file_.read(reinterpret_cast<char*>(&value), sizeof value);
    if (!file_) failed_ = true;
    return failed_ ? T{} : value;
  }
  std::string TakeText() {
    const auto bytes = Take<uint64_t>();
    if (bytes > kTextMax) failed_ = true;
    if (failed_) return {};
    std::string text(bytes, '\0');
    file_.read(text.data(), static_cast<std::streamsize>(bytes));
    if (!file_) failed_ = true;
    return text;
  }
  // Of an integer type or bool; nothing, and it is skipped, for the floats.
  std::optional<int64_t> TakeNumber(uint32_t type) {
    switch (type) {
      case kU8:
      case kBool: return Take<uint8_t>();
      case kI8: return Take<int8_t>();
      case kU16: return Take<uint16_t>();
      case kI16: return Take<int16_t>();
      case kU32: return Take<uint32_t>();
      case kI32: return Take<int32_t>();
      case kU64: return static_cast<int64_t>(Take<uint64_t>());
      case kI64: return Take<int64_t>();
      default: Skip(kSizes[type]); return std::nullopt;
    }
  }
  void Skip(uint64_t bytes) {
    file_.ignore(static_cast<std::streamsize>(bytes));
    if (file_.gcount() != static_cast<std::streamsize>(bytes)) failed_ = true;
  }
  void Refuse() { failed_ = true; }
  bool failed() const { return failed_; }

 private:
  std::istream& file_;
  bool failed_ = false;
};

void TakeArray(Reader& reader, const std::string& key, GgufMetadata& out) {
  const auto type = reader.Take<uint32_t>();
  const auto count = reader.Take<uint64_t>();
  if (reader.failed() || count > kElementsMax) return reader.Refuse();
  if (type == kText) {
    for (uint64_t i = 0; i < count && !reader.failed(); ++i) reader.TakeText();
  } else if (type < kSizes.size() && kSizes[type] > 0) {
    if (count > kKeptElementsMax) return reader.Skip(count * kSizes[type]);
    std::vector<int64_t> numbers;
    for (uint64_t i = 0; i < count && !reader.failed(); ++i) {
      if (const auto number = reader.TakeNumber(type)) numbers.push_back(*number);
    }
    if (!numbers.empty()) out.numbers[key] = std::move(numbers);
  } else {
    reader.Refuse();  // Arrays of arrays: nobody writes them.
  }
}

}  // namespace

Result<GgufMetadata> ReadGgufMetadata(std::istream& file) {
  Reader reader(file);
  const auto magic = reader.Take<std::array<char, 4>>();
  const auto version = reader.Take<uint32_t>();
  reader.Take<uint64_t>();  // Tensors.
  const auto pairs = reader.Take<uint64_t>();
  if (reader.failed() || std::memcmp(magic.data(), "GGUF", 4) != 0) return Fail(Code::kInvalid, "it is no GGUF file");
  if (version < 2 || version > 3) {
    return Fail(Code::kInvalid, "GGUF version " + std::to_string(version) + " is not known here (2 and 3 are)");
  }
  if (pairs > kPairsMax) return Fail(Code::kInvalid, "it is damaged: " + std::to_string(pairs) + " metadata keys");
  GgufMetadata out;
  for (uint64_t i = 0; i < pairs && !reader.failed(); ++i) {
    const std::string key = reader.TakeText();
    const auto type = reader.Take<uint32_t>();
    if (type >= kSizes.size()) reader.Refuse();
    if (reader.failed()) break;
    if (type == kText) {
      out.texts[key] = reader.TakeText();
    } else if (type == kArray) {
      TakeArray(reader, key, out);
    } else if (const auto number = reader.TakeNumber(type)) {
      out.numbers[key] = {*number};
    }
  }
  if (reader.failed()) return Fail(Code::kInvalid, "its metadata is damaged or cut off");
  return out;
}

}  // namespace terrace::doctor
