// One call of the client, from the queue to its end: shared by the files of the client, used by nobody else.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "s3/object_store.h"
#include "s3/sigv4.h"

namespace terrace::s3 {

enum class CallClass : uint8_t { kProbe, kRead, kWrite };  // In order of urgency.

struct Call {
  // What is asked. Set by whoever makes the call.
  const char* operation = "";  // A metric's label.
  CallClass kind = CallClass::kRead;
  std::string method = "GET";
  std::string key;  // "": the bucket.
  Parameters query;
  Parameters headers;  // Beside those that signing adds.
  std::vector<std::span<const std::byte>> body;
  std::shared_ptr<const void> owner;
  uint64_t begin = 0, end = 0;  // Of a range; end 0: none.
  decltype(GetRequest::sink) sink;
  TimePoint deadline = TimePoint::max();
  std::function<void(const Failure& failure, const HttpResponse& response)> done;

  // The client's.
  struct Transfer {
    uint64_t id = 0;  // 0: none on its way.
    TimePoint begun;
  };
  ObjectStore::CallId id = 0;
  int attempts = 0;
  bool renewed = false;  // Credentials were looked for again.
  int redirects = 0;
  bool clock_set = false;
  bool ended = false;
  bool queued = false;
  std::array<Transfer, 2> transfers;  // The second is a hedge.
  int winner = -1;                    // Whose bytes count.
  uint64_t received = 0;              // By the winner's sink.
  bool is_document = false;           // The body is XML, not the object.
  std::string document;
  ObjectInfo info;
  Credentials used;
};
using CallPtr = std::shared_ptr<Call>;

}  // namespace terrace::s3
