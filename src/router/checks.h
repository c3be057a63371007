// Asks the backends how they are, so that one that hangs or has gone is left out, and comes back by itself.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "http/proxy.h"
#include "http/server.h"
#include "router/fleet.h"

namespace terrace::router {

// Used by one thread. The fleet outlives the server's threads.
class Checks {
 public:
  Checks(http::Server& server, Fleet& fleet, std::chrono::milliseconds timeout);
  // Asks each backend that is not being asked already; the fleet hears of it within the timeout. Quick.
  void Begin();

 private:
  struct Check {
    explicit Check(std::shared_ptr<http::Backend> b) : backend(std::move(b)) {}
    const std::shared_ptr<http::Backend> backend;
    std::atomic<bool> running{false};  // Set by Begin, cleared on the server's thread. Relaxed: it stands alone.
  };

  http::Server& server_;
  Fleet& fleet_;
  const std::chrono::milliseconds timeout_;
  std::vector<std::shared_ptr<Check>> checks_;
};

}  // namespace terrace::router
