#include "openai/parse.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "openai/errors.h"
#include "openai/fields.h"

namespace terrace::openai {
namespace {

using Json = nlohmann::json;

constexpr double kLogitBiasMax = 100;
// vLLM takes anything above 0; far below this a logit that is divided by it is no number any more.
constexpr double kRepetitionPenaltyMin = 0.1;

// The value, or null if it is absent or JSON's null: the two mean the same in this API.
const Json* Member(const Json& object, const char* name) {
  const auto it = object.find(name);
  return it == object.end() || it->is_null() ? nullptr : &*it;
}

// Reads the fields of one object; the first bad one becomes the error and the rest is skipped.
class Fields {
 public:
  explicit Fields(const Json& object) : object_(object) {}

  bool failed() const { return error_.has_value(); }
  const ApiError& error() const { return *error_; }

  void Fail(std::string param, const std::string& why) {
    if (!error_) error_ = ApiError{.message = "'" + param + "' " + why, .param = param};
  }

  void Fail(ApiError error) {
    if (!error_) error_ = std::move(error);
  }

  void Refuse(const std::string& param, const std::string& remedy) {
    if (error_) return;
    error_ = ApiError{
        .message = "'" + param + "' is not supported: " + remedy, .param = param, .code = "unsupported_parameter"};
  }

  const Json* Find(const char* name) const { return Member(object_, name); }

  void Text(const char* name, std::string* into) {
    const Json* value = Find(name);
    if (value == nullptr) return;
    if (!value->is_string()) return Fail(name, "must be a string");
    *into = value->get_ref<const std::string&>();
  }

  void Bool(const char* name, bool* into) {
    const Json* value = Find(name);
    if (value == nullptr) return;
    if (!value->is_boolean()) return Fail(name, "must be true or false");
    *into = value->get<bool>();
  }

  void Number(const char* name, double low, double high, double* into) {
    const Json* value = Find(name);
    if (value == nullptr) return;
    if (!value->is_number()) return Fail(name, "must be a number");
    const double number = value->get<double>();
    if (!(number >= low && number <= high)) {
      return Fail(name, "must be between " + Json(low).dump() + " and " + Json(high).dump());
    }
    *into = number;
  }

  // An integer of at least `low`, cut at `high`.
  void Count(const char* name, uint32_t low, std::optional<uint32_t>* into) {
    const Json* value = Find(name);
    if (value == nullptr) return;
    if (!value->is_number_integer()) return Fail(name, "must be an integer");
    if (!value->is_number_unsigned() || value->get<uint64_t>() < low) {
      return Fail(name, "must be at least " + std::to_string(low));
    }
    *into = static_cast<uint32_t>(std::min<uint64_t>(value->get<uint64_t>(), std::numeric_limits<uint32_t>::max()));
  }

