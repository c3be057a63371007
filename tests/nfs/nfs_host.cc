// One host of the NFS tests: a process with the real shared_fs tier on a mount. It is told what to do by lines on
// stdin, `ID VERB ARGUMENTS`, does each on a thread of its own, and answers with `ID RESULT`. nfs_test.cc is the other
// end. It ends with its stdin.
//
//   nfs_host DIRECTORY [stale] [guard]
//
// With `stale`, what dead nodes left is removed at once. With `guard`, the tier has deadlines as in the program, but
// shorter ones.
//
//   save N BYTES            new | existed | declined REASON | failed REASON WHAT
//   load N BYTES            hit | wrong | miss REASON | failed REASON WHAT
//   probe N BYTES           as load, but reads the file whether the index has it or not
//   await N COUNT BYTES     milliseconds until the index had them all
//   check N COUNT BYTES     loads them all: hit=%d other=%d, and the first that was none
//   erase N COUNT           ok
//   stats                   available=%d ready=%d frames=%d quarantined=%d WHY
//   verify                  loads all that a scan finds: frames=%d bad=%d
//   churn N BYTES OTHER     saves and loads, also what the host that began at OTHER saved, until
//   calm                    as `did`
//   did                     saved=%d save_errors=%d save_ms=%d loaded=%d load_errors=%d load_ms=%d wrong=%d
//   hold END OP...          from now on such calls on files whose path ends so wait; END is `.kvf`, or `.kvf.tmp` for
//   both held                    the OP that waits, or `idle` once no save or load is under way step lets it go release
//   lets all go
#include <sys/prctl.h>

#include <algorithm>
#include <charconv>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <iostream>
#include <iterator>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "base/assert.h"
#include "base/clock.h"
#include "base/executor.h"
#include "base/log.h"
#include "terrace/metrics.h"
#include "tests/nfs/frames.h"
#include "tests/support/faulty_file_io.h"
#include "tier/guard_tier.h"
#include "tier/shared_fs_dir.h"
#include "tier/shared_fs_tier.h"

namespace terrace {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// No call is waited for longer; nfs_test.cc gives up before.
constexpr std::chrono::minutes kLongest{10};

int64_t MillisecondsSince(TimePoint begin) {
  return std::chrono::duration_cast<milliseconds>(steady_clock::now() - begin).count();
}

std::string Word(const std::optional<Error>& error) { return error ? " " + error->what : ""; }

// Calls on files that wait until they are let go, one by one.
class Gate {
 public:
  explicit Gate(FaultyFileIo& io) : io_(io) {}

  std::string Hold(const std::string& ends, std::set<std::string> ops) {
    io_.SetRule([this, ends, ops = std::move(ops)](const FaultyFileIo::Call& call) {
      const std::string end = call.path.substr(call.path.size() - std::min<size_t>(call.path.size(), 4));
      if (ops.contains(kNames[call.op]) && ends.find(end) != std::string::npos) Wait(kNames[call.op]);
      return FaultyFileIo::Verdict{};
    });
    return "ok";
  }
  std::string Held() {
    std::unique_lock lock(mutex_);
    changed_.wait_for(lock, kLongest, [&] { return !held_.empty() || busy_ == 0; });
    return held_.empty() ? "idle" : held_;
  }
  std::string Step() {
    std::lock_guard lock(mutex_);
    held_.clear();
    changed_.notify_all();
    return "ok";
  }
  std::string Release() {
    io_.SetRule(nullptr);
    return Step();
  }
  void Busy(int change) {
    std::lock_guard lock(mutex_);
    busy_ += change;
    changed_.notify_all();
  }

 private:
  static constexpr const char* kNames[] = {"open", "read",   "write",  "sync",     "file_stat", "close",     "stat",
                                           "link", "rename", "unlink", "make_dir", "list",      "free_space"};
  static_assert(std::size(kNames) == FaultyFileIo::kOps);

  void Wait(const char* op) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return held_.empty(); });
    held_ = op;
    changed_.notify_all();
    changed_.wait(lock, [&] { return held_.empty(); });
  }

  FaultyFileIo& io_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::string held_;  // Guarded by mutex_. The operation of the one call that waits, if there is one.
  int busy_ = 0;      // Guarded by mutex_. Saves and loads under way.
};

