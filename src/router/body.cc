#include "router/body.h"

#include <array>
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <unordered_set>
#include <utility>

namespace terrace::router {
namespace {

using Json = nlohmann::ordered_json;

// Takes the events of the parser; false stops it.
class ModelFinder final : public nlohmann::json_sax<nlohmann::json> {
 public:
  enum class Found { kNothing, kModel, kOtherType, kNoObject, kNoJson };

  bool null() override { return Value(); }
  bool boolean(bool) override { return Value(); }
  bool number_integer(number_integer_t) override { return Value(); }
  bool number_unsigned(number_unsigned_t) override { return Value(); }
  bool number_float(number_float_t, const string_t&) override { return Value(); }
  bool binary(binary_t&) override { return Value(); }
  bool string(string_t& text) override {
    if (!at_model_) return Value();
    model = std::move(text);
    return Stop(Found::kModel);
  }
  bool start_object(size_t) override {
    if (at_model_) return Stop(Found::kOtherType);
    return ++depth_, true;
  }
  bool start_array(size_t) override { return Value() && (++depth_, true); }
  bool key(string_t& name) override {
    at_model_ = depth_ == 1 && name == "model";
    return true;
  }
  bool end_object() override { return --depth_, true; }
  bool end_array() override { return --depth_, true; }
  bool parse_error(size_t at, const std::string&, const nlohmann::json::exception&) override {
    position = at;
    return Stop(Found::kNoJson);
  }

  Found found = Found::kNothing;
  std::string model;
  size_t position = 0;  // Of the error, with kNoJson.

 private:
  bool Stop(Found what) {
    found = what;
    return false;
  }
  // A value that is neither an object nor the model's text.
  bool Value() {
    if (at_model_) return Stop(Found::kOtherType);
    return depth_ > 0 || Stop(Found::kNoObject);
  }

  int depth_ = 0;
  bool at_model_ = false;
};

}  // namespace

std::variant<std::string, BodyError> FindModel(std::string_view body) {
  ModelFinder finder;
  nlohmann::json::sax_parse(body.begin(), body.end(), &finder);
  switch (finder.found) {
    case ModelFinder::Found::kModel: return std::move(finder.model);
    case ModelFinder::Found::kOtherType: return BodyError{"\"model\" must be a string", true};
    case ModelFinder::Found::kNoJson:
      return BodyError{"the request's body is not valid JSON (at byte " + std::to_string(finder.position) + ")", false};
    case ModelFinder::Found::kNoObject: return BodyError{"the request's body must be a JSON object", false};
    case ModelFinder::Found::kNothing: break;
  }
  return BodyError{"the request's body has no \"model\"; /v1/models lists what there is", true};
}

// Writing a list again goes down one stack frame a level; no list of models has many.
constexpr int kListDepthMax = 64;

std::string MergeModelLists(const std::vector<std::string>& bodies) {
  Json merged = {{"object", "list"}, {"data", Json::array()}};
  std::unordered_set<std::string> seen;
  for (const std::string& body : bodies) {
    const auto shallow = [](int depth, Json::parse_event_t, Json&) { return depth <= kListDepthMax; };
    Json list = Json::parse(body, shallow, /*allow_exceptions=*/false);
    if (!list.is_object() || !list.contains("data") || !list["data"].is_array()) continue;
    for (Json& model : list["data"]) {
      if (!model.is_object() || !model.contains("id") || !model["id"].is_string()) continue;
      if (seen.insert(model["id"].get<std::string>()).second) merged["data"].push_back(std::move(model));
    }
  }
  return merged.dump(-1, ' ', false, Json::error_handler_t::replace);
}

HealthPage MakeHealthPage(const std::vector<BackendHealth>& backends) {
  constexpr std::array kStates = {"unknown", "in_use", "left_out"};
  Json list = Json::array();
  std::string why;
  size_t in_use = 0;
  for (const BackendHealth& backend : backends) {
    list.push_back({{"url", backend.url},
                    {"models", backend.models},
                    {"state", kStates[static_cast<size_t>(backend.state)]},
                    {"in_flight", backend.in_flight}});
    if (backend.state == BackendState::kInUse) {
      ++in_use;
      continue;
    }
    const std::string reason = backend.state == BackendState::kUnknown ? "not asked yet" : backend.why;
    list.back()["why"] = reason;
    why += (why.empty() ? "" : "; ") + backend.url + ": " + reason;
  }
  const char* status = in_use == 0 ? "unavailable" : in_use < backends.size() ? "degraded" : "ok";
  Json health = {{"status", status}};
  if (!why.empty()) health["why"] = std::move(why);
  health["backends"] = std::move(list);
  return {.status = in_use == 0 ? 503 : 200, .body = health.dump(-1, ' ', false, Json::error_handler_t::replace)};
}

}  // namespace terrace::router
