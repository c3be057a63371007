// fio as the limit of the disk tier: the same I/O, by a program that does nothing else. io_uring, O_DIRECT, 8 requests
// of 1 MiB at the device.
#pragma once

#include <cstdint>
#include <string>

namespace terrace::bench {

// Seconds to read the first `bytes` of each of the files 0, 1, ... of the directory, one file after the other. fio
// opens them before its clock runs.
double FioRead(const std::string& directory, uint64_t files, uint64_t bytes);

// Seconds to write `bytes` to the new file `path`, which is removed, with an fdatasync each `group_bytes` and at the
// end. Further writes are at the device meanwhile, as in the tier. The file's space is reserved before the clock runs.
double FioWrite(const std::string& path, uint64_t bytes, uint64_t group_bytes);

}  // namespace terrace::bench
