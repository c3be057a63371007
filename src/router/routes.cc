#include "router/routes.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <random>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "http/error.h"
#include "openai/errors.h"
#include "openai/format.h"
#include "openai/parse.h"
#include "router/body.h"

namespace terrace::router {
namespace {

constexpr std::chrono::seconds kModelsTimeout{5};
constexpr size_t kRequestIdMax = 128;

// The client's, so that it finds its request in the logs of all who handled it; else a new one.
std::string RequestId(const http::Request& request) {
  const std::string_view given = request.Header("x-request-id");
  const bool plain = std::all_of(given.begin(), given.end(), [](char c) { return c > 0x20 && c < 0x7f; });
  if (!given.empty() && given.size() <= kRequestIdMax && plain) return std::string(given);
  thread_local std::mt19937_64 random{std::random_device{}()};
  std::array<char, 33> hex;
  std::snprintf(hex.data(), hex.size(), "%016llx%016llx", static_cast<unsigned long long>(random()),
                static_cast<unsigned long long>(random()));
  return hex.data();
}

void SendText(http::Responder& responder, int status, const std::string& type, std::string body, std::string id) {
  responder.Send(status, {{"Content-Type", type}, {"X-Request-Id", std::move(id)}}, std::move(body));
}

constexpr const char* kJson = "application/json";

// Of those that gave no list, one tells the client most: a refusal of its key, say.
const http::FetchResult* BestRefusal(const std::vector<http::FetchResult>& results) {
  const auto it = std::find_if(results.begin(), results.end(), [](const auto& r) { return r.status != 0; });
  return it == results.end() ? nullptr : &*it;
}

}  // namespace

Routes::Refusal Routes::MakeRefusal(int status, const char* code) {
  return {status, code,
          metrics_.GetCounter("terrace_router_refusals_total",
                              "Requests that the router answered with an error of its own.", {{"reason", code}})};
}

Routes::Routes(Fleet& fleet, Metrics& metrics, const http::ProxyOptions& options)
    : fleet_(fleet),
      metrics_(metrics),
      options_(options),
      bad_body_(MakeRefusal(400, "invalid_body")),
      coded_(MakeRefusal(415, "unsupported_encoding")),
      no_model_(MakeRefusal(400, "model_missing")),
      unknown_model_(MakeRefusal(404, "model_not_found")),
      no_path_(MakeRefusal(404, "not_found")),
      no_list_(MakeRefusal(503, "no_backend")) {}

void Routes::Refuse(http::Responder& responder, Refusal& refusal, openai::ApiError error, std::string id) {
  refusal.count.Add();
  error.status = refusal.status;
  error.type = http::ErrorType(refusal.status);
  SendText(responder, refusal.status, kJson, openai::ErrorBody(error), std::move(id));
}

void Routes::Handle(http::Request request, std::shared_ptr<http::Responder> responder) {
  std::string id = RequestId(request);
  const bool post = request.method == "POST";
  const bool get = request.method == "GET" || request.method == "HEAD";
  if (post && (request.path.starts_with("/v1/") || request.path == "/terrace/lookup")) {
    return Forward(std::move(request), std::move(responder), std::move(id));
  }
  if (get && request.path == "/v1/models") return SendModels(request, std::move(responder), std::move(id));
  if (get && request.path == "/health") {
    HealthPage page = MakeHealthPage(fleet_.health());
    return SendText(*responder, page.status, kJson, std::move(page.body), std::move(id));
  }
  if (get && request.path == "/metrics") {
    return SendText(*responder, 200, "text/plain; version=0.0.4", metrics_.Text(), std::move(id));
  }
  Refuse(*responder, no_path_,
         {.message = "the router has no " + request.method + " " + openai::Echo(request.path), .code = no_path_.code},
         std::move(id));
}

void Routes::Forward(http::Request request, std::shared_ptr<http::Responder> responder, std::string id) {
  if (const std::string_view coding = request.BodyCoding(); !coding.empty()) {
    return Refuse(*responder, coded_, openai::BodyIsCoded(coding), std::move(id));
  }
  const auto model = openai::FindModel(request.body);
  if (const auto* error = std::get_if<openai::ApiError>(&model)) {
    return Refuse(*responder, bad_body_, *error, std::move(id));
  }
  std::string_view name = std::get<std::string>(model);
  if (name.empty()) name = fleet_.OnlyModel();
  if (name.empty()) {
    return Refuse(*responder, no_model_,
                  {.message = "'model' is missing, and several are served here; GET /v1/models lists them",
                   .param = "model",
                   .code = no_model_.code},
                  std::move(id));
  }
  std::unique_ptr<http::Route> route = fleet_.RouteFor(name);
  if (!route) {
    return Refuse(*responder, unknown_model_, openai::ModelNotFound(name, "GET /v1/models lists what is served here"),
                  std::move(id));
  }
  const http::Headers with_id = {{"X-Request-Id", std::move(id)}};
  const bool openai = request.path == "/v1/chat/completions" || request.path == "/v1/completions";
  http::Forward(std::move(responder),
                {.request = std::move(request),
                 .set_in_request = with_id,
                 .set_in_answer = with_id,
                 .last_event = openai ? "data: [DONE]" : ""},
                std::move(route), options_);
}

void Routes::SendModels(const http::Request& request, std::shared_ptr<http::Responder> responder, std::string id) {
  // Not all of the client's fields: an Accept-Encoding, say, would bring answers that we can't read.
  http::Request question{.method = "GET", .path = request.path, .headers = {{"X-Request-Id", id}}};
  if (const auto key = request.Header("authorization"); !key.empty())
    question.headers.emplace_back("Authorization", key);
  http::Responder& of_client = *responder;
  http::Fetch(of_client, question, fleet_.answering(), {.timeout = kModelsTimeout},
              [this, responder = std::move(responder), id = std::move(id)](std::vector<http::FetchResult> results) {
                std::vector<std::string> lists;
                for (const http::FetchResult& result : results) {
                  if (result.status == 200) lists.push_back(result.body);
                }
                if (!lists.empty()) return SendText(*responder, 200, kJson, MergeModelLists(lists), id);
                if (const http::FetchResult* refusal = BestRefusal(results)) {
                  return SendText(*responder, refusal->status, refusal->content_type, refusal->body, id);
                }
                Refuse(*responder, no_list_,
                       {.message = "none of " + std::to_string(results.size()) +
                                   " backends answered; the first: " + results[0].body,
                        .code = no_list_.code},
                       id);
              });
}

}  // namespace terrace::router
