#include "engine/prepare_pool.h"

#include <pthread.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

namespace terrace::engine {
namespace {

// A third of the weight of a thread that answers or computes, when there are not enough cores for all.
constexpr int kNice = 5;

}  // namespace

PreparePool::PreparePool(const std::string& size, PrepareOptions options, Metrics& metrics)
    : options_(options),
      refused_(metrics.GetCounter("terrace_prepare_refused_total",
                                  "Requests refused because too many waited to be parsed and tokenized.",
                                  {{"size", size}})) {
  metrics.AddGaugeCallback("terrace_prepare_queue_requests", "Requests that wait to be parsed and tokenized.",
                           {{"size", size}}, [this] {
                             const std::lock_guard lock(mutex_);
                             return static_cast<double>(queue_.size());
                           });
  for (size_t i = 0; i < options_.threads; ++i) {
    threads_.emplace_back([this] { Run(); });
    pthread_setname_np(threads_.back().native_handle(), ("prepare-" + size).substr(0, 15).c_str());
  }
}

PreparePool::~PreparePool() { Stop(); }

bool PreparePool::Post(Job job) {
  {
    const std::lock_guard lock(mutex_);
    if (!stopping_ && queue_.size() < options_.queue_max) {
      queue_.push_back(std::move(job));
      wake_.notify_one();
      return true;
    }
  }
  refused_.Add(1);
  return false;
}

void PreparePool::DropGone() {
  std::vector<Job> gone;  // Destroyed without the lock.
  const std::lock_guard lock(mutex_);
  for (Job& job : queue_) {
    if (job.gone()) gone.push_back(std::exchange(job, {}));
  }
  std::erase_if(queue_, [](const Job& job) { return job.run == nullptr; });
}

void PreparePool::Stop() {
  std::deque<Job> dropped;  // Destroyed without the lock.
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(queue_);
    wake_.notify_all();
  }
  dropped.clear();
  for (std::thread& thread : threads_) {
    if (thread.joinable()) thread.join();
  }
}

void PreparePool::Run() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);  // Of this thread alone, on Linux.
  std::unique_lock lock(mutex_);
  for (;;) {
    wake_.wait(lock, [&] { return stopping_ || !queue_.empty(); });
    if (stopping_) return;
    {
      const Job job = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      job.run();
    }  // What the job held goes before the lock is taken again.
    lock.lock();
  }
}

}  // namespace terrace::engine