class Host {
 public:
  Host(const SharedFsOptions& options, bool guard) : directory_(options.directory), gate_(io_) {
    auto opened = OpenSharedFsTier(options, {.io = io_, .clock = clock_, .metrics = metrics_});
    if (!opened) {
      std::fprintf(stderr, "nfs_host: %s\n", opened.error().what.c_str());
      std::exit(1);
    }
    tier_ = *std::move(opened);
    if (!guard) return;
    const GuardOptions deadlines{.load_timeout = std::chrono::seconds(5), .save_timeout = std::chrono::seconds(10)};
    tier_ = std::make_unique<GuardTier>(std::move(tier_), deadlines, sweeps_, clock_);
  }

  // A command and its answer, in threads of their own, but begun in the order of these calls: who asks for `held` after
  // a load does not hear `idle` because that had not begun.
  std::thread Begin(const std::string& line, std::function<void(const std::string&)> answer) {
    const bool counted = line.starts_with("save ") || line.starts_with("load ");
    if (counted) gate_.Busy(1);
    return std::thread([this, line, counted, answer = std::move(answer)] {
      const std::string said = Do(line);
      if (counted) gate_.Busy(-1);
      answer(said);
    });
  }

  void Close() {
    gate_.Release();
    EndChurn();
    tier_->Close(steady_clock::now() + std::chrono::seconds(10));
  }

 private:
  std::string Do(const std::string& line) {
    std::istringstream in(line);
    std::string verb;
    in >> verb;
    const std::vector<std::string> words{std::istream_iterator<std::string>(in), {}};
    const auto number = [&](size_t i) {
      uint64_t n = 0;
      if (i < words.size()) std::from_chars(words[i].data(), words[i].data() + words[i].size(), n);
      return n;
    };
    const uint64_t a = number(0), b = number(1), c = number(2);
    if (verb == "save") return Save(a, b);
    if (verb == "load") return Load(a, b);
    if (verb == "probe") return Probe(a, b);
    if (verb == "await") return Await(a, b, c);
    if (verb == "check") return Check(a, b, c);
    if (verb == "erase") return Erase(a, b);
    if (verb == "stats") return Stats();
    if (verb == "verify") return Verify();
    if (verb == "churn") return BeginChurn(a, b, c);
    if (verb == "calm") return EndChurn();
    if (verb == "did") return Did();
    if (verb == "hold") return gate_.Hold(words.at(0), {words.begin() + 1, words.end()});
    if (verb == "held") return gate_.Held();
    if (verb == "step") return gate_.Step();
    if (verb == "release") return gate_.Release();
    return "no such verb";
  }

  std::string Save(uint64_t n, uint64_t bytes) {
    const auto payload = std::make_shared<std::vector<std::byte>>(PayloadOf(n, bytes));
    auto done = std::make_shared<SaveBatch>(1);
    tier_->Save({{.info = InfoOf(n, bytes), .payload = *payload, .owner = payload}}, done);
    const SaveResult* result = done->Wait(0, steady_clock::now() + kLongest);
    TERRACE_ASSERT(result);
    switch (result->outcome) {
      case Outcome::kHit: return result->existed ? "existed" : "new";
      case Outcome::kDeclined: return std::string("declined ") + ReasonName(result->reason);
      default: return std::string("failed ") + ReasonName(result->reason) + Word(result->error);
    }
  }

  std::string Load(uint64_t n, uint64_t bytes) {
    const FrameInfo info = InfoOf(n, bytes);
    const auto into = std::make_shared<std::vector<std::byte>>(bytes);
    auto done = std::make_shared<LoadBatch>(1);
    tier_->Load({{.key = info.key, .space = info.space, .into = *into, .owner = into}}, TimePoint::max(), done);
    const LoadResult* result = done->Wait(0, steady_clock::now() + kLongest);
    TERRACE_ASSERT(result);
    switch (result->outcome) {
      case Outcome::kHit: return result->info == info && *into == PayloadOf(n, bytes) ? "hit" : "wrong";
      case Outcome::kMiss: return std::string("miss ") + ReasonName(result->reason);
      default: return std::string("failed ") + ReasonName(result->reason) + Word(result->error);
    }
  }

