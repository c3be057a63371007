// Objects under keys, asynchronously: what the s3 tier stands on. s3/client.h is the real one; a test may put another
// in its place.
//
// All methods and all callbacks run on the thread of executor(). A callback runs once, never from within the call that
// it was given to. `key` is any bytes, the prefix of the endpoint included.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/executor.h"
#include "s3/failure.h"
#include "s3/xml.h"
#include "terrace/tier.h"

namespace terrace::s3 {

struct ObjectInfo {
  uint64_t bytes = 0;  // Of the whole object.
  std::string etag;
  // Of an answer to a GET: when the object was written, and when the answer was; Unix seconds by the server's clock, 0
  // if it did not say.
  int64_t modified = 0, now = 0;
};

struct GetRequest {
  std::string key;
  uint64_t begin = 0;
  uint64_t end = 0;  // Behind the last byte; 0: the whole object.
  // Takes the bytes in order, from `begin` on; and from `begin` again, if an attempt broke and is repeated. False: no
  // more, the call ends with kStopped.
  std::function<bool(const ObjectInfo& info, uint64_t offset, std::span<const std::byte> piece)> sink;
  TimePoint deadline = TimePoint::max();
};

struct PutRequest {
  std::string key;
  std::vector<std::span<const std::byte>> body;  // One after the other.
  std::shared_ptr<const void> owner;             // Keeps `body` alive.
  bool only_if_absent = false;  // kExists if the server honours it and the object is there; else it is written.
  std::string if_match;         // Not "": kExists if the server honours it and the object's ETag is another.
  TimePoint deadline = TimePoint::max();
};

class ObjectStore {
 public:
  using CallId = uint64_t;
  using Done = std::function<void(const Failure& failure, const ObjectInfo& info)>;
  virtual ~ObjectStore() = default;

  virtual Executor& executor() = 0;
  virtual const Endpoint& endpoint() const = 0;

  virtual CallId Get(GetRequest request, Done done) = 0;
  virtual CallId Head(const std::string& key, TimePoint deadline, Done done) = 0;
  virtual CallId Put(PutRequest request, Done done) = 0;
  virtual CallId Delete(const std::string& key, TimePoint deadline, Done done) = 0;
  // Objects whose keys begin with `prefix`, in order of key; `token` of the page before, or "" with a key to begin
  // after.
  struct ListRequest {
    std::string prefix, start_after, token;
    size_t limit = 1000;
    TimePoint deadline = TimePoint::max();
  };
  virtual CallId List(const ListRequest& request, std::function<void(const Failure&, const ListPage&)> done) = 0;

  // The call ends soon, with kCancelled; its sink is not called any more. Nothing if it has ended.
  virtual void Cancel(CallId call) = 0;

  // Aborts multipart uploads under `prefix` that were begun before `before` (Unix seconds, by the server's clock): what
  // writers that died have left. `done` gets how many.
  virtual void AbortOldUploads(const std::string& prefix, std::chrono::seconds age,
                               std::function<void(const Failure&, size_t aborted)> done) = 0;

  // Calls that go on at once. Others wait for their turn.
  virtual size_t parallel() const = 0;

  // Ends every call with kCancelled, and takes no more. From any other thread; blocks until the last callback has run.
  virtual void Stop() = 0;
};

}  // namespace terrace::s3
