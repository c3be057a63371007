// How many bytes of KV a model makes for each token, by its metadata alone.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "terrace/result.h"

namespace terrace::doctor {

struct ModelSize {
  std::string shape;               // "llama: 30 layers x 3 KV heads x (64 + 64) values".
  std::string type;                // Of a value: "f16".
  uint64_t bytes_per_token = 0;    // Of all layers, at full length.
  uint64_t context = 0;            // That it was trained for; 0: unknown.
  std::vector<std::string> notes;  // What the figure does not say: sliding windows, recurrent layers.
};

// `path`: a GGUF file, a Hugging Face config.json, or a folder that holds one. `kv_type`: f16 or q8_0, for GGUF; a
// config.json names its own. Fails if the metadata does not say enough: no guesses.
Result<ModelSize> ReadModelSize(const std::string& path, const std::string& kv_type);

}  // namespace terrace::doctor
