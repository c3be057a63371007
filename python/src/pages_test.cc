// Would catch: bytes that come back to another block, layer or place; padding that is overwritten; a job that never
// ends or ends while its pages are still read; an engine that waits for more than copies; addresses outside vLLM's
// memory.
#include "pages.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "base/executor.h"
#include "client/local_client.h"
#include "terrace/key.h"
#include "terrace/metrics.h"
#include "terrace/store.h"

namespace terrace::pages {
namespace {

using std::chrono::seconds;
using std::chrono::steady_clock;

constexpr size_t kBlocks = 16;
constexpr size_t kBlocksPerChunk = 2;
constexpr std::byte kPadding{0xee};

TimePoint Soon() { return steady_clock::now() + seconds(30); }

// Runs nothing before it is told to.
class Held final : public Executor {
 public:
  bool Post(Task task) override {
    std::lock_guard lock(mutex_);
    tasks_.push_back(std::move(task));
    return true;
  }
  bool PostAfter(std::chrono::milliseconds, Task) override { return true; }
  void RunAll() {
    std::vector<Task> tasks;
    {
      std::lock_guard lock(mutex_);
      tasks.swap(tasks_);
    }
    for (const Task& task : tasks) task();
  }

 private:
  std::mutex mutex_;
  std::vector<Task> tasks_;  // Guarded by mutex_.
};

// A vLLM in small: two layers, the second with pages that are shorter than its blocks.
class PagesTest : public testing::Test {
 protected:
  struct Layer {
    size_t stride, page;
    std::vector<std::byte> memory;
  };

  void SetUp() override { Open(nullptr); }
  void Open(Executor* executor) {
    store_ = *OpenStore({.ram_bytes_max = 64ull << 20, .executor = executor}, {}, metrics_);
    client_ = NewLocalClient({}, *store_, nullptr);
    std::vector<Tensor> tensors;
    std::vector<Part> parts;
    for (Layer& layer : layers_) {
      layer.memory.assign(layer.stride * kBlocks, kPadding);
      parts.push_back({tensors.size(), layer.page});
      tensors.push_back({layer.memory.data(), layer.stride, kBlocks});
    }
    pages_ = *Pages::Create(client_, tensors, {parts}, kBlocksPerChunk);
  }

  std::byte* Page(size_t layer, int32_t block) {
    return layers_[layer].memory.data() + static_cast<size_t>(block) * layers_[layer].stride;
  }
  // A byte that tells layer, block of the sequence and place in the page.
  static std::byte Value(size_t layer, size_t block, size_t at) {
    return static_cast<std::byte>(layer * 101 + block * 37 + at * 3 + at / 251);
  }
  void Fill(const std::vector<int32_t>& blocks, size_t first = 0) {
    for (size_t l = 0; l < layers_.size(); ++l) {
      for (size_t b = 0; b < blocks.size(); ++b) {
        for (size_t at = 0; at < layers_[l].page; ++at) Page(l, blocks[b])[at] = Value(l, first + b, at);
      }
    }
  }
  // `blocks` hold blocks `first`, first + 1, ... of the sequence, and nothing else was touched.
  void ExpectOnly(const std::vector<int32_t>& blocks, size_t first = 0) {
    for (size_t l = 0; l < layers_.size(); ++l) {
      std::vector<std::byte> wanted(layers_[l].memory.size(), kPadding);
      for (size_t b = 0; b < blocks.size(); ++b) {
        for (size_t at = 0; at < layers_[l].page; ++at) {
          wanted[static_cast<size_t>(blocks[b]) * layers_[l].stride + at] = Value(l, first + b, at);
        }
      }
      EXPECT_EQ(layers_[l].memory, wanted) << "layer " << l;
    }
  }
  void Forget() {
    for (Layer& layer : layers_) layer.memory.assign(layer.memory.size(), kPadding);
  }

