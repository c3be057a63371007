// Bodies too large for one PUT: parts in parallel, completed or aborted, so that nothing is left behind; and what dead
// writers left is found and aborted. On the client's thread alone.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>

#include "base/executor.h"
#include "s3/call.h"
#include "s3/object_store.h"

namespace terrace::s3 {

// What this needs of the client.
class MultipartHost {
 public:
  virtual ~MultipartHost() = default;
  virtual ObjectStore::CallId Submit(const CallPtr& call) = 0;
  virtual ObjectStore::CallId NextId() = 0;
  virtual void CancelCall(ObjectStore::CallId id) = 0;
  virtual ObjectStore::CallId PutWhole(PutRequest request, ObjectStore::Done done) = 0;
  virtual void NoMultipart() = 0;  // The server can't: never again.
};

class Multiparts {
 public:
  struct Options {
    uint64_t part_bytes = 0;
    size_t parallel_max = 1;
    bool conditional = true;  // The server may know conditions.
  };
  explicit Multiparts(MultipartHost& host) : host_(host) {}

  ObjectStore::CallId Put(PutRequest request, const Options& options, ObjectStore::Done done);
  bool Cancel(ObjectStore::CallId id);  // False: none of ours.
  void AbortOld(const std::string& prefix, std::chrono::seconds age,
                std::function<void(const Failure&, size_t aborted)> done);

 private:
  struct Upload;
  using UploadPtr = std::shared_ptr<Upload>;
  void SendParts(const UploadPtr& upload);
  void Complete(const UploadPtr& upload, bool conditional);
  void Fail(const UploadPtr& upload, const Failure& failure);
  void End(const UploadPtr& upload, const Failure& failure, const ObjectInfo& info);
  CallPtr NewCall(const UploadPtr& upload, const char* operation, const char* method) const;

  MultipartHost& host_;
  std::unordered_map<ObjectStore::CallId, UploadPtr> uploads_;
};

}  // namespace terrace::s3
