// Rows of our tiers beside LMCache's storage backends: the same payloads, the same directory, in turn.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "bench/harness.h"
#include "bench/store/peer.h"

namespace terrace::bench {

// Which of our tiers beside which of LMCache's backends (lmcache_peer.py knows them by these names).
struct PeerPair {
  std::string tier;     // "disk" or "shared_fs".
  std::string backend;  // "local_disk", "local_disk_direct", "fs", "fs_native".
};

// Saves, loads and lookups of `frames` frames of `bytes`, all given at once, in `scratch`.
void PeerRows(std::vector<Row>& rows, int rounds, Peer& peer, const PeerPair& pair, const std::string& scratch,
              uint64_t bytes, uint64_t frames);

}  // namespace terrace::bench
