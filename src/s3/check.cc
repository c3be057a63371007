#include "s3/check.h"

#include <memory>

#include "base/handover.h"

namespace terrace::s3 {
namespace {

constexpr const char* kFormat = "terrace s3\nversion 1\n";
constexpr size_t kFormatBytesMax = 4096;

// Begins a call on the store's thread, and waits for its end.
template <class Begin>
Failure Await(ObjectStore& store, const Begin& begin) {
  auto end = std::make_shared<Handover<Failure>>();
  if (!store.executor().Post([begin, end] { begin([end](const Failure& f) { end->Give(f); }); })) {
    return {.trouble = Trouble::kCancelled};
  }
  return end->Take();
}

}  // namespace

std::string WithPrefix(const Endpoint& endpoint, const std::string& name) {
  return endpoint.prefix.empty() ? name : endpoint.prefix + "/" + name;
}

CheckResult CheckBucket(ObjectStore& store, TimePoint deadline) {
  CheckResult result{.step = "list"};
  const std::string key = WithPrefix(store.endpoint(), "terrace.format");
  result.failure = Await(store, [&store, deadline](auto done) {
    store.List({.prefix = WithPrefix(store.endpoint(), ""), .limit = 1, .deadline = deadline},
               [done](const Failure& failure, const ListPage&) { done(failure); });
  });
  if (result.failure) return result;

  result.step = "read";
  auto found = std::make_shared<std::string>();
  result.failure = Await(store, [&store, deadline, key, found](auto done) {
    GetRequest request{.key = key, .deadline = deadline};
    request.sink = [found](const ObjectInfo&, uint64_t offset, std::span<const std::byte> piece) {
      found->resize(offset);
      found->append(reinterpret_cast<const char*>(piece.data()), piece.size());
      return found->size() <= kFormatBytesMax;
    };
    store.Get(std::move(request), [done](const Failure& failure, const ObjectInfo&) { done(failure); });
  });
  if (result.failure && result.failure.trouble != Trouble::kNotFound && result.failure.trouble != Trouble::kStopped) {
    return result;
  }
  if (result.failure.trouble != Trouble::kNotFound && *found != kFormat) result.format = *found;

  // A conditional write of what is there is refused for want of rights before it is refused for the condition.
  result.step = "write";
  auto bytes = std::make_shared<std::string>(kFormat);
  result.failure = {};
  if (!result.format.empty()) return result;
  result.failure = Await(store, [&store, deadline, key, bytes](auto done) {
    store.Put({.key = key,
               .body = {std::as_bytes(std::span(*bytes))},
               .owner = bytes,
               .only_if_absent = true,
               .deadline = deadline},
              [done](const Failure& failure, const ObjectInfo&) {
                done(failure.trouble == Trouble::kExists ? Failure{} : failure);
              });
  });
  return result;
}

Error CheckError(const CheckResult& result, const Endpoint& endpoint) {
  if (!result.failure) {
    return {Code::kInvalid,
            WithPrefix(endpoint, "terrace.format") + " in " + endpoint.Describe() +
                " is not of this release's format: use another --s3-prefix, or run one release",
            0};
  }
  Error error = ToError(result.failure, endpoint.Describe() + ": " + result.step);
  if (const std::string remedy = Remedy(result.failure, endpoint); !remedy.empty()) error.what += "; " + remedy;
  return error;
}

}  // namespace terrace::s3
