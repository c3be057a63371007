// The verb `terrace doctor`: will an instance with this configuration work, how well, and do instances share?
#pragma once

#include <string>
#include <vector>

#include "base/config.h"

namespace terrace {

namespace doctor {
// Its own options, and those of an instance.
config::Schema Schema();
}  // namespace doctor

// `args` without "terrace doctor". Returns the exit code: 0 no problem, 1 at least one, 2 wrong usage or a
// configuration that can't be read; then one line on stderr says what.
int RunDoctor(const std::vector<std::string>& args);

}  // namespace terrace
