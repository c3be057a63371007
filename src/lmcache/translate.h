// LMCache's configuration as options of ours: the file that LMCACHE_CONFIG_FILE names, then the variables LMCACHE_*,
// which win over it. Every key of LMCache is known (known.h): it becomes an option, or is accepted with one line that
// says what it means here, or is refused, where silence would harm. No secret appears in notes or errors.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "base/config.h"
#include "terrace/result.h"

namespace terrace::lmcache {

struct Translation {
  std::vector<config::Preset> presets;  // For config::Load.
  std::vector<std::string> notes;       // "lmcache.yaml:8: s3_num_io_threads: nothing to tune: ...".
  // Keys that LMCache does not have either, one line each with the nearest that it has. An error, unless the operator
  // lets them pass.
  std::vector<std::string> unknown;
  bool secret_readable = false;  // The file holds a key in plain text and others may read it.
  std::string file;              // "" if there is none.
};

// Name to value, those that begin with LMCACHE_.
using Variables = std::map<std::string, std::string>;
Variables VariablesOfThisProcess();

// Errors are one line: where, what, and what to do.
Result<Translation> Translate(const Variables& variables);

}  // namespace terrace::lmcache
