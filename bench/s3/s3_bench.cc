// The s3 tier beside a bare libcurl loop that moves the same bytes to and from the same server, and beside LMCache's S3
// connector, in one run. `make bench WHAT=s3` writes out/bench-s3.json; docs/internals/figures.md says what each row
// means.
//
//   s3_bench OUT.json PART... [--peer COMMAND...]
//
// Parts: plain, tls, visible, ttft, peer. ttft computes with the model that MODEL_F16 names. The server (VERSITYGW in
// the environment) keeps its objects below TMPDIR: a tmpfs.
#include <unistd.h>

#include <algorithm>
#include <array>
#include <functional>
#include <future>
#include <thread>

#include "base/clock.h"
#include "bench/engine/prefix.h"
#include "bench/harness.h"
#include "bench/s3/bare_loop.h"
#include "bench/store/frames.h"
#include "bench/store/peer.h"
#include "chunk/frame.h"
#include "terrace/store.h"
#include "tests/support/s3_servers.h"
#include "tier/s3_tier.h"

namespace terrace::bench {
namespace {

constexpr int kRounds = 7;
constexpr int kPeerRounds = 3;
constexpr uint64_t kBytes = 36 << 20;
constexpr uint64_t kFrames = 16;
constexpr size_t kInFlight = 16;
constexpr double kCpuAllowed = 0.15;  // Seconds a GB above the bare loop's: the hash.
constexpr double kVisibleMax = 2;     // Seconds.
constexpr size_t kPrefixTokens = 6144;

std::string NameOf(const Digest& key) {
  const std::string hex = key.Hex();
  return "bench/frames/" + hex.substr(0, 3) + "/" + hex + ".kvf";  // docs/internals/s3.md
}

// Of another process, all its threads.
double CpuSecondsOf(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string word;
  for (int i = 1; i < 14; ++i) file >> word;  // Its name is one word: versitygw.
  double user = 0, system = 0;
  file >> user >> system;
  return (user + system) / static_cast<double>(sysconf(_SC_CLK_TCK));
}

class Bench {
 public:
  explicit Bench(bool tls)
      : server_(S3Server::Get(S3Server::Kind::kVersitygw, tls)),
        name_(tls ? "s3 over TLS" : "s3"),
        client_(server_.Client("bench", s3::Style::kPath)),
        tier_(Open()),
        bare_(client_) {}

  void Moves(std::vector<Row>& rows) {
    const auto save = [this] {
      batch_.NewNames();
      const Sample sample = Timed([&] { batch_.Save(*tier_, kInFlight); });
      Forget();
      return sample;
    };
    const auto put = [this] { return Timed([&] { bare_.Put(Objects("bare/"), kInFlight); }); };
    Add(rows, "PUT", TakeTurns(kRounds, save, put));

    batch_.NewNames();
    batch_.Save(*tier_, kInFlight);
    const auto load = [this] { return Timed([&] { batch_.Load(*tier_, kInFlight); }); };
    const auto get = [this] { return Timed([&] { bare_.Get(Objects(""), kInFlight); }); };
    Add(rows, "GET", TakeTurns(kRounds, load, get));
    Forget();
  }

  // LMCache's connector, the same server, the same number of payloads of the same size.
  void BesidePeer(std::vector<Row>& rows, const std::vector<std::string>& command) {
    Peer peer(command);
    const s3::Endpoint& e = client_.endpoint;
    peer.Ask({{"do", "open"},
              {"backend", "s3"},
              {"directory", "s3://" + e.bucket + ".s3.localhost:" + std::to_string(e.port)},
              {"bytes", kBytes},
              {"frames", kFrames}});
    const auto add = [&](const char* what, const char* measure, const char* unit, const Turns& turns, size_t i) {
      rows.push_back(RowOf(
          {.name = std::string("s3: ") + what + measure + ", peer LMCache s3_connector", .size = kBytes, .unit = unit},
          Beside::kPeer, batch_.gigabytes(), turns, i));
    };
    const Turns saves = TakeTurns(
        kPeerRounds,
        [this] {
          batch_.NewNames();
          const Sample sample = Timed([&] { batch_.Save(*tier_, kFrames); });
          Forget();
          return sample;
        },
        [&] {
          const auto answer = peer.Ask({{"do", "save"}});
          return Sample{answer["durable"], answer["cpu"]};
        });
    add("PUT", "", "GB/s", saves, 0);
    add("PUT", ", client", "GB/cpu s", saves, 1);
    batch_.NewNames();
    batch_.Save(*tier_, kInFlight);
    const Turns loads = TakeTurns(
        kPeerRounds, [this] { return Timed([&] { batch_.Load(*tier_, kFrames); }); },
        [&] {
          const auto answer = peer.Ask({{"do", "load"}, {"warm", true}, {"copy", false}});
          return Sample{answer["seconds"], answer["cpu"]};
        });
    add("GET", "", "GB/s", loads, 0);
    add("GET", ", client", "GB/cpu s", loads, 1);
    peer.Ask({{"do", "close"}});
    Forget();
  }

