// A model's file that an operator got from anywhere: whatever it holds, its metadata is read or refused.
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>

#include "doctor/gguf.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  std::istringstream file(std::string(reinterpret_cast<const char*>(data), size));
  static_cast<void>(terrace::doctor::ReadGgufMetadata(file).has_value());
  return 0;
}
