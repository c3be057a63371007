// Would catch: cached_tokens that are not true, a warm answer that differs from the cold one, a chunk of wrong
// structure reaching the context or harming the answer (D28), a client that left and is computed for, a queue without
// its bound, a stop that leaves somebody without an answer. Runs the real model; MODEL_F16 is its path.
#include "engine/model_thread.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <future>
#include <string>
#include <thread>

#include "tests/support/memory_tier.h"

namespace terrace::engine {
namespace {

constexpr uint32_t kChunk = 64;
constexpr auto kLongest = std::chrono::seconds(120);
constexpr std::chrono::milliseconds kLoadDeadline{600'000};  // What is waited for to its end fails a test.

struct Answer {
  std::string text;
  openai::Usage usage;
  int failed_status = 0;
};

// Collects an answer; `leaves_after` texts, or after it was asked `stays_for` times, it is gone.
class Collector final : public GenerationSink {
 public:
  explicit Collector(size_t leaves_after = SIZE_MAX, size_t stays_for = SIZE_MAX)
      : left_(leaves_after), stays_for_(stays_for) {}
  ~Collector() override {
    if (!answered_) done_.set_value({.text = text_, .usage = {}, .failed_status = -1});  // Dropped: nobody listened.
  }
  std::future<Answer> answer() { return done_.get_future(); }
  std::future<void> first_text() { return first_text_.get_future(); }

  void Text(std::string text) override {
    if (text_.empty()) first_text_.set_value();
    text_ += text;
    if (left_ > 0) left_.fetch_sub(1);
  }
  void Done(FinishReason, const openai::Usage& usage) override {
    Settle({.text = text_, .usage = usage, .failed_status = 0});
  }
  void Failed(openai::ApiError error) override { Settle({.text = text_, .usage = {}, .failed_status = error.status}); }
  bool gone() const override { return left_.load() == 0 || asked_.fetch_add(1) >= stays_for_; }

 private:
  void Settle(Answer answer) {
    answered_ = true;
    done_.set_value(std::move(answer));
  }
  std::string text_;
  std::atomic<size_t> left_;
  const size_t stays_for_;
  mutable std::atomic<size_t> asked_{0};
  bool answered_ = false;
  std::promise<void> first_text_;
  std::promise<Answer> done_;
};

// Holds the model thread at its first text until told to go on.
class HeldSink final : public GenerationSink {
 public:
  std::future<void> held() { return held_.get_future(); }
  std::promise<void> go_on;

  void Text(std::string) override {
    if (std::exchange(said_, true)) return;
    held_.set_value();
    go_on.get_future().wait_for(kLongest);
  }
  void Done(FinishReason, const openai::Usage&) override {}
  void Failed(openai::ApiError) override {}
  bool gone() const override { return false; }

 private:
  bool said_ = false;
  std::promise<void> held_;
};

// A store whose loads can be made to deliver other bytes than were saved.
class BendingStore final : public Store {
 public:
  explicit BendingStore(Metrics& metrics, std::unique_ptr<Tier> lower = {}, uint64_t ram_bytes = 256 << 20) {
    std::vector<std::unique_ptr<Tier>> tiers;
    if (lower) tiers.push_back(std::move(lower));
    auto opened = OpenStore({.ram_bytes_max = ram_bytes}, std::move(tiers), metrics);
    EXPECT_TRUE(opened) << opened.error().what;
    inner_ = std::move(*opened);
  }
  std::function<void(std::span<std::byte>)> bend;  // Set before a request is submitted.
  bool keep_deadlines = false;                     // As above. A load brings nothing after its deadline.

  const std::vector<std::string>& tier_names() const override { return inner_->tier_names(); }
  PrefixHit Lookup(std::span<const Digest> keys) override { return inner_->Lookup(keys); }
  std::shared_ptr<LoadJob> Load(const Digest& space, std::span<const Digest> keys, uint64_t payload_bytes,
                                TimePoint deadline) override {
    return std::make_shared<Job>(*this, inner_->Load(space, keys, payload_bytes, deadline), deadline);
  }
  void ExpectChunks(uint64_t payload_bytes) override { inner_->ExpectChunks(payload_bytes); }
  Result<SaveSlot> BeginSave(const FrameInfo& info) override { return inner_->BeginSave(info); }
  bool Needs(const Digest& key) override { return inner_->Needs(key); }
  void Offer(const Digest& key) override { inner_->Offer(key); }
  void Commit(SaveSlot slot, std::function<void(bool)> done) override {
    inner_->Commit(std::move(slot), std::move(done));
  }
  TierStats ram_stats() const override { return inner_->ram_stats(); }
  TierStats tier_stats(size_t tier) const override { return inner_->tier_stats(tier); }
  RamMemory ram_memory() const override { return inner_->ram_memory(); }
  Health health() const override { return inner_->health(); }
  uint64_t pending_saves() const override { return inner_->pending_saves(); }
  CloseReport Close(TimePoint deadline) override { return inner_->Close(deadline); }

 private:
  class Job final : public LoadJob {
   public:
    Job(const BendingStore& store, std::shared_ptr<LoadJob> inner, TimePoint deadline)
        : store_(store), inner_(std::move(inner)), deadline_(deadline) {}
    size_t size() const override { return inner_->size(); }
    Item Wait(size_t i, TimePoint deadline) override {
      if (store_.keep_deadlines && std::chrono::steady_clock::now() >= deadline_) return {.reason = Reason::kTimeout};
      Item item = inner_->Wait(i, deadline);
      if (item.outcome == Outcome::kHit && store_.bend) {
        const auto copy = std::make_shared<std::vector<std::byte>>(item.lease.bytes.begin(), item.lease.bytes.end());
        store_.bend(*copy);
        item.lease.bytes = *copy;
        item.lease.pin = copy;
      }
      return item;
    }
    bool ReadyOr(size_t i, std::function<void()> later) override { return inner_->ReadyOr(i, std::move(later)); }

   private:
    const BendingStore& store_;
    const std::shared_ptr<LoadJob> inner_;
    const TimePoint deadline_;
  };
  std::unique_ptr<Store> inner_;
};

class ModelThreadTest : public testing::Test {
 protected:
  static void SetUpTestSuite() {
    const char* path = std::getenv("MODEL_F16");
    ASSERT_NE(path, nullptr) << "MODEL_F16 is not set; scripts/setup env prints it";
    auto model = Model::Load(path);
    ASSERT_TRUE(model) << model.error().what;
    loaded_model = std::move(*model);
  }
  static void TearDownTestSuite() { loaded_model.reset(); }

  // The store outlives the engines of a test, as RAM outlives nothing but engine memory: a new engine is a cold one.
  void StartEngine(const EngineOptions& more = {}) {
    thread_.reset();
    EngineOptions options = more;
    options.context_tokens = 1024;
    options.chunk_tokens = kChunk;
    options.threads = 2;
    options.load_deadline_ms = kLoadDeadline.count();
    engine_metrics_ = std::make_unique<Metrics>();
    auto started = ModelThread::Start(options, *loaded_model, *store_, *engine_metrics_);
    ASSERT_TRUE(started) << started.error().what;
    thread_ = std::move(*started);
  }

  std::unique_ptr<Generation> Ask(const std::string& text, std::unique_ptr<GenerationSink> sink,
                                  uint32_t max_tokens = 8) {
    auto generation = std::make_unique<Generation>();
    generation->tokens = loaded_model->Tokenize(text);
    generation->max_tokens = max_tokens;
    generation->sampling.temperature = 0;
    generation->chain = KeyChain(SpaceId(thread_->space()), kChunk);
    generation->chain.Extend(generation->tokens);
    generation->usable = (generation->tokens.size() - 1) / kChunk;
    generation->sink = std::move(sink);
    return generation;
  }

  Answer Run(const std::string& text, uint32_t max_tokens = 8) {
    auto sink = std::make_unique<Collector>();
    auto answer = sink->answer();
    EXPECT_EQ(thread_->Submit(Ask(text, std::move(sink), max_tokens)), nullptr);
    if (answer.wait_for(kLongest) != std::future_status::ready) {
      ADD_FAILURE() << "no answer";
      return {};
    }
    return answer.get();
  }

  // A story whose chunks are its own from the first on.
  static std::string Story(const std::string& name) {
    std::string text;
    for (int i = 0; i < 15; ++i)
      text += name + " walked past house " + std::to_string(i * 7) + " and greeted the owner. ";
    return text;
  }

  // A list that the model goes on with.
  static std::string Counting() {
    std::string text;
    for (int i = 1; i < 60; ++i) text += std::to_string(i) + ", ";
    return text;
  }

  static inline std::unique_ptr<Model> loaded_model;
  Metrics store_metrics_;
  std::unique_ptr<BendingStore> store_ = std::make_unique<BendingStore>(store_metrics_);
  std::unique_ptr<Metrics> engine_metrics_;
  std::unique_ptr<ModelThread> thread_;
};

uint32_t From(const Answer& answer, std::string_view tier) {
  for (size_t i = 0; i < openai::kTiers.size(); ++i) {
    if (openai::kTiers[i] == tier) return answer.usage.cached.by_tier[i];
  }
  return 0;
}

uint32_t WholeChunks(const Answer& answer) { return (answer.usage.prompt_tokens - 1) / kChunk * kChunk; }

TEST_F(ModelThreadTest, RepeatComesFromEngineMemoryAndSaysTheSame) {
  StartEngine();
  const Answer cold = Run(Story("Ada"));
  EXPECT_EQ(cold.usage.cached.total(), 0u);
  EXPECT_EQ(cold.usage.cached.miss_reason, "not_found");
  ASSERT_GE(WholeChunks(cold), 2 * kChunk);
  const Answer warm = Run(Story("Ada"));
  EXPECT_EQ(From(warm, "engine"), WholeChunks(cold));
  EXPECT_EQ(warm.usage.cached.total(), WholeChunks(cold));
  EXPECT_EQ(warm.usage.cached.miss_reason, "none");
  EXPECT_EQ(warm.text, cold.text);
}

TEST_F(ModelThreadTest, WhatLeftEngineMemoryComesFromRamAndSaysTheSame) {
  StartEngine();
  const Answer ada = Run(Story("Ada"));
  const Answer bob = Run(Story("Bob"));
  EXPECT_EQ(bob.usage.cached.total(), 0u);
  const Answer ada_again = Run(Story("Ada"));
  EXPECT_EQ(ada_again.usage.cached.total(), WholeChunks(ada));
  EXPECT_EQ(ada_again.text, ada.text);
  StartEngine();
  const Answer bob_again = Run(Story("Bob"));
  EXPECT_EQ(From(bob_again, "ram"), WholeChunks(bob));
  EXPECT_EQ(bob_again.text, bob.text);
}

// A directory that was emptied, or away.
TEST_F(ModelThreadTest, WhatEngineMemoryServesAndALowerTierLostIsWrittenAnew) {
  auto tier = std::make_unique<MemoryTier>();
  MemoryTier& lower = *tier;
  store_ = std::make_unique<BendingStore>(store_metrics_, std::move(tier));
  StartEngine();
  const auto written = [&](size_t chunks) {
    const auto deadline = std::chrono::steady_clock::now() + kLongest;
    while (lower.size() < chunks && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
    return lower.size();
  };
  const size_t chunks = WholeChunks(Run(Story("Ada"))) / kChunk;
  ASSERT_EQ(written(chunks), chunks);
  const auto ask = Ask(Story("Ada"), nullptr);
  lower.Erase({ask->chain.keys().data(), ask->usable});
  EXPECT_EQ(From(Run(Story("Ada")), "engine"), chunks * kChunk);
  EXPECT_EQ(written(chunks), chunks);
}

TEST_F(ModelThreadTest, StrictKeepsOnlyTheMatchingSequence) {
  StartEngine({.strict = true});
  const Answer ada = Run(Story("Ada"));
  Run(Story("Bob"));
  EXPECT_EQ(thread_->ResidentPrefix(Ask(Story("Ada"), nullptr)->chain.keys()), 0u);
  EXPECT_GT(thread_->ResidentPrefix(Ask(Story("Bob"), nullptr)->chain.keys()), 0u);
  EXPECT_EQ(Run(Story("Ada")).text, ada.text);
}

TEST_F(ModelThreadTest, ChunkOfWrongStructureIsAMissThatHarmsNothing) {
  StartEngine();
  const Answer cold = Run(Story("Ada"));
  StartEngine();
  // Position of a cell in the second chunk that comes.
  store_->bend = [calls = 0](std::span<std::byte> bytes) mutable {
    if (++calls == 2) bytes[16] ^= std::byte{1};
  };
  const Answer bent = Run(Story("Ada"));
  EXPECT_EQ(From(bent, "ram"), kChunk);
  EXPECT_EQ(bent.usage.cached.total(), kChunk);
  EXPECT_EQ(bent.usage.cached.miss_reason, "foreign");
  EXPECT_EQ(bent.text, cold.text);
}

// Text need not tokenize as it was generated, so what is kept is counted, not asked for.
TEST_F(ModelThreadTest, GeneratedChunksAreKeptOnlyIfAskedFor) {
  const auto resident = [&] {
    const std::string text = engine_metrics_->Text();
    const std::string name = "\nterrace_engine_resident_chunks ";
    return std::strtoul(text.c_str() + text.find(name) + name.size(), nullptr, 10);
  };
  StartEngine();
  const Answer dropped = Run(Counting(), kChunk);
  ASSERT_EQ(dropped.usage.completion_tokens, kChunk) << "the model ended early: choose another text";
  const uint32_t prompt = dropped.usage.prompt_tokens;
  ASSERT_NE(prompt % kChunk, 0u) << "choose another text";
  EXPECT_EQ(resident(), prompt / kChunk);

  StartEngine({.save_decode_cache = true});
  EXPECT_EQ(Run(Counting(), kChunk).text, dropped.text);
  EXPECT_EQ(resident(), prompt / kChunk + 1);
  EXPECT_EQ(Run(Counting(), kChunk).text, dropped.text);  // The same text once more: not kept twice.
  EXPECT_EQ(resident(), prompt / kChunk + 1);
}

TEST_F(ModelThreadTest, ClientThatLeftIsNotComputedFor) {
  StartEngine();
  auto sink = std::make_unique<Collector>(/*leaves_after=*/1);
  auto answer = sink->answer();
  ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(sink), 900)), nullptr);
  ASSERT_EQ(answer.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(answer.get().failed_status, -1);
  EXPECT_EQ(Run("Hello", 1).usage.completion_tokens, 1u);
}

TEST_F(ModelThreadTest, ClientThatLeavesDuringAStepEndsItAndHarmsNothing) {
  StartEngine();
  const Answer cold = Run(Story("Ada"));
  StartEngine();
  auto sink = std::make_unique<Collector>(SIZE_MAX, /*stays_for=*/50);  // An answer has far fewer steps.
  auto answer = sink->answer();
  ASSERT_EQ(thread_->Submit(Ask(Story("Bob"), std::move(sink))), nullptr);
  ASSERT_EQ(answer.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(answer.get().failed_status, -1) << "computed to its end";
  EXPECT_EQ(Run(Story("Ada")).text, cold.text);
  EXPECT_EQ(Run(Story("Bob"), 1).usage.completion_tokens, 1u);
}

// On storage that hangs. Others wait behind it, and a server that stops has to say so.
TEST_F(ModelThreadTest, ALoadThatHangsIsNotWaitedForOnceTheClientLeftOrTheServerStops) {
  auto tier = std::make_unique<MemoryTier>();
  MemoryTier& lower = *tier;
  store_ = std::make_unique<BendingStore>(store_metrics_, std::move(tier));
  StartEngine();
  FrameInfo info;
  info.key = Ask(Story("Ada"), nullptr)->chain.keys()[0];
  lower.Put(info, {});
  lower.Hold();
  auto leaves = std::make_unique<Collector>(SIZE_MAX, /*stays_for=*/5);
  auto left = leaves->answer();
  ASSERT_EQ(thread_->Submit(Ask(Story("Ada"), std::move(leaves))), nullptr);
  ASSERT_EQ(left.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(left.get().failed_status, -1);
  EXPECT_EQ(Run("Hello", 1).usage.completion_tokens, 1u);

  auto stays = std::make_unique<Collector>();
  auto stopped = stays->answer();
  ASSERT_EQ(thread_->Submit(Ask(Story("Ada"), std::move(stays))), nullptr);
  const auto deadline = std::chrono::steady_clock::now() + kLongest;
  while (engine_metrics_->Text().find("\nterrace_engine_queue_requests 0\n") == std::string::npos) {
    ASSERT_LT(std::chrono::steady_clock::now(), deadline);
    std::this_thread::yield();
  }
  thread_->StopBy(std::chrono::steady_clock::now());
  ASSERT_EQ(stopped.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(stopped.get().failed_status, 503);
}

// What requests load ahead of their turn is pinned.
TEST_F(ModelThreadTest, RequestsThatWaitLeaveRoomForTheSavesOfTheOneThatRuns) {
  store_ =
      std::make_unique<BendingStore>(store_metrics_, std::make_unique<MemoryTier>("shared_fs"), 9 << 20);  // 6 chunks.
  StartEngine();
  for (const char* name : {"Ada", "Bob", "Cy"}) Run(Story(name), 1);
  const auto deadline = std::chrono::steady_clock::now() + kLongest;
  while (store_->pending_saves() > 0 && std::chrono::steady_clock::now() < deadline) std::this_thread::yield();
  Run("The end", 1);
  StartEngine({.engine_kv_tokens = 0});

  auto sink = std::make_unique<HeldSink>();
  HeldSink& holder = *sink;
  auto held = holder.held();
  ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(sink), 2)), nullptr);
  ASSERT_EQ(held.wait_for(kLongest), std::future_status::ready);
  std::vector<std::future<Answer>> answers;
  for (const char* name : {"Eve", "Ada", "Bob", "Cy"}) {
    auto collector = std::make_unique<Collector>();
    answers.push_back(collector->answer());
    ASSERT_EQ(thread_->Submit(Ask(Story(name), std::move(collector), 1)), nullptr);
  }
  holder.go_on.set_value();
  for (auto& answer : answers) ASSERT_EQ(answer.wait_for(kLongest), std::future_status::ready);
  EXPECT_NE(engine_metrics_->Text().find("\nterrace_engine_saves_declined_total 0\n"), std::string::npos);
  EXPECT_EQ(answers[0].get().usage.cached.total(), 0u);
  for (size_t i = 1; i < answers.size(); ++i) {
    const Answer answer = answers[i].get();
    EXPECT_EQ(answer.usage.cached.total(), WholeChunks(answer)) << i << " " << answer.usage.cached.miss_reason;
  }
}

TEST_F(ModelThreadTest, LoadThatRanOutOfTimeInTheQueueIsBegunAnew) {
  StartEngine();
  const Answer cold = Run(Story("Ada"));
  StartEngine({.queue_allowance = -kLoadDeadline});  // Out of time at once.
  store_->keep_deadlines = true;
  auto running = std::make_unique<Collector>();
  auto first = running->answer();
  auto runs = running->first_text();
  ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(running), 60)), nullptr);
  ASSERT_EQ(runs.wait_for(kLongest), std::future_status::ready);
  const Answer warm = Run(Story("Ada"));
  EXPECT_EQ(From(warm, "ram"), WholeChunks(cold)) << warm.usage.cached.miss_reason;
  EXPECT_EQ(warm.text, cold.text);
  EXPECT_EQ(first.get().failed_status, 0);
}

