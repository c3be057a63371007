// A bucket, simulated: the twin of the S3 client of one process, whose objects are the files of the simulated server,
// under the same names as on a share. So the oracle, saboteurs and checks are those of the share.
//
// Every call takes virtual time and goes wrong as an operation on the share does: it fails, is late, has its answer
// lost though it took place, waits for a server that is down. Besides: a body breaks off and is sent again, the server
// ignores conditions, a deadline ends a call that takes place later all the same.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "s3/object_store.h"
#include "tests/sim/random.h"
#include "tests/sim/scheduler.h"
#include "tests/sim/sim_executor.h"
#include "tests/sim/sim_file_io.h"
#include "tests/sim/sim_log.h"

namespace terrace::sim {

class SimObjectStore final : public s3::ObjectStore {
 public:
  // `view`, of the same process, knows whether the process lives and what is wrong with the way to the server; `rates`
  // outlive this and may change. `node`: whose life, who gives names.
  SimObjectStore(SimDisk& disk, SimFileIo& view, Scheduler& scheduler, SimLog& log, const std::string& node,
                 const FaultRates& rates, bool honours_conditions, Random random);
  ~SimObjectStore() override { Stop(); }  // On a fiber.

  Executor& executor() override { return executor_; }
  const s3::Endpoint& endpoint() const override { return endpoint_; }
  CallId Get(s3::GetRequest request, Done done) override;
  CallId Head(const std::string& key, TimePoint deadline, Done done) override;
  CallId Put(s3::PutRequest request, Done done) override;
  CallId Delete(const std::string& key, TimePoint deadline, Done done) override;
  CallId List(const ListRequest& request, std::function<void(const s3::Failure&, const s3::ListPage&)> done) override;
  void Cancel(CallId call) override;
  void AbortOldUploads(const std::string& prefix, std::chrono::seconds age,
                       std::function<void(const s3::Failure&, size_t aborted)> done) override;
  size_t parallel() const override { return kParallel; }
  void Stop() override;

 private:
  static constexpr size_t kParallel = 8;
  // What a call does at the server: its end, to be run on the executor if the call has not ended before.
  using Ending = std::function<void()>;
  using Work = std::function<s3::Failure(Ending& ending)>;
  using Failed = std::function<void(const s3::Failure&)>;

  CallId Begin(const char* operation, const std::string& key, TimePoint deadline, Work work, Failed failed);
  void End(CallId call, const Ending& ending);
  void Fail(CallId call, s3::Trouble trouble);
  bool Hits(double rate, const char* fault, const std::string& key);
  s3::ObjectInfo InfoOf(const Inode& inode) const;
  void Name(const std::string& key, InodePtr inode);  // Null: takes the name away.
  int64_t NowSeconds() const { return disk_.ServerNs() / 1'000'000'000; }

  SimDisk& disk_;
  SimFileIo& view_;
  Scheduler& scheduler_;
  SimLog& log_;
  const std::string node_;
  const FaultRates& rates_;
  const bool honours_conditions_;
  Random random_;
  const s3::Endpoint endpoint_{.scheme = "https", .host = "sim", .port = 443, .bucket = "kv"};
  std::map<CallId, Failed> calls_;  // That have not ended.
  CallId next_id_ = 1;
  bool stopping_ = false, stopped_ = false;
  SimExecutor executor_, wires_;  // The client's thread; a fiber for each call that is on its way.
};

}  // namespace terrace::sim
