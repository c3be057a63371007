// Where the control groups of this process have their files.
#pragma once

#include <functional>
#include <string>
#include <string_view>

namespace terrace {

// Calls `visit` with the folder of each group (v1, v2) that bounds what this process gets of `controller` ("cpu",
// "memory"): the mount point, this process' own group and all above it, since each may have a bound of its own. In a
// container the path of the group may be the host's, of which only the mount point is visible; that is then the
// container's own group. A folder may not exist, and one may be named twice. `root` stands before /proc and /sys.
// `process` is a name under /proc: the number of another process whose groups are asked for.
void VisitCgroups(const std::string& root, std::string_view controller,
                  const std::function<void(const std::string& folder, bool is_v2)>& visit,
                  std::string_view process = "self");

}  // namespace terrace
