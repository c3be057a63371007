#include "tier/s3_probes.h"

#include <map>
#include <utility>

#include "tier/s3_search.h"

namespace terrace {

using s3::Failure;
using s3::ObjectInfo;
using s3::Trouble;

struct S3Probes::Probing {
  explicit Probing(std::vector<Digest> k) : keys(std::move(k)), search(keys.size()) {}
  std::vector<Digest> keys;
  S3Search search;
  TimePoint deadline;
  Tier::Probed done;
  std::map<size_t, s3::ObjectStore::CallId> calls;  // By position.
  uint64_t round = 0;
  bool ended = false;
};

void S3Probes::Begin(std::vector<Digest> keys, TimePoint deadline, Tier::Probed done) {
  auto probing = std::make_shared<Probing>(std::move(keys));
  probing->deadline = deadline;
  probing->done = std::move(done);
  NextRound(probing);
}

void S3Probes::NextRound(const ProbingPtr& probing) {
  for (;;) {
    const std::vector<size_t> positions = probing->search.Round();
    if (positions.empty()) return Ended(probing, std::nullopt);
    ++probing->round;
    std::vector<size_t> to_ask;
    bool over = false;
    for (const size_t position : positions) {
      const Digest& key = probing->keys[position];
      const S3Index::Belief belief = deps_.index.Of(key, deps_.clock.Now());
      if (deps_.is_leaving(key) || belief == S3Index::Belief::kAbsent) {
        over = probing->search.Answer(position, false);
        break;  // Those behind it do not matter.
      }
      if (belief == S3Index::Belief::kPresent) {
        over = probing->search.Answer(position, true);
      } else {
        to_ask.push_back(position);
      }
    }
    for (const size_t position : to_ask) {
      probing->calls[position] = deps_.store.Head(
          deps_.names.Of(probing->keys[position]), probing->deadline,
          [this, probing, position, round = probing->round](const Failure& failure, const ObjectInfo& info) {
            const Digest& key = probing->keys[position];
            if (!failure && info.bytes > 0) deps_.index.Saw(key, info.bytes, deps_.clock.Now());
            if (failure.trouble == Trouble::kNotFound) deps_.index.Missed(key, deps_.clock.Now());
            if (probing->ended || round != probing->round) return;
            probing->calls.erase(position);
            if (failure && failure.trouble != Trouble::kNotFound) {
              return Ended(probing, s3::ToError(failure, "s3: head " + deps_.names.Of(key)));
            }
            Answered(probing, position, !failure);
          });
    }
    if (!over) return;  // An answer goes on, or there was none to wait for.
  }
}

void S3Probes::Answered(const ProbingPtr& probing, size_t position, bool present) {
  if (!probing->search.Answer(position, present)) return;
  ++probing->round;  // What is still on its way came too late.
  for (const auto& [late, call] : std::exchange(probing->calls, {})) deps_.store.Cancel(call);
  NextRound(probing);
}

void S3Probes::Ended(const ProbingPtr& probing, const std::optional<Error>& trouble) {
  probing->ended = true;
  for (const auto& [late, call] : std::exchange(probing->calls, {})) deps_.store.Cancel(call);
  const TimePoint now = deps_.clock.Now();
  for (size_t i = 0; i < probing->search.known(); ++i) {
    if (!deps_.is_leaving(probing->keys[i])) deps_.index.Propose(probing->keys[i], now);
  }
  probing->done(trouble);
}

}  // namespace terrace
