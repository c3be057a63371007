#include "doctor/node.h"

#include <chrono>
#include <memory>
#include <utility>

#include "client/node_client.h"
#include "client/node_link.h"

namespace terrace::doctor {
namespace {

constexpr std::chrono::seconds kAnswerMax{5};  // Of a node that does not hang.

TimePoint Soon() { return std::chrono::steady_clock::now() + kAnswerMax; }

}  // namespace

void CheckNode(const std::string& socket, Report& report) {
  report.Doing("joining the node");
  const Joining joining = JoinNode(socket, std::make_shared<const Waker>(), Soon(), [] { return false; });
  if (!joining.link) {
    // "what is wrong; what to do".
    const size_t cut = joining.why.find("; ");
    const std::string remedy = cut == std::string::npos ? "start it, or correct the path" : joining.why.substr(cut + 2);
    report.Add({"node.join", Severity::kProblem, socket + ": " + joining.why.substr(0, cut), remedy, {}});
    return;
  }
  std::string names;
  for (const std::string& name : joining.link->tier_names) names += (names.empty() ? "" : ", ") + name;
  report.Add({"node.join", Severity::kOk, socket + ": a node, whose tiers are " + names, "", {}});

  const auto client = NewNodeClient({.node_wait = kAnswerMax}, socket);
  const auto stats = client->Stats();
  const ClientStats* told = stats->Wait(Soon()) ? stats->Poll(0) : nullptr;
  if (told == nullptr || !told->connected) {
    report.Add({"node.answers",
                Severity::kProblem,
                socket + ": it lets clients in and does not answer",
                "is it stopped, or out of memory?",
                {}});
    return;
  }
  Figures figures;
  for (const auto& [name, tier] : told->tiers) figures.emplace_back(name + "_bytes", static_cast<double>(tier.bytes));
  if (told->degraded.empty()) {
    report.Add({"node.tiers", Severity::kOk, "its tiers work", "", std::move(figures)});
  } else {
    report.Add({"node.tiers", Severity::kProblem, told->degraded,
                "run the doctor with the node's own configuration on its host", std::move(figures)});
  }
}

}  // namespace terrace::doctor
