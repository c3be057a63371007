// The program's only main: picks a verb and hands it the rest.
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <exception>
#include <string>
#include <string_view>
#include <vector>

#include "base/config.h"
#include "base/environment.h"
#include "doctor/doctor.h"
#ifdef TERRACE_WITH_ENGINE
#include "engine/serve.h"
#include "engine/template_worker.h"
#endif
#include "node/node.h"
#include "router/options.h"
#include "router/router.h"
#include "terrace/version.h"

namespace terrace {
namespace {

struct Verb {
  const char* name;
  int (*run)(const std::vector<std::string>& args);
  const char* summary;
};

constexpr std::array kVerbs = {
#ifdef TERRACE_WITH_ENGINE
    Verb{"serve", RunServe, "serve a GGUF model over OpenAI's API, its KV in tiers"},
#endif
    Verb{"node", RunNode, "keep KV for all engines of this host"},
    Verb{"router", RunRouter, "one OpenAI-compatible entry to several instances"},
    Verb{"doctor", RunDoctor, "checks machine, configuration and storage, and that instances share"},
};

// TERRACE_* that scripts and tests of ours read.
const std::vector<std::string> kOthersVariables = {
    "TERRACE_BIN",       "TERRACE_BUILD", "TERRACE_CACHE",          "TERRACE_CONFIG_FILE", "TERRACE_KILL_ROUNDS",
    "TERRACE_KILL_SEED", "TERRACE_ONLY",  "TERRACE_OUTAGE_SECONDS", "TERRACE_WRITE_DOCS"};

// The verbs share one environment: a variable of one is no mistake for another, in this build or not. The doctor has
// all options of serve.
Result<void> CheckEnvironment() {
  const std::vector<config::Schema> schemas = {doctor::Schema(), node::Schema(), router::Schema()};
  return config::CheckVariables(config::VariablesOfThisProcess(), schemas, kOthersVariables);
}

// Each client, each connection to a backend and each call to storage takes a descriptor. The soft limit, 1,024 in most
// shells and units, is there for programs that use select(), which none of ours does; the hard one is the operator's.
void RaiseFileLimit() {
  rlimit limit{};
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  (void)setrlimit(RLIMIT_NOFILE, &limit);
}

int Usage(std::FILE* out, int code) {
  std::fprintf(out, "usage: terrace VERB [--help]\n\n");
  for (const Verb& verb : kVerbs) std::fprintf(out, "  %-8s %s\n", verb.name, verb.summary);
  std::fprintf(out, "\n  --version\n");
  return code;
}

int Main(const std::vector<std::string>& args) {
  if (args.empty()) return Usage(stderr, 2);
  const std::string& name = args[0];
  if (name == "--help" || name == "-h" || name == "help") return Usage(stdout, 0);
  if (name == "--version") {
    std::printf("terrace %s\n", kVersion);
    return 0;
  }
#ifdef TERRACE_WITH_ENGINE
  if (name == "template-worker") return RunTemplateWorker();  // For `serve` alone, so it stands in no list of verbs.
#endif
  const bool asks_help = std::ranges::any_of(args, [](const std::string& a) { return a == "--help" || a == "-h"; });
  std::vector<std::string> known;
  for (const Verb& verb : kVerbs) {
    if (name == verb.name) {
      const Result<void> environment = CheckEnvironment();
      if (!environment && !asks_help) {
        std::fprintf(stderr, "terrace %s: %s\n", verb.name, environment.error().what.c_str());
        return 2;
      }
      RaiseFileLimit();
      return verb.run({args.begin() + 1, args.end()});
    }
    known.emplace_back(verb.name);
  }
  const auto nearest = config::Nearest(name, known);
  std::fprintf(stderr, "terrace: unknown verb \"%s\"%s\n", name.c_str(),
               nearest ? ("; did you mean \"" + *nearest + "\"?").c_str() : "; terrace --help lists them");
  return 2;
}

}  // namespace
}  // namespace terrace

int main(int argc, char** argv) {
  try {
    return terrace::Main({argv + 1, argv + argc});
  } catch (const std::exception& e) {  // Third-party code only; ours returns errors.
    std::fprintf(stderr, "terrace: internal error: %s\n", e.what());
    return 1;
  }
}
