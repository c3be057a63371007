// The backends: which serve a model, whose turn it is, and which are left out because they could not be reached.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "http/proxy.h"
#include "router/body.h"
#include "router/options.h"
#include "terrace/metrics.h"

namespace terrace::router {

// Thread-safe. Outlives its routes; clock and metrics outlive it.
class Fleet {
 public:
  // An URL that is named several times, with several models, is one backend.
  Fleet(const std::vector<StaticBackend>& backends, const Clock& clock, Metrics& metrics);

  // How long a backend that could not be reached is left out. Then one request tries it, and the others follow if that
  // one gets through.
  static constexpr std::chrono::seconds kEjection{3};

  // The way of one request for `model`: round robin over its backends, those left out last. Null: nobody serves it.
  std::unique_ptr<http::Route> RouteFor(std::string_view model);

  std::vector<std::shared_ptr<http::Backend>> backends() const;
  std::vector<BackendHealth> health() const;
  // Begins to look up the names, so that the first request need not wait for it.
  void ResolveNames();

 private:
  struct Member {
    std::shared_ptr<http::Backend> backend;
    std::vector<std::string> models;
    // 0: in use. Else nanoseconds of the clock: left out until then. Relaxed: nothing is published by it.
    std::atomic<int64_t> ejected_until{0};
    std::vector<Counter*> outcomes;  // By http::Ended.
  };
  struct Model {
    std::vector<Member*> members;
    std::atomic<size_t> turn{0};  // Relaxed: a turn more or less does not matter.
  };
  class RoundRobin;

  int64_t Now() const;
  bool MayTry(Member& member) const;
  void Note(Member& member, http::Ended ended, const std::string& why) const;

  const Clock& clock_;
  std::vector<std::unique_ptr<Member>> members_;  // Fixed after the constructor, as is models_.
  std::map<std::string, std::unique_ptr<Model>, std::less<>> models_;
  Histogram& seconds_;
};

}  // namespace terrace::router