 private:
  const Json& object_;
  std::optional<ApiError> error_;
};

void ReadContent(Fields& fields, const Json& content, const std::string& where, std::string* into) {
  if (content.is_string()) {
    *into = content.get_ref<const std::string&>();
    return;
  }
  if (!content.is_array()) return fields.Fail(where, "must be a string or an array of text parts");
  for (size_t i = 0; i < content.size(); ++i) {
    const Json& part = content[i];
    const std::string part_where = where + "[" + std::to_string(i) + "]";
    if (!part.is_object()) return fields.Fail(part_where, "must be an object with type \"text\"");
    const auto type = part.find("type");
    const auto text = part.find("text");
    if (type == part.end() || *type != "text") return fields.Fail(part_where + ".type", "must be \"text\"");
    if (text == part.end() || !text->is_string()) return fields.Fail(part_where + ".text", "must be a string");
    if (i > 0) into->push_back('\n');
    into->append(text->get_ref<const std::string&>());
  }
}

bool KnownRole(const std::string& role) {
  return role == "system" || role == "developer" || role == "user" || role == "assistant" || role == "tool" ||
         role == "function";
}

// Calls as the client got them from a server, for templates that show what was called. What they have besides is
// nothing that a model has seen.
void ReadToolCalls(Fields& fields, const Json& calls, const std::string& where, Json* into) {
  if (!calls.is_array()) return fields.Fail(where, "must be an array of tool calls");
  *into = Json::array();
  for (size_t i = 0; i < calls.size(); ++i) {
    const std::string call_where = where + "[" + std::to_string(i) + "]";
    const Json& call = calls[i];
    if (!call.is_object()) return fields.Fail(call_where, "must be an object");
    const Json *type = Member(call, "type"), *id = Member(call, "id"), *function = Member(call, "function");
    if (type != nullptr && *type != "function") return fields.Fail(call_where + ".type", "must be \"function\"");
    if (function == nullptr || !function->is_object()) {
      return fields.Fail(call_where + ".function", "must be an object");
    }
    Json read = {{"type", "function"}};
    for (const char* name : {"name", "arguments"}) {
      const Json* text = Member(*function, name);
      if (text == nullptr || !text->is_string()) {
        return fields.Fail(call_where + ".function." + name, "must be a string");
      }
      read["function"][name] = *text;
    }
    if (id != nullptr && !id->is_string()) return fields.Fail(call_where + ".id", "must be a string");
    if (id != nullptr) read["id"] = *id;
    into->push_back(std::move(read));
  }
}

void ReadMessages(Fields& fields, std::vector<Message>* into) {
  const Json* messages = fields.Find("messages");
  if (messages == nullptr) return fields.Fail("messages", "is required");
  if (!messages->is_array() || messages->empty()) return fields.Fail("messages", "must be an array of messages");
  for (size_t i = 0; i < messages->size() && !fields.failed(); ++i) {
    const Json& message = (*messages)[i];
    const std::string where = "messages[" + std::to_string(i) + "]";
    if (!message.is_object()) return fields.Fail(where, "must be an object");
    const auto role = message.find("role");
    if (role == message.end() || !role->is_string()) return fields.Fail(where + ".role", "must be a string");
    Message read{.role = role->get<std::string>(), .content = {}, .more = {}};
    if (!KnownRole(read.role)) {
      return fields.Fail(where + ".role", "must be system, developer, user, assistant or tool");
    }
    const auto content = message.find("content");
    if (content != message.end() && !content->is_null()) {
      ReadContent(fields, *content, where + ".content", &read.content);
    } else if (read.role != "assistant") {  // One that only called tools has no content.
      return fields.Fail(where + ".content", "is required");
    }
    Json more = Json::object();
    for (const char* name : {"name", "tool_call_id", "reasoning_content"}) {
      const Json* text = Member(message, name);
      if (text == nullptr) continue;
      if (!text->is_string()) return fields.Fail(where + "." + name, "must be a string");
      more[name] = *text;
    }
    const Json *calls = Member(message, "tool_calls"), *call = Member(message, "function_call");
    if (calls != nullptr && !calls->empty()) ReadToolCalls(fields, *calls, where + ".tool_calls", &more["tool_calls"]);
    if (call != nullptr && !call->empty()) return fields.Refuse(where + ".function_call", "say tool_calls");
    if (!more.empty()) read.more = more.dump();
    into->push_back(std::move(read));
  }
}

// What a template may be told, beside the messages.
void ReadTemplateArguments(Fields& fields, Request* request) {
  fields.Bool("continue_final_message", &request->continue_final_message);
  request->add_generation_prompt = !request->continue_final_message;
  fields.Bool("add_generation_prompt", &request->add_generation_prompt);
  if (request->continue_final_message && !fields.failed()) {
    if (request->add_generation_prompt) {
      fields.Fail("continue_final_message", "goes on with the last message, add_generation_prompt begins one: choose");
    }
    const Message& last = request->messages.back();
    if (last.role != "assistant" || last.content.find_first_not_of(" \t\n\v\f\r") == std::string::npos) {
      fields.Fail("continue_final_message", "needs an assistant's message with content at the end");
    }
  }
  const Json* kwargs = fields.Find("chat_template_kwargs");
  if (kwargs == nullptr) return;
  if (!kwargs->is_object()) return fields.Fail("chat_template_kwargs", "must be an object");
  for (const char* name : {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template",
                           "tokenize", "bos_token", "eos_token"}) {
    if (kwargs->contains(name)) {
      return fields.Fail(std::string("chat_template_kwargs.") + name, "is no argument of the template's own");
    }
  }
  if (!kwargs->empty()) request->chat_template_kwargs = kwargs->dump();
}

void ReadPrompt(Fields& fields, Request* request) {
  const Json* prompt = fields.Find("prompt");
  if (prompt == nullptr) return fields.Fail("prompt", "is required");
  // An array of one prompt is that prompt.
  if (prompt->is_array() && prompt->size() == 1 && !prompt->front().is_number()) prompt = &prompt->front();
  if (prompt->is_string()) {
    request->prompt = prompt->get_ref<const std::string&>();
    return;
  }
  if (!prompt->is_array() || prompt->empty()) {
    return fields.Fail("prompt", "must be a string, an array of one string, or an array of token ids");
  }
  for (const Json& token : *prompt) {
    if (!token.is_number()) return fields.Fail("prompt", "must be one prompt; several at once are not supported");
    if (!token.is_number_integer()) return fields.Fail("prompt", "must have integers for token ids");
    if (!token.is_number_unsigned()) return fields.Fail("prompt", "must not have a token id below 0");
    if (token.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max())) {
      return fields.Fail("prompt", "has a token id that is too large");
    }
    request->prompt_tokens.push_back(token.get<int32_t>());
  }
}

void ReadStop(Fields& fields, std::vector<std::string>* into) {
  const Json* stop = fields.Find("stop");
  if (stop == nullptr) return;
  const Json list = stop->is_array() ? *stop : Json::array({*stop});
  if (list.size() > kStopsMax)
    return fields.Fail("stop", "must have at most " + std::to_string(kStopsMax) + " entries");
  for (const Json& item : list) {
    if (!item.is_string()) return fields.Fail("stop", "must be a string or an array of strings");
    const auto& text = item.get_ref<const std::string&>();
    if (text.size() > kStopBytesMax) {
      return fields.Fail("stop", "must have entries of at most " + std::to_string(kStopBytesMax) + " bytes");
    }
    if (!text.empty()) into->push_back(text);
  }
}

void ReadTopK(Fields& fields, uint32_t* into) {
  const Json* top_k = fields.Find("top_k");
  if (top_k == nullptr || *top_k == -1) return;  // vLLM's older word for all.
  std::optional<uint32_t> count;
  fields.Count("top_k", 0, &count);
  *into = count.value_or(0);
}

void ReadLogitBias(Fields& fields, std::vector<LogitBias>* into) {
  const Json* biases = fields.Find("logit_bias");
  if (biases == nullptr) return;
  if (!biases->is_object()) return fields.Fail("logit_bias", "must be an object: token id to bias");
  if (biases->size() > kLogitBiasesMax) {
    return fields.Fail("logit_bias", "must have at most " + std::to_string(kLogitBiasesMax) + " tokens");
  }
  for (const auto& [key, value] : biases->items()) {
    LogitBias read;
    const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), read.token);
    const bool canonical = error == std::errc() && std::to_string(read.token) == key;  // "07" would be 7 a second time.
    if (!canonical || read.token < 0) return fields.Fail("logit_bias", "must have token ids for names");
    if (!value.is_number() || !(std::abs(value.get<double>()) <= kLogitBiasMax)) {
      return fields.Fail("logit_bias", "must have numbers between -100 and 100");
    }
    read.bias = value.get<float>();
    into->push_back(read);
  }
}

