// The simulation by hand: `sim --seed 7 --log` for one run, `sim --seeds 1-10000` for many.
#include <chrono>
#include <cinttypes>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "tests/sim/simulation.h"

namespace {

int Usage() {
  std::fprintf(
      stderr,
      "sim [--seed N | --seeds A-B] [--disk yes|no] [--share bucket] [--bounds yes|no] [--steps N] [--log]\n"
      "  --seed N     one run; prints its faults if it fails\n"
      "  --seeds A-B  a run for each, stops at the first that fails\n"
      "  --disk yes   nodes have a local disk, too (default: the seed decides)\n"
      "  --share bucket  nodes share a bucket instead of a directory\n"
      "  --bounds yes|no  the share has bounds (default: the seed decides for a bucket; a directory has none)\n"
      "  --steps N    a run of more steps hangs (20000000)\n"
      "  --log        prints every step\n");
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t first = 1, last = 1;
  terrace::sim::RunOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--log") {
      options.log_all = true;
    } else if (flag == "--seed" && i + 1 < argc) {
      first = last = std::strtoull(argv[++i], nullptr, 10);
    } else if (flag == "--seeds" && i + 1 < argc && std::strchr(argv[i + 1], '-')) {
      first = std::strtoull(argv[++i], nullptr, 10);
      last = std::strtoull(std::strchr(argv[i], '-') + 1, nullptr, 10);
    } else if (flag == "--disk" && i + 1 < argc) {
      options.with_disk = std::string(argv[++i]) == "yes";
    } else if (flag == "--share" && i + 1 < argc) {
      options.on_bucket = std::string(argv[++i]) == "bucket";
    } else if (flag == "--bounds" && i + 1 < argc) {
      options.with_bounds = std::string(argv[++i]) == "yes";
    } else if (flag == "--steps" && i + 1 < argc) {
      options.steps_max = std::strtoull(argv[++i], nullptr, 10);
    } else {
      return Usage();
    }
  }
  const auto begun = std::chrono::steady_clock::now();
  for (uint64_t seed = first; seed <= last; ++seed) {
    options.seed = seed;
    const terrace::sim::RunReport report = terrace::sim::RunSeed(options);
    if (!report.ok || options.log_all) {
      for (const std::string& line : report.log) std::fputs(line.c_str(), stdout);
    }
    std::printf("seed %" PRIu64 ": %s, %.0f s simulated, %" PRIu64 " steps, %" PRIu64 " faults, %" PRIu64
                " lives (%" PRIu64 " killed), %" PRIu64 " chunks asked: %" PRIu64 " from ram, %" PRIu64
                " from below; %" PRIu64 " frames written; digest %016" PRIx64 "\n",
                seed, report.ok ? "ok" : "FAILED", report.virtual_seconds, report.steps, report.faults, report.lives,
                report.deaths, report.chunks_asked, report.hits_ram, report.hits_below, report.saves_written,
                report.digest);
    if (report.ok) continue;
    std::printf("%s\nreproduce: sim --seed %" PRIu64 " --log\n", report.failure.c_str(), seed);
    return 1;
  }
  const double took = std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  std::printf("%" PRIu64 " seeds in %.1f s\n", last - first + 1, took);
  return 0;
}
