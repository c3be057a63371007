#include "router/fleet.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "base/log.h"

namespace terrace::router {
namespace {

constexpr std::array kOutcomes = {"answered", "client_left", "unreachable", "died", "timed_out", "bad_answer", "cut"};
static_assert(kOutcomes.size() == static_cast<size_t>(http::Ended::kCut) + 1);

std::string Url(const http::Backend& backend) { return "http://" + backend.authority(); }

}  // namespace

// Tries each member at most once: from the one whose turn it is on, those in use first.
class Fleet::RoundRobin final : public http::Route {
 public:
  RoundRobin(const Fleet& fleet, Model& model)
      : fleet_(fleet), model_(model), begin_(fleet.clock_.Now()), first_(model.turn.fetch_add(1)) {}
  ~RoundRobin() override {
    fleet_.seconds_.Observe(std::chrono::duration<double>(fleet_.clock_.Now() - begin_).count());
  }

  std::shared_ptr<http::Backend> Next() override {
    const auto choose = [&](bool only_usable) -> Member* {
      for (size_t i = 0; i < model_.members.size(); ++i) {
        Member* member = model_.members[(first_ + i) % model_.members.size()];
        const bool tried = std::find(tried_.begin(), tried_.end(), member) != tried_.end();
        if (!tried && (!only_usable || fleet_.MayTry(*member))) return member;
      }
      return nullptr;
    };
    current_ = choose(true);
    if (current_ == nullptr) current_ = choose(false);  // Better a long shot than a refusal.
    if (current_ == nullptr) return nullptr;
    tried_.push_back(current_);
    return current_->backend;
  }

  void Report(http::Backend&, http::Ended ended, int, const std::string& why) override {
    fleet_.Note(*current_, ended, why);
  }

 private:
  const Fleet& fleet_;
  Model& model_;
  const TimePoint begin_;
  const size_t first_;
  std::vector<Member*> tried_;
  Member* current_ = nullptr;
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
      metrics.AddGaugeCallback("terrace_router_backend_in_use", "0 while a backend is left out as unreachable.",
                               {{"backend", url}}, [member] { return member->ejected_until == 0 ? 1.0 : 0.0; });
    }
    if (std::find(member->models.begin(), member->models.end(), entry.model) != member->models.end()) continue;
    member->models.push_back(entry.model);
    auto& model = models_[entry.model];
    if (!model) model = std::make_unique<Model>();
    model->members.push_back(member);
  }
}

int64_t Fleet::Now() const {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(clock_.Now().time_since_epoch()).count();
}

bool Fleet::MayTry(Member& member) const {
  int64_t until = member.ejected_until.load(std::memory_order_relaxed);
  if (until == 0) return true;
  const int64_t now = Now();
  // Whoever moves the time on is the one to try.
  return now >= until && member.ejected_until.compare_exchange_strong(
                             until, now + std::chrono::nanoseconds(kEjection).count(), std::memory_order_relaxed);
}

void Fleet::Note(Member& member, http::Ended ended, const std::string& why) const {
  member.outcomes[static_cast<size_t>(ended)]->Add();
  if (ended == http::Ended::kClientLeft) return;  // Tells nothing about the backend.
  if (ended != http::Ended::kUnreachable) {
    if (member.ejected_until.exchange(0, std::memory_order_relaxed) != 0) {
      log::Info("backend_returned", {{"backend", Url(*member.backend)}});
    }
    return;
  }
  const int64_t until = Now() + std::chrono::nanoseconds(kEjection).count();
  if (member.ejected_until.exchange(until, std::memory_order_relaxed) == 0) {
    log::Warn("backend_unreachable", {{"backend", Url(*member.backend)}, {"why", why}});
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

std::vector<BackendHealth> Fleet::health() const {
  std::vector<BackendHealth> all;
  for (const auto& member : members_) {
    all.push_back({.url = Url(*member->backend),
                   .models = member->models,
                   .ejected = member->ejected_until != 0,
                   .in_flight = member->backend->in_flight()});
  }
  return all;
}

void Fleet::ResolveNames() {
  for (const auto& member : members_) member->backend->Resolve([] {});
}

}  // namespace terrace::router
