// The s3 tier over real servers: plain and TLS, path style and virtual-hosted, each in a prefix of its own.
#include <filesystem>

#include "base/assert.h"
#include "base/clock.h"
#include "terrace/metrics.h"
#include "tests/contract/tier_contract.h"
#include "tests/support/s3_servers.h"
#include "tier/guard_tier.h"
#include "tier/s3_tier.h"

namespace terrace {
namespace {

using Kind = S3Server::Kind;

std::unique_ptr<Tier> Open(World& world, Kind kind, bool tls, s3::Style style) {
  static SystemClock clock;
  static Metrics metrics;
  const std::string prefix = std::filesystem::path(world.directory).filename().string();
  s3::ClientOptions client = S3Server::Get(kind, tls).Client(prefix, style);
  client.single_put_bytes_max = 4 << 20;  // The largest frame of the suite goes in parts.
  client.part_bytes = 5 << 20;
  S3TierOptions options;
  options.range_bytes_min = 1 << 20;  // And comes in ranges.
  auto tier = OpenS3Tier(client, options, {.clock = clock, .metrics = metrics});
  if (!tier) std::fprintf(stderr, "%s\n", tier.error().what.c_str());
  TERRACE_ASSERT(tier.has_value());
  return *std::move(tier);
}

std::unique_ptr<Tier> Guarded(std::unique_ptr<Tier> tier, World& world) {
  static SystemClock clock;
  return std::make_unique<GuardTier>(std::move(tier), GuardOptions{}, world.executor, clock);
}

}  // namespace

std::vector<TierCase> AllTiers() {
  return {
      {"s3_versitygw", [](World& w) { return Open(w, Kind::kVersitygw, false, s3::Style::kPath); }},
      {"s3_versitygw_tls", [](World& w) { return Open(w, Kind::kVersitygw, true, s3::Style::kVirtual); }},
      {"s3_seaweedfs", [](World& w) { return Open(w, Kind::kSeaweedfs, false, s3::Style::kVirtual); }},
      {"s3_seaweedfs_tls", [](World& w) { return Open(w, Kind::kSeaweedfs, true, s3::Style::kPath); }},
      {"guard_s3", [](World& w) { return Guarded(Open(w, Kind::kVersitygw, false, s3::Style::kPath), w); }},
  };
}

}  // namespace terrace
