// Jobs of a tier that wait for a thread. Each ends exactly once: it is run, or it is dropped by Close. So a batch is
// settled whatever becomes of the executor, and a tier may be destroyed once its JobSet is closed.
#pragma once

#include <chrono>
#include <cstddef>
#include <memory>

#include "base/executor.h"

namespace terrace {

class JobSet {
 public:
  struct Job {
    Task run;
    Task drop;  // Instead of run. Quick.
  };

  // Null: jobs run at once, on the thread that adds them. The executor outlives this.
  explicit JobSet(Executor* executor);
  ~JobSet();  // Close, without waiting for what has not begun.

  // Runs the job later, or drops it now if the set is closed. The caller bounds how many it has waiting.
  void Add(Job job, std::chrono::milliseconds delay = std::chrono::milliseconds(0));

  // Takes no more jobs, waits until the deadline for those that wait, drops the rest, and waits for those that run.
  // Returns how many it dropped. Idempotent. Not from a job.
  size_t Close(TimePoint deadline);

 private:
  struct State;
  Executor* const executor_;
  const std::shared_ptr<State> state_;  // Shared with what the executor still holds after Close.
};

}  // namespace terrace
