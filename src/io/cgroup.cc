#include "io/cgroup.h"

#include <fstream>

namespace terrace {

void VisitCgroups(const std::string& root, std::string_view controller,
                  const std::function<void(const std::string& folder, bool is_v2)>& visit, std::string_view process) {
  const std::string v1 = "," + std::string(controller) + ",";
  std::ifstream groups(root + "/proc/" + std::string(process) + "/cgroup");
  std::string line;  // "4:cpu,cpuacct:/path" (v1) or "0::/path" (v2).
  while (std::getline(groups, line)) {
    const size_t first = line.find(':');
    const size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const bool is_v2 = controllers == ",,";
    if (!is_v2 && controllers.find(v1) == std::string::npos) continue;
    std::string mount = root + "/sys/fs/cgroup";
    if (!is_v2) mount += "/" + std::string(controller);
    visit(mount, is_v2);
    for (std::string path = line.substr(second + 1); path.size() > 1 && path.front() == '/';
         path.resize(path.find_last_of('/'))) {
      visit(mount + path, is_v2);
    }
  }
}

}  // namespace terrace
