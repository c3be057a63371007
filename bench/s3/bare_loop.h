// What a client can reach that does nothing but move the bytes: libcurl's multi interface on the calling thread, one
// request an object, each signed. No checks, no queue, no second try.
#pragma once

#include <curl/curl.h>

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "s3/client.h"

namespace terrace::bench {

class BareLoop {
 public:
  explicit BareLoop(const s3::ClientOptions& client);
  ~BareLoop();
  BareLoop(const BareLoop&) = delete;
  BareLoop& operator=(const BareLoop&) = delete;

  // An object is `head`, then `body`.
  struct Object {
    std::string key;
    std::span<std::byte> head, body;
  };
  // All of them, `in_flight` at once. Ends the program if one fails.
  void Get(const std::vector<Object>& objects, size_t in_flight) { Move(objects, in_flight, false); }
  void Put(const std::vector<Object>& objects, size_t in_flight) { Move(objects, in_flight, true); }

 private:
  void Move(const std::vector<Object>& objects, size_t in_flight, bool put);

  const s3::ClientOptions client_;
  CURLM* multi_ = nullptr;
  std::vector<CURL*> idle_;
};

}  // namespace terrace::bench
