#include "s3/multipart.h"

#include <algorithm>
#include <ctime>
#include <set>
#include <utility>
#include <vector>

#include "base/log.h"
#include "s3/xml.h"

namespace terrace::s3 {
namespace {

// Of old uploads, in one call of AbortOld: as many as a page of them has.
constexpr size_t kAbortsMax = 1000;

// Part i of `body`: the pieces of the spans that fall into it.
std::vector<std::span<const std::byte>> Slice(const std::vector<std::span<const std::byte>>& body, uint64_t begin,
                                              uint64_t end) {
  std::vector<std::span<const std::byte>> pieces;
  uint64_t at = 0;
  for (const auto& span : body) {
    const uint64_t from = std::max(begin, at);
    const uint64_t to = std::min(end, at + span.size());
    if (from < to) pieces.push_back(span.subspan(from - at, to - from));
    at += span.size();
  }
  return pieces;
}

}  // namespace

struct Multiparts::Upload {
  ObjectStore::CallId id = 0;
  PutRequest request;
  Options options;
  ObjectStore::Done done;
  uint64_t bytes = 0;
  std::string upload_id;
  std::vector<std::string> etags;  // By part.
  size_t next_part = 0;
  size_t parts_done = 0;
  std::set<ObjectStore::CallId> calls;  // On their way.
  bool ended = false;
};

CallPtr Multiparts::NewCall(const UploadPtr& upload, const char* operation, const char* method) const {
  auto call = std::make_shared<Call>();
  call->operation = operation;
  call->kind = CallClass::kWrite;
  call->method = method;
  call->key = upload->request.key;
  call->deadline = upload->request.deadline;
  if (!upload->upload_id.empty()) call->query.emplace_back("uploadId", upload->upload_id);
  return call;
}

ObjectStore::CallId Multiparts::Put(PutRequest request, const Options& options, ObjectStore::Done done) {
  auto upload = std::make_shared<Upload>();
  upload->id = host_.NextId();
  upload->request = std::move(request);
  upload->options = options;
  upload->done = std::move(done);
  for (const auto& span : upload->request.body) upload->bytes += span.size();
  upload->etags.resize((upload->bytes + options.part_bytes - 1) / options.part_bytes);
  uploads_.emplace(upload->id, upload);

  const CallPtr call = NewCall(upload, "create_multipart", "POST");
  call->query.emplace_back("uploads", "");
  call->headers.emplace_back("content-type", "application/octet-stream");
  call->done = [this, upload](const Failure& failure, const HttpResponse& response) {
    upload->calls.clear();
    if (upload->ended) return;
    if (failure.trouble == Trouble::kNotImplemented) {
      host_.NoMultipart();
      uploads_.erase(upload->id);
      upload->ended = true;
      host_.PutWhole(std::move(upload->request), std::move(upload->done));
      return;
    }
    if (failure) return End(upload, failure, {});
    Result<std::string> id = ParseUploadId(response.text);
    if (!id) {
      return End(upload, {.trouble = Trouble::kNoS3, .status = response.status, .message = id.error().what}, {});
    }
    upload->upload_id = *std::move(id);
    SendParts(upload);
  };
  upload->calls.insert(host_.Submit(call));
  return upload->id;
}

void Multiparts::SendParts(const UploadPtr& upload) {
  while (!upload->ended && upload->calls.size() < upload->options.parallel_max &&
         upload->next_part < upload->etags.size()) {
    const size_t part = upload->next_part++;
    const CallPtr call = NewCall(upload, "put_part", "PUT");
    call->query.emplace_back("partNumber", std::to_string(part + 1));
    const uint64_t begin = part * upload->options.part_bytes;
    call->body = Slice(upload->request.body, begin, std::min(upload->bytes, begin + upload->options.part_bytes));
    call->owner = upload->request.owner;
    call->done = [this, upload, part, c = call.get()](const Failure& failure, const HttpResponse& response) {
      upload->calls.erase(c->id);
      if (upload->ended) return;
      if (failure) return Fail(upload, failure);
      upload->etags[part] = response.Header("etag");
      if (upload->etags[part].empty()) {
        return Fail(upload,
                    {.trouble = Trouble::kNoS3, .status = response.status, .message = "a part without an ETag"});
      }
      if (++upload->parts_done == upload->etags.size()) return Complete(upload, upload->request.only_if_absent);
      SendParts(upload);
    };
    upload->calls.insert(host_.Submit(call));
  }
}

void Multiparts::Complete(const UploadPtr& upload, bool conditional) {
  const CallPtr call = NewCall(upload, "complete_multipart", "POST");
  conditional = conditional && upload->options.conditional;
  if (conditional) call->headers.emplace_back("if-none-match", "*");
  call->headers.emplace_back("content-type", "application/xml");
  auto body = std::make_shared<std::string>(CompleteUploadBody(upload->etags));
  call->body = {std::as_bytes(std::span(*body))};
  call->owner = body;
  call->done = [this, upload, conditional](const Failure& failure, const HttpResponse& response) {
    upload->calls.clear();
    if (upload->ended) return;
    if (conditional && failure.trouble == Trouble::kNotImplemented) return Complete(upload, false);
    if (failure) return Fail(upload, failure);
    End(upload, {}, {.bytes = upload->bytes, .etag = response.Header("etag")});
  };
  upload->calls.insert(host_.Submit(call));
}

void Multiparts::Fail(const UploadPtr& upload, const Failure& failure) {
  upload->ended = true;
  for (const ObjectStore::CallId id : std::set(upload->calls)) host_.CancelCall(id);
  const CallPtr abort = NewCall(upload, "abort_multipart", "DELETE");
  abort->deadline = TimePoint::max();  // Its own time, which the client gives: what failed may have been late.
  abort->done = [this, upload, failure](const Failure& left, const HttpResponse&) {
    if (left && left.trouble != Trouble::kNotFound && left.trouble != Trouble::kCancelled) {
      log::Warn("s3_upload_left", {{"key", upload->request.key}, {"why", left.Describe()}});
    }
    upload->ended = false;
    End(upload, failure, {});
  };
  host_.Submit(abort);
}

void Multiparts::End(const UploadPtr& upload, const Failure& failure, const ObjectInfo& info) {
  if (std::exchange(upload->ended, true)) return;
  uploads_.erase(upload->id);
  const ObjectStore::Done done = std::move(upload->done);
  upload->request = {};
  done(failure, info);
}

bool Multiparts::Cancel(ObjectStore::CallId id) {
  const auto it = uploads_.find(id);
  if (it == uploads_.end()) return false;
  const UploadPtr upload = it->second;
  if (upload->ended) return true;  // It is being aborted.
  if (upload->upload_id.empty()) {
    for (const ObjectStore::CallId call : std::set(upload->calls)) host_.CancelCall(call);
  } else {
    Fail(upload, {.trouble = Trouble::kCancelled});
  }
  return true;
}

void Multiparts::AbortOld(const std::string& prefix, std::chrono::seconds age,
                          std::function<void(const Failure&, size_t)> done) {
  auto list = std::make_shared<Call>();
  list->operation = "list_multipart";
  list->kind = CallClass::kWrite;
  list->query = {{"uploads", ""}, {"prefix", prefix}};
  list->done = [this, prefix, age, done = std::move(done)](const Failure& failure, const HttpResponse& response) {
    if (failure) return done(failure, 0);
    const Result<UploadPage> page = ParseUploadPage(response.text);
    const std::string& date = response.Header("date");
    tm utc{};
    if (!page || strptime(date.c_str(), "%a, %d %b %Y %H:%M:%S GMT", &utc) == nullptr) {
      return done({.trouble = Trouble::kNoS3, .status = response.status, .message = "no list of uploads with a date"},
                  0);
    }
    const int64_t before = timegm(&utc) - age.count();
    struct Progress {
      size_t left = 1;
      size_t aborted = 0;
    };
    auto progress = std::make_shared<Progress>();
    const auto one_less = [progress, done] {
      if (--progress->left == 0) done({}, progress->aborted);
    };
    for (const UploadPage::Upload& old : page->uploads) {
      // Some servers show the uploads of the whole bucket, which are not ours to abort.
      if (old.initiated >= before || !old.key.starts_with(prefix)) continue;
      if (progress->left > kAbortsMax) break;  // The others at the next call.
      auto abort = std::make_shared<Call>();
      abort->operation = "abort_multipart";
      abort->kind = CallClass::kWrite;
      abort->method = "DELETE";
      abort->key = old.key;
      abort->query = {{"uploadId", old.id}};
      abort->done = [progress, one_less](const Failure& left, const HttpResponse&) {
        progress->aborted += left ? 0 : 1;
        one_less();
      };
      ++progress->left;
      host_.Submit(abort);
    }
    one_less();
  };
  host_.Submit(list);
}

}  // namespace terrace::s3