  std::vector<FrameInfo> Infos(size_t chunks) {
    std::vector<int32_t> tokens(4 * chunks);
    std::iota(tokens.begin(), tokens.end(), 0);
    KeyChain chain(Digest{}, 4);
    chain.Extend(tokens);
    keys_ = chain.keys();
    std::vector<FrameInfo> infos;
    for (size_t i = 0; i < chunks; ++i) {
      infos.push_back({.key = chain.keys()[i],
                       .parent = chain.parent(i),
                       .first_token = static_cast<uint32_t>(4 * i),
                       .token_count = 4,
                       .payload_bytes = pages_->payload_bytes(0)});
    }
    return infos;
  }

  static Blocks Of(const std::vector<int32_t>& ids, const std::vector<int32_t>& size,
                   const std::vector<int32_t>& first) {
    return {ids, size, first};
  }

  std::vector<Done> Finished() {
    std::vector<Done> done;
    for (const TimePoint end = Soon(); done.empty() && steady_clock::now() < end; done = pages_->Finished()) {
      hashing_.RunAll();
    }
    return done;
  }

  void SaveAll(const std::vector<int32_t>& blocks) {
    const std::vector<int32_t> size = {static_cast<int32_t>(blocks.size())};
    const std::vector<int32_t> first = {0};
    ASSERT_TRUE(pages_->Save(1, Infos(blocks.size() / kBlocksPerChunk), Of(blocks, size, first)).has_value());
    const std::vector<Done> done = Finished();
    ASSERT_EQ(done.size(), 1U);
    EXPECT_EQ(done[0].job, 1U);
    EXPECT_EQ(done[0].bytes, pages_->payload_bytes(0) * blocks.size() / kBlocksPerChunk);
    EXPECT_EQ(done[0].declined, 0U);
  }

  std::vector<terrace::Lease> Leases(size_t first, size_t count) {
    auto call = client_->Lease(
        {.keys = {keys_.begin() + static_cast<ptrdiff_t>(first), keys_.begin() + static_cast<ptrdiff_t>(first + count)},
         .payload_bytes = pages_->payload_bytes(0),
         .deadline = Soon()});
    EXPECT_TRUE(call->Wait(Soon()));
    std::vector<terrace::Lease> leases;
    for (size_t i = 0; i < count; ++i) {
      EXPECT_EQ(call->Poll(i)->outcome, Outcome::kHit);
      leases.push_back(call->Poll(i)->lease);
    }
    return leases;
  }

  void LoadAll(std::vector<terrace::Lease> leases, const std::vector<int32_t>& blocks, int32_t first) {
    const std::vector<int32_t> size = {static_cast<int32_t>(blocks.size())};
    const std::vector<int32_t> index = {first};
    ASSERT_TRUE(pages_->Load(2, std::move(leases), Of(blocks, size, index)).has_value());
    const uint64_t job = 2;
    pages_->Wait({&job, 1});
    const std::vector<Done> done = pages_->Finished();
    ASSERT_EQ(done.size(), 1U);
    EXPECT_EQ(done[0].job, 2U);
  }

  std::vector<Layer> layers_ = {{4096, 4096, {}}, {3000, 2500, {}}};
  Held hashing_;
  Metrics metrics_;
  std::unique_ptr<Store> store_;
  std::shared_ptr<Client> client_;
  std::unique_ptr<Pages> pages_;
  std::vector<Digest> keys_;
};

TEST_F(PagesTest, WhatIsSavedComesBackInOtherBlocks) {
  Fill({5, 2, 7, 11});
  SaveAll({5, 2, 7, 11});
  Forget();
  LoadAll(Leases(0, 2), {0, 15, 3, 4}, 0);
  ExpectOnly({0, 15, 3, 4});
}

TEST_F(PagesTest, ALoadThatBeginsWithinAChunkLeavesTheBlocksBeforeAlone) {
  Fill({5, 2, 7, 11});
  SaveAll({5, 2, 7, 11});
  Forget();
  LoadAll(Leases(0, 2), {9, 8, 1}, 1);
  ExpectOnly({9, 8, 1}, 1);
}

TEST_F(PagesTest, ALoadMayEndWithinAChunk) {
  Fill({5, 2, 7, 11});
  SaveAll({5, 2, 7, 11});
  Forget();
  LoadAll(Leases(1, 1), {6}, 2);
  ExpectOnly({6}, 2);
}

TEST_F(PagesTest, WhatWasThereAlreadyIsNotCountedAsCopied) {
  Fill({5, 2, 7, 11});
  SaveAll({5, 2});
  const std::vector<int32_t> blocks = {5, 2, 7, 11};
  const std::vector<int32_t> size = {4};
  const std::vector<int32_t> first = {0};
  ASSERT_TRUE(pages_->Save(1, Infos(2), Of(blocks, size, first)).has_value());
  const std::vector<Done> done = Finished();
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].bytes, pages_->payload_bytes(0));
  EXPECT_EQ(done[0].written, 1U);
  EXPECT_EQ(done[0].existed, 1U);
  EXPECT_EQ(done[0].declined, 0U);
}

