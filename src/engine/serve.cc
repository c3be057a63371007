#include "engine/serve.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <optional>
#include <set>
#include <string_view>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/config.h"
#include "base/executor.h"
#include "base/log.h"
#include "base/stop_signals.h"
#include "chunk/weights.h"
#include "engine/caps.h"
#include "engine/chat_template.h"
#include "engine/cpu_quota.h"
#include "engine/model.h"
#include "engine/model_thread.h"
#include "engine/prepare_pool.h"
#include "engine/routes.h"
#include "http/server.h"
#include "io/file_io.h"
#include "settings/instance.h"
#include "settings/open_tiers.h"
#include "terrace/metrics.h"
#include "terrace/store.h"
#include "terrace/version.h"
#include "tier/fault_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace {
namespace {

using engine::KvType;
using engine::Model;
using engine::ModelThread;
using std::chrono::milliseconds;

constexpr int kUserMustMend = 2;
constexpr uint32_t kContextDefaultMax = 8192;
constexpr size_t kChatTemplateBytesMax = 1 << 20;  // The longest known has 30 KB.
constexpr uint32_t kChunkStep = 64;                // Attention kernels take cells in groups of up to 64.
constexpr uint32_t kChunkMax = 4096;
constexpr milliseconds kRequestsDrain{10'000};
constexpr milliseconds kLastStep{2'000};  // Then a running answer is cut; its client is told.
constexpr std::chrono::seconds kStoreDrain{15};
// Then the process ends, whatever hangs: below the 30 s that Kubernetes and systemd grant or more.
constexpr std::chrono::seconds kStopMax{28};
// A file that is hashed faster than this is known before the port opens, so that the first request is cached already.
constexpr milliseconds kWeightsWait{5'000};

config::Schema ServeSchema() {
  return {
      .program = "terrace serve",
      .summary = "Serves a GGUF model over OpenAI's API and keeps its KV in tiers: engine memory, RAM, shared storage.",
      .options = settings::InstanceOptions()};
}

int Refuse(const std::string& why) {
  std::fprintf(stderr, "terrace serve: %s\n", why.c_str());
  return kUserMustMend;
}

// llama.cpp computes with OpenMP, whose threads spin at barriers unless told otherwise before the program starts;
// spinning threads collapse when anything else runs on the machine. Whoever sets either variable decides.
void EnsureOpenMpPassive() {
  if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::string line{std::istreambuf_iterator<char>(file), {}};
  std::vector<char*> argv;
  for (size_t at = 0; at < line.size(); at += std::strlen(line.data() + at) + 1) argv.push_back(line.data() + at);
  if (argv.empty()) return;
  argv.push_back(nullptr);
  setenv("OMP_WAIT_POLICY", "passive", 1);
  execv("/proc/self/exe", argv.data());  // On failure we go on as we are: slower under load, still right.
}

// Cores this process may use, threads of one core counted once.
uint32_t PhysicalCores() {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return 1;
  std::set<std::string> cores;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(static_cast<size_t>(cpu), &allowed)) continue;
    std::ifstream file("/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/thread_siblings_list");
    std::string siblings;
    cores.insert(std::getline(file, siblings) ? siblings : "cpu" + std::to_string(cpu));
  }
  return static_cast<uint32_t>(std::max<size_t>(cores.size(), 1));
}

struct ServeOptions {
  std::string model_path;
  std::string served_name;
  std::string chat_template;  // "": the model's.
  engine::EngineOptions engine;
  StoreOptions store;
  settings::Tiers tiers;
  std::optional<FaultSpec> fault;
  http::Options http;
  engine::PrepareOptions prepare;
  std::string api_key;
};

Result<std::string> ReadChatTemplate(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string source(kChatTemplateBytesMax + 1, '\0');
  if (!file.read(source.data(), static_cast<std::streamsize>(source.size())) && !file.eof()) {
    return Fail(Code::kInvalid, "--chat-template-file " + path + ": " + std::strerror(errno), errno);
  }
  source.resize(static_cast<size_t>(file.gcount()));
  if (source.empty() || source.size() > kChatTemplateBytesMax) {
    return Fail(Code::kInvalid,
                "--chat-template-file " + path + ": " + (source.empty() ? "empty" : "larger than 1 MiB"));
  }
  return source;
}

// What can be said of the options before the model is there.
Result<ServeOptions> ReadOptions(const config::Values& values) {
  ServeOptions options;
  options.model_path = values.Text("model");
  options.served_name = values.Text("served-name");
  if (options.served_name.empty()) {
    const std::filesystem::path file = std::filesystem::path(options.model_path).filename();
    options.served_name = file.extension() == ".gguf" ? file.stem().string() : file.string();
  }
  options.api_key = values.Text("api-key");
  if (values.IsSet("api-key") && options.api_key.empty()) {
    return Fail(Code::kInvalid, "--api-key is empty; give a key, or leave the flag out to serve without one");
  }
  if (values.IsSet("chat-template-file")) {
    Result<std::string> source = ReadChatTemplate(values.Text("chat-template-file"));
    if (!source) return tl::unexpected(source.error());
    options.chat_template = *std::move(source);
  }
  options.http.host = values.Text("host");
  options.http.threads = 2;  // One more keeps /health quick while a large body arrives.
  options.engine.kv_type = values.Text("kv-type") == "f16" ? KvType::kF16 : KvType::kQ8_0;
  options.engine.strict = values.Bool("strict");
  options.engine.save_decode_cache = values.Bool("save-decode-cache");
  if (options.engine.strict && options.engine.save_decode_cache) {
    return Fail(Code::kInvalid,
                "--strict keeps KV of prompts only, --save-decode-cache that of answers too: choose one");
  }
  if (values.IsSet("load-deadline")) {
    options.engine.load_deadline_ms = std::max<int64_t>(values.DurationMs("load-deadline"), 1);
  }

  const auto port = config::Bounded(values, "port", 0, 65535);
  if (!port) return tl::unexpected(port.error());
  options.http.port = static_cast<uint16_t>(*port);
  const auto queue = config::Bounded(values, "queue-max", 1, 100'000);
  if (!queue) return tl::unexpected(queue.error());
  options.engine.queue_max = *queue;
  const auto prepare_threads = config::Bounded(values, "prepare-threads", 1, 64);
  if (!prepare_threads) return tl::unexpected(prepare_threads.error());
  options.prepare.threads = *prepare_threads;
  const auto prepare_queue = config::Bounded(values, "prepare-queue-max", 1, 100'000);
  if (!prepare_queue) return tl::unexpected(prepare_queue.error());
  options.prepare.queue_max = *prepare_queue;
  const auto chunk = config::Bounded(values, "chunk", kChunkStep, kChunkMax);
  if (!chunk) return tl::unexpected(chunk.error());
  if (*chunk % kChunkStep != 0) {
    return Fail(Code::kInvalid, values.Place("chunk") + " " + std::to_string(*chunk) + " is no multiple of " +
                                    std::to_string(kChunkStep));
  }
  options.engine.chunk_tokens = *chunk;
  options.engine.threads = std::min(PhysicalCores(), CpuQuotaCores());
  if (values.IsSet("threads")) {
    const auto threads = config::Bounded(values, "threads", 1, 512);
    if (!threads) return tl::unexpected(threads.error());
    options.engine.threads = *threads;
  }

  Result<settings::Tiers> tiers = settings::ReadTiers(values);
  if (!tiers) return tl::unexpected(tiers.error());
  options.tiers = *std::move(tiers);
  options.store.ram_bytes_max = options.tiers.ram_bytes_max;

  if (values.IsSet("fault")) {
    Result<FaultSpec> fault = FaultSpec::Parse(values.Text("fault"));
    if (!fault) return Fail(fault.error(), "--fault");
    if (options.tiers.shared.directory.empty() && !options.tiers.s3) {
      return Fail(Code::kInvalid, "--fault makes --shared and --s3-bucket fail, and there is neither");
    }
    options.fault = *fault;
  }
  return options;
}

// The rest, now that the model is known.
Result<void> FitToModel(const config::Values& values, const Model& model, ServeOptions& options) {
  const uint32_t trained = model.train_context();
  options.engine.context_tokens = std::min(trained, kContextDefaultMax);
  if (values.IsSet("ctx")) {
    const int64_t asked = values.Int("ctx");
    if (asked > trained) {
      return Fail(Code::kInvalid, "--ctx " + std::to_string(asked) + " is above the " + std::to_string(trained) +
                                      " tokens that the model was trained for");
    }
    if (asked < 2)
      return Fail(Code::kInvalid, "--ctx " + std::to_string(asked) + " has no room for a prompt and an answer");
    options.engine.context_tokens = static_cast<uint32_t>(asked);
  }
  options.engine.engine_kv_tokens = options.engine.context_tokens;
  if (values.IsSet("engine-kv-tokens")) {
    const auto kept = config::Bounded(values, "engine-kv-tokens", 0, 1 << 26);
    if (!kept) return tl::unexpected(kept.error());
    options.engine.engine_kv_tokens = *kept;
  }
  return {};
}

Result<void> CapsHoldAChunk(const ServeOptions& options, const Store& store, const ModelThread& thread, FileIo& io) {
  if (thread.chunk_bytes() == 0) return {};
  const SharedFsBounds& bounds = options.tiers.shared.bounds;
  Caps caps{.ram_bytes = store.ram_stats().bytes_max,
            .disk_bytes = options.tiers.disk.directory.empty() ? 0 : options.tiers.disk.bytes_max,
            .shared_bytes = bounds.frame_bytes_max(),
            .shared_free_bytes_min = bounds.free_bytes_min};
  if (bounds.free_bytes_min > 0) {
    const auto space = io.FreeSpace(options.tiers.shared.directory);
    if (space) caps.shared_volume_bytes = space->total_bytes;
  }
  return HoldAChunk(caps, thread.chunk_bytes(), options.engine.chunk_tokens);
}

void WaitForWeights(const WeightsDigest& weights) {
  for (milliseconds waited{0}; !weights.Get() && waited < kWeightsWait; waited += milliseconds(10)) {
    std::this_thread::sleep_for(milliseconds(10));
  }
}

// The operator's template, or the model's. A model without one gets none that it was not trained on: its answers would
// be worse than a refusal, and nobody would know why.
engine::OpenedChatTemplate OpenChatTemplate(const ServeOptions& options, const Model& model) {
  const bool own = options.chat_template.empty();
  const std::string source = own ? model.chat_template() : options.chat_template;
  if (source.empty()) return Fail(Code::kInvalid, "the model has no chat template (--chat-template-file gives it one)");
  if (source.size() > kChatTemplateBytesMax)
    return Fail(Code::kInvalid, "the model's chat template is larger than 1 MiB");
  engine::OpenedChatTemplate opened = engine::ChatTemplate::Open(
      {.source = source, .bos = model.bos_text(), .eos = model.eos_text(), .bos_is_added = model.adds_bos()});
  if (!opened) return Fail(opened.error(), own ? "the model's chat template" : "--chat-template-file");
  return opened;
}

void LogReady(const ServeOptions& options, const Model& model, const Store& store, const ModelThread& thread,
              const WeightsDigest& weights, const engine::OpenedChatTemplate& chat, uint16_t port) {
  const std::optional<Digest> digest = weights.Get();
  const SpaceFields& space = thread.space();
  const std::string& host = options.http.host;
  const std::string shown = host.find(':') == std::string::npos ? host : "[" + host + "]";
  log::Info("serve_ready", {{"url", "http://" + shown + ":" + std::to_string(port) + "/v1"},
                            {"model", options.served_name},
                            {"description", model.Description()},
                            {"weights", digest ? digest->Hex() : "pending"},
                            {"engine", space.engine + " " + space.engine_build},
                            {"kv_type", space.kv_dtype_k},
                            {"layout", space.layout},
                            {"chunk", options.engine.chunk_tokens},
                            {"ctx", options.engine.context_tokens},
                            {"engine_kv_tokens", options.engine.engine_kv_tokens},
                            {"threads", options.engine.threads},
                            {"ram", store.ram_stats().bytes_max},
                            {"disk", options.tiers.disk.directory},
                            {"shared", options.tiers.shared.directory},
                            {"s3", options.tiers.s3 ? options.tiers.s3->endpoint.Describe() : ""},
                            {"strict", options.engine.strict}});
  if (!thread.not_cacheable().empty()) log::Warn("not_cacheable", {{"why", thread.not_cacheable()}});
  if (!chat) log::Warn("no_chat", {{"why", chat.error().what}, {"use", "/v1/completions"}});
}

int Serve(const config::Values& values, ServeOptions options) {
  StopSignals signals(StopSignals::Early::kEnds);
  std::signal(SIGPIPE, SIG_IGN);
  // Before the model: what is loaded must be what is hashed.
  const auto weights = WeightsDigest::Start(options.model_path, DefaultDigestCacheDir());
  options.engine.weights = weights.get();
  Result<std::unique_ptr<Model>> model = Model::Load(options.model_path);
  if (!model) return Refuse(model.error().what);
  if (const Result<void> fits = FitToModel(values, **model, options); !fits) return Refuse(fits.error().what);

  const engine::OpenedChatTemplate chat = OpenChatTemplate(options, **model);
  if (!chat && !options.chat_template.empty()) return Refuse(chat.error().what);

  // Destroyed in reverse: the server first, then the thread, the store, and what the store's tiers use.
  Metrics metrics;
  const SystemClock clock;
  const std::unique_ptr<FileIo> io = RealFileIo();
  ThreadPool timers("terrace-timers", settings::kTimerThreads);
  auto tiers =
      settings::OpenTiers(options.tiers, options.fault, {.io = *io, .clock = clock, .metrics = metrics}, timers);
  if (!tiers) return Refuse(tiers.error().what);
  Result<std::unique_ptr<Store>> store = OpenStore(options.store, std::move(*tiers), metrics);
  if (!store) return Refuse(store.error().what);
  auto thread = ModelThread::Start(options.engine, **model, **store, metrics);
  if (!thread) return Refuse(thread.error().what);
  if (const Result<void> holds = CapsHoldAChunk(options, **store, **thread, *io); !holds) {
    return Refuse(holds.error().what);
  }
  WaitForWeights(*weights);

  engine::Routes routes({.served_name = options.served_name,
                         .api_key = options.api_key,
                         .context_tokens = options.engine.context_tokens,
                         .prepare = options.prepare},
                        **model, chat, **thread, **store, weights, metrics);
  auto server =
      http::Server::Start(options.http, [&routes](http::Request request, std::shared_ptr<http::Responder> responder) {
        routes.Handle(std::move(request), std::move(responder));
      });
  if (!server) return Refuse(server.error().what);
  LogReady(options, **model, **store, **thread, *weights, chat, (*server)->port());

  signals.Wait();
  EndAtTheLatestAfter(kStopMax, "terrace serve: a call to the storage does not return; ended without it\n");
  log::Info("serve_stopping", {{"requests_deadline_ms", kRequestsDrain.count()}});
  (*thread)->StopBy(std::chrono::steady_clock::now() + kRequestsDrain);
  const bool all_answered = (*server)->Drain(kRequestsDrain + kLastStep);
  (*thread)->Stop();
  (*server)->Stop();
  const CloseReport closed = (*store)->Close(std::chrono::steady_clock::now() + kStoreDrain);
  log::Info("serve_stopped", {{"requests_cut", !all_answered || (*thread)->cut()},
                              {"saves_finished", closed.clean},
                              {"saves_abandoned", closed.abandoned}});
  return 0;
}

}  // namespace

int RunServe(const std::vector<std::string>& args) {
  EnsureOpenMpPassive();
  const config::Schema schema = ServeSchema();
  log::LogToStderr();  // Warnings about the configuration itself.
  const Result<settings::Loaded> loaded = settings::Load(schema, args);
  if (!loaded) return Refuse(loaded.error().what);
  const config::Parsed& parsed = loaded->parsed;
  if (parsed.help) {
    std::fputs(config::Help(schema).c_str(), stdout);
    return 0;
  }
  if (loaded->secret_readable) {
    log::Warn("config_secret_readable", {{"file", loaded->lmcache_file},
                                         {"option", "aws_secret_access_key"},
                                         {"remedy", "chmod 600 " + loaded->lmcache_file}});
  }
  // No events: of those only so many a second come out.
  for (const std::string& note : loaded->notes) std::fprintf(stderr, "terrace serve: %s\n", note.c_str());
  if (parsed.print_config) {
    std::fputs(parsed.values.Dump().c_str(), stdout);
    return 0;
  }
  log::LogToStderr(log::LevelNamed(parsed.values.Text("log-level")));
  Result<ServeOptions> options = ReadOptions(parsed.values);
  if (!options) return Refuse(options.error().what);
  return Serve(parsed.values, std::move(*options));
}

}  // namespace terrace
