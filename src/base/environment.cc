#include "base/environment.h"

#include <unistd.h>

#include <algorithm>
#include <optional>

namespace terrace::config {
namespace {

constexpr std::string_view kPrefix = "TERRACE_";

}  // namespace

bool FromKubernetes(std::string_view name, std::string_view value) {
  const auto names = [&](std::string_view word) {  // It ends with the word, or goes on with another one.
    const size_t at = name.find(word);
    return at != std::string_view::npos && (at + word.size() == name.size() || name[at + word.size()] == '_');
  };
  const auto is_address = [&](std::string_view scheme) { return value.starts_with(scheme); };
  if (names("_SERVICE_HOST") || names("_SERVICE_PORT")) return true;
  if (name.find("_PORT") == std::string_view::npos) return false;
  return names("_TCP") || names("_UDP") || is_address("tcp://") || is_address("udp://");
}

Result<void> CheckVariables(const std::vector<std::string>& variables, const std::vector<Schema>& schemas,
                            const std::vector<std::string>& others) {
  std::vector<std::string> known = {EnvironmentName("config")};
  for (const Schema& schema : schemas) {
    for (const Option& option : schema.options) known.push_back(EnvironmentName(option.name));
  }
  for (const std::string& variable : variables) {
    const std::string name = variable.substr(0, variable.find('='));
    const std::string value = variable.substr(std::min(name.size() + 1, variable.size()));
    if (!name.starts_with(kPrefix) || value.empty() || FromKubernetes(name, value)) continue;
    if (std::ranges::find(known, name) != known.end() || std::ranges::find(others, name) != others.end()) continue;
    // Without the prefix, which all share: it would make everything look near.
    std::vector<std::string> names;
    for (const std::string& one : known) names.push_back(one.substr(kPrefix.size()));
    const auto nearest = Nearest(name.substr(kPrefix.size()), names);
    return Fail(Code::kInvalid,
                "unknown variable " + name + " in the environment; " +
                    (nearest ? "did you mean " + std::string(kPrefix) + *nearest + "?" : "unset it, or see --help"));
  }
  return {};
}

std::vector<std::string> VariablesOfThisProcess() {
  std::vector<std::string> variables;
  for (char** variable = environ; variable != nullptr && *variable != nullptr; ++variable) {
    variables.emplace_back(*variable);
  }
  return variables;
}

}  // namespace terrace::config
