// The C interface. The edge where exceptions end; of ours there are none.
#include "terrace/client_c.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "terrace/client.h"

using terrace::Call;
using terrace::CallOf;
using terrace::Client;
using terrace::Digest;
using terrace::LoadedChunk;
using terrace::PrefixHit;
using terrace::SavedChunk;
using terrace::SaveSegment;

struct terrace_client {
  std::unique_ptr<Client> client;
};

// NOLINTNEXTLINE(readability-identifier-naming): the names of C.
struct terrace_call {
  std::variant<std::shared_ptr<CallOf<PrefixHit>>, std::shared_ptr<CallOf<LoadedChunk>>,
               std::shared_ptr<CallOf<SavedChunk>>, std::shared_ptr<CallOf<SaveSegment>>>
      any;
  const Call& call() const {
    return *std::visit([](const auto& one) -> const Call* { return one.get(); }, any);
  }
  template <class Item>
  const Item* Poll(size_t index) const {
    const auto* one = std::get_if<std::shared_ptr<CallOf<Item>>>(&any);
    return one != nullptr && index < (*one)->size() ? (*one)->Poll(index) : nullptr;
  }
};

namespace {

terrace::TimePoint In(int64_t ms) {
  constexpr int64_t kDay = int64_t{24} * 3600 * 1000;
  return std::chrono::steady_clock::now() + std::chrono::milliseconds(std::clamp<int64_t>(ms, 0, kDay));
}

Digest DigestAt(const uint8_t* bytes) {
  Digest digest;
  std::memcpy(digest.bytes.data(), bytes, digest.bytes.size());
  return digest;
}

std::vector<Digest> KeysOf(const uint8_t* keys, size_t count) {
  std::vector<Digest> digests;
  digests.reserve(count);
  for (size_t i = 0; i < count; ++i) digests.push_back(DigestAt(keys + i * TERRACE_KEY_BYTES));
  return digests;
}

terrace::LoadRequest RequestOf(const terrace_load& load) {
  terrace::LoadRequest request{.space = DigestAt(load.space),
                               .keys = KeysOf(load.keys, load.key_count),
                               .payload_bytes = load.payload_bytes,
                               .deadline = In(load.deadline_ms)};
  for (size_t i = 0; load.into != nullptr && i < load.key_count; ++i) {
    request.into.push_back({{static_cast<std::byte*>(load.into[i]), load.payload_bytes}});
  }
  return request;
}

std::vector<terrace::FrameInfo> InfosOf(const terrace_save& save) {
  std::vector<terrace::FrameInfo> infos;
  Digest parent = DigestAt(save.parent);
  for (size_t i = 0; i < save.key_count; ++i) {
    terrace::FrameInfo& info = infos.emplace_back();
    info.space = DigestAt(save.space);
    info.key = DigestAt(save.keys + i * TERRACE_KEY_BYTES);
    info.parent = std::exchange(parent, info.key);
    info.first_token = save.first_token + static_cast<uint32_t>(i) * save.chunk_tokens;
    info.token_count = save.chunk_tokens;
    info.payload_bytes = save.payload_bytes;
  }
  return infos;
}

template <class Item>
terrace_call* Handle(std::shared_ptr<CallOf<Item>> call) {
  return new terrace_call{std::move(call)};
}

// The part that all items have. Nothing: pending.
struct Verdict {
  terrace::Outcome outcome;
  terrace::Reason reason;
};
std::optional<Verdict> VerdictOf(const terrace_call& call, size_t index) {
  if (const auto* hit = call.Poll<PrefixHit>(index)) {
    return Verdict{hit->chunks > 0 ? terrace::Outcome::kHit : terrace::Outcome::kMiss, hit->miss_reason};
  }
  if (const auto* chunk = call.Poll<LoadedChunk>(index)) {
    return Verdict{chunk->outcome, chunk->reason};
  }
  if (const auto* chunk = call.Poll<SavedChunk>(index)) {
    return Verdict{chunk->outcome, chunk->reason};
  }
  if (const auto* room = call.Poll<SaveSegment>(index)) {
    return Verdict{room->outcome, room->reason};
  }
  return std::nullopt;
}

void Tell(const std::string& text, char* out, size_t out_bytes) {
  if (out == nullptr || out_bytes == 0) return;
  out[text.copy(out, out_bytes - 1)] = 0;
}

}  // namespace

