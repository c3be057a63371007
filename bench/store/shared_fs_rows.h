// Rows of the shared_fs tier, 8 frames in flight, beside threads that move the same bytes by plain system calls.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness.h"

namespace terrace::bench {

// Saves and loads of `frames` frames of `bytes`, in `scratch`. Loads with the page cache warm and dropped, beside 8
// threads of pread, and beside one.
void SharedFsRows(std::vector<Row>& rows, int rounds, const std::string& scratch, uint64_t bytes, uint64_t frames);

}  // namespace terrace::bench