TEST_F(ModelThreadTest, QueueIsBoundedAndTheGoneLeaveIt) {
  StartEngine({.queue_max = 2});
  auto running = std::make_unique<Collector>();
  auto first = running->answer();
  auto runs = running->first_text();
  ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(running), 60)), nullptr);
  ASSERT_EQ(runs.wait_for(kLongest), std::future_status::ready);
  // Clients that have left fill the queue while the first is computed.
  EXPECT_EQ(thread_->Submit(Ask("x", std::make_unique<Collector>(0))), nullptr);
  EXPECT_EQ(thread_->Submit(Ask("x", std::make_unique<Collector>(0))), nullptr);
  EXPECT_NE(thread_->Submit(Ask("x", std::make_unique<Collector>(0))), nullptr);
  thread_->DropGone();
  auto sink = std::make_unique<Collector>();
  auto last = sink->answer();
  EXPECT_EQ(thread_->Submit(Ask("Hello", std::move(sink), 1)), nullptr);
  ASSERT_EQ(first.wait_for(kLongest), std::future_status::ready);
  ASSERT_EQ(last.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(last.get().failed_status, 0);
}

TEST_F(ModelThreadTest, StopAnswersEverybody) {
  StartEngine();
  std::vector<std::future<Answer>> answers;
  for (int i = 0; i < 3; ++i) {
    auto sink = std::make_unique<Collector>();
    answers.push_back(sink->answer());
    ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(sink), 900)), nullptr);
  }
  thread_->Stop();
  for (auto& answer : answers) {
    ASSERT_EQ(answer.wait_for(std::chrono::seconds(0)), std::future_status::ready);
    const int status = answer.get().failed_status;
    EXPECT_TRUE(status == 503 || status == 0) << status;
  }
  EXPECT_NE(thread_->Submit(Ask("x", std::make_unique<Collector>())), nullptr);
}