TEST_F(PagesTest, ASaveThatIsNotTakenIsDone) {
  std::vector<int32_t> blocks(kBlocks);
  std::iota(blocks.begin(), blocks.end(), 0);
  Fill(blocks);
  client_->Close(Soon());
  const std::vector<int32_t> size = {kBlocks};
  const std::vector<int32_t> first = {0};
  ASSERT_TRUE(pages_->Save(1, Infos(kBlocks / kBlocksPerChunk), Of(blocks, size, first)).has_value());
  const uint64_t job = 1;
  pages_->Wait({&job, 1});
  const std::vector<Done> done = Finished();
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].declined, kBlocks / kBlocksPerChunk);
  EXPECT_EQ(done[0].bytes, 0U);
}

TEST_F(PagesTest, PagesThatAreCopiedAreNotWaitedForUntilTheirChunksAreCommitted) {
  pages_.reset();
  client_.reset();
  Open(&hashing_);
  Fill({5, 2});
  const std::vector<int32_t> blocks = {5, 2};
  const std::vector<int32_t> size = {2};
  const std::vector<int32_t> first = {0};
  ASSERT_TRUE(pages_->Save(1, Infos(1), Of(blocks, size, first)).has_value());
  const uint64_t job = 1;
  pages_->Wait({&job, 1});
  EXPECT_TRUE(pages_->Finished().empty()) << "nobody has hashed it";
  Forget();  // vLLM has its pages back.
  const std::vector<Done> done = Finished();
  ASSERT_EQ(done.size(), 1U);
  EXPECT_EQ(done[0].declined, 0U);
  LoadAll(Leases(0, 1), {0, 15}, 0);
  ExpectOnly({0, 15});
}

TEST_F(PagesTest, BlocksOutsideTheTensorAreRefused) {
  const std::vector<int32_t> ids = {0, kBlocks};
  const std::vector<int32_t> size = {2};
  const std::vector<int32_t> first = {0};
  EXPECT_EQ(pages_->Save(1, Infos(1), Of(ids, size, first)).error().code, Code::kInvalid);
  EXPECT_TRUE(pages_->Finished().empty());
}

TEST_F(PagesTest, BlocksThatDoNotMakeTheChunksGivenAreRefused) {
  const std::vector<int32_t> ids = {0, 1, 2};
  const std::vector<int32_t> size = {3};
  const std::vector<int32_t> first = {0};
  EXPECT_EQ(pages_->Save(1, Infos(1), Of(ids, size, first)).error().code, Code::kInvalid);
  EXPECT_EQ(pages_->Save(1, Infos(2), Of(ids, size, first)).error().code, Code::kInvalid) << "the last is not whole";
}

TEST_F(PagesTest, APageLargerThanItsBlockIsRefused) {
  std::byte memory[16];
  const auto pages = Pages::Create(client_, {{memory, 8, 2}}, {{{0, 9}}}, 1);
  ASSERT_FALSE(pages.has_value());
  EXPECT_EQ(pages.error().code, Code::kInvalid);
}

}  // namespace
}  // namespace terrace::pages
