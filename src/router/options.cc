#include "router/options.h"

#include <arpa/inet.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <optional>
#include <utility>

#include "base/text.h"

namespace terrace::router {
namespace {

// More often, the questions would be a load.
constexpr std::chrono::milliseconds kCheckTimeMin{50};

std::optional<uint16_t> ParsePort(std::string_view text) {
  unsigned port = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), port);
  if (error != std::errc() || end != text.data() + text.size() || port == 0 || port > 65535) return std::nullopt;
  return static_cast<uint16_t>(port);
}

bool IsName(std::string_view host) {
  return !host.empty() && std::all_of(host.begin(), host.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_' ||
           c == '.';
  });
}

bool IsIpv6(const std::string& host) {
  std::array<unsigned char, sizeof(in6_addr)> bytes;
  return ::inet_pton(AF_INET6, host.c_str(), bytes.data()) == 1;
}

std::string Count(size_t n, const char* what) { return std::to_string(n) + " " + what + (n == 1 ? "" : "s"); }

}  // namespace

config::Schema Schema() {
  using config::Type;
  return {.program = "terrace router",
          .summary = "One OpenAI-compatible entry to several instances. Clients' keys are passed on as they are.",
          .options = {
              {.name = "host",
               .type = Type::kText,
               .default_value = "0.0.0.0",
               .help = "address to listen on",
               .metavar = "ADDR"},
              {.name = "port",
               .type = Type::kInt,
               .default_value = "8001",
               .help = "port to listen on; 0: any free one",
               .metavar = "N"},
              {.name = "service-discovery",
               .type = Type::kChoice,
               .default_value = "static",
               .help = "where backends come from",
               .choices = {"static"},
               .metavar = "HOW"},
              {.name = "static-backends",
               .type = Type::kTextList,
               .help = "URLs of the instances, by commas",
               .metavar = "URL,...",
               .required = true},
              {.name = "static-models",
               .type = Type::kTextList,
               .help = "the model each of them serves, in the same order",
               .metavar = "NAME,...",
               .required = true},
              {.name = "routing-logic",
               .type = Type::kChoice,
               .default_value = "roundrobin",
               .help = "how one of a model's instances is chosen",
               .choices = {"roundrobin"},
               .metavar = "HOW"},
              {.name = "threads",
               .type = Type::kInt,
               .default_value = "1",
               .help = "threads that move bytes; one is enough for thousands of requests a second",
               .metavar = "N"},
              {.name = "first-byte-timeout",
               .type = Type::kDuration,
               .default_value = "300s",
               .help = "longest wait for an answer to begin",
               .metavar = "TIME"},
              {.name = "idle-timeout",
               .type = Type::kDuration,
               .default_value = "300s",
               .help = "longest silence in the middle of an answer",
               .metavar = "TIME"},
              {.name = "health-check-interval",
               .type = Type::kDuration,
               .default_value = "2s",
               .help = "how often each instance is asked how it is (GET /health)",
               .metavar = "TIME"},
              {.name = "health-check-timeout",
               .type = Type::kDuration,
               .default_value = "5s",
               .help = "one that gives no answer for so long is left out until it does",
               .metavar = "TIME"},
              {.name = "drain-timeout",
               .type = Type::kDuration,
               .default_value = "25s",
               .help = "how long running answers may take after a stop signal",
               .metavar = "TIME"},
              config::LogLevel(),
          }};
}

