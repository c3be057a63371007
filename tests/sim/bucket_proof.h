// What must be true of a bucket that nodes keep within bounds.
#pragma once

#include <cstdint>
#include <string>

#include "terrace/key.h"
#include "tests/sim/sim_node.h"

namespace terrace::sim {

// Is it right to take this frame away: is the bucket at least half full, or the frame older than the ttl?
bool MayBeCollected(const World& world, const SimDisk::NameChange& change);

// In peace: the bucket is not above its bound.
void ProveSize(World& world, const std::string& when);

// In peace: what one node uses again and again stays, with all before it; what nobody uses goes. On a fiber.
void ProveTtl(World& world, SimNode& user);

}  // namespace terrace::sim