  std::string Probe(uint64_t n, uint64_t bytes) {
    const auto real = RealFileIo();  // The gate holds the tier's calls alone.
    SharedFsDir dir({.root = directory_, .node = "probe"}, *real, clock_, metrics_);
    const FrameInfo info = InfoOf(n, bytes);
    std::vector<std::byte> into(bytes);
    const FrameProof proof = dir.Read(info.key, info.space, into, [] { return false; }, nullptr);
    if (proof.reason != Reason::kNone) return std::string("miss ") + ReasonName(proof.reason) + Word(proof.error);
    return proof.frame.info == info && into == PayloadOf(n, bytes) ? "hit" : "wrong";
  }

  bool Has(uint64_t n, uint64_t bytes) {
    const Digest key = InfoOf(n, bytes).key;
    uint8_t present = 0;
    tier_->Contains({&key, 1}, {&present, 1});
    return present != 0;
  }

  std::string Await(uint64_t n, uint64_t count, uint64_t bytes) {
    const TimePoint begin = steady_clock::now();
    for (uint64_t i = n; i < n + count; ++i) {
      while (!Has(i, bytes)) {
        if (steady_clock::now() - begin > kLongest) return "never";
        Pause(milliseconds(2));
      }
    }
    return std::to_string(MillisecondsSince(begin));
  }

  std::string Check(uint64_t n, uint64_t count, uint64_t bytes) {
    uint64_t hits = 0;
    std::string first;
    for (uint64_t i = n; i < n + count; ++i) {
      const std::string answer = Load(i, bytes);
      hits += answer == "hit";
      if (answer != "hit" && first.empty()) first = " frame " + std::to_string(i) + ": " + answer;
    }
    return "hit=" + std::to_string(hits) + " other=" + std::to_string(count - hits) + first;
  }

  std::string Erase(uint64_t n, uint64_t count) {
    std::vector<Digest> keys;
    for (uint64_t i = n; i < n + count; ++i) keys.push_back(InfoOf(i, 1).key);
    tier_->Erase(keys);
    return "ok";
  }

  std::string Stats() const {
    const TierStats stats = tier_->stats();
    return "available=" + std::to_string(stats.available) + " ready=" + std::to_string(stats.index_ready) +
           " frames=" + std::to_string(stats.frames) + " quarantined=" + std::to_string(stats.quarantined) + " " +
           stats.why;
  }

  std::string Verify() {
    uint64_t frames = 0, bad = 0;
    for (std::string cursor;;) {
      auto page = tier_->Scan(cursor, 100);
      if (!page) return "scan: " + page.error().what;
      for (const FrameInfo& info : page->frames) {
        const auto into = std::make_shared<std::vector<std::byte>>(info.payload_bytes);
        auto done = std::make_shared<LoadBatch>(1);
        tier_->Load({{.key = info.key, .space = info.space, .into = *into, .owner = into}}, TimePoint::max(), done);
        const LoadResult* result = done->Wait(0, steady_clock::now() + kLongest);
        TERRACE_ASSERT(result);
        ++frames;
        bad += result->outcome != Outcome::kHit;
      }
      cursor = page->next;
      if (cursor.empty()) return "frames=" + std::to_string(frames) + " bad=" + std::to_string(bad);
    }
  }

  // ---- Work that goes on whatever happens

  struct Churn {
    uint64_t first = 0, bytes = 0, other = 0;
    std::atomic<uint64_t> saved{0}, save_errors{0}, loaded{0}, load_errors{0}, wrong{0};
    std::atomic<int64_t> save_ms{0}, load_ms{0};  // The longest.
  };

  std::string BeginChurn(uint64_t first, uint64_t bytes, uint64_t other) {
    std::lock_guard lock(churn_mutex_);
    churn_.first = first;
    churn_.bytes = bytes;
    churn_.other = other;
    calm_ = false;
    churners_.emplace_back([this] { SaveOn(); });
    for (int i = 0; i < 2; ++i) churners_.emplace_back([this, i] { LoadOn(i); });
    return "ok";
  }

