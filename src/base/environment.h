// What stands in the environment under our prefix and means nothing.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"
#include "terrace/result.h"

namespace terrace::config {

// A variable TERRACE_* that no option of `schemas` reads and that is none of `others` is a slip of the fingers: an
// error that names the nearest. `schemas`: of all verbs, which share one environment. `variables`: NAME=value, as a
// process has them. Passed over: empty ones, which count as not set, and what Kubernetes sets for a service named
// terrace-*.
Result<void> CheckVariables(const std::vector<std::string>& variables, const std::vector<Schema>& schemas,
                            const std::vector<std::string>& others);

// Kubernetes tells each container where the services of its namespace are: for "terrace-router" by
// TERRACE_ROUTER_SERVICE_HOST, TERRACE_ROUTER_PORT=tcp://10.0.0.7:8000, TERRACE_ROUTER_PORT_8000_TCP_ADDR and others.
bool FromKubernetes(std::string_view name, std::string_view value);

std::vector<std::string> VariablesOfThisProcess();

}  // namespace terrace::config
