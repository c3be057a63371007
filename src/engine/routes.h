// The HTTP side of `terrace serve`: requests to generations, generations to answers. Handle runs on a reactor thread
// and never waits; what takes long is done on pools of threads beside the reactors, which the destructor waits for.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "chunk/weights.h"
#include "engine/chat_template.h"
#include "engine/model.h"
#include "engine/model_thread.h"
#include "engine/prepare_pool.h"
#include "http/server.h"
#include "openai/parse.h"
#include "openai/types.h"
#include "terrace/metrics.h"
#include "terrace/store.h"

namespace terrace::engine {

struct RouteOptions {
  std::string served_name;
  std::string api_key;  // "": none is asked for.
  uint32_t context_tokens = 0;
  PrepareOptions prepare;  // Of short requests, and of long ones.
};

// Or why chat does not work.
using OpenedChatTemplate = Result<std::unique_ptr<ChatTemplate>>;

class Routes {
 public:
  // All references outlive the routes, and the server is stopped before they go.
  Routes(RouteOptions options, const Model& model, const OpenedChatTemplate& chat, ModelThread& thread, Store& store,
         std::shared_ptr<WeightsDigest> weights, Metrics& metrics);

  void Handle(http::Request request, std::shared_ptr<http::Responder> responder);

 private:
  bool Authorized(const http::Request& request) const;
  // On a thread of a pool: the rest of the way from a body to the queue of the model thread, or to an error.
  void Read(const std::string& body, openai::Endpoint endpoint, std::shared_ptr<http::Responder> responder);
  void Generate(const openai::Request& request, std::shared_ptr<http::Responder> responder);
  void Lookup(const openai::Request& request, std::shared_ptr<http::Responder> responder) const;
  openai::ApiError TooLong(const std::string& tokens) const;
  // Why not, or nothing: then the tokens are there. Given up when the client leaves or the server stops.
  std::optional<openai::ApiError> Tokenize(std::string_view text, const http::Responder& responder,
                                           std::vector<int32_t>* into) const;
  // Template, tokens and names of a request; no sink yet.
  std::variant<std::unique_ptr<Generation>, openai::ApiError> Prepare(const openai::Request& request,
                                                                      const http::Responder& responder) const;

  const RouteOptions options_;
  const Model& model_;
  const OpenedChatTemplate& chat_;
  ModelThread& thread_;
  Store& store_;
  const std::shared_ptr<WeightsDigest> weights_;
  const Metrics& metrics_;
  const int64_t started_;     // Seconds since 1970.
  const Digest api_key_;      // SHA-256 of the key: compared in constant time whatever its length.
  PreparePool short_, long_;  // Last, so that their threads end first.
};

}  // namespace terrace::engine
