// DiskIo by threads: a pool for transfers, as many as the depth, and one for syncs, which take long and move nothing.
#include <pthread.h>
#include <sys/uio.h>
#include <unistd.h>

#include <cerrno>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "io/disk_queue.h"

namespace terrace::disk_io {
namespace {

// Syncs of files that were written together wait for the same commit of the file system.
constexpr size_t kSyncThreads = 4;

class ThreadsDiskIo final : public OsDiskIo {
 public:
  explicit ThreadsDiskIo(size_t depth) : queue_(depth) {
    for (size_t i = 0; i < depth + kSyncThreads; ++i) {
      threads_.emplace_back([this, transfers = i < depth] { Run(transfers); });
      pthread_setname_np(threads_.back().native_handle(), "terrace-disk-io");
    }
  }

  ~ThreadsDiskIo() override {
    CancelQueued();
    {
      std::lock_guard lock(mutex_);
      stopping_ = true;
    }
    wake_.notify_all();
    for (std::thread& t : threads_) t.join();
  }

  void Submit(std::vector<DiskOp> ops) override {
    {
      std::lock_guard lock(mutex_);
      if (!cancelled_) {
        for (DiskOp& op : ops) queue_.Push(std::move(op));
        ops.clear();
      }
    }
    wake_.notify_all();
    for (DiskOp& op : ops) EndCancelled(op);
  }

  void CancelQueued() override {
    std::vector<DiskOp> dropped;
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
      dropped = queue_.TakeAll();
    }
    for (DiskOp& op : dropped) EndCancelled(op);
  }

  const char* name() const override { return "threads"; }

 private:
  void Run(bool transfers) {
    std::unique_lock lock(mutex_);
    for (;;) {
      std::optional<DiskOp> op = transfers ? queue_.PopTransfer(writes_in_flight_) : queue_.PopSync();
      if (!op) {
        if (stopping_) return;
        wake_.wait(lock);
        continue;
      }
      const bool write = op->kind == DiskOp::Kind::kWrite;
      if (write) ++writes_in_flight_;
      lock.unlock();
      {
        Transfer transfer(*std::move(op));
        while (!transfer.Advance(Call(transfer))) {
        }
        transfer.Finish();
      }
      lock.lock();
      if (write) --writes_in_flight_;
    }
  }

  static int64_t Call(const Transfer& transfer) {
    const int fd = transfer.file().fd();
    const auto vectors = transfer.left();
    const int count = static_cast<int>(vectors.size());
    const auto offset = static_cast<off_t>(transfer.offset());
    int64_t n = 0;
    switch (transfer.op().kind) {
      case DiskOp::Kind::kRead: n = ::preadv(fd, vectors.data(), count, offset); break;
      case DiskOp::Kind::kWrite: n = ::pwritev(fd, vectors.data(), count, offset); break;
      // A directory is synced whole: fdatasync need not make names durable.
      case DiskOp::Kind::kSync: n = transfer.file().is_directory() ? ::fsync(fd) : ::fdatasync(fd); break;
    }
    return n < 0 ? -errno : n;
  }

  std::mutex mutex_;
  std::condition_variable wake_;
  Queue queue_;                  // Guarded by mutex_.
  size_t writes_in_flight_ = 0;  // Guarded by mutex_.
  bool cancelled_ = false;       // Guarded by mutex_.
  bool stopping_ = false;        // Guarded by mutex_.
  std::vector<std::thread> threads_;
};

}  // namespace

std::unique_ptr<DiskIo> OpenThreads(size_t depth) { return std::make_unique<ThreadsDiskIo>(depth); }

}  // namespace terrace::disk_io
