#include "terrace/metrics.h"

#include <algorithm>
#include <charconv>
#include <cmath>

#include "base/assert.h"

namespace terrace {
namespace {

// The smallest text that reads back as the same number.
std::string NumberText(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "+Inf" : "-Inf";
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, value).ptr;
  return {buffer, end};
}

std::string Escaped(const std::string& text, bool quotes_too) {
  std::string out;
  for (const char c : text) {
    if (c == '\\') {
      out += "\\\\";
    } else if (c == '\n') {
      out += "\\n";
    } else if (c == '"' && quotes_too) {
      out += "\\\"";
    } else {
      out += c;
    }
  }
  return out;
}

// `tier="ram",outcome="hit"`: identity of a metric within its family, and its text.
std::string LabelText(const Labels& labels) {
  std::string out;
  for (const auto& [name, value] : labels) {
    if (!out.empty()) out += ',';
    out += name + "=\"" + Escaped(value, true) + '"';
  }
  return out;
}

std::string Line(const std::string& name, const std::string& labels, const std::string& value) {
  return name + (labels.empty() ? "" : "{" + labels + "}") + " " + value + "\n";
}

// Upper bound of bucket i. A quotient, so that it is the nearest double to the decimal figure and prints as such.
double BucketSeconds(int i) { return static_cast<double>(1 << i) / 1000.0; }

}  // namespace

void Histogram::Observe(double seconds) {
  if (!(seconds > 0)) seconds = 0;  // A NaN too.
  int i = 0;
  while (i < kBuckets && seconds > BucketSeconds(i)) ++i;
  counts_[static_cast<size_t>(i)].fetch_add(1, std::memory_order_relaxed);
  // A year is more than any observation that means something, and keeps the cast defined.
  sum_us_.fetch_add(static_cast<uint64_t>(std::min(seconds, 31536000.0) * 1e6), std::memory_order_relaxed);
}

struct Metrics::Family {
  std::string help;
  std::string type;  // As Prometheus names it.
  // By LabelText. Nodes of a map stay where they are, so references to the metrics last. Only one of the first three is
  // in use.
  std::map<std::string, Counter> counters;
  std::map<std::string, Gauge> gauges;
  std::map<std::string, Histogram> histograms;
  std::map<std::string, std::function<double()>> callbacks;  // Gauges too.
};

Metrics::Family& Metrics::GetFamily(const std::string& name, const std::string& help, const char* type) {
  std::shared_ptr<Family>& family = families_[name];
  if (family == nullptr) family = std::make_shared<Family>(Family{.help = help, .type = type});
  TERRACE_ASSERT(family->type == type);  // One name, one kind of metric.
  return *family;
}

Counter& Metrics::GetCounter(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  return GetFamily(name, help, "counter").counters[LabelText(labels)];
}

Gauge& Metrics::GetGauge(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  return GetFamily(name, help, "gauge").gauges[LabelText(labels)];
}

Histogram& Metrics::GetHistogram(const std::string& name, const std::string& help, const Labels& labels) {
  std::lock_guard lock(mutex_);
  return GetFamily(name, help, "histogram").histograms[LabelText(labels)];
}

void Metrics::AddGaugeCallback(const std::string& name, const std::string& help, const Labels& labels,
                               std::function<double()> read) {
  std::lock_guard lock(mutex_);
  GetFamily(name, help, "gauge").callbacks[LabelText(labels)] = std::move(read);
}

std::string Metrics::Text() const {
  // Callbacks take locks of their own, so they run on a copy, before the lock that the rest needs.
  std::map<std::string, std::map<std::string, std::function<double()>>> callbacks;
  {
    std::lock_guard lock(mutex_);
    for (const auto& [name, family] : families_) callbacks[name] = family->callbacks;
  }
  std::map<std::string, std::string> read_lines;
  for (const auto& [name, by_labels] : callbacks) {
    for (const auto& [labels, read] : by_labels) read_lines[name] += Line(name, labels, NumberText(read()));
  }

  std::string out;
  std::lock_guard lock(mutex_);
  for (const auto& [name, family] : families_) {
    out += "# HELP " + name + " " + Escaped(family->help, false) + "\n# TYPE " + name + " " + family->type + "\n";
    for (const auto& [labels, counter] : family->counters) out += Line(name, labels, std::to_string(counter.value()));
    for (const auto& [labels, gauge] : family->gauges) out += Line(name, labels, std::to_string(gauge.value()));
    out += read_lines[name];
    for (const auto& [labels, histogram] : family->histograms) {
      const std::string before_le = labels.empty() ? "" : labels + ",";
      uint64_t count = 0;  // Of the buckets as read here, so that the last one and _count agree.
      for (int i = 0; i <= Histogram::kBuckets; ++i) {
        count += histogram.counts_[static_cast<size_t>(i)].load(std::memory_order_relaxed);
        const std::string le = i == Histogram::kBuckets ? "+Inf" : NumberText(BucketSeconds(i));
        out += Line(name + "_bucket", before_le + "le=\"" + le + "\"", std::to_string(count));
      }
      const double sum = static_cast<double>(histogram.sum_us_.load(std::memory_order_relaxed)) / 1e6;
      out += Line(name + "_sum", labels, NumberText(sum));
      out += Line(name + "_count", labels, std::to_string(count));
    }
  }
  return out;
}

}  // namespace terrace
