// What the router answers to which path: its own pages, or a backend's answer.
#pragma once

#include <memory>
#include <string>

#include "http/proxy.h"
#include "http/server.h"
#include "openai/types.h"
#include "router/fleet.h"
#include "terrace/metrics.h"

namespace terrace::router {

// Thread-safe; outlives the server whose handler it is. Fleet and metrics outlive it.
class Routes {
 public:
  Routes(Fleet& fleet, Metrics& metrics, const http::ProxyOptions& options);
  void Handle(http::Request request, std::shared_ptr<http::Responder> responder);

 private:
  void Forward(http::Request request, std::shared_ptr<http::Responder> responder, std::string id);
  void SendModels(const http::Request& request, std::shared_ptr<http::Responder> responder, std::string id);

  // A kind of request that the router refuses itself.
  struct Refusal {
    int status;
    const char* code;
    Counter& count;
  };
  Refusal MakeRefusal(int status, const char* code);
  static void Refuse(http::Responder& responder, Refusal& refusal, openai::ApiError error, std::string id);

  Fleet& fleet_;
  Metrics& metrics_;
  const http::ProxyOptions options_;
  Refusal bad_body_, coded_, no_model_, unknown_model_, no_path_, no_list_;
};

}  // namespace terrace::router
