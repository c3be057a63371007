#include "tier/fault_tier.h"

#include <cerrno>
#include <charconv>
#include <map>
#include <utility>

#include "base/assert.h"
#include "base/config.h"
#include "base/log.h"

namespace terrace {
namespace {

// One step of splitmix64: every bit of the result depends on every bit of `x`.
uint64_t Mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

template <class T>
bool ParseNumber(std::string_view text, T& value) {
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size();
}

Error Injected(Code code, const char* fault, const Digest& key, int os_error) {
  return {code, std::string("injected ") + fault + " on " + key.Hex(), os_error};
}

// What waits for a delay or hang. It is shared by the two ends that a job has, of which one happens.
template <class Item, class R>
struct Waiting {
  std::vector<Item> items;
  std::shared_ptr<Batch<R>> done;
  std::vector<size_t> index;  // In `done`, of each item.

  void SettleAll(const R& result) {
    const size_t n = std::exchange(items, {}).size();
    for (size_t i = 0; i < n; ++i) done->Settle(index[i], result);
  }
};

constexpr auto kMissed = [](Reason reason) { return LoadResult{.reason = reason}; };
constexpr auto kDeclined = [](Reason reason) { return SaveResult{.outcome = Outcome::kDeclined, .reason = reason}; };

}  // namespace

Result<FaultSpec> FaultSpec::Parse(std::string_view text) {
  FaultSpec spec;
  const std::map<std::string, Trigger*, std::less<>> triggers = {
      {"load.error", &spec.load_error},     {"load.corrupt", &spec.load_corrupt}, {"load.hang", &spec.load_hang},
      {"save.error", &spec.save_error},     {"save.enospc", &spec.save_enospc},   {"save.hang", &spec.save_hang},
      {"contains.lie", &spec.contains_lie},
  };
  const std::map<std::string, std::chrono::milliseconds*, std::less<>> durations = {
      {"load.delay", &spec.load_delay}, {"save.delay", &spec.save_delay}, {"hang", &spec.hang}};

  while (!text.empty()) {
    const std::string_view term = text.substr(0, text.find(','));
    text.remove_prefix(std::min(text.size(), term.size() + 1));
    const std::string where = "fault \"" + std::string(term) + "\": ";
    const size_t sign = term.find_first_of("=@");
    if (sign == std::string_view::npos) return Fail(Code::kInvalid, where + "write NAME=VALUE or NAME@N");
    const std::string_view name = term.substr(0, sign);
    const std::string_view value = term.substr(sign + 1);
    const bool nth = term[sign] == '@';

    if (const auto trigger = triggers.find(name); trigger != triggers.end()) {
      Trigger& t = *trigger->second;
      if (nth && (!ParseNumber(value, t.at) || t.at == 0)) {
        return Fail(Code::kInvalid, where + "the number of an item, from 1, comes after @");
      }
      if (!nth && (!ParseNumber(value, t.probability) || !(t.probability >= 0 && t.probability <= 1))) {
        return Fail(Code::kInvalid, where + "a probability from 0 to 1 comes after =");
      }
    } else if (const auto duration = durations.find(name); duration != durations.end() && !nth) {
      const Result<int64_t> ms = config::ParseDurationMs(value);
      if (!ms) return Fail(ms.error(), "fault \"" + std::string(term) + "\"");
      *duration->second = std::chrono::milliseconds(*ms);
    } else if (name == "seed" && !nth) {
      if (!ParseNumber(value, spec.seed)) return Fail(Code::kInvalid, where + "a whole number comes after =");
    } else {
      std::vector<std::string> known = {"seed"};
      for (const auto& [k, v] : triggers) known.push_back(k);
      for (const auto& [k, v] : durations) known.push_back(k);
      const auto nearest = config::Nearest(name, known);
      if (nearest == name) return Fail(Code::kInvalid, where + "takes =, not @");
      return Fail(Code::kInvalid, where + "unknown" + (nearest ? "; did you mean \"" + *nearest + "\"?" : ""));
    }
  }
  return spec;
}

FaultTier::FaultTier(std::unique_ptr<Tier> inner, const FaultSpec& spec, Executor& executor)
    : spec_(spec), inner_(std::move(inner)), delayed_(&executor), hung_(&executor) {}

FaultTier::~FaultTier() { Close(TimePoint::min()); }

bool FaultTier::Fires(const FaultSpec::Trigger& trigger, const char* name, uint64_t n, const Digest& key) const {
  if (trigger.at > 0) {
    if (n != trigger.at) return false;
  } else {
    // Each fault draws from a sequence of its own, so that adding one to a specification moves no other.
    uint64_t salt = 0;
    for (const char* c = name; *c; ++c) salt = Mix(salt ^ static_cast<unsigned char>(*c));
    const uint64_t draw = Mix(Mix(spec_.seed ^ salt) ^ n) >> 11;
    if (static_cast<double>(draw) * 0x1p-53 >= trigger.probability) return false;
  }
  log::Info("fault_injected", {{"tier", info().name}, {"fault", name}, {"item", n}, {"key", key.Hex()}});
  return true;
}

void FaultTier::Contains(std::span<const Digest> keys, std::span<uint8_t> present) {
  inner_->Contains(keys, present);
  for (size_t i = 0; i < keys.size(); ++i) {
    const uint64_t n = contained_.fetch_add(1, std::memory_order_relaxed) + 1;
    if (Fires(spec_.contains_lie, "contains.lie", n, keys[i])) present[i] = !present[i];
  }
}

void FaultTier::Load(std::vector<LoadItem> items, TimePoint deadline, std::shared_ptr<LoadBatch> done) {
  TERRACE_ASSERT(items.size() == done->size());
  using Loads = Waiting<LoadItem, LoadResult>;
  auto forward = std::make_shared<Loads>();
  std::vector<size_t> index;
  std::vector<uint8_t> corrupt;
  for (size_t i = 0; i < items.size(); ++i) {
    const uint64_t n = loads_.fetch_add(1, std::memory_order_relaxed) + 1;
    const Digest key = items[i].key;
    if (Fires(spec_.load_hang, "load.hang", n, key)) {
      auto hung = std::make_shared<Loads>(Loads{{}, done, {i}});
      hung->items.push_back(std::move(items[i]));
      hung_.Add({.run = [hung] { hung->SettleAll(kMissed(Reason::kTimeout)); },
                 .drop = [hung] { hung->SettleAll(kMissed(Reason::kCancelled)); }},
                spec_.hang);
    } else if (Fires(spec_.load_error, "load.error", n, key)) {
      items[i] = {};
      done->Settle(i, {.outcome = Outcome::kFailed,
                       .reason = Reason::kUnavailable,
                       .error = Injected(Code::kIo, "load.error", key, EIO)});
    } else {
      forward->index.push_back(index.size());
      index.push_back(i);
      corrupt.push_back(Fires(spec_.load_corrupt, "load.corrupt", n, key));
      forward->items.push_back(std::move(items[i]));
    }
  }
  if (index.empty()) return;

  std::vector<Digest> keys;
  for (const LoadItem& item : forward->items) keys.push_back(item.key);
  forward->done =
      std::make_shared<LoadBatch>(index.size(), [this, done, index, corrupt, keys](size_t i, const LoadResult& result) {
        if (!corrupt[i] || result.outcome != Outcome::kHit) return done->Settle(index[i], result);
        inner_->Erase({&keys[i], 1});
        corrupted_.fetch_add(1, std::memory_order_relaxed);
        done->Settle(index[i], kMissed(Reason::kDamaged));
      });
  if (spec_.load_delay.count() == 0) return inner_->Load(std::move(forward->items), deadline, forward->done);
  delayed_.Add({.run =
                    [this, forward, deadline, done] {
                      if (done->cancelled()) return forward->SettleAll(kMissed(Reason::kCancelled));
                      inner_->Load(std::move(forward->items), deadline, forward->done);
                    },
                .drop = [forward] { forward->SettleAll(kMissed(Reason::kCancelled)); }},
               spec_.load_delay);
}

void FaultTier::Save(std::vector<SaveItem> items, std::shared_ptr<SaveBatch> done) {
  TERRACE_ASSERT(items.size() == done->size());
  using Saves = Waiting<SaveItem, SaveResult>;
  auto forward = std::make_shared<Saves>();
  std::vector<size_t> index;
  for (size_t i = 0; i < items.size(); ++i) {
    const uint64_t n = saves_.fetch_add(1, std::memory_order_relaxed) + 1;
    const Digest key = items[i].info.key;
    if (Fires(spec_.save_hang, "save.hang", n, key)) {
      auto hung = std::make_shared<Saves>(Saves{{}, done, {i}});
      hung->items.push_back(std::move(items[i]));
      hung_.Add({.run = [hung] { hung->SettleAll(kDeclined(Reason::kTimeout)); },
                 .drop = [hung] { hung->SettleAll(kDeclined(Reason::kCancelled)); }},
                spec_.hang);
    } else if (Fires(spec_.save_error, "save.error", n, key)) {
      items[i] = {};
      done->Settle(i, {.reason = Reason::kUnavailable, .error = Injected(Code::kIo, "save.error", key, EIO)});
    } else if (Fires(spec_.save_enospc, "save.enospc", n, key)) {
      items[i] = {};
      done->Settle(i, {.reason = Reason::kFull, .error = Injected(Code::kFull, "save.enospc", key, ENOSPC)});
    } else {
      forward->index.push_back(index.size());
      index.push_back(i);
      forward->items.push_back(std::move(items[i]));
    }
  }
  if (index.empty()) return;

  forward->done = std::make_shared<SaveBatch>(
      index.size(), [done, index](size_t i, const SaveResult& result) { done->Settle(index[i], result); });
  if (spec_.save_delay.count() == 0) return inner_->Save(std::move(forward->items), forward->done);
  delayed_.Add({.run =
                    [this, forward, done] {
                      if (done->cancelled()) return forward->SettleAll(kDeclined(Reason::kCancelled));
                      inner_->Save(std::move(forward->items), forward->done);
                    },
                .drop = [forward] { forward->SettleAll(kDeclined(Reason::kCancelled)); }},
               spec_.save_delay);
}

// Counted apart: a probe comes at its own time, and must not move the faults of the items.
Result<void> FaultTier::ProbeSave(uint64_t payload_bytes) {
  const uint64_t n = save_probes_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (spec_.save_error.at == 0 && Fires(spec_.save_error, "save.error", n, {})) {
    return tl::unexpected(Injected(Code::kIo, "save.error", {}, EIO));
  }
  if (spec_.save_enospc.at == 0 && Fires(spec_.save_enospc, "save.enospc", n, {})) {
    return tl::unexpected(Injected(Code::kFull, "save.enospc", {}, ENOSPC));
  }
  return inner_->ProbeSave(payload_bytes);
}

TierStats FaultTier::stats() const {
  TierStats stats = inner_->stats();
  stats.quarantined += corrupted_.load(std::memory_order_relaxed);
  return stats;
}

CloseReport FaultTier::Close(TimePoint deadline) {
  const size_t hung = hung_.Close(TimePoint::min());
  const size_t delayed = delayed_.Close(deadline);
  CloseReport report = inner_->Close(deadline);
  report.abandoned += hung + delayed;
  report.clean = report.clean && hung + delayed == 0;
  return report;
}

}  // namespace terrace
