// Connections to backends: making, keeping, reusing. One pool per reactor; nothing here is shared between threads.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "http/conn.h"
#include "http/proxy.h"
#include "http/reactor.h"
#include "http/wire.h"

namespace terrace::http {

struct Upstream {
  explicit Upstream(Reactor& reactor);
  ~Upstream();

  Conn conn;
  InBuffer in;
  ResponseReader reader;
  SteadyTime idle_since{};

 private:
  const std::shared_ptr<Counters> counters_;
};

// Idle connections, the last used first out.
class UpstreamPool {
 public:
  // Null: none that still lives.
  std::unique_ptr<Upstream> Take(const Backend& backend);
  void Put(std::shared_ptr<Backend> backend, std::unique_ptr<Upstream> upstream);
  void DropIdleSince(SteadyTime now);
  void Clear() { idle_.clear(); }

 private:
  struct Idle {
    std::shared_ptr<Backend> backend;  // Keeps the key unique.
    std::vector<std::unique_ptr<Upstream>> connections;
  };
  std::unordered_map<const Backend*, Idle> idle_;
};

struct Dialled {
  std::unique_ptr<Upstream> upstream;  // Null: `why` says what happened.
  std::string why;
};
// A new connection, within `timeout`; tries the addresses of the name in turn. Sets activity.upstream on success.
Async<Dialled> Dial(Activity& activity, std::shared_ptr<Backend> backend, std::chrono::milliseconds timeout);

}  // namespace terrace::http
