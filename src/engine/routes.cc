#include "engine/routes.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <exception>
#include <random>
#include <utility>

#include "base/hash.h"
#include "base/log.h"
#include "openai/errors.h"
#include "openai/format.h"
#include "openai/parse.h"

namespace terrace::engine {
namespace {

// What OpenAI's completions end at if nothing is said.
constexpr uint32_t kCompletionTokensDefault = 16;
// Bodies up to this are read on threads of their own: they take some ten milliseconds at most, and don't wait for those
// that take seconds.
constexpr size_t kShortBytes = 64 << 10;
constexpr std::chrono::seconds kProbeMax{2};  // Of a look-up, for what other instances have.

int64_t NowSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void SendJson(http::Responder& responder, int status, std::string body, http::Headers headers = {}) {
  headers.emplace_back("Content-Type", "application/json");
  responder.Send(status, std::move(headers), std::move(body));
}

void SendError(http::Responder& responder, const openai::ApiError& error, http::Headers headers = {}) {
  if (error.status == 429 || error.status == 503) headers.emplace_back("Retry-After", "1");
  SendJson(responder, error.status, openai::ErrorBody(error), std::move(headers));
}

openai::ApiError Refusal(int status, std::string message, std::string code) {
  return {.status = status,
          .message = std::move(message),
          .type = "invalid_request_error",
          .param = {},
          .code = std::move(code)};
}

openai::ApiError TemplateRefusal(const Error& error) {
  const bool for_good = error.code == Code::kInvalid || error.code == Code::kTimeout || error.code == Code::kFull;
  auto refusal = Refusal(for_good ? 400 : 503, "the model's chat template: " + error.what, "chat_template_failed");
  if (for_good) refusal.param = "messages";
  if (!for_good) refusal.type = "server_error";
  return refusal;
}

openai::ApiError Overloaded() {
  openai::ApiError error = ShuttingDown();
  error.message = "too many requests wait to be read; try again";
  error.code = "overloaded";
  return error;
}

uint32_t SamplerSeed(const std::optional<int64_t>& seed) {
  // Any 64 bits to 32; llama.cpp takes the largest value as "choose one yourself".
  const uint64_t bits = seed ? static_cast<uint64_t>(*seed) : std::random_device{}();
  return static_cast<uint32_t>((bits ^ (bits >> 32)) % 0xffffffffu);
}

// Answers one request, as a stream or as a whole. Used by the model thread; `gone` by all.
class HttpSink final : public GenerationSink {
 public:
  HttpSink(std::shared_ptr<http::Responder> responder, openai::AnswerHead head, bool stream, bool include_usage)
      : responder_(std::move(responder)), head_(std::move(head)), stream_(stream), include_usage_(include_usage) {}

  void Text(std::string text) override {
    if (stream_) {
      Write(openai::StreamText(head_, text, include_usage_));
    } else {
      text_ += text;
    }
  }

  void Done(FinishReason reason, const openai::Usage& usage) override {
    const char* finish = reason == FinishReason::kStop ? "stop" : "length";
    if (!stream_) return SendJson(*responder_, 200, openai::AnswerBody(head_, text_, finish, usage));
    Write(openai::StreamEnd(head_, finish, include_usage_ ? &usage : nullptr));
    responder_->End();
  }

  void Failed(openai::ApiError error) override {
    if (!begun_) return SendError(*responder_, error);
    Write(openai::StreamError(error));
    responder_->End();
  }

  bool gone() const override { return cut_.load(std::memory_order_relaxed) || responder_->gone(); }

 private:
  void Write(std::string events) {
    if (!std::exchange(begun_, true)) {
      responder_->Begin(200, {{"Content-Type", "text/event-stream"}, {"Cache-Control", "no-cache"}});
      events.insert(0, openai::StreamStart(head_, include_usage_));
    }
    if (!responder_->Write(std::move(events))) cut_.store(true, std::memory_order_relaxed);
  }

