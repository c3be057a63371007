#include "client/load_follower.h"

#include <algorithm>

#include "base/assert.h"
#include "client/gate.h"

namespace terrace {

// What follows outlives the follower in callbacks of the store, so they share this.
struct LoadFollower::Core {
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::pair<TimePoint, uint64_t>, std::shared_ptr<Follow>> live;  // Guarded by mutex. By deadline.
  uint64_t next_id = 0;                                                    // Guarded by mutex.
  bool closed = false;                                                     // Guarded by mutex.
  const std::shared_ptr<Gate> gate = std::make_shared<Gate>();             // To the store and to on_item.
};

class LoadFollower::Follow : public std::enable_shared_from_this<Follow> {
 public:
  Follow(std::shared_ptr<Core> core, Request request, uint64_t id)
      : core_(std::move(core)), request_(std::move(request)), id_(id) {}

  void Begin(Store& store) {
    const Gate::Pass pass(core_->gate);
    if (!pass) return;  // Close has ended it.
    auto job = store.Load(request_.space, request_.keys, request_.payload_bytes, request_.deadline);
    bool ended = false;
    {
      std::lock_guard lock(mutex_);
      ended = next_ == request_.keys.size();
      if (!ended) job_ = std::move(job);
    }
    if (ended) return Forget();  // Maybe before it stood among those to be watched.
    Run();
  }

  void Run() {
    Go();
    LetOthersRun(request_.window);
  }

  // Whoever waits for room that there is now. They go on here, one after the other: none of them calls another.
  static void LetOthersRun(const std::shared_ptr<Window>& window) {
    if (!window) return;
    while (const std::shared_ptr<Follow> next = window->Next()) next->Go();
  }

  // Delivers the rest. The first of it as the store sees it, which counts it.
  void End(Reason reason) {
    const Gate::Pass pass(core_->gate);
    if (pass) Finish(reason);
  }

  void Finish(Reason reason) {
    size_t first = 0;
    std::shared_ptr<LoadJob> job;
    {
      std::lock_guard lock(mutex_);
      first = std::exchange(next_, request_.keys.size());
      job.swap(job_);
    }
    for (size_t i = first; i < request_.keys.size(); ++i) {
      LoadJob::Item item;
      item.reason = reason;
      if (i == first && job && reason == Reason::kTimeout) item = job->Wait(i, TimePoint::min());
      if (request_.window && item.outcome == Outcome::kHit) request_.window->TakeAnyway(window_bytes());
      request_.on_item(i, std::move(item));
    }
    Forget();
  }

  const Request& request() const { return request_; }
  // What one hit takes of the window. The size comes from a client: above this no chunk is a hit, and sums of sizes
  // that a client may make up would pass 64 bits.
  uint64_t window_bytes() const { return std::min(request_.payload_bytes, uint64_t{1} << 48); }

 private:
  // One thread at a time: it goes on where the last one left off, called by the job or by whoever gave room back.
  void Go() {
    const Gate::Pass pass(core_->gate);
    if (!pass) return;
    for (;;) {
      size_t i = 0;
      std::shared_ptr<LoadJob> job;
      {
        std::lock_guard lock(mutex_);
        if (next_ == request_.keys.size()) return;
        i = next_;
        job = job_;
      }
      const auto later = [weak = weak_from_this()] {
        if (const auto follow = weak.lock()) follow->Run();
      };
      if (!job->ReadyOr(i, later)) return;
      if (request_.window && !request_.window->Take(window_bytes(), shared_from_this())) return;
      LoadJob::Item item = job->Wait(i, TimePoint::min());
      const bool hit = item.outcome == Outcome::kHit;
      if (request_.window && !hit) request_.window->Give(window_bytes());
      const Reason reason = item.reason;
      bool last = false;
      {
        std::lock_guard lock(mutex_);
        if (next_ != i) {  // Ended meanwhile.
          if (request_.window && hit) request_.window->Give(window_bytes());
          return;
        }
        ++next_;
        last = next_ == request_.keys.size();
      }
      request_.on_item(i, std::move(item));
      if (last) return Forget();
      if (!hit && request_.stop_at_miss) return End(reason);
    }
  }

