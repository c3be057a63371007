// The backends: which serve a model, whose turn it is, and which are left out because they do not answer.
#pragma once

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
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

  // The way of one request for `model`: round robin over its backends, those left out last. Null: nobody serves it.
  std::unique_ptr<http::Route> RouteFor(std::string_view model);

  // The name of the model that is served, if it is only one; else "".
  std::string_view OnlyModel() const { return models_.size() == 1 ? std::string_view(models_.begin()->first) : ""; }

  // What a check of a backend found: "" if it answers, else why not. One that could not be reached, by a check or a
  // request, is left out until a check finds it well: only that can bring back one that hangs and answers nothing.
  void NoteCheck(const http::Backend& backend, const std::string& why);

  std::vector<std::shared_ptr<http::Backend>> backends() const;
  // Those that a question is worth asking: all but those left out; all, if all are.
  std::vector<std::shared_ptr<http::Backend>> answering() const;
  std::vector<BackendHealth> health() const;
  // Begins to look up the names, so that the first request need not wait for it.
  void ResolveNames();

 private:
  struct Member {
    std::shared_ptr<http::Backend> backend;
    std::vector<std::string> models;
    std::atomic<BackendState> state{BackendState::kUnknown};  // Relaxed reads: nothing is published by it.
    std::string why;                                          // Guarded by mutex_, as are changes of state.
    std::vector<Counter*> outcomes;                           // By http::Ended.
  };
  struct Model {
    std::vector<Member*> members;
    std::atomic<size_t> turn{0};  // Relaxed: a turn more or less does not matter.
  };
  class RoundRobin;

  void Note(Member& member, http::Ended ended, const std::string& why);
  void Set(Member& member, const std::string& why);

  const Clock& clock_;
  std::vector<std::unique_ptr<Member>> members_;  // Fixed after the constructor, as is models_.
  std::map<std::string, std::unique_ptr<Model>, std::less<>> models_;
  Histogram& seconds_;
  mutable std::mutex mutex_;
};

}  // namespace terrace::router