extern "C" {

void terrace_log_to(void (*sink)(void* context, int level, const char* line), void* context) {
  terrace::LogTo([sink, context](terrace::LogLevel level, std::string_view line) {
    sink(context, static_cast<int>(level), std::string(line).c_str());
  });
}

terrace_client* terrace_open(const char* node, const char* const* settings, char* error, size_t error_bytes) {
  terrace::ClientOptions options;
  if (node != nullptr) options.node = node;
  for (; settings != nullptr && settings[0] != nullptr && settings[1] != nullptr; settings += 2) {
    options.settings.emplace_back(settings[0], settings[1]);
  }
  try {
    terrace::Result<std::unique_ptr<Client>> client = Client::Open(options);
    if (client) return new terrace_client{*std::move(client)};
    Tell(client.error().what, error, error_bytes);
  } catch (const std::exception& e) {  // Third-party code only, and no memory.
    Tell(e.what(), error, error_bytes);
  }
  return nullptr;
}

void terrace_close(terrace_client* client, int64_t deadline_ms) {
  if (client == nullptr) return;
  client->client->Close(In(deadline_ms));
  delete client;
}

int terrace_connected(const terrace_client* client) { return client->client->connected() ? 1 : 0; }
int terrace_event_fd(const terrace_client* client) { return client->client->event_fd(); }
void terrace_clear_event(terrace_client* client) { client->client->ClearEvent(); }

size_t terrace_chunk_keys(const uint8_t* parent, const int32_t* tokens, size_t count, uint32_t chunk_tokens,
                          uint8_t* keys) {
  if (chunk_tokens == 0) return 0;
  Digest before = DigestAt(parent);
  const size_t chunks = count / chunk_tokens;
  for (size_t i = 0; i < chunks; ++i) {
    before = terrace::ChunkKey(before, {tokens + i * chunk_tokens, chunk_tokens});
    std::memcpy(keys + i * TERRACE_KEY_BYTES, before.bytes.data(), TERRACE_KEY_BYTES);
  }
  return chunks;
}

terrace_call* terrace_lookup(terrace_client* client, const uint8_t* keys, size_t key_count) {
  return Handle(client->client->Lookup(KeysOf(keys, key_count)));
}
terrace_call* terrace_load_into(terrace_client* client, const terrace_load* load) {
  return Handle(client->client->Load(RequestOf(*load)));
}
terrace_call* terrace_lease(terrace_client* client, const terrace_load* load) {
  return Handle(client->client->Lease(RequestOf(*load)));
}
terrace_call* terrace_prefetch(terrace_client* client, const terrace_load* load) {
  return Handle(client->client->Prefetch(RequestOf(*load)));
}
terrace_call* terrace_pin(terrace_client* client, const terrace_load* load, int64_t lifetime_ms) {
  const auto lifetime =
      std::chrono::ceil<std::chrono::milliseconds>(In(lifetime_ms) - std::chrono::steady_clock::now());
  return Handle(client->client->Pin(RequestOf(*load), lifetime));
}
void terrace_unpin(terrace_client* client, const uint8_t* keys, size_t key_count) {
  client->client->Unpin(KeysOf(keys, key_count));
}

terrace_call* terrace_save_from(terrace_client* client, const terrace_save* save) {
  std::vector<terrace::SaveChunk> chunks;
  for (terrace::FrameInfo& info : InfosOf(*save)) {
    const auto* from = static_cast<const std::byte*>(save->from[chunks.size()]);
    chunks.push_back({info, {{from, save->payload_bytes}}});
  }
  return Handle(client->client->Save(std::move(chunks), nullptr));
}
terrace_call* terrace_begin_save(terrace_client* client, const terrace_save* save) {
  return Handle(client->client->BeginSave(InfosOf(*save)));
}
terrace_call* terrace_commit(terrace_client* client, terrace_call* room) {
  std::vector<SaveSegment> segments;
  for (size_t i = 0; i < room->call().size(); ++i) {
    const SaveSegment* segment = room->Poll<SaveSegment>(i);
    segments.push_back(segment != nullptr ? *segment : SaveSegment{});
  }
  return Handle(client->client->Commit(std::move(segments)));
}

int terrace_stats(terrace_client* client, int64_t deadline_ms, char* text, size_t text_bytes) {
  const auto call = client->client->Stats();
  if (!call->Wait(In(deadline_ms)) || !call->Poll(0)->connected) return -1;
  const terrace::ClientStats& stats = *call->Poll(0);
  std::string out = "pending_saves=" + std::to_string(stats.pending_saves) +
                    "\nleased_bytes=" + std::to_string(stats.leased_bytes) +
                    "\npinned_bytes=" + std::to_string(stats.pinned_bytes) +
                    "\nsessions=" + std::to_string(stats.sessions) + "\ndegraded=" + stats.degraded + "\n";
  for (const auto& [name, tier] : stats.tiers) {
    out += name + ".frames=" + std::to_string(tier.frames) + "\n" + name + ".bytes=" + std::to_string(tier.bytes) +
           "\n" + name + ".bytes_max=" + std::to_string(tier.bytes_max) + "\n";
  }
  Tell(out, text, text_bytes);
  return 0;
}

size_t terrace_call_size(const terrace_call* call) { return call->call().size(); }
int terrace_call_wait(const terrace_call* call, int64_t deadline_ms) {
  return call->call().Wait(In(deadline_ms)) ? 1 : 0;
}
int terrace_call_done(const terrace_call* call) { return call->call().done() ? 1 : 0; }
void terrace_call_cancel(terrace_call* call) {
  std::visit([](const auto& one) { one->Cancel(); }, call->any);
}
void terrace_call_free(terrace_call* call) { delete call; }

int terrace_call_outcome(const terrace_call* call, size_t index) {
  const auto verdict = VerdictOf(*call, index);
  return verdict ? static_cast<int>(verdict->outcome) : TERRACE_PENDING;
}
const char* terrace_call_reason(const terrace_call* call, size_t index) {
  const auto verdict = VerdictOf(*call, index);
  return verdict ? terrace::ReasonName(verdict->reason) : "";
}
size_t terrace_call_count(const terrace_call* call) {
  const PrefixHit* hit = call->Poll<PrefixHit>(0);
  return hit != nullptr ? hit->chunks : 0;
}
void* terrace_call_bytes(const terrace_call* call, size_t index) {
  if (const auto* chunk = call->Poll<LoadedChunk>(index)) {
    return const_cast<std::byte*>(chunk->lease.bytes.data());  // C has no const of this kind; to be read only.
  }
  const auto* room = call->Poll<SaveSegment>(index);
  return room != nullptr && !room->bytes.empty() ? room->bytes.data() : nullptr;
}

}  // extern "C"
