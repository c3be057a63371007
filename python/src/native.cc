// terrace_kv._native: the client library (terrace/client.h) for Python, call by call, and vLLM's pages.
//
// Nothing here decides anything. Calls that may block let other Python threads run. A buffer that is handed in is kept
// alive by a reference until its call is settled. Errors are exceptions: ValueError for what the caller can mend, else
// RuntimeError.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "pages.h"
#include "terrace/client.h"
#include "terrace/key.h"
#include "terrace/version.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace terrace::python {
namespace {

using Tokens = nb::ndarray<const int32_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Bytes = nb::ndarray<uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using ConstBytes = nb::ndarray<const uint8_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

constexpr double kSecondsMax = 1e9;  // Longer is for ever; more would not fit a time point.

[[noreturn]] void Raise(const Error& error) {
  if (error.code == Code::kInvalid) throw nb::value_error(error.what.c_str());
  throw std::runtime_error(error.what);
}

template <class T>
T Take(Result<T> result) {
  if (!result) Raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

TimePoint In(double seconds) {
  const double bounded = std::isnan(seconds) ? 0 : std::clamp(seconds, 0.0, kSecondsMax);
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(bounded));
}

Digest ToDigest(const nb::bytes& bytes) {
  Digest digest;
  if (bytes.size() != digest.bytes.size()) throw nb::value_error("a digest has 32 bytes");
  std::memcpy(digest.bytes.data(), bytes.data(), digest.bytes.size());
  return digest;
}
nb::bytes ToBytes(const Digest& digest) { return nb::bytes(digest.bytes.data(), digest.bytes.size()); }

const char* OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kHit: return "hit";
    case Outcome::kMiss: return "miss";
    case Outcome::kDeclined: return "declined";
    case Outcome::kFailed: return "failed";
  }
  return "failed";
}

// Keeps Python objects until a call is settled, which any thread may do.
std::shared_ptr<void> Keep(nb::object object) {
  auto* const kept = new nb::object(std::move(object));
  return {static_cast<void*>(kept), [](void* p) {
            if (!Py_IsInitialized()) return;  // The interpreter is gone, and its objects with it.
            const nb::gil_scoped_acquire gil;
            delete static_cast<nb::object*>(p);
          }};
}

// Where a chunk belongs when several ranks and groups keep KV; their spaces differ, too.
struct Shard {
  uint32_t tp_rank = 0, pp_rank = 0, kv_group = 0;
  bool gaps = false;  // Chunks are saved with gaps between them (a sliding window): each is a chain's first.
};

// The keys of one sequence in one space.
class Chain {
 public:
  Chain(const nb::bytes& space, uint32_t chunk_tokens,
        const std::vector<std::tuple<uint32_t, uint32_t, nb::bytes>>& media, uint32_t tp_rank, uint32_t pp_rank,
        uint32_t kv_group, bool gaps)
      : shard_{tp_rank, pp_rank, kv_group, gaps},
        media_(ToItems(media)),
        chain_(ToDigest(space), Checked(chunk_tokens), media_) {}

  // The same sequence, as another rank keeps it.
  Chain OnRank(const nb::bytes& space, uint32_t tp_rank, uint32_t pp_rank) const {
    Chain other(*this);
    other.shard_.tp_rank = tp_rank;
    other.shard_.pp_rank = pp_rank;
    other.chain_ = KeyChain(ToDigest(space), chain_.chunk_tokens(), media_);
    other.chain_.Extend(tokens_);
    return other;
  }
  void Extend(const Tokens& tokens) {
    tokens_.insert(tokens_.end(), tokens.data(), tokens.data() + tokens.size());
    chain_.Extend(tokens_);
  }
  size_t tokens() const { return tokens_.size(); }
  const std::vector<Digest>& keys() const { return chain_.keys(); }
  const Digest& space() const { return chain_.space(); }
  nb::bytes Key(size_t i) const { return ToBytes(keys().at(i)); }