  // What a prompt's prefix from the bucket adds to the time to the first token, beside the same from RAM: whatever
  // follows the prefix costs alike after either.
  void Restores(std::vector<Row>& rows) {
    const char* model = std::getenv("MODEL_F16");
    Check(model != nullptr, "MODEL_F16 does not name a model");
    Engine engine(model, kPrefixTokens + kChunkTokens, std::max(1u, std::thread::hardware_concurrency()));
    const std::vector<int32_t> tokens = Document(*engine.model, kPrefixTokens);
    const KeyChain chain = Keys(*engine.model, tokens);
    const uint64_t bytes = engine.bridge.chunk_bytes();
    const uint64_t all = bytes * chain.keys().size();
    engine.Prefill(tokens, 0, tokens.size());
    {
      Metrics metrics;
      SavePrefix(engine, *NewStore(metrics), chain);
    }

    const uint64_t padded = FrameBytes(bytes) - kFrameHeaderBytes;
    std::vector<std::byte> memory(padded * chain.keys().size());
    std::vector<std::array<std::byte, kFrameHeaderBytes>> heads(chain.keys().size());
    std::vector<BareLoop::Object> objects;
    for (size_t i = 0; i < heads.size(); ++i) {
      objects.push_back({NameOf(chain.keys()[i]), heads[i], std::span(memory).subspan(i * padded, padded)});
    }
    const auto ours = [&] {
      Metrics metrics;
      const std::unique_ptr<Store> store = NewStore(metrics);  // Nothing in RAM.
      AwaitResident(*store, metrics, bytes);
      engine.Clear();
      const double s3 = engine.Restore(*store, chain);
      engine.Clear();
      return Sample{s3 - engine.Restore(*store, chain)};
    };
    const auto bare = [&] { return Sample{Seconds([&] { bare_.Get(objects, kInFlight); })}; };
    const Turns turns = TakeTurns(kRounds, ours, bare);
    std::vector<double> values, limits, ratios;
    for (size_t i = 0; i < turns.ours.size(); ++i) {
      values.push_back(turns.ours[i][0]);
      limits.push_back(1.15 * turns.other[i][0] + 0.020);
      ratios.push_back(values.back() / limits.back());
    }
    const auto [least, most] = std::minmax_element(values.begin(), values.end());
    rows.push_back({.name = name_ + ": restore of 6144 tokens less that from ram, limit 1.15 x bare loop + 20 ms",
                    .size = all,
                    .unit = "s",
                    .value = Median(values),
                    .limit = Median(limits),
                    .ratio = Median(ratios),
                    .spread = (*most - *least) / Median(values)});
    tier_->Erase(chain.keys());
    Forget();
  }

  // From the end of a save until another instance knows of it that was told a moment before that it is not there.
  void Visible(std::vector<Row>& rows) {
    const std::unique_ptr<Tier> other = Open();
    Frames small(1 << 20, 1);
    std::vector<double> waits;
    for (int i = 0; i < kRounds; ++i) {
      small.NewNames();
      const Digest key = small.info(0).key;
      const auto knows = [&] {
        std::promise<void> asked;
        other->Probe({key}, clock_.Now() + std::chrono::seconds(10),
                     [&](const std::optional<Error>& trouble) { Check(!trouble, "probe"), asked.set_value(); });
        asked.get_future().get();
        uint8_t present = 0;
        other->Contains({&key, 1}, {&present, 1});
        return present != 0;
      };
      Check(!knows(), "a name that is new");
      small.Save(*tier_, 1);
      waits.push_back(Seconds([&] {
        while (!knows()) std::this_thread::sleep_for(std::chrono::milliseconds(5));
      }));
      small.Erase(*tier_);  // Forget() waits until no frame is left.
    }
    const auto [least, most] = std::minmax_element(waits.begin(), waits.end());
    rows.push_back({.name = "s3: a save is seen by another instance, the longest of " + std::to_string(kRounds),
                    .size = small.bytes(),
                    .unit = "s",
                    .value = *most,
                    .limit = kVisibleMax,
                    .ratio = *most / kVisibleMax,
                    .spread = (*most - *least) / *most});
  }

