// What must be true of a node's local disk.
#pragma once

#include <cstdint>
#include <set>

#include "terrace/key.h"
#include "tests/sim/sim_node.h"

namespace terrace::sim {

// Chunks whose right frame is on the disk under its name.
std::set<Digest> RightFrames(const World& world, const LocalDisk& disk);

// A node that has begun in peace, on a disk that held `before` when its last process had closed: all of it is found and
// delivered, it is counted to the byte and below the cap, and nothing else is left. On a fiber.
void ProveDisk(World& world, SimNode& node, const std::set<Digest>& before);

}  // namespace terrace::sim