  // For pickle: what the constructor takes, and the tokens. The keys are hashed anew.
  using Media = std::vector<std::tuple<uint32_t, uint32_t, nb::bytes>>;
  using State = std::tuple<nb::bytes, uint32_t, Media, uint32_t, uint32_t, uint32_t, bool, nb::bytes>;
  State GetState() const {
    Media media;
    for (const MediaItem& item : media_)
      media.emplace_back(item.position, item.length, nb::bytes(item.id.data(), item.id.size()));
    return {ToBytes(space()),
            chain_.chunk_tokens(),
            media,
            shard_.tp_rank,
            shard_.pp_rank,
            shard_.kv_group,
            shard_.gaps,
            nb::bytes(tokens_.data(), tokens_.size() * sizeof(int32_t))};
  }
  static void SetState(Chain& self, const State& state) {
    const auto& [space, chunk_tokens, media, tp_rank, pp_rank, kv_group, gaps, tokens] = state;
    new (&self) Chain(space, chunk_tokens, media, tp_rank, pp_rank, kv_group, gaps);
    self.tokens_.resize(tokens.size() / sizeof(int32_t));
    std::memcpy(self.tokens_.data(), tokens.data(), self.tokens_.size() * sizeof(int32_t));
    self.chain_.Extend(self.tokens_);
  }

  std::vector<Digest> Keys(size_t first, std::optional<size_t> last) const {
    const size_t end = last.value_or(keys().size());
    if (first > end || end > keys().size()) throw nb::index_error("the chain has fewer chunks");
    return {keys().begin() + static_cast<ptrdiff_t>(first), keys().begin() + static_cast<ptrdiff_t>(end)};
  }
  FrameInfo Info(size_t i, uint64_t payload_bytes) const {
    return {.space = chain_.space(),
            .key = keys().at(i),
            .parent = shard_.gaps ? chain_.space() : chain_.parent(i),
            .first_token = static_cast<uint32_t>(i) * chain_.chunk_tokens(),
            .token_count = chain_.chunk_tokens(),
            .tp_rank = shard_.tp_rank,
            .pp_rank = shard_.pp_rank,
            .kv_group = shard_.kv_group,
            .payload_bytes = payload_bytes};
  }

 private:
  static uint32_t Checked(uint32_t chunk_tokens) {
    if (chunk_tokens == 0) throw nb::value_error("a chunk of 0 tokens");
    return chunk_tokens;
  }
  static std::vector<MediaItem> ToItems(const std::vector<std::tuple<uint32_t, uint32_t, nb::bytes>>& media) {
    std::vector<MediaItem> items;
    uint64_t end = 0;
    for (const auto& [position, length, id] : media) {
      if (position < end) throw nb::value_error("media items overlap, or are not in order");
      end = uint64_t{position} + length;
      items.push_back({position, length, std::string(id.c_str(), id.size())});
    }
    return items;
  }

  Shard shard_;
  std::vector<MediaItem> media_;
  std::vector<int32_t> tokens_;
  KeyChain chain_;
};

