// The router's options: the flags of the production-stack router, as its guide writes them, and a few of ours.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"
#include "http/proxy.h"
#include "http/server.h"
#include "terrace/result.h"

namespace terrace::router {

// One entry of --static-backends with its entry of --static-models.
struct StaticBackend {
  std::string host;  // A name or an address, IPv6 without brackets.
  uint16_t port = 80;
  std::string model;
};

struct Options {
  http::Options http;
  http::ProxyOptions proxy;
  std::vector<StaticBackend> backends;
  std::chrono::milliseconds drain_timeout{};
  std::chrono::milliseconds check_interval{};  // From one question to a backend how it is to the next.
  std::chrono::milliseconds check_timeout{};
};

config::Schema Schema();

// What the schema can't check. An error is one line that names what is wrong.
Result<Options> ReadOptions(const config::Values& values);

struct BackendAddress {
  std::string host;
  uint16_t port = 80;
};
// "http://vllm:8000", "http://10.0.0.7", "http://[::1]:8000/". Bare names, underscores and IPv6 are fine; anything that
// would be dropped in silence (a path, a query, a user) is an error, as is https.
Result<BackendAddress> ParseBackendUrl(std::string_view url);

}  // namespace terrace::router
