// What an instance is told: one schema for every program that takes an instance's configuration (`terrace serve`,
// `terrace doctor`), from flags, TERRACE_*, the file, and LMCache's own configuration.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "s3/client.h"
#include "terrace/result.h"
#include "tier/disk_tier.h"
#include "tier/s3_tier.h"
#include "tier/shared_fs_tier.h"

namespace terrace::settings {

// All options of `terrace serve`. Another program may add its own, and need none of these.
std::vector<config::Option> InstanceOptions();

// Those of them that say where KV is kept.
std::vector<config::Option> TierOptions();

// What an engine is told of a node that keeps its KV.
std::vector<config::Option> NodeOptions();

struct Loaded {
  config::Parsed parsed;           // With `help`, nothing else is there.
  std::vector<std::string> notes;  // Of LMCache's configuration, a line each: what a key means here, what is left out.
  std::string lmcache_file;        // "" if there is none.
  bool secret_readable = false;    // lmcache_file holds a key in plain text, and others may read it.
};

// config::Load, with LMCache's configuration between our file and the defaults. Its keys must have a meaning here, key
// by key; errors are one line.
Result<Loaded> Load(const config::Schema& schema, const std::vector<std::string>& args);

// Where KV is kept.
struct Tiers {
  uint64_t ram_bytes_max = 0;
  DiskTierOptions disk;    // directory "": none.
  SharedFsOptions shared;  // directory "": none.
  std::optional<s3::ClientOptions> s3;
  S3TierOptions bucket;  // With s3.
  bool allow_degraded = false;
};
Result<Tiers> ReadTiers(const config::Values& values);

}  // namespace terrace::settings
