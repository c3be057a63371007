#include "bench/store/fio.h"

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "bench/store/frames.h"

namespace terrace::bench {
namespace {

constexpr uint64_t kRequestBytes = 1 << 20;

double Run(const std::string& options, const char* direction) {
  const std::string command =
      "fio --name=limit --ioengine=io_uring --direct=1 --iodepth=8 --bs=1m --thread --output-format=json " + options;
  FILE* pipe = popen(command.c_str(), "r");
  Check(pipe != nullptr, command);
  std::string text;
  char part[4096];
  for (size_t n; (n = fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
  Check(pclose(pipe) == 0, command);
  const auto report = nlohmann::json::parse(text.substr(std::min(text.find('{'), text.size())), nullptr, false);
  Check(!report.is_discarded(), "reading what fio says");
  return report["jobs"][0][direction]["runtime"].get<double>() / 1e3;
}

}  // namespace

double FioRead(const std::string& directory, uint64_t files, uint64_t bytes) {
  return Run("--rw=read --readonly --file_service_type=sequential --directory=" + directory +
                 " --filename_format='$filenum' --nrfiles=" + std::to_string(files) +
                 " --filesize=" + std::to_string(bytes),
             "read");
}

double FioWrite(const std::string& path, uint64_t bytes, uint64_t group_bytes) {
  const uint64_t requests = std::max<uint64_t>(1, group_bytes / kRequestBytes);
  return Run("--rw=write --unlink=1 --end_fsync=1 --fdatasync=" + std::to_string(requests) + " --filename=" + path +
                 " --size=" + std::to_string(bytes),
             "write");
}

}  // namespace terrace::bench
