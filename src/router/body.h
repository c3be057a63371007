// The JSON that the router makes itself: lists of models, the page of /health. Pure; any thread.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace terrace::router {

// One list of models out of several answers of /v1/models: each id once, as the first answer had it, in order. What is
// no such answer is left out.
std::string MergeModelLists(const std::vector<std::string>& bodies);

enum class BackendState {
  kUnknown,  // Nobody has asked it yet. It is used.
  kInUse,
  kLeftOut,
};
struct BackendHealth {
  std::string url;
  std::vector<std::string> models;
  BackendState state = BackendState::kUnknown;
  std::string why;  // With kLeftOut.
  long in_flight = 0;
};
// The page of /health: 200 "ok" or "degraded" (some are left out, and why), 503 "unavailable" if none is known to work.
struct HealthPage {
  int status = 200;
  std::string body;
};
HealthPage MakeHealthPage(const std::vector<BackendHealth>& backends);

}  // namespace terrace::router