void ReadSeed(Fields& fields, std::optional<int64_t>* into) {
  const Json* seed = fields.Find("seed");
  if (seed == nullptr) return;
  if (!seed->is_number_integer()) return fields.Fail("seed", "must be an integer");
  *into = seed->is_number_unsigned() ? static_cast<int64_t>(seed->get<uint64_t>()) : seed->get<int64_t>();
}

void ReadStreaming(Fields& fields, Request* request) {
  fields.Bool("stream", &request->stream);
  const Json* options = fields.Find("stream_options");
  if (options == nullptr) return;
  if (!options->is_object()) return fields.Fail("stream_options", "must be an object");
  if (!request->stream) return fields.Fail("stream_options", "is only allowed with stream: true");
  const auto continuous = options->find("continuous_usage_stats");
  if (continuous != options->end() && !continuous->is_null() && *continuous != false) {
    return fields.Refuse("stream_options.continuous_usage_stats", "leave it out; include_usage is supported");
  }
  const auto padding = options->find("include_obfuscation");  // OpenAI pads events; the text is the same.
  if (padding != options->end() && !padding->is_null() && *padding != false) {
    return fields.Refuse("stream_options.include_obfuscation", "leave it out");
  }
  for (const auto& [name, value] : options->items()) {
    if (name != "include_usage" && name != "continuous_usage_stats" && name != "include_obfuscation") {
      ApiError unknown = UnknownField(name);
      unknown.message = "'" + unknown.param + "' is not a field of stream_options; include_usage is";
      unknown.param = "stream_options." + unknown.param;
      return fields.Fail(std::move(unknown));
    }
  }
  const auto usage = options->find("include_usage");
  if (usage == options->end() || usage->is_null()) return;
  if (!usage->is_boolean()) return fields.Fail("stream_options.include_usage", "must be true or false");
  request->include_usage = usage->get<bool>();
}

