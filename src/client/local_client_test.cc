// Would catch: a close or a client's end that waits for storage that never answers, or that frees what a thread in the
// middle of a call to it still uses; memory or a folder that stays taken once storage does answer.
#include "client/local_client.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <condition_variable>
#include <filesystem>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/hash.h"
#include "terrace/metrics.h"
#include "terrace/store.h"
#include "tests/support/faulty_file_io.h"
#include "tier/shared_fs_tier.h"

// A close that runs out of time leaves its thread behind, which is what these tests are about: no leak to report.
extern "C" const char* __tsan_default_options() { return "report_thread_leaks=0"; }
extern "C" const char* __lsan_default_suppressions() { return "leak:Apart"; }

namespace terrace {
namespace {

using namespace std::chrono_literals;
using Op = FaultyFileIo::Op;

constexpr uint64_t kChunkBytes = 100'000;
constexpr auto kPatience = 60s;  // A failure, not a measure.

TimePoint Now() { return std::chrono::steady_clock::now(); }

// Calls that are held as those on a hard mount are, whose server is gone. Threads that were left behind use it, too.
class Outage : public std::enable_shared_from_this<Outage> {
 public:
  void Begin(FaultyFileIo& io, Op op) {
    io.SetRule([self = shared_from_this(), op](const FaultyFileIo::Call& call) { return self->Hold(call.op == op); });
  }
  bool AwaitHeld() {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, kPatience, [&] { return held_ > 0; });
  }
  void End() {
    std::unique_lock lock(mutex_);
    over_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return held_ == 0; });
  }

 private:
  FaultyFileIo::Verdict Hold(bool concerned) {
    std::unique_lock lock(mutex_);
    if (concerned && !over_) {
      ++held_;
      changed_.notify_all();
      changed_.wait(lock, [&] { return over_; });
      --held_;
      changed_.notify_all();
    }
    return {};
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  int held_ = 0;       // Guarded by mutex_.
  bool over_ = false;  // Guarded by mutex_.
};

// All that a client in process stands on.
struct Stack {
  Metrics metrics;
  const SystemClock clock;
  FaultyFileIo io;
  std::unique_ptr<Store> store;
};

class LocalClientTest : public testing::TestWithParam<Op> {
 protected:
  LocalClientTest() { std::filesystem::create_directory(folder_); }
  ~LocalClientTest() override {
    outage_->End();
    // What was left behind goes when storage answers.
    const TimePoint deadline = Now() + kPatience;
    while (!stack_.expired() && Now() < deadline) std::this_thread::yield();
    EXPECT_TRUE(stack_.expired());
    std::filesystem::remove_all(folder_);
  }
  std::unique_ptr<Client> Open(std::optional<Op> held = {}) {
    auto stack = std::make_shared<Stack>();
    if (held) outage_->Begin(stack->io, *held);
    std::vector<std::unique_ptr<Tier>> tiers;
    tiers.push_back(OpenSharedFsTier({.directory = folder_, .open_lazily = held.has_value()},
                                     {.io = stack->io, .clock = stack->clock, .metrics = stack->metrics})
                        .value());
    stack->store = OpenStore({.ram_bytes_max = 16 << 20}, std::move(tiers), stack->metrics).value();
    stack_ = stack;
    io_ = &stack->io;
    return NewLocalClient({}, *stack->store, stack);
  }
  static FrameInfo Info() {
    FrameInfo info;
    info.space = info.parent = Sha256Of("a space");
    info.key = Sha256Of("a key");
    info.token_count = 2;
    info.payload_bytes = kChunkBytes;
    return info;
  }
  static void Save(Client& client) {
    const auto bytes = std::make_shared<std::vector<std::byte>>(kChunkBytes);
    const auto call = client.Save({{Info(), {*bytes}}}, bytes);
    ASSERT_TRUE(call->Wait(Now() + kPatience));
    ASSERT_EQ(call->Poll(0)->outcome, Outcome::kHit);
  }
  // Whether it ends while storage does not answer. If not, storage does, so that the test can end.
  template <class Work>
  bool Ends(Work work) {
    auto done = std::async(std::launch::async, std::move(work));
    if (done.wait_for(kPatience) == std::future_status::ready) return true;
    outage_->End();
    return false;
  }

  const std::string folder_ = testing::TempDir() + "/local-client-" + std::to_string(getpid());
  const std::shared_ptr<Outage> outage_ = std::make_shared<Outage>();
  std::weak_ptr<Stack> stack_;
  FaultyFileIo* io_ = nullptr;
};

TEST_F(LocalClientTest, AHealthyCloseIsCleanAndCanBeRepeated) {
  auto client = Open();
  Save(*client);
  EXPECT_TRUE(client->Close(Now() + kPatience).clean);
  EXPECT_TRUE(client->Close(Now()).clean);
  client.reset();
  EXPECT_TRUE(stack_.expired()) << "its folder is free again";
}

INSTANTIATE_TEST_SUITE_P(Held, LocalClientTest,
                         testing::Values(Op::kOpen, Op::kWrite, Op::kLink, Op::kList, Op::kStat));

TEST_P(LocalClientTest, CloseEndsThoughStorageHangs) {
  auto client = Open();
  ASSERT_TRUE(client->Stats()->Wait(Now() + kPatience));
  outage_->Begin(*io_, GetParam());
  Save(*client);
  ASSERT_TRUE(outage_->AwaitHeld());
  CloseReport report;
  EXPECT_TRUE(Ends([&] { report = client->Close(Now() + 1s); }));
  EXPECT_FALSE(report.clean);
  EXPECT_TRUE(Ends([&] { client.reset(); }));
  EXPECT_FALSE(stack_.expired()) << "the call that hangs still uses it";
}

TEST_P(LocalClientTest, AClientEndsThoughStorageHangs) {
  auto client = Open();
  outage_->Begin(*io_, GetParam());
  Save(*client);
  ASSERT_TRUE(outage_->AwaitHeld());
  EXPECT_TRUE(Ends([&] { client.reset(); }));
}

}  // namespace
}  // namespace terrace
