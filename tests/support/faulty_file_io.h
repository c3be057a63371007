// The operating system's files, made to fail, stall or lie on demand, with every call counted. For tests of what stands
// on FileIo.
#pragma once

#include <array>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "io/file_io.h"

namespace terrace {

class FaultyFileIo : public FileIo {
 public:
  enum Op {
    kOpen,
    kRead,
    kWrite,
    kSync,
    kFileStat,
    kClose,
    kStat,
    kLink,
    kRename,
    kUnlink,
    kMakeDir,
    kList,
    kFreeSpace,
    kOps
  };
  struct Call {
    Op op;
    const std::string& path;          // The name that comes to be, for kLink and kRename.
    OpenMode mode = OpenMode::kRead;  // With kOpen.
    uint64_t offset = 0;
    uint64_t bytes = 0;
  };
  // Asked before each call, from whatever thread makes it. An errno fails the call, 0 lets it go on. A failing write
  // first writes what is below `keep_bytes`.
  struct Verdict {
    int os_error = 0;
    uint64_t keep_bytes = 0;
  };
  using Rule = std::function<Verdict(const Call&)>;

  void SetRule(Rule rule) {
    std::lock_guard lock(mutex_);
    rule_ = rule ? std::make_shared<Rule>(std::move(rule)) : nullptr;
  }
  int calls(Op op) const { return calls_[op].load(); }
  int all_calls() const {
    int sum = 0;
    for (const auto& n : calls_) sum += n.load();
    return sum;
  }

  Result<std::unique_ptr<File>> Open(const std::string& path, OpenMode mode, uint32_t permissions) override {
    if (const auto verdict = Ask({kOpen, path, mode}); verdict.os_error) return Refuse(verdict, path);
    auto file = real_->Open(path, mode, permissions);
    if (!file) return file;
    return std::make_unique<FaultyFile>(*this, path, *std::move(file));
  }
  Result<FileStat> Stat(const std::string& path) override {
    if (const auto verdict = Ask({kStat, path}); verdict.os_error) return Refuse(verdict, path);
    return real_->Stat(path);
  }
  Result<FileStat> StatName(const std::string& path) override {
    if (const auto verdict = Ask({kStat, path}); verdict.os_error) return Refuse(verdict, path);
    return real_->StatName(path);
  }
  Result<void> Link(const std::string& from, const std::string& to) override {
    if (const auto verdict = Ask({kLink, to}); verdict.os_error) return Refuse(verdict, to);
    return real_->Link(from, to);
  }
  Result<void> Rename(const std::string& from, const std::string& to) override {
    if (const auto verdict = Ask({kRename, to}); verdict.os_error) return Refuse(verdict, to);
    return real_->Rename(from, to);
  }
  Result<void> Unlink(const std::string& path) override {
    if (const auto verdict = Ask({kUnlink, path}); verdict.os_error) return Refuse(verdict, path);
    return real_->Unlink(path);
  }
  Result<void> MakeDir(const std::string& path, uint32_t permissions) override {
    if (const auto verdict = Ask({kMakeDir, path}); verdict.os_error) return Refuse(verdict, path);
    return real_->MakeDir(path, permissions);
  }
  Result<std::vector<std::string>> List(const std::string& path) override {
    if (const auto verdict = Ask({kList, path}); verdict.os_error) return Refuse(verdict, path);
    return real_->List(path);
  }
  Result<Space> FreeSpace(const std::string& path) override {
    if (const auto verdict = Ask({kFreeSpace, path}); verdict.os_error) return Refuse(verdict, path);
    return real_->FreeSpace(path);
  }

 protected:
  Verdict Ask(const Call& call) {
    calls_[call.op].fetch_add(1);
    std::shared_ptr<Rule> rule;
    {
      std::lock_guard lock(mutex_);
      rule = rule_;
    }
    return rule ? (*rule)(call) : Verdict{};
  }

 private:
  static tl::unexpected<Error> Refuse(const Verdict& verdict, const std::string& path) {
    Code code = Code::kIo;
    if (verdict.os_error == ENOSPC || verdict.os_error == EDQUOT) code = Code::kFull;
    if (verdict.os_error == EACCES || verdict.os_error == EPERM || verdict.os_error == EROFS) code = Code::kDenied;
    return Fail(code, "injected: " + path + ": " + strerrorname_np(verdict.os_error), verdict.os_error);
  }

  class FaultyFile final : public File {
   public:
    FaultyFile(FaultyFileIo& io, std::string path, std::unique_ptr<File> real)
        : io_(io), path_(std::move(path)), real_(std::move(real)) {}
    Result<size_t> ReadAt(uint64_t offset, std::span<std::byte> into) override {
      const auto verdict = io_.Ask({.op = kRead, .path = path_, .offset = offset, .bytes = into.size()});
      if (verdict.os_error) return Refuse(verdict, path_);
      return real_->ReadAt(offset, into);
    }
    Result<void> WriteAt(uint64_t offset, std::span<const std::byte> bytes) override {
      const auto verdict = io_.Ask({.op = kWrite, .path = path_, .offset = offset, .bytes = bytes.size()});
      if (!verdict.os_error) return real_->WriteAt(offset, bytes);
      if (verdict.keep_bytes > offset) (void)real_->WriteAt(offset, bytes.first(verdict.keep_bytes - offset));
      return Refuse(verdict, path_);
    }
    Result<void> Append(std::span<const std::byte> bytes) override {
      const auto verdict = io_.Ask({.op = kWrite, .path = path_, .bytes = bytes.size()});
      if (!verdict.os_error) return real_->Append(bytes);
      if (verdict.keep_bytes > 0) (void)real_->Append(bytes.first(verdict.keep_bytes));
      return Refuse(verdict, path_);
    }
    Result<void> Sync() override {
      if (const auto verdict = io_.Ask({kSync, path_}); verdict.os_error) return Refuse(verdict, path_);
      return real_->Sync();
    }
    Result<FileStat> Stat() override {
      if (const auto verdict = io_.Ask({kFileStat, path_}); verdict.os_error) return Refuse(verdict, path_);
      return real_->Stat();
    }
    Result<void> Close() override {
      const auto verdict = io_.Ask({kClose, path_});
      Result<void> closed = real_->Close();
      if (verdict.os_error) return Refuse(verdict, path_);
      return closed;
    }

   private:
    FaultyFileIo& io_;
    const std::string path_;
    const std::unique_ptr<File> real_;
  };

  const std::unique_ptr<FileIo> real_ = RealFileIo();
  std::array<std::atomic<int>, kOps> calls_{};
  mutable std::mutex mutex_;
  std::shared_ptr<Rule> rule_;  // Guarded by mutex_.
};

}  // namespace terrace