// Another answer than was asked for is worse than none.
void CheckFields(Fields& fields, const Json& body, bool chat) {
  for (const auto& [name, value] : body.items()) {
    if (fields.failed()) return;
    const FieldRule* rule = FindField(name);
    if (rule == nullptr) return fields.Fail(UnknownField(name));
    if (value.is_null()) continue;
    if (chat && rule->use == FieldUse::kReadInCompletion) return fields.Refuse(name, "it belongs to /v1/completions");
    if (!chat && rule->use == FieldUse::kReadInChat) return fields.Refuse(name, "it belongs to /v1/chat/completions");
    if (rule->use != FieldUse::kRefused) continue;
    const Json neutral = Json::parse(rule->neutral);
    const bool harmless =
        name == "add_special_tokens" ? value == !chat : std::ranges::find(neutral, value) != neutral.end();
    if (!harmless) fields.Refuse(name, rule->note);
  }
}

// A request has a few levels, and about as many values as tokens. Whoever copies a value goes down one stack frame a
// level; each value takes some hundred bytes, so that a body of 64 MiB could become gigabytes.
constexpr int kDepthMax = 64;
constexpr size_t kValuesMax = 2 << 20;

// What the body has too much of, before anybody reads it; "" if nothing.
std::string TooMuch(std::string_view json) {
  int depth = 0;
  size_t values = 1;
  bool in_string = false;
  for (size_t i = 0; i < json.size(); ++i) {
    const char c = json[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      ++values;
      if (++depth > kDepthMax) return "is nested more than " + std::to_string(kDepthMax) + " levels deep";
    } else if (c == ']' || c == '}') {
      --depth;
    } else if (c == ',') {
      ++values;
    }
  }
  return values > kValuesMax ? "has more than " + std::to_string(kValuesMax) + " values" : "";
}

}  // namespace

std::variant<Request, ApiError> ParseRequest(std::string_view body, Endpoint endpoint) {
  if (const std::string what = TooMuch(body); !what.empty()) return ApiError{.message = "the body " + what};
  std::set<std::string, std::less<>> names;
  std::string twice;
  const auto each_name = [&](int depth, Json::parse_event_t event, const Json& name) {
    if (event == Json::parse_event_t::key && depth == 1 && !names.insert(name.get<std::string>()).second) {
      twice = name.get<std::string>();
    }
    return true;
  };
  const Json json = Json::parse(body, each_name, /*allow_exceptions=*/false);
  if (json.is_discarded()) return ExplainBadJson(body);
  if (!json.is_object()) return NotAnObject();
  if (!twice.empty()) return GivenTwice(twice);

  Fields fields(json);
  Request request;
  request.chat = endpoint == Endpoint::kChat || (endpoint == Endpoint::kEither && fields.Find("messages") != nullptr);
  CheckFields(fields, json, request.chat);
  fields.Text("model", &request.model);
  if (request.chat) {
    ReadMessages(fields, &request.messages);
    ReadTemplateArguments(fields, &request);
  } else {
    ReadPrompt(fields, &request);
  }
  fields.Count("max_tokens", 1, &request.max_tokens);
  fields.Count("max_completion_tokens", 1, &request.max_tokens);  // The newer name wins.
  fields.Number("temperature", 0, 2, &request.temperature);
  fields.Number("top_p", 0, 1, &request.top_p);
  fields.Number("min_p", 0, 1, &request.min_p);
  fields.Number("presence_penalty", -2, 2, &request.presence_penalty);
  fields.Number("frequency_penalty", -2, 2, &request.frequency_penalty);
  fields.Number("repetition_penalty", kRepetitionPenaltyMin, 2, &request.repetition_penalty);
  ReadTopK(fields, &request.top_k);
  ReadLogitBias(fields, &request.logit_bias);
  fields.Text("cache_salt", &request.cache_salt);
  ReadStop(fields, &request.stop);
  ReadSeed(fields, &request.seed);
  ReadStreaming(fields, &request);
  if (fields.failed()) return fields.error();
  return request;
}

}  // namespace terrace::openai
