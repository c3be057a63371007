#include "node/segment_lender.h"

#include <algorithm>
#include <utility>

namespace terrace {
namespace {

constexpr uint64_t kPage = 4096;
constexpr uint64_t kChunks = 2;  // One is filled while the other is on its way.

}  // namespace

SegmentLender::Granted SegmentLender::Lend(Session& session, uint64_t wanted, uint64_t chunk_bytes) {
  if (session.segments.size() >= bounds_.segments_max) return {};
  // Half of what is free, if some chunks fit: others come, too.
  const uint64_t free = bounds_.bytes_max - bytes_;
  const uint64_t some_chunks = chunk_bytes > free / kChunks ? free : kChunks * chunk_bytes;
  const uint64_t fair = std::max(free / 2, some_chunks);
  const uint64_t bytes = std::min({wanted, fair, bounds_.segment_bytes_max}) / kPage * kPage;
  if (bytes == 0 || bytes < chunk_bytes) return {};
  Result<Fd> memory = NewSharedMemory("terrace-segment", bytes);
  std::shared_ptr<Mapping> mapping = memory ? Mapping::Map(memory->get(), bytes, false) : nullptr;
  if (!mapping) return {};
  session.segments.emplace(++last_handle_, std::move(mapping));
  session.segments_bytes += bytes;
  bytes_ += bytes;
  return {.handle = last_handle_, .bytes = bytes, .memory = std::make_shared<const Fd>(*std::move(memory))};
}

std::optional<SegmentLender::Filled> SegmentLender::Find(const Session& session, const wire::CommitItem& item) {
  const auto it = session.segments.find(item.segment);
  if (it == session.segments.end()) return std::nullopt;
  const std::span<const std::byte> all = it->second->bytes();
  if (item.offset > all.size() || item.info.payload_bytes > all.size() - item.offset) return std::nullopt;
  return Filled{all.subspan(item.offset, item.info.payload_bytes), it->second};
}

}  // namespace terrace
