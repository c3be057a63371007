// `terrace router`: one OpenAI-compatible entry to several instances. Blocks until SIGTERM or SIGINT; the exit code of
// the program: 0 after a stop, 2 if the user must mend something.
#pragma once

#include <string>
#include <vector>

namespace terrace {

// `args` without program name and verb.
int RunRouter(const std::vector<std::string>& args);

}  // namespace terrace
