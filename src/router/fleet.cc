#include "router/fleet.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "base/log.h"

namespace terrace::router {
namespace {

constexpr std::array kOutcomes = {"answered",  "client_left", "unreachable", "died",
                                  "timed_out", "bad_answer",  "cut",         "stopped"};
static_assert(kOutcomes.size() == static_cast<size_t>(http::Ended::kStopped) + 1);

std::string Url(const http::Backend& backend) { return "http://" + backend.authority(); }

}  // namespace

// Tries each member at most once, those in use first. They take turns among themselves: the turns of one that is left
// out must not all go to its neighbour.
class Fleet::RoundRobin final : public http::Route {
 public:
  RoundRobin(Fleet& fleet, Model& model)
      : fleet_(fleet), model_(model), begin_(fleet.clock_.Now()), turn_(model.turn.fetch_add(1)) {}
  ~RoundRobin() override {
    fleet_.seconds_.Observe(std::chrono::duration<double>(fleet_.clock_.Now() - begin_).count());
  }

  std::shared_ptr<http::Backend> Next() override {
    const auto choose = [&](bool only_usable) -> Member* {
      std::vector<Member*> open;
      for (Member* member : model_.members) {
        const bool tried = std::find(tried_.begin(), tried_.end(), member) != tried_.end();
        if (!tried && (!only_usable || member->state != BackendState::kLeftOut)) open.push_back(member);
      }
      return open.empty() ? nullptr : open[turn_ % open.size()];
    };
    Member* member = choose(true);
    if (member == nullptr) member = choose(false);  // Better a long shot than a refusal.
    if (member == nullptr) return nullptr;
    tried_.push_back(member);
    return member->backend;
  }

  void Report(http::Backend& backend, http::Ended ended, int, const std::string& why) override {
    const auto is_it = [&](const Member* member) { return member->backend.get() == &backend; };
    fleet_.Note(**std::ranges::find_if(tried_, is_it), ended, why);
  }

 private:
  Fleet& fleet_;
  Model& model_;
  const TimePoint begin_;
  const size_t turn_;
  std::vector<Member*> tried_;
};

Fleet::Fleet(const std::vector<StaticBackend>& backends, const Clock& clock, Metrics& metrics)
    : clock_(clock),
      seconds_(metrics.GetHistogram("terrace_router_request_seconds",
                                    "Time from a whole request to the end of its answer.")) {
  std::map<std::string, Member*> by_authority;
  for (const StaticBackend& entry : backends) {
    auto backend = std::make_shared<http::Backend>(entry.host, entry.port);
    Member*& member = by_authority[backend->authority()];
    if (member == nullptr) {
      member = members_.emplace_back(std::make_unique<Member>()).get();
      member->backend = backend;
      const std::string url = Url(*backend);
      for (const char* outcome : kOutcomes) {
        member->outcomes.push_back(&metrics.GetCounter("terrace_router_attempts_total",
                                                       "Attempts to have a request answered by a backend.",
                                                       {{"backend", url}, {"outcome", outcome}}));
      }
      metrics.AddGaugeCallback("terrace_router_in_flight", "Requests that are with a backend now.", {{"backend", url}},
                               [backend] { return static_cast<double>(backend->in_flight()); });
      metrics.AddGaugeCallback("terrace_router_backend_in_use", "0 while a backend is left out: it does not answer.",
                               {{"backend", url}}, [member] { return member->state != BackendState::kLeftOut; });
    }
    if (std::find(member->models.begin(), member->models.end(), entry.model) != member->models.end()) continue;
    member->models.push_back(entry.model);
    auto& model = models_[entry.model];
    if (!model) model = std::make_unique<Model>();
    model->members.push_back(member);
  }
}

void Fleet::Note(Member& member, http::Ended ended, const std::string& why) {
  member.outcomes[static_cast<size_t>(ended)]->Add();
  if (ended == http::Ended::kUnreachable) Set(member, why);
}

void Fleet::NoteCheck(const http::Backend& backend, const std::string& why) {
  for (const auto& member : members_) {
    if (member->backend.get() == &backend) Set(*member, why);
  }
}

void Fleet::Set(Member& member, const std::string& why) {
  const BackendState now = why.empty() ? BackendState::kInUse : BackendState::kLeftOut;
  BackendState before;
  {
    const std::lock_guard lock(mutex_);
    before = member.state.exchange(now);
    member.why = why;
  }
  if (before == now) return;
  if (now == BackendState::kLeftOut) {
    log::Warn("backend_left_out", {{"backend", Url(*member.backend)}, {"why", why}});
  } else if (before == BackendState::kLeftOut) {
    log::Info("backend_returned", {{"backend", Url(*member.backend)}});
  }
}

std::unique_ptr<http::Route> Fleet::RouteFor(std::string_view model) {
  const auto it = models_.find(model);
  if (it == models_.end()) return nullptr;
  return std::make_unique<RoundRobin>(*this, *it->second);
}

std::vector<std::shared_ptr<http::Backend>> Fleet::backends() const {
  std::vector<std::shared_ptr<http::Backend>> all;
  for (const auto& member : members_) all.push_back(member->backend);
  return all;
}

std::vector<std::shared_ptr<http::Backend>> Fleet::answering() const {
  std::vector<std::shared_ptr<http::Backend>> some;
  for (const auto& member : members_) {
    if (member->state != BackendState::kLeftOut) some.push_back(member->backend);
  }
  return some.empty() ? backends() : some;
}

std::vector<BackendHealth> Fleet::health() const {
  const std::lock_guard lock(mutex_);
  std::vector<BackendHealth> all;
  for (const auto& member : members_) {
    all.push_back({.url = Url(*member->backend),
                   .models = member->models,
                   .state = member->state,
                   .why = member->why,
                   .in_flight = member->backend->in_flight()});
  }
  return all;
}

void Fleet::ResolveNames() {
  for (const auto& member : members_) member->backend->Resolve([] {});
}

}  // namespace terrace::router