nb::bytes PySpaceId(const nb::bytes& weights, const std::string& engine, uint32_t engine_state_version,
                    const std::string& engine_build, const std::string& kv_dtype_k, const std::string& kv_dtype_v,
                    uint32_t layers, uint32_t kv_heads, uint32_t head_size, uint32_t head_size_v,
                    const std::string& layout, const std::string& attention, const std::string& rope_type,
                    double rope_freq_base, double rope_freq_scale, double rope_ext_factor, double rope_attn_factor,
                    double rope_beta_fast, double rope_beta_slow, uint32_t rope_orig_context,
                    const std::vector<std::pair<nb::bytes, double>>& adapters, uint32_t tp_size, uint32_t tp_rank,
                    uint32_t pp_size, uint32_t pp_rank, uint32_t kv_group, uint32_t chunk_tokens,
                    const std::string& salt) {
  SpaceFields fields{.weights = ToDigest(weights),
                     .engine = engine,
                     .engine_state_version = engine_state_version,
                     .engine_build = engine_build,
                     .kv_dtype_k = kv_dtype_k,
                     .kv_dtype_v = kv_dtype_v,
                     .layers = layers,
                     .kv_heads = kv_heads,
                     .head_size = head_size,
                     .head_size_v = head_size_v,
                     .layout = layout,
                     .attention = attention,
                     .rope_type = rope_type,
                     .rope_freq_base = rope_freq_base,
                     .rope_freq_scale = rope_freq_scale,
                     .rope_ext_factor = rope_ext_factor,
                     .rope_attn_factor = rope_attn_factor,
                     .rope_beta_fast = rope_beta_fast,
                     .rope_beta_slow = rope_beta_slow,
                     .rope_orig_context = rope_orig_context,
                     .tp_size = tp_size,
                     .tp_rank = tp_rank,
                     .pp_size = pp_size,
                     .pp_rank = pp_rank,
                     .kv_group = kv_group,
                     .chunk_tokens = chunk_tokens,
                     .salt = salt};
  for (const auto& [content, scale] : adapters) fields.adapters.push_back({ToDigest(content), scale});
  return ToBytes(SpaceId(fields));
}

// A client that Python code holds. Closed by the last reference at the latest.
struct PyClient {
  std::shared_ptr<Client> client;
};

LoadRequest Request(const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
                    double timeout) {
  return {
      .space = chain.space(), .keys = chain.Keys(first, last), .payload_bytes = payload_bytes, .deadline = In(timeout)};
}

std::shared_ptr<CallOf<LoadedChunk>> LoadInto(PyClient& self, const Chain& chain, size_t first,
                                              const std::vector<Bytes>& into, double timeout) {
  if (into.empty()) throw nb::value_error("no buffers to load into");
  LoadRequest request = Request(chain, first, first + into.size(), into[0].size(), timeout);
  for (const Bytes& buffer : into) {
    if (buffer.size() != request.payload_bytes) throw nb::value_error("buffers of different sizes");
    request.into.push_back({std::as_writable_bytes(std::span(buffer.data(), buffer.size()))});
  }
  request.owner = Keep(nb::cast(into));
  return self.client->Load(std::move(request));
}

std::shared_ptr<CallOf<SavedChunk>> SaveFrom(PyClient& self, const Chain& chain, size_t first,
                                             const std::vector<ConstBytes>& payloads) {
  if (first > chain.keys().size() || payloads.size() > chain.keys().size() - first) {
    throw nb::index_error("the chain has fewer chunks");
  }
  std::vector<SaveChunk> chunks;
  for (size_t i = 0; i < payloads.size(); ++i) {
    chunks.push_back({.info = chain.Info(first + i, payloads[i].size()),
                      .from = {std::as_bytes(std::span(payloads[i].data(), payloads[i].size()))}});
  }
  return self.client->Save(std::move(chunks), Keep(nb::cast(payloads)));
}

template <class Item>
void BindCall(nb::module_& m, const char* name, const char* doc) {
  using C = CallOf<Item>;
  nb::class_<C>(m, name, doc)
      .def("__len__", &C::size)
      .def_prop_ro("done", &C::done, "All items are settled.")
      .def(
          "wait",
          [](const C& self, double timeout) {
            const TimePoint deadline = In(timeout);
            const nb::gil_scoped_release free;
            return self.Wait(deadline);
          },
          "timeout"_a, "For all items, in seconds. False if they are not settled by then.")
      .def("cancel", &C::Cancel)
      .def(
          "poll",
          [](const C& self, size_t index) -> std::optional<Item> {
            if (index >= self.size()) throw nb::index_error();
            const Item* item = self.Poll(index);
            return item ? std::optional<Item>(*item) : std::nullopt;
          },
          "index"_a = 0, "The item, or None if it is not settled.");
}

