#include "doctor/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <nlohmann/json.hpp>

#include "base/assert.h"
#include "terrace/version.h"

namespace terrace::doctor {
namespace {

using JsonValue = nlohmann::ordered_json;

std::string Number(double value, const char* unit) {
  std::array<char, 64> text{};
  const int digits = std::abs(value) < 10 ? 2 : std::abs(value) < 100 ? 1 : 0;
  std::snprintf(text.data(), text.size(), "%.*f %s", digits, value, unit);
  return text.data();
}

}  // namespace

const char* SeverityName(Severity severity) {
  switch (severity) {
    case Severity::kOk: return "ok";
    case Severity::kNote: return "note";
    case Severity::kProblem: return "problem";
  }
  return "?";
}

void Report::Doing(const std::string& what) {
  if (progress_ == nullptr) return;
  const std::lock_guard lock(mutex_);
  std::fputs(("... " + what + "\n").c_str(), progress_);
  std::fflush(progress_);
}

void Report::Add(Finding finding) {
  TERRACE_ASSERT(finding.severity == Severity::kOk || !finding.remedy.empty());
  const std::lock_guard lock(mutex_);
  if (out_ != nullptr) {
    std::string text;
    if (finding.section() != section_) {
      section_ = finding.section();
      text = section_ + "\n";
    }
    std::string name = finding.id.substr(finding.id.find('.') + 1);
    name.resize(std::max<size_t>(name.size(), 12), ' ');
    std::string severity = SeverityName(finding.severity);
    severity.resize(8, ' ');
    text += "  " + severity + name + "  " + finding.what + "\n";
    if (!finding.remedy.empty()) text += "            do: " + finding.remedy + "\n";
    std::fputs(text.c_str(), out_);
    std::fflush(out_);
  }
  findings_.push_back(std::move(finding));
}

std::vector<Finding> Report::findings() const {
  const std::lock_guard lock(mutex_);
  return findings_;
}

bool Report::Has(Severity severity) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(findings_, [&](const Finding& finding) { return finding.severity == severity; });
}

std::string Report::Json() const {
  auto list = JsonValue::array();
  for (const Finding& finding : findings()) {
    JsonValue figures = JsonValue::object();
    for (const auto& figure : finding.figures) {
      std::visit([&](const auto& value) { figures[figure.first] = value; }, figure.second);
    }
    list.push_back({{"id", finding.id},
                    {"section", finding.section()},
                    {"severity", SeverityName(finding.severity)},
                    {"what", finding.what},
                    {"remedy", finding.remedy},
                    {"measured", std::move(figures)}});
  }
  const Severity worst = Has(Severity::kProblem) ? Severity::kProblem
                         : Has(Severity::kNote)  ? Severity::kNote
                                                 : Severity::kOk;
  const JsonValue document = {{"terrace", kVersion}, {"status", SeverityName(worst)}, {"findings", std::move(list)}};
  // What servers say may be any bytes.
  return document.dump(2, ' ', false, JsonValue::error_handler_t::replace) + "\n";
}

std::string Report::Summary() const {
  std::array<int, 3> counts{};
  for (const Finding& finding : findings()) ++counts[static_cast<size_t>(finding.severity)];
  const auto plural = [](int n, const char* one) { return std::to_string(n) + " " + one + (n == 1 ? "" : "s"); };
  return plural(counts[2], "problem") + ", " + plural(counts[1], "note") + ", " + std::to_string(counts[0]) + " ok";
}

std::string BytesText(double bytes) {
  constexpr std::array kUnits = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  size_t unit = 0;
  for (; bytes >= 1024 && unit + 1 < kUnits.size(); ++unit) bytes /= 1024;
  if (unit == 0) return std::to_string(static_cast<int64_t>(bytes)) + " B";
  return Number(bytes, kUnits[unit]);
}

std::string RateText(double bytes_per_s) {
  return bytes_per_s >= 1e9 ? Number(bytes_per_s / 1e9, "GB/s") : Number(bytes_per_s / 1e6, "MB/s");
}

std::string MsText(double ms) { return ms >= 1000 ? Number(ms / 1000, "s") : Number(ms, "ms"); }

std::string Spread(const std::string& name, std::vector<double> ms, Figures& figures) {
  TERRACE_ASSERT(!ms.empty());
  std::ranges::sort(ms);
  const double p50 = ms[ms.size() / 2];
  const double p99 = ms[std::min(ms.size() - 1, ms.size() * 99 / 100)];
  figures.emplace_back(name + "_p50_ms", p50);
  figures.emplace_back(name + "_p99_ms", p99);
  return MsText(p50) + " (p99 " + MsText(p99) + ")";
}

}  // namespace terrace::doctor
