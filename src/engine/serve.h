// The verb `terrace serve`: one model behind OpenAI's API, its KV in tiers.
#pragma once

#include <string>
#include <vector>

namespace terrace {

// `args` without "terrace serve". Returns the exit code: 0 after a drained stop, 1 for a problem, 2 for something that
// the user must mend first; then one line on stderr says what. Called by main before any thread exists: it may replace
// the process by itself with another environment (see OpenMP in docs/internals/engine.md).
int RunServe(const std::vector<std::string>& args);

}  // namespace terrace