  const std::shared_ptr<http::Responder> responder_;
  const openai::AnswerHead head_;
  const bool stream_;
  const bool include_usage_;
  bool begun_ = false;
  std::string text_;
  std::atomic<bool> cut_{false};  // Relaxed: a flag that stands alone. The client is too slow or gone.
};

}  // namespace

Routes::Routes(RouteOptions options, const Model& model, const OpenedChatTemplate& chat, ModelThread& thread,
               Store& store, std::shared_ptr<WeightsDigest> weights, Metrics& metrics)
    : options_(std::move(options)),
      model_(model),
      chat_(chat),
      thread_(thread),
      store_(store),
      weights_(std::move(weights)),
      metrics_(metrics),
      started_(NowSeconds()),
      api_key_(Sha256Of(options_.api_key)),
      short_("short", options_.prepare, metrics),
      long_("long", options_.prepare, metrics) {}

bool Routes::Authorized(const http::Request& request) const {
  if (options_.api_key.empty()) return true;
  constexpr std::string_view kBearer = "bearer ";  // In any case: RFC 9110, 11.1.
  const std::string_view header = request.Header("Authorization");
  const auto same = [](char a, char b) { return a == std::tolower(static_cast<unsigned char>(b)); };
  if (header.size() < kBearer.size() || !std::equal(kBearer.begin(), kBearer.end(), header.begin(), same)) return false;
  const Digest given = Sha256Of(header.substr(kBearer.size()));
  unsigned difference = 0;
  for (size_t i = 0; i < given.bytes.size(); ++i) difference |= unsigned{given.bytes[i]} ^ api_key_.bytes[i];
  return difference == 0;
}

void Routes::Handle(http::Request request, std::shared_ptr<http::Responder> responder) {
  struct Route {
    std::string_view path;
    std::string_view method;
  };
  static constexpr Route kRoutes[] = {{"/health", "GET"},          {"/metrics", "GET"},
                                      {"/v1/models", "GET"},       {"/v1/chat/completions", "POST"},
                                      {"/v1/completions", "POST"}, {"/terrace/lookup", "POST"}};
  const auto* route = std::ranges::find(kRoutes, request.path, &Route::path);
  if (route == std::end(kRoutes)) {
    return SendError(*responder, Refusal(404, "there is nothing at " + openai::Echo(request.path), "not_found"));
  }
  const bool heads = request.method == "HEAD" && route->method == "GET";  // The server leaves the body out.
  if (request.method != route->method && !heads) {
    return SendError(*responder,
                     Refusal(405, request.path + " takes " + std::string(route->method), "method_not_allowed"),
                     {{"Allow", std::string(route->method)}});
  }
  if (route->path == "/health") {
    const Store::Health health = store_.health();
    return SendJson(*responder, 200, openai::HealthBody(health.degraded, health.why));
  }
  if (route->path == "/metrics") {
    return responder->Send(200, {{"Content-Type", "text/plain; version=0.0.4"}}, metrics_.Text());
  }
  if (!Authorized(request)) {
    return SendError(*responder,
                     Refusal(401, "the API key is missing or wrong; send Authorization: Bearer KEY", "invalid_api_key"),
                     {{"WWW-Authenticate", "Bearer"}});
  }
  if (route->path == "/v1/models") {
    return SendJson(*responder, 200, openai::ModelsBody(options_.served_name, started_, options_.context_tokens));
  }

  if (const std::string_view coding = request.BodyCoding(); !coding.empty()) {
    return SendError(*responder, openai::BodyIsCoded(coding));
  }
  const bool lookup = route->path == "/terrace/lookup";
  const auto endpoint = lookup                             ? openai::Endpoint::kEither
                        : route->path == "/v1/completions" ? openai::Endpoint::kCompletion
                                                           : openai::Endpoint::kChat;
  PreparePool& pool = request.body.size() <= kShortBytes ? short_ : long_;
  auto body = std::make_shared<const std::string>(std::move(request.body));
  // Before the job is posted, which has another use for it.
  responder->OnGone([&pool] { pool.DropGone(); });
  const bool posted = pool.Post({.run = [this, endpoint, body, responder] { Read(*body, endpoint, responder); },
                                 .gone = [responder] { return responder->gone(); }});
  if (!posted) SendError(*responder, thread_.stopping() ? ShuttingDown() : Overloaded());
}

void Routes::Read(const std::string& body, openai::Endpoint endpoint, std::shared_ptr<http::Responder> responder) {
  if (thread_.stopping()) return SendError(*responder, ShuttingDown());
  try {
    const auto parsed = openai::ParseRequest(body, endpoint);
    if (const auto* error = std::get_if<openai::ApiError>(&parsed)) return SendError(*responder, *error);
    const auto& asked = std::get<openai::Request>(parsed);
    if (endpoint == openai::Endpoint::kEither) return Lookup(asked, std::move(responder));
    Generate(asked, std::move(responder));
  } catch (const std::exception& e) {  // llama.cpp's tokenizers may throw; unanswered requests get a 500.
    log::Error("request_failed", {{"why", e.what()}});
  }
}

openai::ApiError Routes::TooLong(const std::string& tokens) const {
  return Refusal(400,
                 "this model's maximum context length is " + std::to_string(options_.context_tokens) +
                     " tokens, and the prompt has " + tokens +
                     " tokens; shorten it (one token is needed for the answer)",
                 "context_length_exceeded");
}

std::optional<openai::ApiError> Routes::Tokenize(std::string_view text, const http::Responder& responder,
                                                 std::vector<int32_t>* into) const {
  if (const size_t run = LongestRun(text); run > kRunBytesMax) {
    return Refusal(400,
                   "the prompt has " + std::to_string(run) +
                       " bytes without a blank, or of blanks, in a row; this server reads " +
                       std::to_string(kRunBytesMax) + " at most",
                   "invalid_prompt");
  }
  Tokenized found = model_.tokenizer().Tokenize(
      text, {.tokens_max = options_.context_tokens, .stop = [&] { return responder.gone() || thread_.stopping(); }});
  if (found.at_least > options_.context_tokens) {
    return TooLong((found.whole ? "" : "at least ") + std::to_string(found.at_least));
  }
  if (!found.whole) return ShuttingDown();  // Or nobody is there to be told.
  *into = std::move(found.tokens);
  return std::nullopt;
}

std::variant<std::unique_ptr<Generation>, openai::ApiError> Routes::Prepare(const openai::Request& request,
                                                                            const http::Responder& responder) const {
  if (!request.model.empty() && request.model != options_.served_name) {
    return openai::ModelNotFound(request.model, "this server has '" + options_.served_name + "'");
  }
  auto generation = std::make_unique<Generation>();
  if (request.chat) {
    if (!chat_) return Refusal(400, chat_.error().what + "; use /v1/completions", "chat_not_supported");
    const Result<std::string> text = (*chat_)->Render(request);
    if (!text) return TemplateRefusal(text.error());
    if (auto refusal = Tokenize(*text, responder, &generation->tokens)) return *std::move(refusal);
  } else if (!request.prompt_tokens.empty()) {
    generation->tokens = request.prompt_tokens;
    if (std::ranges::max(generation->tokens) >= static_cast<int32_t>(model_.vocabulary())) {
      return openai::ApiError{.message = "'prompt' has a token id that the model does not know", .param = "prompt"};
    }
  } else {
    if (auto refusal = Tokenize(request.prompt, responder, &generation->tokens)) return *std::move(refusal);
  }

  for (const openai::LogitBias& bias : request.logit_bias) {
    if (bias.token >= static_cast<int32_t>(model_.vocabulary())) {
      return openai::ApiError{.message = "'logit_bias' has a token id that the model does not know",
                              .param = "logit_bias"};
    }
  }

  const size_t prompt = generation->tokens.size();
  if (prompt == 0)
    return openai::ApiError{.message = "the prompt has no tokens", .param = request.chat ? "messages" : "prompt"};
  if (prompt >= options_.context_tokens) {
    return TooLong(std::to_string(prompt));
  }
  const auto room = static_cast<uint32_t>(options_.context_tokens - prompt);
  if (request.max_tokens.value_or(0) > room) {
    openai::ApiError error = Refusal(
        400,
        "the prompt has " + std::to_string(prompt) + " tokens and max_tokens is " +
            std::to_string(*request.max_tokens) + ", together more than this model's maximum context length of " +
            std::to_string(options_.context_tokens) + "; ask for at most " + std::to_string(room) + ", or leave it out",
        "context_length_exceeded");
    error.param = "max_tokens";
    return error;
  }
  generation->max_tokens = std::min(room, request.max_tokens.value_or(request.chat ? room : kCompletionTokensDefault));
  generation->sampling = {.temperature = static_cast<float>(request.temperature),
                          .top_p = static_cast<float>(request.top_p),
                          .min_p = static_cast<float>(request.min_p),
                          .top_k = request.top_k,
                          .presence_penalty = static_cast<float>(request.presence_penalty),
                          .frequency_penalty = static_cast<float>(request.frequency_penalty),
                          .repetition_penalty = static_cast<float>(request.repetition_penalty),
                          .logit_bias = request.logit_bias,
                          .seed = SamplerSeed(request.seed)};
  generation->stops = request.stop;

  const std::optional<Digest> weights = weights_->Get();
  if (!thread_.not_cacheable().empty()) {
    generation->not_named = Reason::kNotCacheable;
  } else if (!weights) {
    generation->not_named = weights_->Intact() ? Reason::kWeightsPending : Reason::kNotCacheable;
  } else {
    SpaceFields space = thread_.space();
    space.weights = *weights;
    space.salt = request.cache_salt;
    generation->chain = KeyChain(SpaceId(space), space.chunk_tokens);
    generation->chain.Extend(generation->tokens);
    generation->usable = (prompt - 1) / space.chunk_tokens;
  }
  return generation;
}

void Routes::Generate(const openai::Request& request, std::shared_ptr<http::Responder> responder) {
  auto prepared = Prepare(request, *responder);
  if (const auto* error = std::get_if<openai::ApiError>(&prepared)) return SendError(*responder, *error);
  auto generation = std::move(std::get<std::unique_ptr<Generation>>(prepared));
  const openai::AnswerHead head{.chat = request.chat,
                                .id = openai::NewAnswerId(request.chat),
                                .created = NowSeconds(),
                                .model = options_.served_name};
  generation->sink = std::make_unique<HttpSink>(responder, head, request.stream, request.include_usage);
  if (thread_.Submit(std::move(generation)) != nullptr) {
    if (thread_.stopping()) return SendError(*responder, ShuttingDown());
    return SendError(*responder, {.status = 429,
                                  .message = "too many requests are waiting; try again",
                                  .type = "rate_limit_error",
                                  .param = {},
                                  .code = "queue_full"});
  }
  // A generation that runs asks its sink; one that waits is dropped here.
  responder->OnGone([&thread = thread_] { thread.DropGone(); });
}

void Routes::Lookup(const openai::Request& request, std::shared_ptr<http::Responder> responder) const {
  auto prepared = Prepare(request, *responder);
  if (const auto* error = std::get_if<openai::ApiError>(&prepared)) return SendError(*responder, *error);
  // Shared with the answer, which may come from another thread: what other instances have may have to be asked for.
  const std::shared_ptr<const Generation> generation = std::move(std::get<std::unique_ptr<Generation>>(prepared));
  const std::span<const Digest> keys(generation->chain.keys().data(), generation->usable);
  const bool named = generation->not_named == Reason::kNone;
  const size_t resident = named ? thread_.ResidentPrefix(keys) : 0;
  const auto answer = [this, generation, keys, resident, responder] {
    const uint32_t chunk = thread_.space().chunk_tokens;
    openai::LookupAnswer found{.prompt_tokens = static_cast<uint32_t>(generation->tokens.size()),
                               .cached = {},
                               .chunk_tokens = chunk,
                               .pending_saves = store_.pending_saves()};
    Reason miss = generation->not_named;
    if (miss == Reason::kNone && generation->usable == 0) miss = Reason::kShortPrompt;
    if (miss == Reason::kNone) {
      found.cached.Add("engine", static_cast<uint32_t>(resident) * chunk);
      if (resident < keys.size()) {
        const PrefixHit hit = store_.Lookup(keys.subspan(resident));
        for (const uint8_t tier : hit.tier) found.cached.Add(store_.tier_names()[tier], chunk);
        miss = hit.miss_reason;
      }
    }
    found.cached.miss_reason = ReasonName(miss);
    SendJson(*responder, 200, openai::LookupBody(found));
  };
  if (!named || resident == keys.size()) return answer();
  store_.Probe(keys.subspan(resident), std::chrono::steady_clock::now() + kProbeMax, answer);
}

}  // namespace terrace::engine
