// `terrace node`: one store for all engines of a host.
#pragma once

#include <string>
#include <vector>

#include "base/config.h"

namespace terrace {

namespace node {
config::Schema Schema();
}  // namespace node

// Returns the exit code: 0 after a stop by signal.
int RunNode(const std::vector<std::string>& args);

}  // namespace terrace