Result<BackendAddress> ParseBackendUrl(std::string_view url) {
  const auto refuse = [&](const std::string& why) {
    return Fail(Code::kInvalid, "--static-backends: \"" + WithoutUserInfo(url) + "\": " + why);
  };
  constexpr std::string_view kScheme = "http://";
  if (url.find('@') != std::string_view::npos) return refuse("it has credentials in it; clients' keys are passed on");
  if (url.starts_with("https://")) return refuse("https is not supported; use http inside the cluster");
  if (!url.starts_with(kScheme)) return refuse("expected http://HOST or http://HOST:PORT");
  if (url.find('?') != std::string_view::npos)
    return refuse("it has a query; leave it out, queries come from the requests");
  std::string_view rest = url.substr(kScheme.size());
  const size_t slash = rest.find('/');
  if (slash != std::string_view::npos && slash + 1 < rest.size()) {
    return refuse("it has a path; leave it out, paths come from the requests");
  }
  rest = rest.substr(0, slash);

  std::string host;
  if (rest.starts_with('[')) {
    const size_t end = rest.find(']');
    if (end == std::string_view::npos) return refuse("the bracket of the address is not closed");
    host = rest.substr(1, end - 1);
    rest.remove_prefix(end + 1);
    if (!IsIpv6(host)) return refuse("\"" + host + "\" is no IPv6 address");
    if (!rest.empty() && !rest.starts_with(':')) return refuse("expected a port after the address");
  } else {
    host = rest.substr(0, rest.find(':'));
    rest.remove_prefix(host.size());
    if (rest.find(':', 1) != std::string_view::npos) return refuse("an IPv6 address stands in brackets");
    if (!IsName(host)) return refuse("\"" + host + "\" is no host name");
  }
  BackendAddress address{.host = std::move(host)};
  if (rest.empty()) return address;
  const std::optional<uint16_t> port = ParsePort(rest.substr(1));
  if (!port) return refuse("\"" + std::string(rest.substr(1)) + "\" is no port");
  address.port = *port;
  return address;
}

Result<Options> ReadOptions(const config::Values& values) {
  Options options;
  options.http.host = values.Text("host");
  const auto port = config::Bounded(values, "port", 0, 65535);
  if (!port) return tl::unexpected(port.error());
  options.http.port = static_cast<uint16_t>(*port);
  const auto threads = config::Bounded(values, "threads", 1, 256);
  if (!threads) return tl::unexpected(threads.error());
  options.http.threads = static_cast<size_t>(*threads);
  for (const char* name : {"first-byte-timeout", "idle-timeout"}) {
    if (values.DurationMs(name) == 0) {
      return Fail(Code::kInvalid, values.Place(name) + ": 0 leaves no time to answer; say how long, 1h if need be");
    }
  }
  options.proxy.first_byte_timeout = std::chrono::milliseconds(values.DurationMs("first-byte-timeout"));
  options.proxy.idle_timeout = std::chrono::milliseconds(values.DurationMs("idle-timeout"));
  for (const char* name : {"health-check-interval", "health-check-timeout"}) {
    if (values.DurationMs(name) < kCheckTimeMin.count()) {
      return Fail(Code::kInvalid, std::string("--") + name + " " + std::to_string(values.DurationMs(name)) +
                                      "ms is too short: say " + std::to_string(kCheckTimeMin.count()) + "ms or more");
    }
  }
  options.check_interval = std::chrono::milliseconds(values.DurationMs("health-check-interval"));
  options.check_timeout = std::chrono::milliseconds(values.DurationMs("health-check-timeout"));
  options.drain_timeout = std::chrono::milliseconds(values.DurationMs("drain-timeout"));

  const std::vector<std::string> urls = values.List("static-backends");
  const std::vector<std::string> models = values.List("static-models");
  if (urls.size() != models.size()) {
    return Fail(Code::kInvalid, Count(urls.size(), "URL") + " in --static-backends, but " +
                                    Count(models.size(), "name") +
                                    " in --static-models: give one name for each URL, in the same order");
  }
  if (urls.empty()) return Fail(Code::kInvalid, "--static-backends names no URL");
  for (size_t i = 0; i < urls.size(); ++i) {
    Result<BackendAddress> address = ParseBackendUrl(urls[i]);
    if (!address) return tl::unexpected(address.error());
    options.backends.push_back({.host = std::move(address->host), .port = address->port, .model = models[i]});
  }
  return options;
}

}  // namespace terrace::router
