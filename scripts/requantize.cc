// requantize SOURCE.gguf TARGET.gguf: writes the model with F16 weights through llama.cpp's own API.
// Run by scripts/setup. F16 because it has fast prefill kernels on AVX2 and keeps sensible answers
// (docs/internals/engine.md has the measurements).
#include <cstdio>

#include "llama.h"

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: requantize SOURCE.gguf TARGET.gguf\n");
    return 2;
  }
  llama_backend_init();
  llama_model_quantize_params params = llama_model_quantize_default_params();
  params.ftype = LLAMA_FTYPE_MOSTLY_F16;
  params.allow_requantize = true;
  const uint32_t rc = llama_model_quantize(argv[1], argv[2], &params);
  if (rc != 0) std::fprintf(stderr, "requantize: llama_model_quantize returned %u\n", rc);
  return rc == 0 ? 0 : 1;
}
