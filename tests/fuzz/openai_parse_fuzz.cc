// Any bytes as a request body: parsed or refused, never a crash; what is parsed keeps its bounds, what is refused is
// not sent back whole, and the router finds the model that the server finds.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "openai/format.h"
#include "openai/parse.h"

// The bounds of message and name, each byte as an escape of six.
constexpr size_t kErrorBytesMax = 8000;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace terrace::openai;
  const std::string_view body(reinterpret_cast<const char*>(data), size);
  const auto model = FindModel(body);
  for (const Endpoint endpoint : {Endpoint::kChat, Endpoint::kCompletion, Endpoint::kEither}) {
    const auto parsed = ParseRequest(body, endpoint);
    if (const auto* error = std::get_if<ApiError>(&parsed)) {
      if (error->status != 400 || error->message.empty() || ErrorBody(*error).size() > kErrorBytesMax) std::abort();
      continue;
    }
    const auto& request = std::get<Request>(parsed);
    if (!std::holds_alternative<std::string>(model) || std::get<std::string>(model) != request.model) std::abort();
    if (request.stop.size() > kStopsMax || request.temperature < 0 || request.temperature > 2 || request.top_p < 0 ||
        request.top_p > 1 || request.min_p < 0 || request.min_p > 1 || request.max_tokens == 0u ||
        request.repetition_penalty <= 0 || request.logit_bias.size() > kLogitBiasesMax ||
        (request.chat && request.messages.empty()) ||
        (request.continue_final_message && request.messages.back().content.empty())) {
      std::abort();
    }
  }
  return 0;
}
