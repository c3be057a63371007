#include "base/executor.h"

#include <pthread.h>

#include <utility>

namespace terrace {

ThreadPool::ThreadPool(std::string name, size_t threads) {
  if (name.size() > 15) name.resize(15);
  for (size_t i = 0; i < threads; ++i) {
    threads_.emplace_back([this] { Run(); });
    pthread_setname_np(threads_.back().native_handle(), name.c_str());
  }
}

ThreadPool::~ThreadPool() { Stop(); }

// Wakes under the lock: once it is released, the task may run and whoever waits for it may destroy the pool.
bool ThreadPool::Post(Task task) {
  std::lock_guard lock(mutex_);
  if (stopping_) return false;
  queue_.push_back(std::move(task));
  wake_.notify_one();
  return true;
}

bool ThreadPool::PostAfter(std::chrono::milliseconds delay, Task task) {
  std::lock_guard lock(mutex_);
  if (stopping_) return false;
  delayed_.emplace(std::chrono::steady_clock::now() + delay, std::move(task));
  wake_.notify_one();
  return true;
}

void ThreadPool::Stop() {
  std::multimap<TimePoint, Task> dropped;  // Their captures die outside the lock.
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    dropped.swap(delayed_);
    wake_.notify_all();
  }
  dropped.clear();
  for (std::thread& t : threads_) {
    if (t.joinable()) t.join();
  }
}

void ThreadPool::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    const TimePoint now = std::chrono::steady_clock::now();
    while (!delayed_.empty() && delayed_.begin()->first <= now) {
      queue_.push_back(std::move(delayed_.begin()->second));
      delayed_.erase(delayed_.begin());
      if (queue_.size() > 1) wake_.notify_one();
    }
    if (!queue_.empty()) {
      Task task = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      task();
      task = nullptr;  // Its captures die outside the lock.
      lock.lock();
    } else if (stopping_) {
      return;
    } else if (delayed_.empty()) {
      wake_.wait(lock);
    } else {
      const TimePoint first = delayed_.begin()->first;  // By value: the entry may be gone when the wait looks again.
      wake_.wait_until(lock, first);
    }
  }
}

}  // namespace terrace
