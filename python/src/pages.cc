#include "pages.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <string>
#include <utility>

namespace terrace::pages {
namespace {

using std::chrono::steady_clock;

// For copies into RAM. Beyond this whoever makes them hangs, and what is not copied yet is given up.
constexpr std::chrono::seconds kFlushMax{10};

double SecondsSince(TimePoint begun) { return std::chrono::duration<double>(steady_clock::now() - begun).count(); }

}  // namespace

class Pages::Reading {
 public:
  // To be given to the client as the owner of the pages: it drops that with its last copy.
  static std::shared_ptr<const void> Owner(const std::shared_ptr<Reading>& reading) {
    return {reading.get(), [reading](const void*) {
              {
                std::lock_guard lock(reading->mutex_);
                reading->over_ = true;
              }
              reading->changed_.notify_all();
            }};
  }
  bool Wait(TimePoint deadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return over_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool over_ = false;  // Guarded by mutex_.
};

Result<std::unique_ptr<Pages>> Pages::Create(std::shared_ptr<Client> client, std::vector<Tensor> tensors,
                                             std::vector<std::vector<Part>> groups, size_t blocks_per_chunk) {
  if (blocks_per_chunk == 0) return Fail(Code::kInvalid, "a chunk of 0 blocks");
  for (const auto& parts : groups) {
    if (parts.empty()) return Fail(Code::kInvalid, "a group without pages");
    for (const Part& part : parts) {
      if (part.tensor >= tensors.size()) return Fail(Code::kInvalid, "a part of tensor " + std::to_string(part.tensor));
      if (part.bytes == 0 || part.bytes > tensors[part.tensor].stride) {
        return Fail(Code::kInvalid, "a page of " + std::to_string(part.bytes) + " bytes in a block of " +
                                        std::to_string(tensors[part.tensor].stride));
      }
    }
  }
  return std::unique_ptr<Pages>(new Pages(std::move(client), std::move(tensors), std::move(groups), blocks_per_chunk));
}

Pages::Pages(std::shared_ptr<Client> client, std::vector<Tensor> tensors, std::vector<std::vector<Part>> groups,
             size_t blocks_per_chunk)
    : client_(std::move(client)),
      tensors_(std::move(tensors)),
      groups_(std::move(groups)),
      blocks_per_chunk_(blocks_per_chunk) {
  for (const auto& parts : groups_) {
    uint64_t bytes = 0;
    for (const Part& part : parts) bytes += part.bytes * blocks_per_chunk_;
    payload_bytes_.push_back(bytes);
  }
  thread_ = std::thread([this] { Run(); });
}

Pages::~Pages() {
  for (const SaveJob& save : saves_) {
    save.call->Cancel();
    save.reading->Wait(TimePoint::max());  // Ends with the copy under way: the pages are the caller's again.
  }
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

Result<std::vector<Pages::Place>> Pages::Places(const Blocks& blocks, size_t chunks) const {
  if (blocks.group_sizes.size() != groups_.size() || blocks.first_indices.size() != groups_.size()) {
    return Fail(Code::kInvalid, "blocks of " + std::to_string(blocks.group_sizes.size()) + " groups instead of " +
                                    std::to_string(groups_.size()));
  }
  std::vector<Place> places;
  size_t at = 0;     // In blocks.ids.
  size_t chunk = 0;  // Chunks before this group's.
  for (size_t g = 0; g < groups_.size(); ++g) {
    if (blocks.group_sizes[g] < 0 || blocks.first_indices[g] < 0) return Fail(Code::kInvalid, "a negative count");
    const auto size = static_cast<size_t>(blocks.group_sizes[g]);
    if (size == 0) continue;
    if (size > blocks.ids.size() - at) return Fail(Code::kInvalid, "groups have more blocks than are listed");
    const std::span<const int32_t> ids = blocks.ids.subspan(at, size);
    const size_t skip = static_cast<size_t>(blocks.first_indices[g]) % blocks_per_chunk_;
    const size_t group_chunks = (skip + size + blocks_per_chunk_ - 1) / blocks_per_chunk_;
    for (size_t c = 0; c < group_chunks; ++c) {
      const size_t first = c == 0 ? skip : 0;
      const size_t last = std::min(blocks_per_chunk_, skip + size - c * blocks_per_chunk_);
      size_t offset = 0;
      for (const Part& part : groups_[g]) {
        const Tensor& tensor = tensors_[part.tensor];
        for (size_t b = first; b < last; ++b) {
          const int32_t id = ids[c * blocks_per_chunk_ + b - skip];
          if (id < 0 || static_cast<size_t>(id) >= tensor.blocks) {
            return Fail(Code::kInvalid,
                        "block " + std::to_string(id) + " of " + std::to_string(tensor.blocks) + " in the tensor");
          }
          places.push_back({.chunk = chunk + c,
                            .offset = offset + b * part.bytes,
                            .page = tensor.base + static_cast<size_t>(id) * tensor.stride,
                            .bytes = part.bytes});
        }
        offset += part.bytes * blocks_per_chunk_;
      }
    }
    at += size;
    chunk += group_chunks;
  }
  if (at != blocks.ids.size() || chunk != chunks) {
    return Fail(Code::kInvalid,
                "the blocks make " + std::to_string(chunk) + " chunks, and " + std::to_string(chunks) + " are given");
  }
  return places;
}

Result<void> Pages::Load(uint64_t job, std::vector<terrace::Lease> leases, const Blocks& blocks) {
  Result<std::vector<Place>> places = Places(blocks, leases.size());
  if (!places) return Fail(places.error(), "load");
  LoadJob load{.job = job, .begun = steady_clock::now()};
  load.copies.reserve(places->size());
  for (const Place& place : *places) {
    const std::span<const std::byte> payload = leases[place.chunk].bytes;
    if (place.offset + place.bytes > payload.size()) return Fail(Code::kInvalid, "load: a payload is too short");
    load.copies.push_back({place.page, payload.data() + place.offset, place.bytes});
    load.bytes += place.bytes;
  }
  load.leases = std::move(leases);
  {
    std::lock_guard lock(mutex_);
    unfinished_.insert(job);
    loads_.push_back(std::move(load));
  }
  changed_.notify_all();
  return {};
}

Result<void> Pages::Save(uint64_t job, std::vector<FrameInfo> infos, const Blocks& blocks) {
  Result<std::vector<Place>> places = Places(blocks, infos.size());
  if (!places) return Fail(places.error(), "save");
  std::vector<SaveChunk> chunks(infos.size());
  for (size_t i = 0; i < infos.size(); ++i) chunks[i].info = std::move(infos[i]);
  std::vector<uint64_t> bytes(chunks.size());
  for (const Place& place : *places) {
    chunks[place.chunk].from.emplace_back(place.page, place.bytes);
    bytes[place.chunk] += place.bytes;
  }
  for (size_t i = 0; i < chunks.size(); ++i) {
    if (bytes[i] != chunks[i].info.payload_bytes) {
      return Fail(Code::kInvalid, "save: blocks of " + std::to_string(bytes[i]) + " bytes for a chunk of " +
                                      std::to_string(chunks[i].info.payload_bytes));
    }
  }
  SaveJob save{.job = job, .chunk_bytes = std::move(bytes), .begun = steady_clock::now()};
  save.reading = std::make_shared<Reading>();
  save.call = client_->Save(std::move(chunks), Reading::Owner(save.reading));
  saves_.push_back(std::move(save));
  return {};
}

std::vector<Done> Pages::Finished() {
  std::vector<Done> finished;
  {
    std::lock_guard lock(mutex_);
    finished = std::exchange(done_, {});
  }
  std::erase_if(saves_, [&finished](const SaveJob& save) {
    if (!save.call->done()) return false;
    Done done{.job = save.job, .seconds = SecondsSince(save.begun)};
    for (size_t i = 0; i < save.call->size(); ++i) {
      const auto chunk = save.call->Poll(i);
      if (chunk->outcome != Outcome::kHit) {
        ++done.declined;
      } else if (chunk->existed) {
        ++done.existed;
      } else {
        ++done.written;
        done.bytes += save.chunk_bytes[i];
      }
    }
    finished.push_back(done);
    return true;
  });
  return finished;
}

void Pages::Wait(std::span<const uint64_t> jobs) {
  const TimePoint deadline = steady_clock::now() + kFlushMax;
  for (const uint64_t job : jobs) {
    const auto save = std::ranges::find(saves_, job, &SaveJob::job);
    if (save != saves_.end()) {
      if (!save->reading->Wait(deadline)) {
        save->call->Cancel();
        save->reading->Wait(TimePoint::max());
      }
      continue;
    }
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !unfinished_.contains(job); });  // A copy in memory: it ends.
  }
}

void Pages::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [&] { return stop_ || !loads_.empty(); });
    if (loads_.empty()) return;  // What was begun is ended first.
    LoadJob load = std::move(loads_.front());
    loads_.pop_front();
    lock.unlock();
    for (const Copy& copy : load.copies) std::memcpy(copy.to, copy.from, copy.bytes);
    load.leases.clear();
    lock.lock();
    unfinished_.erase(load.job);
    done_.push_back({.job = load.job, .bytes = load.bytes, .seconds = SecondsSince(load.begun)});
    changed_.notify_all();
  }
}

}  // namespace terrace::pages
