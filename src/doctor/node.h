// Can an engine here join its node, and does the node have its tiers?
#pragma once

#include <string>

#include "doctor/report.h"

namespace terrace::doctor {

// Joins as an engine does, and leaves again. Takes some seconds at most.
void CheckNode(const std::string& socket, Report& report);

}  // namespace terrace::doctor
