// The client of a node, over its socket.
#pragma once

#include <memory>
#include <string>

#include "client/local_client.h"

namespace terrace {

// Connects in the background, and again whenever the node is gone.
std::unique_ptr<Client> NewNodeClient(const LocalOptions& options, const std::string& socket);

}  // namespace terrace
