// What must be true of a share that nodes keep within bounds: of a directory at any time, of a bucket in peace.
#pragma once

#include <cstdint>
#include <string>

#include "terrace/key.h"
#include "tests/sim/sim_node.h"

namespace terrace::sim {

// Is it right to take this frame away: is it older than the ttl, or the bucket at least half full? A directory gives
// way to what the nodes claim, too, which may be all of a small one.
bool MayBeCollected(const World& world, const SimDisk::NameChange& change);

// It is not above its bound.
void ProveSize(World& world, const std::string& when);

// In peace: what one node uses again and again stays, with all before it; what nobody uses goes. On a fiber.
void ProveTtl(World& world, SimNode& user);

}  // namespace terrace::sim
