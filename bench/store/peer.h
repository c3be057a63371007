// Another program that does what a tier of ours does, driven step by step, so that the two can take turns.
#pragma once

#include <sys/types.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace terrace::bench {

// A child that answers each request, one line of JSON, by one line of JSON.
class Peer {
 public:
  // Begins at once, and may still be starting when this returns.
  explicit Peer(const std::vector<std::string>& command);
  ~Peer();  // The child ends when its input does.
  Peer(const Peer&) = delete;
  Peer& operator=(const Peer&) = delete;

  nlohmann::json Ask(const nlohmann::json& request);

 private:
  pid_t pid_ = 0;
  FILE* requests_ = nullptr;
  FILE* answers_ = nullptr;
};

}  // namespace terrace::bench
