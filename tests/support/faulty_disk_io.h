// A DiskIo made to fail, to wait or to have no O_DIRECT on demand. For tests of what stands on DiskIo.
#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "io/disk_io.h"

namespace terrace {

class FaultyDiskIo final : public DiskIo {
 public:
  explicit FaultyDiskIo(DiskIoKind kind) : real_(OpenDiskIo({.kind = kind}).value()) {}

  enum class What { kOpen, kCreate, kRead, kWrite, kSync };
  struct Call {
    What what;
    const std::string& path;
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };
  // Asked before each call, from whatever thread makes it. An errno fails it, 0 lets it go on. A failing write first
  // writes the whole blocks below `keep_bytes` of the file. `hold`: the operation waits for Release.
  struct Verdict {
    int os_error = 0;
    uint64_t keep_bytes = 0;
    bool hold = false;
  };
  using Rule = std::function<Verdict(const Call&)>;
  void SetRule(Rule rule) {
    std::lock_guard lock(mutex_);
    rule_ = rule ? std::make_shared<Rule>(std::move(rule)) : nullptr;
  }
  void HaveNoDirect() { no_direct_ = true; }  // Before use.

  size_t WaitForHeld(size_t count) {
    std::unique_lock lock(mutex_);
    held_changed_.wait_for(lock, std::chrono::seconds(60), [&] { return held_.size() >= count; });
    return held_.size();
  }
  // Lets go on what was held. From then on nothing is.
  void Release() {
    std::vector<DiskOp> held;
    {
      std::lock_guard lock(mutex_);
      rule_ = nullptr;
      held.swap(held_);
    }
    real_->Submit(std::move(held));
  }

  Result<std::shared_ptr<DiskFile>> Open(const std::string& path, const OpenOptions& options) override {
    const bool create = options.mode == OpenOptions::Mode::kCreateNew;
    if (const Verdict v = Ask({create ? What::kCreate : What::kOpen, path}); v.os_error) return Refuse(v, path);
    OpenOptions asked = options;
    asked.direct = options.direct && !no_direct_;
    auto file = real_->Open(path, asked);
    std::lock_guard lock(mutex_);
    if (file) paths_[file->get()] = path;
    return file;
  }
  void Submit(std::vector<DiskOp> ops) override {
    std::vector<DiskOp> pass;
    for (DiskOp& op : ops) {
      std::string path;
      {
        std::lock_guard lock(mutex_);
        path = paths_[op.file.get()];
      }
      uint64_t bytes = 0;
      for (const auto part : op.parts) bytes += part.size();
      const What what = op.kind == DiskOp::Kind::kRead    ? What::kRead
                        : op.kind == DiskOp::Kind::kWrite ? What::kWrite
                                                          : What::kSync;
      const Verdict v = Ask({what, path, op.offset, bytes});
      if (v.os_error) op = Failing(std::move(op), v, path);
      if (!v.hold || !Hold(op)) pass.push_back(std::move(op));
    }
    real_->Submit(std::move(pass));
  }
  void CancelQueued() override {
    real_->CancelQueued();
    Release();
  }
  Result<std::shared_ptr<void>> Lock(const std::string& path) override { return real_->Lock(path); }
  const char* name() const override { return "faulty"; }

 private:
  Verdict Ask(const Call& call) {
    std::shared_ptr<Rule> rule;
    {
      std::lock_guard lock(mutex_);
      rule = rule_;
    }
    return rule ? (*rule)(call) : Verdict{};
  }
  // False, and nothing is done, if Release came since the rule was asked: nobody would let it go.
  bool Hold(DiskOp& op) {
    std::lock_guard lock(mutex_);
    if (!rule_) return false;
    held_.push_back(std::move(op));
    held_changed_.notify_all();
    return true;
  }
  static tl::unexpected<Error> Refuse(const Verdict& verdict, const std::string& path) {
    return Fail(verdict.os_error == ENOSPC ? Code::kFull : Code::kIo,
                "injected: " + path + ": " + strerrorname_np(verdict.os_error), verdict.os_error);
  }
  // Does a part of the write, or a sync that nobody hears of, and answers with the error.
  static DiskOp Failing(DiskOp op, const Verdict& verdict, const std::string& path) {
    uint64_t keep = verdict.keep_bytes > op.offset ? (verdict.keep_bytes - op.offset) / 4096 * 4096 : 0;
    if (op.kind != DiskOp::Kind::kWrite || keep == 0) op.kind = DiskOp::Kind::kSync;
    for (auto& part : op.parts) {
      part = part.first(std::min<uint64_t>(part.size(), keep));
      keep -= part.size();
    }
    op.done = [done = std::move(op.done), verdict, path](const Result<size_t>&) { done(Refuse(verdict, path)); };
    return op;
  }

  const std::unique_ptr<DiskIo> real_;
  bool no_direct_ = false;
  std::mutex mutex_;
  std::condition_variable held_changed_;
  std::shared_ptr<Rule> rule_;                    // Guarded by mutex_.
  std::map<const DiskFile*, std::string> paths_;  // Guarded by mutex_. By address: the last one opened there.
  std::vector<DiskOp> held_;                      // Guarded by mutex_.
};

}  // namespace terrace
