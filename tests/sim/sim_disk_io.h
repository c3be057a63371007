// The local disk of a node: what outlives its processes, and one process's DiskIo on it. Its names, and all that goes
// through a FileIo, are a SimDisk and a SimFileIo as the share's are, but for the habits of NFS.
//
//   death of the process   What the device had not begun never gets there; a write under way gets there in part. What
//                          is in the page cache, names too, stays.
//   loss of power          Of what was not synced, bytes are lost by page, some pages are torn by sector, and the
//   newest
//                          names are taken back. A name may outlive its bytes.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/disk_io.h"
#include "tests/sim/random.h"
#include "tests/sim/scheduler.h"
#include "tests/sim/sim_executor.h"
#include "tests/sim/sim_file_io.h"
#include "tests/sim/sim_log.h"

namespace terrace::sim {

struct LocalDisk {
  LocalDisk(Scheduler& scheduler, SimLog& log, const std::string& node, Random random)
      : files(scheduler, log, random, node + "'s disk") {
    files.TearSectors();
  }
  SimDisk files;
  std::string locked_by;  // The life that has it; empty: none.
};

class SimDiskIo final : public DiskIo {
 public:
  // `view`, of the same process on the same disk, knows whether the process lives.
  SimDiskIo(LocalDisk& disk, SimFileIo& view, Scheduler& scheduler, SimLog& log, std::string life,
            const FaultRates& rates, bool direct, Random random);
  ~SimDiskIo() override;

  Result<std::shared_ptr<DiskFile>> Open(const std::string& path, const OpenOptions& options) override;
  void Submit(std::vector<DiskOp> ops) override;
  void CancelQueued() override { cancelled_ = true; }
  Result<std::shared_ptr<void>> Lock(const std::string& path) override;
  const char* name() const override { return "simulated"; }

  void Heal() { rates_ = {}; }
  void Stop() { device_.Stop(); }  // On a fiber, when nothing is under way any more.

 private:
  Result<size_t> Do(const DiskOp& op);
  Result<size_t> Read(const DiskOp& op);
  Result<size_t> Write(const DiskOp& op);
  Result<size_t> Sync(const DiskOp& op);
  bool Hits(double rate, const char* fault, const std::string& path);

  LocalDisk& disk_;
  SimFileIo& view_;
  Scheduler& scheduler_;
  SimLog& log_;
  const std::string life_;
  FaultRates rates_;
  const bool direct_;
  Random random_;
  bool cancelled_ = false;
  SimExecutor device_;  // A fiber for each operation that is at the device.
};

}  // namespace terrace::sim