  void Forget() {
    std::lock_guard lock(core_->mutex);
    core_->live.erase({request_.deadline, id_});
  }

  const std::shared_ptr<Core> core_;
  const Request request_;
  const uint64_t id_;
  std::mutex mutex_;
  std::shared_ptr<LoadJob> job_;  // Guarded by mutex_.
  size_t next_ = 0;               // Guarded by mutex_. Not yet delivered, or about to be.
};

LoadFollower::Handle::Handle(const std::shared_ptr<Follow>& follow)
    : follow_(follow), window_(follow->request().window), bytes_(follow->window_bytes()) {}

void LoadFollower::Handle::End(Reason reason) const {
  if (const auto follow = follow_.lock()) follow->End(reason);
}

void LoadFollower::Handle::Consumed() const {
  if (!window_) return;
  window_->Give(bytes_);
  Follow::LetOthersRun(window_);
}

void LoadFollower::Window::SetMax(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  bytes_max_ = bytes;
}

bool LoadFollower::Window::Take(uint64_t bytes, const std::shared_ptr<Follow>& follow) {
  std::lock_guard lock(mutex_);
  const bool fits = HasRoomLocked(bytes);
  if (fits) {
    out_bytes_ += bytes;
  } else {
    waiting_.emplace_back(bytes, follow);
  }
  return fits;
}

void LoadFollower::Window::TakeAnyway(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  out_bytes_ += bytes;
}

void LoadFollower::Window::Give(uint64_t bytes) {
  std::lock_guard lock(mutex_);
  TERRACE_ASSERT(out_bytes_ >= bytes);
  out_bytes_ -= bytes;
}

std::shared_ptr<LoadFollower::Follow> LoadFollower::Window::Next() {
  std::lock_guard lock(mutex_);
  while (!waiting_.empty()) {
    std::shared_ptr<Follow> next = waiting_.front().second.lock();
    if (next && !HasRoomLocked(waiting_.front().first)) return nullptr;
    waiting_.pop_front();
    if (next) return next;
  }
  return nullptr;
}

LoadFollower::LoadFollower(Store& store)
    : store_(store), core_(std::make_shared<Core>()), watcher_([this] { WatchDeadlines(); }) {}

LoadFollower::~LoadFollower() { Close(); }

void LoadFollower::Begin(Request request, const std::function<void(Handle)>& begun) {
  TERRACE_ASSERT(!request.keys.empty());
  const TimePoint deadline = request.deadline;
  uint64_t id = 0;
  {
    std::lock_guard lock(core_->mutex);
    id = core_->next_id++;
  }
  const auto follow = std::make_shared<Follow>(core_, std::move(request), id);
  begun(Handle(follow));  // Before the deadline can come, and with it the first item.
  bool closed = false;
  {
    std::lock_guard lock(core_->mutex);
    closed = core_->closed;
    if (!closed) core_->live.emplace(std::pair(deadline, id), follow);
  }
  if (closed) return follow->Finish(Reason::kCancelled);
  core_->changed.notify_all();
  follow->Begin(store_);
}

void LoadFollower::WatchDeadlines() {
  std::unique_lock lock(core_->mutex);
  while (!core_->closed) {
    if (core_->live.empty()) {
      core_->changed.wait(lock);
      continue;
    }
    const auto first = core_->live.begin();
    const TimePoint deadline = first->first.first;  // By value: the load may be gone while this waits.
    if (deadline > std::chrono::steady_clock::now()) {
      core_->changed.wait_until(lock, deadline);
      continue;
    }
    const std::shared_ptr<Follow> follow = first->second;
    lock.unlock();
    follow->End(Reason::kTimeout);
    lock.lock();
  }
}

void LoadFollower::Close() {
  {
    std::lock_guard lock(core_->mutex);
    if (std::exchange(core_->closed, true)) return;
  }
  core_->changed.notify_all();
  watcher_.join();
  core_->gate->Close();
  std::map<std::pair<TimePoint, uint64_t>, std::shared_ptr<Follow>> left;
  {
    std::lock_guard lock(core_->mutex);
    left.swap(core_->live);
  }
  for (const auto& [when, follow] : left) follow->Finish(Reason::kCancelled);
}

}  // namespace terrace
