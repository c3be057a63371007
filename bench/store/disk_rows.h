// Rows of the disk tier beside fio, which does the same I/O and nothing else.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness.h"

namespace terrace::bench {

// Durable saves and verified loads of `frames` frames of `bytes`, all given at once, in `scratch`.
void DiskRows(std::vector<Row>& rows, int rounds, const std::string& scratch, uint64_t bytes, uint64_t frames);

}  // namespace terrace::bench
