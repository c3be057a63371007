#include "tests/sim/sim_object_store.h"

#include <algorithm>
#include <optional>
#include <span>
#include <string_view>

#include "base/hash.h"

namespace terrace::sim {

using s3::Failure;
using s3::ObjectInfo;
using s3::Trouble;

SimObjectStore::SimObjectStore(SimDisk& disk, SimFileIo& view, Scheduler& scheduler, SimLog& log,
                               const std::string& node, const FaultRates& rates, bool honours_conditions, Random random)
    : disk_(disk),
      view_(view),
      scheduler_(scheduler),
      log_(log),
      node_(node),
      rates_(rates),
      honours_conditions_(honours_conditions),
      random_(random),
      executor_(scheduler, node_ + "-s3", 1),
      wires_(scheduler, node_ + "-wire", kParallel) {}

void SimObjectStore::Stop() {
  if (std::exchange(stopped_, true)) return;
  // What ends may begin more, which ends as soon.
  bool idle = false;
  while (!idle) {
    bool ran = false;
    executor_.Post([&] {
      stopping_ = true;
      idle = calls_.empty();
      while (!calls_.empty()) Fail(calls_.begin()->first, Trouble::kCancelled);
      ran = true;
      scheduler_.Wake(this);
    });
    while (!ran) scheduler_.Wait(this);
  }
  executor_.Stop();
  wires_.Stop();
}

s3::ObjectStore::CallId SimObjectStore::Begin(const char* operation, const std::string& key, TimePoint deadline,
                                              Work work, Failed failed) {
  const CallId id = next_id_++;
  calls_.emplace(id, std::move(failed));
  if (stopping_) {
    executor_.Post([this, id] { Fail(id, Trouble::kCancelled); });
    return id;
  }
  if (deadline != TimePoint::max()) {
    const auto left = std::max(deadline - scheduler_.Now(), TimePoint::duration(0));
    executor_.PostAfter(std::chrono::ceil<std::chrono::milliseconds>(left),
                        [this, id] { Fail(id, Trouble::kTimeout); });
  }
  wires_.Post([this, id, operation, key, work = std::move(work)] {
    Ending ending;
    Failure failure;
    if (!view_.Operate(operation, key)) {
      failure.trouble = Trouble::kServer;
    } else {
      failure = work(ending);
      if (Hits(rates_.lost_reply, "lost reply", key)) failure.trouble = Trouble::kTimeout;
    }
    executor_.Post([this, id, failure, ending] {
      if (failure) return Fail(id, failure.trouble);
      End(id, ending);
    });
  });
  return id;
}

void SimObjectStore::End(CallId call, const Ending& ending) {
  if (calls_.erase(call) > 0) ending();
}

void SimObjectStore::Fail(CallId call, Trouble trouble) {
  const auto it = calls_.find(call);
  if (it == calls_.end()) return;
  const Failed failed = std::move(it->second);
  calls_.erase(it);
  failed({.trouble = trouble, .message = "simulated"});
}

void SimObjectStore::Cancel(CallId call) {
  executor_.Post([this, call] { Fail(call, Trouble::kCancelled); });
}

bool SimObjectStore::Hits(double rate, const char* fault, const std::string& key) {
  if (!random_.Chance(rate)) return false;
  log_.Fault(node_, std::string(fault) + " on " + key);
  return true;
}

ObjectInfo SimObjectStore::InfoOf(const Inode& inode) const {
  return {.bytes = inode.content.size(),
          .etag = std::to_string(Xxh3_64(inode.content)),
          .modified = inode.mtime_ns / 1'000'000'000,
          .now = NowSeconds()};
}

s3::ObjectStore::CallId SimObjectStore::Get(s3::GetRequest request, Done done) {
  auto asked = std::make_shared<s3::GetRequest>(std::move(request));
  const auto work = [this, asked, done](Ending& ending) -> Failure {
    const InodePtr inode = disk_.Find(asked->key);
    if (!inode) return {.trouble = Trouble::kNotFound};
    const ObjectInfo info = InfoOf(*inode);
    if (asked->end > 0 && asked->begin >= info.bytes) return {.trouble = Trouble::kNoRange};
    const uint64_t end = asked->end == 0 ? info.bytes : std::min(asked->end, info.bytes);
    std::vector<std::byte> bytes(inode->content.begin() + static_cast<ptrdiff_t>(asked->begin),
                                 inode->content.begin() + static_cast<ptrdiff_t>(end));
    const size_t cut = bytes.empty() ? 0 : random_.Below(bytes.size());
    const bool breaks = Hits(rates_.torn_write, "a body that breaks off", asked->key);
    ending = [asked, done, info, bytes = std::move(bytes), cut, breaks] {
      const std::span<const std::byte> all(bytes);
      if (breaks && cut > 0 && !asked->sink(info, asked->begin, all.first(cut))) {
        return done({.trouble = Trouble::kStopped}, info);
      }
      for (const auto& [at, piece] : {std::pair(size_t{0}, all.first(cut)), std::pair(cut, all.subspan(cut))}) {
        if (!piece.empty() && !asked->sink(info, asked->begin + at, piece)) {
          return done({.trouble = Trouble::kStopped}, info);
        }
      }
      done({}, info);
    };
    return {};
  };
  return Begin("get", asked->key, asked->deadline, work, [done](const Failure& failure) { done(failure, {}); });
}

s3::ObjectStore::CallId SimObjectStore::Head(const std::string& key, TimePoint deadline, Done done) {
  const auto work = [this, key, done](Ending& ending) -> Failure {
    const InodePtr inode = disk_.Find(key);
    if (!inode) return {.trouble = Trouble::kNotFound};
    ending = [done, info = InfoOf(*inode)] { done({}, info); };
    return {};
  };
  return Begin("head", key, deadline, work, [done](const Failure& failure) { done(failure, {}); });
}

// The server has it on disk before it says so, name and all.
void SimObjectStore::Name(const std::string& key, InodePtr inode) {
  InodePtr directory = disk_.root();
  std::string path;
  std::string_view rest = key;
  for (size_t slash = rest.find('/'); slash != std::string_view::npos; slash = rest.find('/')) {
    const std::string name(rest.substr(0, slash));
    rest.remove_prefix(slash + 1);
    if (!directory->entries.contains(name)) {
      if (!inode) return;
      disk_.SetEntry(directory, path, name, disk_.Create(true), node_);
    }
    disk_.SyncNames(directory);
    directory = directory->entries[name];
    path += (path.empty() ? "" : "/") + name;
  }
  if (!inode && !directory->entries.contains(std::string(rest))) return;
  disk_.SetEntry(directory, path, std::string(rest), std::move(inode), node_);
  disk_.SyncNames(directory);
}

s3::ObjectStore::CallId SimObjectStore::Put(s3::PutRequest request, Done done) {
  auto asked = std::make_shared<s3::PutRequest>(std::move(request));
  const auto work = [this, asked, done](Ending& ending) -> Failure {
    if (disk_.full()) return {.trouble = Trouble::kFull};
    const InodePtr before = disk_.Find(asked->key);
    if (honours_conditions_ && before && asked->only_if_absent) return {.trouble = Trouble::kExists};
    if (honours_conditions_ && !asked->if_match.empty()) {
      if (!before) return {.trouble = Trouble::kNotFound};
      if (InfoOf(*before).etag != asked->if_match) return {.trouble = Trouble::kExists};
    }
    const InodePtr inode = disk_.Create(false);
    for (const auto& part : asked->body) inode->content.insert(inode->content.end(), part.begin(), part.end());
    inode->durable = inode->content;
    Name(asked->key, inode);
    ending = [done, info = InfoOf(*inode)] { done({}, info); };
    return {};
  };
  // The client's own limit, of calls that bring none.
  const TimePoint deadline = std::min(asked->deadline, scheduler_.Now() + std::chrono::seconds(60));
  return Begin("put", asked->key, deadline, work, [done](const Failure& failure) { done(failure, {}); });
}

s3::ObjectStore::CallId SimObjectStore::Delete(const std::string& key, TimePoint deadline, Done done) {
  const auto work = [this, key, done](Ending& ending) -> Failure {
    Name(key, nullptr);
    ending = [done] { done({}, {}); };
    return {};
  };
  deadline = std::min(deadline, scheduler_.Now() + std::chrono::seconds(60));
  return Begin("delete", key, deadline, work, [done](const Failure& failure) { done(failure, {}); });
}

s3::ObjectStore::CallId SimObjectStore::List(const ListRequest& request,
                                             std::function<void(const Failure&, const s3::ListPage&)> done) {
  const auto work = [this, request, done](Ending& ending) -> Failure {
    std::map<std::string, s3::ListPage::Object> all;
    const std::string& after = request.token.empty() ? request.start_after : request.token;
    disk_.Walk([&](const std::string& path, const InodePtr& inode) {
      if (!path.starts_with(request.prefix) || path <= after) return;
      all[path] = {path, inode->content.size(), inode->mtime_ns / 1'000'000'000};
    });
    s3::ListPage page{.now = NowSeconds()};
    for (const auto& [path, object] : all) {
      if (page.objects.size() == request.limit) {
        page.next = page.objects.back().key;
        break;
      }
      page.objects.push_back(object);
    }
    ending = [done, page] { done({}, page); };
    return {};
  };
  const TimePoint deadline = std::min(request.deadline, scheduler_.Now() + std::chrono::seconds(60));
  return Begin("list", request.prefix, deadline, work, [done](const Failure& failure) { done(failure, {}); });
}

void SimObjectStore::AbortOldUploads(const std::string&, std::chrono::seconds,
                                     std::function<void(const Failure&, size_t)> done) {
  executor_.Post([done] { done({}, 0); });
}

}  // namespace terrace::sim
