// DiskIo by io_uring: one ring, touched only by one thread. Others hand it operations through a queue and wake it by an
// eventfd that the ring itself reads.
//
// Plain vectored requests: buffers registered with the kernel were measured and gave nothing at 1 MiB a request
// (docs/internals/disk.md), and the memory they would have to be is the caller's.
#include <liburing.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <mutex>
#include <thread>

#include "base/assert.h"
#include "io/disk_queue.h"

namespace terrace::disk_io {
namespace {

// Syncs that run at once, each on a thread of the kernel. More only wait for the same commit of the file system.
constexpr size_t kSyncsMax = 16;
constexpr uint64_t kWakeData = ~0ull;

class UringDiskIo final : public OsDiskIo {
 public:
  UringDiskIo(size_t depth, const io_uring& ring, int wake_fd)
      : depth_(depth), ring_(ring), wake_fd_(wake_fd), queue_(depth), slots_(depth + kSyncsMax) {
    for (size_t i = 0; i < slots_.size(); ++i) free_slots_.push_back(i);
    thread_ = std::thread([this] { Run(); });
    pthread_setname_np(thread_.native_handle(), "terrace-uring");
  }

  ~UringDiskIo() override {
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
      stopping_ = true;
    }
    Wake();
    thread_.join();
    io_uring_queue_exit(&ring_);
    ::close(wake_fd_);
  }

  void Submit(std::vector<DiskOp> ops) override {
    {
      std::lock_guard lock(mutex_);
      for (DiskOp& op : ops) queue_.Push(std::move(op));
    }
    if (std::this_thread::get_id() != thread_.get_id()) Wake();  // From `done`: the ring's thread looks next.
  }

  void CancelQueued() override {
    {
      std::lock_guard lock(mutex_);
      cancelled_ = true;
    }
    Wake();
  }

  const char* name() const override { return "io_uring"; }

 private:
  void Wake() {
    const uint64_t one = 1;
    while (::write(wake_fd_, &one, sizeof one) < 0 && errno == EINTR) {
    }
  }

  io_uring_sqe* NewRequest() {
    // The submission queue has two places for every slot, and is emptied before each wait.
    io_uring_sqe* request = io_uring_get_sqe(&ring_);
    TERRACE_ASSERT(request != nullptr);
    return request;
  }

  void ListenForWake() {
    io_uring_sqe* request = NewRequest();
    io_uring_prep_read(request, wake_fd_, &wake_count_, sizeof wake_count_, 0);
    io_uring_sqe_set_data64(request, kWakeData);
  }

  void Run() {
    ListenForWake();
    for (;;) {
      const bool stopping = TakeWork();
      if (stopping && free_slots_.size() == slots_.size()) return;
      const int submitted = io_uring_submit_and_wait(&ring_, 1);
      // EAGAIN, EBUSY: the kernel is short of something now; what is queued stays queued.
      TERRACE_ASSERT(submitted >= 0 || submitted == -EINTR || submitted == -EAGAIN || submitted == -EBUSY);
      io_uring_cqe* ready[64];
      const unsigned count = io_uring_peek_batch_cqe(&ring_, ready, 64);
      for (unsigned i = 0; i < count; ++i) {
        const uint64_t data = ready[i]->user_data;
        const int result = ready[i]->res;
        io_uring_cqe_seen(&ring_, ready[i]);
        if (data == kWakeData) {
          ListenForWake();
        } else {
          Completed(data, result);
        }
      }
    }
  }

  // Fills the ring from the queue. True: no more will come.
  bool TakeWork() {
    for (;;) {
      std::vector<DiskOp> dropped;
      const bool stopping = Fill(dropped);
      if (dropped.empty()) return stopping;
      for (DiskOp& op : dropped) EndCancelled(op);  // May submit others.
    }
  }

  bool Fill(std::vector<DiskOp>& dropped) {
    std::lock_guard lock(mutex_);
    while (!cancelled_ && transfers_ < depth_) {
      std::optional<DiskOp> op = queue_.PopTransfer(writes_);
      if (!op) break;
      ++transfers_;
      if (op->kind == DiskOp::Kind::kWrite) ++writes_;
      Begin(*std::move(op));
    }
    while (!cancelled_ && syncs_ < kSyncsMax) {
      std::optional<DiskOp> op = queue_.PopSync();
      if (!op) break;
      ++syncs_;
      Begin(*std::move(op));
    }
    if (cancelled_) dropped = queue_.TakeAll();
    return stopping_;
  }

  void Begin(DiskOp op) {
    const size_t slot = free_slots_.back();
    free_slots_.pop_back();
    slots_[slot].emplace(std::move(op));
    Request(slot);
  }

  void Request(size_t slot) {
    const Transfer& transfer = *slots_[slot];
    const int fd = transfer.file().fd();
    const auto vectors = transfer.left();
    const auto count = static_cast<unsigned>(vectors.size());
    io_uring_sqe* request = NewRequest();
    switch (transfer.op().kind) {
      case DiskOp::Kind::kRead: io_uring_prep_readv(request, fd, vectors.data(), count, transfer.offset()); break;
      case DiskOp::Kind::kWrite: io_uring_prep_writev(request, fd, vectors.data(), count, transfer.offset()); break;
      case DiskOp::Kind::kSync:
        io_uring_prep_fsync(request, fd, transfer.file().is_directory() ? 0 : IORING_FSYNC_DATASYNC);
        break;
    }
    io_uring_sqe_set_data64(request, slot);
  }

  void Completed(size_t slot, int result) {
    Transfer& transfer = *slots_[slot];
    if (!transfer.Advance(result)) {
      Request(slot);
      return;
    }
    const DiskOp::Kind kind = transfer.op().kind;
    transfer.Finish();
    slots_[slot].reset();
    free_slots_.push_back(slot);
    if (kind == DiskOp::Kind::kSync) {
      --syncs_;
    } else {
      --transfers_;
      if (kind == DiskOp::Kind::kWrite) --writes_;
    }
  }

  const size_t depth_;
  io_uring ring_;  // The ring's thread's own.
  const int wake_fd_;

  std::mutex mutex_;
  Queue queue_;             // Guarded by mutex_.
  bool cancelled_ = false;  // Guarded by mutex_.
  bool stopping_ = false;   // Guarded by mutex_.

  // The ring's thread's own.
  std::vector<std::optional<Transfer>> slots_;
  std::vector<size_t> free_slots_;
  size_t transfers_ = 0;
  size_t writes_ = 0;  // Of transfers_.
  size_t syncs_ = 0;
  uint64_t wake_count_ = 0;

  std::thread thread_;  // Last: it uses the rest.
};

tl::unexpected<Error> FailUnavailable(int os_error) {
  Error error = FailWith(os_error, "set up", "io_uring").value();
  error.code = Code::kUnavailable;
  return tl::unexpected(std::move(error));
}

}  // namespace

Result<std::unique_ptr<DiskIo>> OpenUring(size_t depth) {
  io_uring ring;
  // Twice as many places as requests in flight: each may be asked for again, and the wake-up has one.
  const int made = io_uring_queue_init(static_cast<unsigned>(2 * (depth + kSyncsMax)), &ring, 0);
  if (made < 0) return FailUnavailable(-made);
  const int wake_fd = ::eventfd(0, EFD_CLOEXEC);
  if (wake_fd < 0) {
    const int os_error = errno;
    io_uring_queue_exit(&ring);
    return FailUnavailable(os_error);
  }
  return std::make_unique<UringDiskIo>(depth, ring, wake_fd);
}

}  // namespace terrace::disk_io