void BindPages(nb::module_& m) {
  using pages::Done;
  using pages::Pages;
  nb::class_<Done>(m, "Done", "A job of Pages that has ended.")
      .def_ro("job", &Done::job)
      .def_ro("bytes", &Done::bytes)
      .def_ro("seconds", &Done::seconds)
      .def_ro("declined", &Done::declined);
  nb::class_<Pages>(m, "Pages", "Copies between vLLM's KV pages and chunks, on threads of its own.")
      .def(nb::new_([](const PyClient& client, const std::vector<std::tuple<uintptr_t, size_t, size_t>>& tensors,
                       const std::vector<std::vector<std::pair<size_t, size_t>>>& groups, size_t blocks_per_chunk) {
             std::vector<pages::Tensor> in_memory;
             for (const auto& [address, stride, blocks] : tensors) {
               in_memory.push_back({reinterpret_cast<std::byte*>(address), stride, blocks});
             }
             std::vector<std::vector<pages::Part>> parts;
             for (const auto& group : groups) {
               auto& of_group = parts.emplace_back();
               for (const auto& [tensor, bytes] : group) of_group.push_back({tensor, bytes});
             }
             return Take(Pages::Create(client.client, std::move(in_memory), std::move(parts), blocks_per_chunk));
           }),
           "client"_a, "tensors"_a, "groups"_a, "blocks_per_chunk"_a,
           "tensors: (address, bytes from block to block, blocks). groups: for each its (tensor, bytes of a page).")
      .def("payload_bytes", &Pages::payload_bytes, "group"_a)
      .def(
          "load",
          [](Pages& self, uint64_t job, const std::vector<Lease>& leases, const Tokens& ids,
             const std::vector<int32_t>& group_sizes, const std::vector<int32_t>& first_indices) {
            Take(self.Load(job, leases, {{ids.data(), ids.size()}, group_sizes, first_indices}));
          },
          "job"_a, "leases"_a, "block_ids"_a, "group_sizes"_a, "first_indices"_a)
      .def(
          "save",
          [](Pages& self, uint64_t job, const std::vector<std::tuple<const Chain*, size_t, size_t>>& chunks,
             const Tokens& ids, const std::vector<int32_t>& group_sizes, const std::vector<int32_t>& first_indices) {
            std::vector<FrameInfo> infos;
            for (const auto& [chain, index, group] : chunks) {
              infos.push_back(chain->Info(index, self.payload_bytes(group)));
            }
            Take(self.Save(job, std::move(infos), {{ids.data(), ids.size()}, group_sizes, first_indices}));
          },
          "job"_a, "chunks"_a, "block_ids"_a, "group_sizes"_a, "first_indices"_a,
          "chunks: (chain, index in it, group).")
      .def("finished", &Pages::Finished)
      .def(
          "wait",
          [](Pages& self, const std::vector<uint64_t>& jobs) {
            const nb::gil_scoped_release free;
            self.Wait(jobs);
          },
          "jobs"_a);
}

}  // namespace
}  // namespace terrace::python

