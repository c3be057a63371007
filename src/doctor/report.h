// What doctor found: told as it is found, and as one JSON document at the end.
#pragma once

#include <cstdint>
#include <cstdio>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace terrace::doctor {

enum class Severity : uint8_t {
  kOk,
  kNote,     // Works, but costs something, or will surprise; the exit code stays 0.
  kProblem,  // Does not work.
};
const char* SeverityName(Severity severity);  // "ok", "note", "problem".

// What was measured, by names with units: {"read_p50_ms", 0.8}.
using Figures = std::vector<std::pair<std::string, std::variant<double, std::string>>>;

struct Finding {
  std::string id;  // "shared.rights": the section, and what was looked at. Stable, for scripts.
  Severity severity = Severity::kOk;
  std::string what;    // One line. Never a secret.
  std::string remedy;  // What to do. Notes and problems have one.
  Figures figures;

  std::string section() const { return id.substr(0, id.find('.')); }
};

// Any thread.
class Report {
 public:
  // Findings go to `out` as text, unless `json`; what is being done now goes to `progress`. Either may be null.
  Report(std::FILE* out, std::FILE* progress, bool json) : out_(json ? nullptr : out), progress_(progress) {}

  void Doing(const std::string& what);
  void Add(Finding finding);

  std::vector<Finding> findings() const;
  bool Has(Severity severity) const;
  // {"terrace": VERSION, "status": "ok" | "note" | "problem", "findings": [...]}.
  std::string Json() const;
  // "3 problems, 1 note, 20 ok".
  std::string Summary() const;

 private:
  mutable std::mutex mutex_;
  std::FILE* const out_;
  std::FILE* const progress_;
  std::string section_;  // The last one told. Under mutex_, as what follows.
  std::vector<Finding> findings_;
};

std::string BytesText(double bytes);       // "5.6 MiB".
std::string RateText(double bytes_per_s);  // "118 MB/s".
std::string MsText(double ms);             // "0.82 ms".

// Of latencies: median and 99th percentile, in ms, into `figures` as NAME_p50_ms and NAME_p99_ms. Returns "0.8 ms (p99
// 2.1 ms)". Not of nothing.
std::string Spread(const std::string& name, std::vector<double> ms, Figures& figures);

}  // namespace terrace::doctor