TEST_F(ModelThreadTest, StopByEndsWhatWaitsAtOnceAndLetsWhatRunsFinish) {
  StartEngine();
  auto running = std::make_unique<Collector>();
  auto first = running->answer();
  auto runs = running->first_text();
  ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(running), 60)), nullptr);
  ASSERT_EQ(runs.wait_for(kLongest), std::future_status::ready);
  auto waiting = std::make_unique<Collector>();
  auto second = waiting->answer();
  ASSERT_EQ(thread_->Submit(Ask("x", std::move(waiting))), nullptr);

  thread_->StopBy(std::chrono::steady_clock::now() + kLongest);
  ASSERT_EQ(second.wait_for(std::chrono::seconds(0)), std::future_status::ready);
  EXPECT_EQ(second.get().failed_status, 503);
  EXPECT_TRUE(thread_->stopping() && thread_->cut());
  EXPECT_NE(thread_->Submit(Ask("x", std::make_unique<Collector>())), nullptr);
  ASSERT_EQ(first.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(first.get().failed_status, 0);
}

TEST_F(ModelThreadTest, StopByEndsWhatRunsAtItsDeadline) {
  StartEngine();
  auto running = std::make_unique<Collector>();
  auto answer = running->answer();
  auto runs = running->first_text();
  ASSERT_EQ(thread_->Submit(Ask("Count: 1 2 3 4", std::move(running), 900)), nullptr);
  ASSERT_EQ(runs.wait_for(kLongest), std::future_status::ready);
  thread_->StopBy(std::chrono::steady_clock::now());
  ASSERT_EQ(answer.wait_for(kLongest), std::future_status::ready);
  EXPECT_EQ(answer.get().failed_status, 503);
  EXPECT_TRUE(thread_->cut());
}

}  // namespace
}  // namespace terrace::engine
