#include "router/checks.h"

namespace terrace::router {
namespace {

// Any answer that is no complaint will do: not every server has this page, and it may want a key.
std::string WhatIsWrong(const http::FetchResult& result) {
  if (result.status == 0) return result.body;
  return result.status < 500 ? "" : "GET /health: " + std::to_string(result.status);
}

}  // namespace

Checks::Checks(http::Server& server, Fleet& fleet, std::chrono::milliseconds timeout)
    : server_(server), fleet_(fleet), timeout_(timeout) {
  for (const auto& backend : fleet.backends()) checks_.push_back(std::make_shared<Check>(backend));
}

void Checks::Begin() {
  const http::Request question{.method = "GET", .path = "/health"};
  for (const auto& check : checks_) {
    if (check->running.exchange(true, std::memory_order_relaxed)) continue;
    http::Fetch(server_, question, check->backend, {.timeout = timeout_},
                [check, &fleet = fleet_](const http::FetchResult& result) {
                  fleet.NoteCheck(*check->backend, WhatIsWrong(result));
                  check->running.store(false, std::memory_order_relaxed);
                });
  }
}

}  // namespace terrace::router
