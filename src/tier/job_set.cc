#include "tier/job_set.h"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace terrace {

struct JobSet::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::unordered_map<uint64_t, Job> waiting;  // Guarded by mutex.
  uint64_t next_id = 0;                       // Guarded by mutex.
  size_t running = 0;                         // Guarded by mutex.
  bool closed = false;                        // Guarded by mutex.

  // Nothing if Close was faster.
  void Run(uint64_t id) {
    Job job;
    {
      std::lock_guard lock(mutex);
      auto node = waiting.extract(id);
      if (!node) return;
      job = std::move(node.mapped());
      ++running;
    }
    job.run();
    job = {};  // What it holds dies before Close can return.
    std::lock_guard lock(mutex);
    --running;
    changed.notify_all();
  }
};

JobSet::JobSet(Executor* executor) : executor_(executor), state_(std::make_shared<State>()) {}

JobSet::~JobSet() { Close(TimePoint::min()); }

void JobSet::Add(Job job, std::chrono::milliseconds delay) {
  std::unique_lock lock(state_->mutex);
  if (state_->closed) {
    lock.unlock();
    job.drop();
    return;
  }
  const uint64_t id = state_->next_id++;
  state_->waiting.emplace(id, std::move(job));
  lock.unlock();
  if (!executor_) {
    state_->Run(id);
    return;
  }
  Task task = [state = state_, id] { state->Run(id); };
  const bool posted =
      delay.count() > 0 ? executor_->PostAfter(delay, std::move(task)) : executor_->Post(std::move(task));
  if (posted) return;
  lock.lock();
  auto node = state_->waiting.extract(id);
  lock.unlock();
  if (node) node.mapped().drop();
}

size_t JobSet::Close(TimePoint deadline) {
  std::unordered_map<uint64_t, Job> dropped;
  {
    std::unique_lock lock(state_->mutex);
    state_->closed = true;
    state_->changed.wait_until(lock, deadline, [&] { return state_->waiting.empty() && state_->running == 0; });
    dropped.swap(state_->waiting);
  }
  for (auto& [id, job] : dropped) job.drop();
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->running == 0; });
  return dropped.size();
}

}  // namespace terrace