NB_MODULE(_native, m) {
  using namespace terrace;
  using namespace terrace::python;
  nb::set_leak_warnings(false);  // An interpreter that ends early frees nothing; that is not for users to read.
  m.attr("__version__") = kVersion;

  m.def("space_id", &PySpaceId, nb::kw_only(), "weights"_a, "engine"_a, "engine_state_version"_a, "engine_build"_a,
        "kv_dtype_k"_a, "kv_dtype_v"_a, "layers"_a, "kv_heads"_a = 0, "head_size"_a = 0, "head_size_v"_a = 0,
        "layout"_a, "attention"_a, "rope_type"_a = "", "rope_freq_base"_a = 0.0, "rope_freq_scale"_a = 0.0,
        "rope_ext_factor"_a = 0.0, "rope_attn_factor"_a = 0.0, "rope_beta_fast"_a = 0.0, "rope_beta_slow"_a = 0.0,
        "rope_orig_context"_a = 0, "adapters"_a = nb::list(), "tp_size"_a = 1, "tp_rank"_a = 0, "pp_size"_a = 1,
        "pp_rank"_a = 0, "kv_group"_a = 0, "chunk_tokens"_a = 256, "salt"_a = "",
        "Id of what must be equal for KV to be shared (docs/internals/keys.md).");

  nb::class_<Chain>(m, "Chain", "The keys of a token sequence in a space.")
      .def(nb::init<const nb::bytes&, uint32_t, const std::vector<std::tuple<uint32_t, uint32_t, nb::bytes>>&, uint32_t,
                    uint32_t, uint32_t, bool>(),
           "space"_a, "chunk_tokens"_a = 256, "media"_a = nb::list(), "tp_rank"_a = 0, "pp_rank"_a = 0,
           "kv_group"_a = 0, "gaps"_a = false, "media: (position, length, id). gaps: chunks are saved singly.")
      .def("on_rank", &Chain::OnRank, "space"_a, "tp_rank"_a, "pp_rank"_a,
           "The same sequence, as another rank keeps it.")
      .def("__getstate__", &Chain::GetState)
      .def("__setstate__", &Chain::SetState)
      .def("extend", &Chain::Extend, "tokens"_a, "More tokens of the sequence, int32.")
      .def("__len__", [](const Chain& self) { return self.keys().size(); })
      .def("__getitem__",
           [](const Chain& self, size_t i) {
             if (i >= self.keys().size()) throw nb::index_error();
             return self.Key(i);
           })
      .def_prop_ro("tokens", &Chain::tokens, "Number of tokens so far.");

  nb::class_<Lease>(m, "Lease", "A verified chunk in RAM, which stays as it is until this is dropped.")
      .def_prop_ro("nbytes", [](const Lease& self) { return self.bytes.size(); })
      .def(
          "array",
          [](const Lease& self) {
            auto* const kept = new Lease(self);
            const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Lease*>(p); });
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.bytes.data(), {self.bytes.size()}, owner);
          },
          "The bytes, as a read-only NumPy array.");

  nb::class_<LoadedChunk>(m, "LoadedChunk")
      .def_prop_ro("outcome", [](const LoadedChunk& self) { return OutcomeName(self.outcome); })
      .def_prop_ro("hit", [](const LoadedChunk& self) { return self.outcome == Outcome::kHit; })
      .def_prop_ro("reason", [](const LoadedChunk& self) { return ReasonName(self.reason); })
      .def_ro("tier", &LoadedChunk::tier)
      .def_prop_ro("lease", [](const LoadedChunk& self) {
        return self.lease.pin ? std::optional<Lease>(self.lease) : std::nullopt;
      });
  nb::class_<SavedChunk>(m, "SavedChunk")
      .def_prop_ro("outcome", [](const SavedChunk& self) { return OutcomeName(self.outcome); })
      .def_prop_ro("hit", [](const SavedChunk& self) { return self.outcome == Outcome::kHit; })
      .def_prop_ro("reason", [](const SavedChunk& self) { return ReasonName(self.reason); })
      .def_ro("existed", &SavedChunk::existed);
  nb::class_<PrefixHit>(m, "PrefixHit")
      .def_ro("chunks", &PrefixHit::chunks)
      .def_ro("tier", &PrefixHit::tier)
      .def_prop_ro("miss_reason", [](const PrefixHit& self) { return ReasonName(self.miss_reason); });
  nb::class_<TierStats>(m, "TierStats")
      .def_ro("frames", &TierStats::frames)
      .def_ro("bytes", &TierStats::bytes)
      .def_ro("bytes_max", &TierStats::bytes_max)
      .def_ro("available", &TierStats::available)
      .def_ro("why", &TierStats::why);
  nb::class_<ClientStats>(m, "ClientStats")
      .def_ro("connected", &ClientStats::connected)
      .def_ro("in_process", &ClientStats::in_process)
      .def_ro("degraded", &ClientStats::degraded)
      .def_ro("tiers", &ClientStats::tiers)
      .def_ro("pending_saves", &ClientStats::pending_saves)
      .def_ro("leased_bytes", &ClientStats::leased_bytes)
      .def_ro("pinned_bytes", &ClientStats::pinned_bytes);
  BindCall<PrefixHit>(m, "LookupCall", "A look-up under way: one item.");
  BindCall<LoadedChunk>(m, "LoadCall", "Chunks on their way: an item each.");
  BindCall<SavedChunk>(m, "SaveCall", "Chunks on their way down: an item each.");
  BindCall<ClientStats>(m, "StatsCall", "Statistics under way: one item.");

  nb::class_<PyClient>(m, "Client", "KV that is kept: by a store in this process, or by a node.")
      .def(nb::new_([](const std::string& node, const std::map<std::string, std::string>& settings) {
             ClientOptions options{.node = node, .settings = {settings.begin(), settings.end()}};
             Result<std::unique_ptr<Client>> client = [&options] {
               const nb::gil_scoped_release free;
               return Client::Open(options);
             }();
             return new PyClient{Take(std::move(client))};
           }),
           "node"_a = "", "settings"_a = nb::dict(),
           "settings: by the names of `terrace serve`; they win over TERRACE_*, TERRACE_CONFIG_FILE and "
           "LMCACHE_CONFIG_FILE.")
      .def_prop_ro("tier_names", [](const PyClient& self) { return self.client->tier_names(); })
      .def_prop_ro("connected", [](const PyClient& self) { return self.client->connected(); })
      .def(
          "setting", [](const PyClient& self, const std::string& name) { return self.client->Setting(name); }, "name"_a,
          "A setting's value, wherever it came from; None if it is not set.")
      .def(
          "lookup",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last) {
            return self.client->Lookup(chain.Keys(first, last));
          },
          "chain"_a, "first"_a = 0, "last"_a = nb::none(), "Longest known prefix of these chunks.")
      .def("load", &LoadInto, "chain"_a, "first"_a, "into"_a, "timeout"_a, "Chunks from `first` on, one a buffer.")
      .def(
          "lease",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
             double timeout) { return self.client->Lease(Request(chain, first, last, payload_bytes, timeout)); },
          "chain"_a, "first"_a, "last"_a, "payload_bytes"_a, "timeout"_a, "Lends chunks where they are, in RAM.")
      .def(
          "prefetch",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
             double timeout) { return self.client->Prefetch(Request(chain, first, last, payload_bytes, timeout)); },
          "chain"_a, "first"_a, "last"_a, "payload_bytes"_a, "timeout"_a, "Brings chunks into RAM.")
      .def(
          "pin",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
             double timeout, double lifetime) {
            return self.client->Pin(Request(chain, first, last, payload_bytes, timeout),
                                    std::chrono::milliseconds(std::llround(std::min(lifetime, kSecondsMax) * 1e3)));
          },
          "chain"_a, "first"_a, "last"_a, "payload_bytes"_a, "timeout"_a, "lifetime"_a,
          "Brings chunks into RAM and keeps them there so many seconds.")
      .def(
          "unpin",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last) {
            self.client->Unpin(chain.Keys(first, last));
          },
          "chain"_a, "first"_a = 0, "last"_a = nb::none())
      .def("save", &SaveFrom, "chain"_a, "first"_a, "payloads"_a, "Chunks from `first` on, parents first.")
      .def("stats", [](PyClient& self) { return self.client->Stats(); })
      .def(
          "close",
          [](PyClient& self, double timeout) {
            const TimePoint deadline = In(timeout);
            const nb::gil_scoped_release free;
            return self.client->Close(deadline).clean;
          },
          "timeout"_a, "Writes what is queued, until the timeout. False if something was left.");

  BindPages(m);
}
