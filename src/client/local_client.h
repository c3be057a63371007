// The client of a store in this process.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "terrace/client.h"

namespace terrace {

class Pins;

struct LocalOptions {
  size_t copy_threads = 2;
  size_t calls_max = 4096;
  std::chrono::milliseconds node_wait{1000};   // For a node that listens, when the client is made.
  std::chrono::milliseconds save_max{30'000};  // For room at a node, and again for its answer. Beyond: it hangs.
  std::function<std::optional<std::string>(std::string_view)> setting = [](std::string_view) { return std::nullopt; };
};

// `owner` keeps the store alive, with all that it stands on; dropped when the client is closed and gone. If storage
// hangs for ever, a thread keeps it that the client leaves behind.
std::unique_ptr<Client> NewLocalClient(const LocalOptions& options, Store& store, std::shared_ptr<void> owner);

// What a store says of itself. Leased is what is pinned otherwise, for the tiers below, too.
ClientStats StatsOf(const Store& store, const Pins& pins);

}  // namespace terrace
