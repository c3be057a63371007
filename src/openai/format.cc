#include "openai/format.h"

#include <nlohmann/json.hpp>
#include <random>

namespace terrace::openai {
namespace {

using Json = nlohmann::ordered_json;

std::string Dump(const Json& json) { return json.dump(-1, ' ', false, Json::error_handler_t::replace); }

std::string Event(const Json& json) { return "data: " + Dump(json) + "\n\n"; }

constexpr std::string_view kDone = "data: [DONE]\n\n";

Json OrNull(std::string_view text) { return text.empty() ? Json() : Json(text); }

Json CachedByTier(const CachedTokens& cached) {
  Json tiers = Json::object();
  for (size_t i = 0; i < kTiers.size(); ++i) tiers[std::string(kTiers[i])] = cached.by_tier[i];
  return tiers;
}

Json UsageJson(const Usage& usage) {
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached.total()}}},
          {"terrace", {{"cached_by_tier", CachedByTier(usage.cached)}, {"miss_reason", usage.cached.miss_reason}}}};
}

Json HeadJson(const AnswerHead& head, const char* object) {
  return {{"id", head.id}, {"object", object}, {"created", head.created}, {"model", head.model}};
}

Json StreamJson(const AnswerHead& head) {
  return HeadJson(head, head.chat ? "chat.completion.chunk" : "text_completion");
}

// One event with one choice. `delta`: of a chat.
std::string ChoiceEvent(const AnswerHead& head, Json delta, std::string_view text, std::string_view finish_reason,
                        bool include_usage) {
  Json choice = {{"index", 0}};
  if (head.chat) {
    choice["delta"] = std::move(delta);
  } else {
    choice["text"] = text;
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = OrNull(finish_reason);
  Json event = StreamJson(head);
  event["choices"] = Json::array({std::move(choice)});
  if (include_usage) event["usage"] = nullptr;
  return Event(event);
}

// Parts of a request may stand in either, and an answer is not the place to send a megabyte back.
constexpr size_t kMessageBytesMax = 1000;
constexpr size_t kParamBytesMax = 200;

Json ErrorJson(const ApiError& error) {
  return {{"error",
           {{"message", std::string_view(error.message).substr(0, kMessageBytesMax)},
            {"type", error.type},
            {"param", OrNull(std::string_view(error.param).substr(0, kParamBytesMax))},
            {"code", OrNull(error.code)}}}};
}

}  // namespace

std::string NewAnswerId(bool chat) {
  static thread_local std::mt19937_64 random{std::random_device{}()};
  constexpr char kHex[] = "0123456789abcdef";
  std::string id = chat ? "chatcmpl-" : "cmpl-";
  for (int word = 0; word < 2; ++word) {
    uint64_t bits = random();
    for (int i = 0; i < 16; ++i, bits >>= 4) id.push_back(kHex[bits & 15]);
  }
  return id;
}

std::string AnswerBody(const AnswerHead& head, std::string_view text, std::string_view finish_reason,
                       const Usage& usage) {
  Json choice = {{"index", 0}};
  if (head.chat) {
    choice["message"] = {{"role", "assistant"}, {"content", text}};
  } else {
    choice["text"] = text;
  }
  choice["logprobs"] = nullptr;
  choice["finish_reason"] = finish_reason;
  Json body = HeadJson(head, head.chat ? "chat.completion" : "text_completion");
  body["choices"] = Json::array({std::move(choice)});
  body["usage"] = UsageJson(usage);
  return Dump(body);
}

std::string StreamStart(const AnswerHead& head, bool include_usage) {
  if (!head.chat) return "";
  return ChoiceEvent(head, {{"role", "assistant"}, {"content", ""}}, "", "", include_usage);
}

std::string StreamText(const AnswerHead& head, std::string_view text, bool include_usage) {
  return ChoiceEvent(head, {{"content", text}}, text, "", include_usage);
}

std::string StreamEnd(const AnswerHead& head, std::string_view finish_reason, const Usage* usage) {
  std::string events = ChoiceEvent(head, Json::object(), "", finish_reason, usage != nullptr);
  if (usage != nullptr) {
    Json event = StreamJson(head);
    event["choices"] = Json::array();
    event["usage"] = UsageJson(*usage);
    events += Event(event);
  }
  return events.append(kDone);
}

std::string StreamError(const ApiError& error) { return Event(ErrorJson(error)).append(kDone); }

std::string ErrorBody(const ApiError& error) { return Dump(ErrorJson(error)); }

std::string ModelsBody(std::string_view model, int64_t created, uint32_t context_tokens) {
  return Dump({{"object", "list"},
               {"data", Json::array({Json{{"id", model},
                                          {"object", "model"},
                                          {"created", created},
                                          {"owned_by", "terrace"},
                                          {"max_model_len", context_tokens}}})}});
}

std::string HealthBody(bool degraded, std::string_view why) {
  Json body = {{"status", degraded ? "degraded" : "ok"}};
  if (degraded) body["why"] = why;
  return Dump(body);
}

std::string LookupBody(const LookupAnswer& answer) {
  return Dump({{"prompt_tokens", answer.prompt_tokens},
               {"tokens", answer.cached.total()},
               {"cached_by_tier", CachedByTier(answer.cached)},
               {"miss_reason", answer.cached.miss_reason},
               {"chunk", answer.chunk_tokens},
               {"pending_saves", answer.pending_saves}});
}

}  // namespace terrace::openai
