// terrace_kv._native: the client library (terrace/client.h) for Python, call by call, and vLLM's pages.
//
// Nothing here decides anything. Calls that may block let other Python threads run, and no thread of the library ever
// waits for the interpreter: what it lets go of is left for a thread that has the interpreter anyway. Memory that is
// handed in is held, so that it stays where it is, until its call is settled. Errors are exceptions: TypeError for what
// can't be meant, ValueError for what the caller can mend, else RuntimeError.
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
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
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

constexpr double kSecondsMax = 1e9;   // Longer is for ever; more would not fit a time point.
constexpr double kCloseSeconds = 30;  // Of a `with`, and what close() takes if it is not told.

[[noreturn]] void Raise(const Error& error) {
  if (error.code == Code::kInvalid) throw nb::value_error(error.what.c_str());
  throw std::runtime_error(error.what);
}

template <class T>
T Take(Result<T> result) {
  if (!result) Raise(result.error());
  if constexpr (!std::is_void_v<T>) return std::move(*result);
}

double Bounded(double seconds) { return std::isnan(seconds) ? 0 : std::clamp(seconds, 0.0, kSecondsMax); }

TimePoint In(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<TimePoint::duration>(std::chrono::duration<double>(Bounded(seconds)));
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

std::string TypeOf(nb::handle object) { return nb::cast<std::string>(nb::type_name(object.type())); }

// ---- Memory of Python objects

// What a call reads or writes. Made, cleared and destroyed by a thread that has the interpreter.
class Memory {
 public:
  Memory() = default;
  ~Memory() { Clear(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // The bytes of `object`, as they lie in memory; `what` names it for the error.
  std::span<std::byte> Add(nb::handle object, bool writable, const std::string& what) {
    nb::object source = nb::borrow(object);
    if (TakeView(source, writable)) return LastView();
    // NumPy lends no type that the buffer protocol has no letter for (dates, those of ml_dtypes), but views it as
    // bytes.
    if (nb::hasattr(source, "__array_interface__") && nb::hasattr(source, "view")) {
      try {
        source = source.attr("view")("u1");
      } catch (nb::python_error&) {
      }
      if (TakeView(source, writable)) return LastView();
    } else if (writable) {
      if (nb::ndarray<nb::c_contig, nb::device::cpu> array; nb::try_cast(source, array, false)) {
        tensors_.push_back(std::make_shared<decltype(array)>(array));
        return {static_cast<std::byte*>(array.data()), array.nbytes()};
      }
    } else if (nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu> array; nb::try_cast(source, array, false)) {
      tensors_.push_back(std::make_shared<decltype(array)>(array));
      return {static_cast<std::byte*>(const_cast<void*>(array.data())), array.nbytes()};  // Only read.
    }
    throw nb::type_error((what + ": not " + (writable ? "writable " : "") +
                          "memory in one piece (C-contiguous, of the CPU): " + TypeOf(object))
                             .c_str());
  }
  void Clear() {
    for (Py_buffer& view : views_) PyBuffer_Release(&view);
    views_.clear();
    tensors_.clear();
  }

 private:
  bool TakeView(nb::handle object, bool writable) {
    if (!PyObject_CheckBuffer(object.ptr())) return false;
    Py_buffer& view = views_.emplace_back();
    if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) == 0) return true;
    PyErr_Clear();
    views_.pop_back();
    return false;
  }
  std::span<std::byte> LastView() const {
    return {static_cast<std::byte*>(views_.back().buf), static_cast<size_t>(views_.back().len)};
  }

  std::deque<Py_buffer> views_;  // Each stays where it is.
  std::vector<std::shared_ptr<void>> tensors_;
};

// What threads of the library have let go of, until a thread has the interpreter. Never freed: threads outlive modules.
struct Leftovers {
  std::mutex mutex;
  std::vector<Memory*> memory;  // Guarded by mutex.
  bool asked = false;           // Guarded by mutex. The interpreter will call Free.
  bool ended = false;           // Guarded by mutex. The interpreter ends; what is left stays.

  void Add(Memory* let_go) {
    std::lock_guard lock(mutex);
    memory.push_back(let_go);
    // One at a time: the interpreter's queue is short. Python 3.11 may look at it late; the next load or save frees,
    // too.
    if (!asked && !ended) asked = Py_AddPendingCall(&Asked, this) == 0;
  }
  void Free() {
    std::vector<Memory*> gone;
    {
      std::lock_guard lock(mutex);
      gone.swap(memory);
    }
    for (const Memory* one : gone) delete one;
  }
  static int Asked(void* self) {
    auto* const leftovers = static_cast<Leftovers*>(self);
    {
      std::lock_guard lock(leftovers->mutex);
      leftovers->asked = false;
    }
    leftovers->Free();
    return 0;
  }
  void End() {
    std::lock_guard lock(mutex);
    ended = true;
  }
};
Leftovers& leftovers = *new Leftovers;

std::shared_ptr<Memory> NewMemory() {
  leftovers.Free();
  return {new Memory, [](Memory* let_go) { leftovers.Add(let_go); }};
}

// Ids of tokens or blocks out of an array or a sequence of integers.
std::vector<int32_t> Ids(nb::handle object, const char* what) {
  const auto refuse = [&](const std::string& why) { throw nb::type_error((std::string(what) + ": " + why).c_str()); };
  const auto checked = [&](int64_t id) {
    if (id >= 0 && id <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(id);
    throw nb::value_error((std::string(what) + ": ids are from 0 to 2147483647").c_str());
  };
  std::vector<int32_t> ids;
  const bool text = PyUnicode_Check(object.ptr()) || PyBytes_Check(object.ptr()) || PyByteArray_Check(object.ptr());
  if (nb::ndarray<nb::ro, nb::device::cpu> array; !text && nb::try_cast(object, array, false)) {
    const nb::dlpack::dtype type = array.dtype();
    const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
    const bool is_signed = code == nb::dlpack::dtype_code::Int;
    if (array.ndim() != 1 || type.lanes != 1 || (!is_signed && code != nb::dlpack::dtype_code::UInt)) {
      refuse("not an array of integers, of one dimension");
    }
    ids.reserve(array.shape(0));
    const size_t bytes = type.bits / 8;
    const auto* const first = static_cast<const std::byte*>(array.data());
    const auto step = array.stride(0) * static_cast<int64_t>(bytes);
    for (size_t i = 0; i < array.shape(0); ++i) {
      uint64_t bits = 0;  // Little-endian, as all that this is built for.
      std::memcpy(&bits, first + static_cast<int64_t>(i) * step, bytes);
      const unsigned unused = 64 - type.bits;
      // The sign is where it is of the type's size. Above 2^63 it is out of range either way.
      ids.push_back(checked(is_signed ? static_cast<int64_t>(bits << unused) >> unused : static_cast<int64_t>(bits)));
    }
    return ids;
  }
  if (text || !PySequence_Check(object.ptr())) refuse("not a sequence of integers: " + TypeOf(object));
  for (const nb::handle item : object) {
    const nb::object index = nb::steal(PyNumber_Index(item.ptr()));
    if (!index.is_valid()) {
      PyErr_Clear();
      refuse("not an integer: " + TypeOf(item));
    }
    int overflow = 0;
    const int64_t id = PyLong_AsLongLongAndOverflow(index.ptr(), &overflow);
    ids.push_back(checked(overflow == 0 ? id : -1));
  }
  return ids;
}

// ---- What a call is about

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
  void Extend(nb::handle tokens) {
    const std::vector<int32_t> ids = Ids(tokens, "tokens");
    tokens_.insert(tokens_.end(), ids.begin(), ids.end());
    chain_.Extend(tokens_);
  }
  size_t tokens() const { return tokens_.size(); }
  const std::vector<Digest>& keys() const { return chain_.keys(); }
  const Digest& space() const { return chain_.space(); }
  nb::bytes Key(int64_t i) const {
    const auto size = static_cast<int64_t>(keys().size());
    if (i < -size || i >= size) throw nb::index_error("the chain has fewer chunks");
    return ToBytes(keys()[static_cast<size_t>(i < 0 ? i + size : i)]);
  }
  std::string Repr() const {
    return "<Chain of " + std::to_string(keys().size()) + " chunks of " + std::to_string(chain_.chunk_tokens()) +
           " tokens, " + std::to_string(tokens_.size()) + " tokens in all, space " + space().Hex().substr(0, 8) + ">";
  }

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

// What Python code holds of a client. The last holder closes it, and lets other Python threads run meanwhile.
template <class T>
struct Holder {
  explicit Holder(std::shared_ptr<T> to_hold) : held(std::move(to_hold)) {}
  ~Holder() {
    const nb::gil_scoped_release free;
    held.reset();
  }
  Holder(const Holder&) = delete;
  Holder& operator=(const Holder&) = delete;
  T* operator->() const { return held.get(); }
  std::shared_ptr<T> held;
};
using PyClient = Holder<Client>;

// A call under way, and the memory that it uses. That is free once all items are settled.
template <class Item>
class PyCall {
 public:
  explicit PyCall(std::shared_ptr<CallOf<Item>> call, std::shared_ptr<Memory> memory = nullptr)
      : call_(std::move(call)), memory_(std::move(memory)) {}

  size_t size() const { return call_->size(); }
  bool done() const { return Freed(call_->done()); }
  bool Wait(double timeout) const {
    const TimePoint deadline = In(timeout);
    bool done = false;
    {
      const nb::gil_scoped_release free;
      done = call_->Wait(deadline);
    }
    return Freed(done);
  }
  void Cancel() const {
    const nb::gil_scoped_release free;
    call_->Cancel();
  }
  std::optional<Item> Poll(size_t index) const {
    if (index >= size()) throw nb::index_error("the call has fewer items");
    done();
    const Item* item = call_->Poll(index);
    return item ? std::optional<Item>(*item) : std::nullopt;
  }
  size_t settled() const {
    size_t settled = 0;
    for (size_t i = 0; i < size(); ++i) settled += call_->Poll(i) != nullptr;
    return settled;
  }

 private:
  bool Freed(bool done) const {
    leftovers.Free();
    if (done && memory_) memory_->Clear();
    return done;
  }

  std::shared_ptr<CallOf<Item>> call_;
  std::shared_ptr<Memory> memory_;  // The library may have it a little longer, and does not use it.
};

LoadRequest Request(const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
                    double timeout) {
  return {
      .space = chain.space(), .keys = chain.Keys(first, last), .payload_bytes = payload_bytes, .deadline = In(timeout)};
}

PyCall<LoadedChunk> LoadInto(PyClient& self, const Chain& chain, size_t first, const nb::sequence& into,
                             double timeout) {
  const std::shared_ptr<Memory> memory = NewMemory();
  std::vector<std::span<std::byte>> buffers;
  for (const nb::handle buffer : into) {
    buffers.push_back(memory->Add(buffer, true, "buffer " + std::to_string(buffers.size())));
    if (buffers.back().empty()) throw nb::value_error("an empty buffer");
    if (buffers.back().size() != buffers[0].size()) throw nb::value_error("buffers of different sizes");
  }
  if (buffers.empty()) throw nb::value_error("no buffers to load into");
  if (buffers.size() > chain.keys().size()) throw nb::index_error("the chain has fewer chunks");
  LoadRequest request = Request(chain, first, first + buffers.size(), buffers[0].size(), timeout);
  for (const auto& buffer : buffers) request.into.push_back({buffer});
  // Two chunks in one place would both be hits, and one of them would be gone.
  std::ranges::sort(buffers, {}, &std::span<std::byte>::data);
  for (size_t i = 1; i < buffers.size(); ++i) {
    if (buffers[i].data() < buffers[i - 1].data() + buffers[i - 1].size()) throw nb::value_error("buffers overlap");
  }
  request.owner = memory;
  return PyCall<LoadedChunk>(self->Load(std::move(request)), memory);
}

PyCall<SavedChunk> SaveFrom(PyClient& self, const Chain& chain, size_t first, const nb::sequence& payloads) {
  const std::shared_ptr<Memory> memory = NewMemory();
  std::vector<SaveChunk> chunks;
  for (const nb::handle payload : payloads) {
    const auto bytes = memory->Add(payload, false, "payload " + std::to_string(chunks.size()));
    if (bytes.empty()) throw nb::value_error("an empty payload");
    if (first >= chain.keys().size() || chunks.size() >= chain.keys().size() - first) {
      throw nb::index_error("the chain has fewer chunks");
    }
    chunks.push_back({.info = chain.Info(first + chunks.size(), bytes.size()), .from = {bytes}});
  }
  return PyCall<SavedChunk>(self->Save(std::move(chunks), memory), memory);
}

template <class Item>
void BindCall(nb::module_& m, const char* name, const char* doc) {
  using C = PyCall<Item>;
  nb::class_<C>(m, name, doc)
      .def("__len__", &C::size, "Number of items.")
      .def_prop_ro("done", &C::done, "All items are settled, and the memory that was handed in is free.")
      .def("wait", &C::Wait, "timeout"_a, "Waits for all items, in seconds. False if they are not settled by then.")
      .def("cancel", &C::Cancel,
           "Settles what has not begun as cancelled. What is being copied goes on: see `done` for when memory is free.")
      .def("poll", &C::Poll, "index"_a = 0, "The item, or None if it is not settled.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__",
          [](const C& self, const nb::args&) {
            self.Cancel();
            self.Wait(kSecondsMax);  // Copies alone are left, which end soon.
          },
          "Cancels what has not begun, so that the memory that was handed in is free behind the block.")
      .def("__repr__", [name = std::string(name)](const C& self) {
        return "<" + name + ": " + std::to_string(self.settled()) + " of " + std::to_string(self.size()) + " settled>";
      });
}

void BindPages(nb::module_& m) {
  using pages::Done;
  using pages::Pages;
  using PyPages = Holder<Pages>;
  nb::class_<Done>(m, "Done", "A job of Pages that has ended.")
      .def_ro("job", &Done::job, "Its number.")
      .def_ro("bytes", &Done::bytes, "That were copied.")
      .def_ro("seconds", &Done::seconds, "From its start to its end.")
      .def_ro("written", &Done::written, "Chunks of a save that were handed over.")
      .def_ro("existed", &Done::existed, "Chunks of a save that were there already.")
      .def_ro("declined", &Done::declined, "Chunks of a save that were not taken.");
  nb::class_<PyPages>(m, "Pages", "Copies between vLLM's KV pages and chunks, on threads of its own.")
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
             return new PyPages(
                 Take(Pages::Create(client.held, std::move(in_memory), std::move(parts), blocks_per_chunk)));
           }),
           "client"_a, "tensors"_a, "groups"_a, "blocks_per_chunk"_a,
           "tensors: (address, bytes from block to block, blocks). groups: for each its (tensor, bytes of a page).")
      .def(
          "payload_bytes", [](const PyPages& self, size_t group) { return self->payload_bytes(group); }, "group"_a,
          "Of a chunk of this group.")
      .def(
          "load",
          [](PyPages& self, uint64_t job, const std::vector<Lease>& leases, nb::handle block_ids,
             const std::vector<int32_t>& group_sizes, const std::vector<int32_t>& first_indices) {
            const std::vector<int32_t> ids = Ids(block_ids, "block_ids");
            Take(self->Load(job, leases, {ids, group_sizes, first_indices}));
          },
          "job"_a, "leases"_a, "block_ids"_a, "group_sizes"_a, "first_indices"_a,
          "Begins to copy what is lent to these blocks.")
      .def(
          "save",
          [](PyPages& self, uint64_t job, const std::vector<std::tuple<const Chain*, size_t, size_t>>& chunks,
             nb::handle block_ids, const std::vector<int32_t>& group_sizes, const std::vector<int32_t>& first_indices) {
            const std::vector<int32_t> ids = Ids(block_ids, "block_ids");
            std::vector<FrameInfo> infos;
            for (const auto& [chain, index, group] : chunks) {
              infos.push_back(chain->Info(index, self->payload_bytes(group)));
            }
            Take(self->Save(job, std::move(infos), {ids, group_sizes, first_indices}));
          },
          "job"_a, "chunks"_a, "block_ids"_a, "group_sizes"_a, "first_indices"_a,
          "Begins to save these blocks; chunks: (chain, index in it, group).")
      .def(
          "finished", [](PyPages& self) { return self->Finished(); }, "Jobs that have ended, each told once.")
      .def(
          "wait",
          [](PyPages& self, const std::vector<uint64_t>& jobs) {
            const nb::gil_scoped_release free;
            self->Wait(jobs);
          },
          "jobs"_a, "Until vLLM may use the blocks of these jobs again.");
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
      .def("extend", &Chain::Extend, "tokens"_a,
           "More tokens of the sequence: an array or a sequence of integers from 0 to 2147483647.")
      .def(
          "__len__", [](const Chain& self) { return self.keys().size(); }, "Number of whole chunks, which have keys.")
      .def("__getitem__", &Chain::Key, "index"_a, "Key of a chunk, 32 bytes.")
      .def("__repr__", &Chain::Repr)
      .def_prop_ro("tokens", &Chain::tokens, "Number of tokens so far.");

  nb::class_<Lease>(m, "Lease", "A verified chunk in RAM, which stays as it is until this is dropped.")
      .def_prop_ro(
          "nbytes", [](const Lease& self) { return self.bytes.size(); }, "Length of the payload.")
      .def("__repr__", [](const Lease& self) { return "<Lease of " + std::to_string(self.bytes.size()) + " bytes>"; })
      .def(
          "array",
          [](const Lease& self) {
            auto* const kept = new Lease(self);
            const nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<Lease*>(p); });
            return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(self.bytes.data(), {self.bytes.size()}, owner);
          },
          "The bytes, as a read-only NumPy array.");

  const auto verdict = [](const char* name, const auto& chunk) {
    return "<" + std::string(name) + " " + OutcomeName(chunk.outcome) +
           (chunk.outcome == Outcome::kHit ? "" : std::string(": ") + ReasonName(chunk.reason)) + ">";
  };
  nb::class_<LoadedChunk>(m, "LoadedChunk", "What became of a chunk that was asked for.")
      .def_prop_ro(
          "outcome", [](const LoadedChunk& self) { return OutcomeName(self.outcome); },
          "hit, miss, declined or failed. After anything but a hit the buffer holds bytes of no meaning.")
      .def_prop_ro("hit", [](const LoadedChunk& self) { return self.outcome == Outcome::kHit; })
      .def_prop_ro(
          "reason", [](const LoadedChunk& self) { return ReasonName(self.reason); }, "Why it is no hit.")
      .def_ro("tier", &LoadedChunk::tier, "Where it came from: index into Client.tier_names.")
      .def_prop_ro(
          "lease",
          [](const LoadedChunk& self) { return self.lease.pin ? std::optional<Lease>(self.lease) : std::nullopt; },
          "Of a hit of Client.lease.")
      .def("__repr__", [verdict](const LoadedChunk& self) { return verdict("LoadedChunk", self); });
  nb::class_<SavedChunk>(m, "SavedChunk", "What became of a chunk that was to be saved.")
      .def_prop_ro(
          "outcome", [](const SavedChunk& self) { return OutcomeName(self.outcome); },
          "hit: it is in RAM and on its way to the tiers below. Else declined or failed.")
      .def_prop_ro("hit", [](const SavedChunk& self) { return self.outcome == Outcome::kHit; })
      .def_prop_ro(
          "reason", [](const SavedChunk& self) { return ReasonName(self.reason); }, "Why it is no hit.")
      .def_ro("existed", &SavedChunk::existed, "Nothing had to be written.")
      .def("__repr__", [verdict](const SavedChunk& self) { return verdict("SavedChunk", self); });
  nb::class_<PrefixHit>(m, "PrefixHit", "How much of a chain is known.")
      .def_ro("chunks", &PrefixHit::chunks, "Known from the first on, without a hole.")
      .def_ro("tier", &PrefixHit::tier, "For each of them the fastest that has it: index into Client.tier_names.")
      .def_prop_ro(
          "miss_reason", [](const PrefixHit& self) { return ReasonName(self.miss_reason); },
          "Why the next chunk is not known.")
      .def("__repr__", [](const PrefixHit& self) {
        return "<PrefixHit of " + std::to_string(self.chunks) + " chunks, then " + ReasonName(self.miss_reason) + ">";
      });
  nb::class_<TierStats>(m, "TierStats", "What a tier holds.")
      .def_ro("frames", &TierStats::frames, "Chunks.")
      .def_ro("bytes", &TierStats::bytes, "That they take.")
      .def_ro("bytes_max", &TierStats::bytes_max, "That they may take.")
      .def_ro("available", &TierStats::available, "It answers.")
      .def_ro("why", &TierStats::why, "If not: why.")
      .def("__repr__", [](const TierStats& self) {
        return "<TierStats: " + std::to_string(self.frames) + " chunks, " + std::to_string(self.bytes) + " of " +
               std::to_string(self.bytes_max) + " bytes" + (self.available ? "" : ", " + self.why) + ">";
      });
  nb::class_<ClientStats>(m, "ClientStats", "What a client's store holds.")
      .def_ro("connected", &ClientStats::connected, "False: the node is not there, and nothing else is known.")
      .def_ro("in_process", &ClientStats::in_process, "The store is in this process.")
      .def_ro("degraded", &ClientStats::degraded, "Why a tier is not available; empty if all are.")
      .def_ro("tiers", &ClientStats::tiers, "(name, statistics) of each tier.")
      .def_ro("pending_saves", &ClientStats::pending_saves, "Chunks on their way to the tiers below RAM.")
      .def_ro("leased_bytes", &ClientStats::leased_bytes, "Of RAM, lent to clients.")
      .def_ro("pinned_bytes", &ClientStats::pinned_bytes, "Of RAM, by Client.pin.")
      .def("__repr__", [](const ClientStats& self) {
        std::string text = "<ClientStats: ";
        if (!self.connected) return text + "not connected>";
        for (const auto& [name, tier] : self.tiers) text += name + " " + std::to_string(tier.frames) + " chunks, ";
        return text + std::to_string(self.pending_saves) + " saves pending>";
      });
  BindCall<PrefixHit>(m, "LookupCall", "A look-up under way: one item.");
  BindCall<LoadedChunk>(m, "LoadCall", "Chunks on their way: an item each.");
  BindCall<SavedChunk>(m, "SaveCall", "Chunks on their way down: an item each.");
  BindCall<ClientStats>(m, "StatsCall", "Statistics under way: one item.");

  const auto close = [](PyClient& self, double timeout) {
    const TimePoint deadline = In(timeout);
    const nb::gil_scoped_release free;
    return self->Close(deadline).clean;
  };
  nb::class_<PyClient>(m, "Client", "KV that is kept: by a store in this process, or by a node.")
      .def(nb::new_([](const std::string& node, const std::map<std::string, std::string>& settings) {
             ClientOptions options{.node = node, .settings = {settings.begin(), settings.end()}};
             Result<std::unique_ptr<Client>> client = [&options] {
               const nb::gil_scoped_release free;
               return Client::Open(options);
             }();
             return new PyClient(Take(std::move(client)));
           }),
           "node"_a = "", "settings"_a = nb::dict(),
           "settings: by the names of `terrace serve`; they win over TERRACE_*, TERRACE_CONFIG_FILE and "
           "LMCACHE_CONFIG_FILE.")
      .def_prop_ro(
          "tier_names", [](const PyClient& self) { return self->tier_names(); }, "RAM first.")
      .def_prop_ro(
          "connected", [](const PyClient& self) { return self->connected(); }, "To the node. In process: always.")
      .def(
          "setting", [](const PyClient& self, const std::string& name) { return self->Setting(name); }, "name"_a,
          "A setting's value, wherever it came from; None if it is not set.")
      .def(
          "lookup",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last) {
            return PyCall<PrefixHit>(self->Lookup(chain.Keys(first, last)));
          },
          "chain"_a, "first"_a = 0, "last"_a = nb::none(), "Longest known prefix of these chunks.")
      .def("load", &LoadInto, "chain"_a, "first"_a, "into"_a, "timeout"_a,
           "Chunks from `first` on, one a buffer: writable memory of any type in one piece, all of one size. It is the "
           "call's until that is done.")
      .def(
          "lease",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
             double timeout) {
            return PyCall<LoadedChunk>(self->Lease(Request(chain, first, last, payload_bytes, timeout)));
          },
          "chain"_a, "first"_a, "last"_a, "payload_bytes"_a, "timeout"_a, "Lends chunks where they are, in RAM.")
      .def(
          "prefetch",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
             double timeout) {
            return PyCall<LoadedChunk>(self->Prefetch(Request(chain, first, last, payload_bytes, timeout)));
          },
          "chain"_a, "first"_a, "last"_a, "payload_bytes"_a, "timeout"_a, "Brings chunks into RAM.")
      .def(
          "pin",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last, uint64_t payload_bytes,
             double timeout, double lifetime) {
            return PyCall<LoadedChunk>(self->Pin(Request(chain, first, last, payload_bytes, timeout),
                                                 std::chrono::milliseconds(std::llround(Bounded(lifetime) * 1e3))));
          },
          "chain"_a, "first"_a, "last"_a, "payload_bytes"_a, "timeout"_a, "lifetime"_a,
          "Brings chunks into RAM and keeps them there so many seconds.")
      .def(
          "unpin",
          [](PyClient& self, const Chain& chain, size_t first, std::optional<size_t> last) {
            self->Unpin(chain.Keys(first, last));
          },
          "chain"_a, "first"_a = 0, "last"_a = nb::none(), "Ends what pin began.")
      .def("save", &SaveFrom, "chain"_a, "first"_a, "payloads"_a,
           "Chunks from `first` on, parents first, each out of memory of any type in one piece, which stays unchanged "
           "until the call is done.")
      .def(
          "stats", [](PyClient& self) { return PyCall<ClientStats>(self->Stats()); }, "What the tiers hold.")
      .def("close", close, "timeout"_a = kCloseSeconds,
           "Settles all calls and writes what is queued, until the timeout in seconds. False if something was left.")
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def(
          "__exit__", [close](PyClient& self, const nb::args&) { close(self, kCloseSeconds); },
          "close(), as if it were called without a timeout.")
      .def("__repr__", [](const PyClient& self) {
        std::string tiers;
        for (const std::string& name : self->tier_names()) tiers += (tiers.empty() ? "" : ", ") + name;
        return "<Client " + std::string(self->connected() ? "with " + tiers : "that waits for its node") + ">";
      });

  nb::module_::import_("atexit").attr("register")(nb::cpp_function([] { leftovers.End(); }));
  BindPages(m);
}
