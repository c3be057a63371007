// The metadata of a GGUF file, without its tensors. Foreign bytes: whatever they are, the answer is an error at worst.
#pragma once

#include <cstdint>
#include <istream>
#include <map>
#include <string>
#include <vector>

#include "terrace/result.h"

namespace terrace::doctor {

struct GgufMetadata {
  std::map<std::string, std::string> texts;
  // Integers and booleans; arrays of those with 4,096 elements at most. Other values are left out.
  std::map<std::string, std::vector<int64_t>> numbers;
};

Result<GgufMetadata> ReadGgufMetadata(std::istream& file);

}  // namespace terrace::doctor