  std::string EndChurn() {
    std::lock_guard lock(churn_mutex_);
    {
      std::lock_guard pause(pause_mutex_);
      calm_ = true;
      paused_.notify_all();
    }
    for (std::thread& churner : churners_) churner.join();
    churners_.clear();
    return Did();
  }

  std::string Did() const {
    std::ostringstream out;
    out << "saved=" << churn_.saved << " save_errors=" << churn_.save_errors << " save_ms=" << churn_.save_ms
        << " loaded=" << churn_.loaded << " load_errors=" << churn_.load_errors << " load_ms=" << churn_.load_ms
        << " wrong=" << churn_.wrong;
    return out.str();
  }

  // Frame after frame, each until it is there: so what is saved is `first` and the `saved - 1` after it.
  void SaveOn() {
    while (!calm_) {
      const std::string answer = Timed(churn_.save_ms, [&] { return Save(churn_.first + churn_.saved, churn_.bytes); });
      const bool there = answer == "new" || answer == "existed";
      there ? ++churn_.saved : ++churn_.save_errors;
      Pause(milliseconds(50));
    }
  }

  void LoadOn(uint64_t seed) {
    std::mt19937_64 random(seed);
    while (!calm_) {
      const uint64_t first = random() % 2 ? churn_.first : churn_.other;
      const uint64_t n = first + random() % (churn_.saved + 1);
      if (Has(n, churn_.bytes)) {
        const std::string answer = Timed(churn_.load_ms, [&] { return Load(n, churn_.bytes); });
        ++(answer == "hit" ? churn_.loaded : answer == "wrong" ? churn_.wrong : churn_.load_errors);
      }
      Pause(milliseconds(20));
    }
  }

  static std::string Timed(std::atomic<int64_t>& longest_ms, const std::function<std::string()>& work) {
    const TimePoint begin = steady_clock::now();
    std::string answer = work();
    const int64_t took = MillisecondsSince(begin);
    for (int64_t longest = longest_ms; took > longest && !longest_ms.compare_exchange_weak(longest, took);) {
    }
    return answer;
  }

  // What another process does can't wake us: look again after a while.
  void Pause(milliseconds time) {
    std::unique_lock lock(pause_mutex_);
    paused_.wait_for(lock, time);
  }

  const std::string directory_;
  FaultyFileIo io_;
  SystemClock clock_;
  Metrics metrics_;
  Gate gate_;
  std::mutex churn_mutex_;  // Held by whoever begins or ends it.
  std::vector<std::thread> churners_;
  Churn churn_;
  std::atomic<bool> calm_{false};
  std::mutex pause_mutex_;
  std::condition_variable paused_;
  ThreadPool sweeps_{"sweeps", 2};
  std::unique_ptr<Tier> tier_;
};

int Main(int argc, char** argv) {
  const std::vector<std::string_view> words(argv + 1, argv + argc);
  if (words.empty()) {
    std::fprintf(stderr, "usage: nfs_host DIRECTORY [stale] [guard]\n");
    return 2;
  }
  const auto has = [&](std::string_view word) { return std::count(words.begin(), words.end(), word) > 0; };
  prctl(PR_SET_PDEATHSIG, SIGKILL);  // With the test, whatever becomes of it.
  SharedFsOptions options{.directory = argv[1]};
  if (has("stale")) options.stale_age = std::chrono::seconds(0);
  log::SetSink(
      [](log::Level, std::string_view line) {
        std::fprintf(stderr, "  %.*s\n", static_cast<int>(line.size()), line.data());
      },
      log::Level::kWarn);
  Host host(options, has("guard"));
  std::mutex answers;
  std::vector<std::thread> threads;
  for (std::string line; std::getline(std::cin, line);) {
    const size_t blank = line.find(' ');
    threads.push_back(
        host.Begin(line.substr(blank + 1), [&answers, id = line.substr(0, blank)](const std::string& said) {
          std::lock_guard lock(answers);
          std::cout << id << " " << said << std::endl;
        }));
  }
  host.Close();
  for (std::thread& thread : threads) thread.join();
  return 0;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) { return terrace::Main(argc, argv); }
