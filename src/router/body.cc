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

}  // namespace

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