 private:
  // Seconds; CPU seconds of this process; those of the server.
  Sample Timed(const std::function<void()>& run) const {
    const double cpu = CpuSeconds(), server = CpuSecondsOf(server_.pid());
    const double seconds = Seconds(run);
    return {seconds, CpuSeconds() - cpu, CpuSecondsOf(server_.pid()) - server};
  }
  std::unique_ptr<Tier> Open() { return OpenS3Tier(client_, {}, {.clock = clock_, .metrics = metrics_}).value(); }
  std::unique_ptr<Store> NewStore(Metrics& metrics) {
    std::vector<std::unique_ptr<Tier>> tiers;
    tiers.push_back(OpenS3Tier(client_, {}, {.clock = clock_, .metrics = metrics}).value());
    return Must(OpenStore({.ram_bytes_max = 1ull << 30}, std::move(tiers), metrics));
  }
  void Forget() {
    batch_.Erase(*tier_);
    // A scan after the erases: it ends behind them.
    while (!tier_->Scan("", 1)->frames.empty()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  std::vector<BareLoop::Object> Objects(const std::string& prefix) {
    std::vector<BareLoop::Object> objects;
    for (uint64_t i = 0; i < kFrames; ++i) {
      objects.push_back(
          {prefix.empty() ? NameOf(batch_.info(i).key) : prefix + std::to_string(i), heads_[i], batch_.payload(i)});
    }
    return objects;
  }
  void Add(std::vector<Row>& rows, const std::string& what, const Turns& turns) {
    const std::string name = name_ + ": " + what;
    rows.push_back(RowOf({.name = name + ", 16 in flight, limit a bare libcurl loop", .size = kBytes, .unit = "GB/s"},
                         Beside::kLimit, batch_.gigabytes(), turns));
    std::vector<double> above, ours, servers, bare_servers;
    for (size_t i = 0; i < turns.ours.size(); ++i) {
      servers.push_back(turns.ours[i][2] / batch_.gigabytes());
      bare_servers.push_back(turns.other[i][2] / batch_.gigabytes());
      ours.push_back(turns.ours[i][1] / batch_.gigabytes());
      above.push_back(ours.back() - turns.other[i][1] / batch_.gigabytes());
    }
    const auto [least, most] = std::minmax_element(above.begin(), above.end());
    rows.push_back({.name = name + ", CPU of the client", .size = kBytes, .unit = "s/GB", .value = Median(ours)});
    rows.push_back({.name = name + ", CPU of the server, limit its CPU for the bare loop",
                    .size = kBytes,
                    .unit = "s/GB",
                    .value = Median(servers),
                    .limit = Median(bare_servers),
                    .ratio = Median(servers) / Median(bare_servers)});
    rows.push_back({.name = name + ", CPU of the client above the bare loop's",
                    .size = kBytes,
                    .unit = "s/GB",
                    .value = Median(above),
                    .limit = kCpuAllowed,
                    .ratio = Median(above) / kCpuAllowed,
                    .spread = (*most - *least) / kCpuAllowed});
  }

  const S3Server& server_;
  const std::string name_;
  const SystemClock clock_;
  Metrics metrics_;
  const s3::ClientOptions client_;
  const std::unique_ptr<Tier> tier_;
  BareLoop bare_;
  Frames batch_{kBytes, kFrames};
  std::array<std::array<std::byte, kFrameHeaderBytes>, kFrames> heads_{};
};

int Main(const std::string& out, const std::vector<std::string>& parts, const std::vector<std::string>& peer_command) {
  std::vector<Row> rows;
  const auto run = [&](const char* name, const std::function<void()>& part) {
    if (std::find(parts.begin(), parts.end(), name) != parts.end()) RunPart(rows, part);
  };
  run("plain", [&] { Bench(false).Moves(rows); });
  run("tls", [&] { Bench(true).Moves(rows); });
  run("visible", [&] { Bench(false).Visible(rows); });
  run("ttft", [&] { Bench(false).Restores(rows); });
  run("peer", [&] { Bench(false).BesidePeer(rows, peer_command); });
  WriteRows(out, rows, {{"rounds", kRounds}});
  return 0;
}

}  // namespace
}  // namespace terrace::bench

int main(int argc, char** argv) {
  const auto [words, peer] = terrace::bench::ReadCommandLine(argc, argv);
  if (words.size() < 2) {
    std::fprintf(stderr, "usage: s3_bench OUT.json PART... [--peer COMMAND...]\n");
    return 2;
  }
  return terrace::bench::Main(words[0], {words.begin() + 1, words.end()}, peer);
}
