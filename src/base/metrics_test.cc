// Would catch: an exposition that Prometheus refuses (escaping, HELP or TYPE twice, buckets not cumulative), two
// objects for one metric, lost counts, a callback run under the registry's lock.
#include "terrace/metrics.h"

#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <thread>
#include <vector>

namespace terrace {
namespace {

TEST(Metrics, TextHasHelpAndTypeOncePerFamily) {
  Metrics metrics;
  metrics.GetCounter("terrace_loads_total", "Chunks asked for", {{"tier", "ram"}, {"outcome", "hit"}}).Add(3);
  metrics.GetCounter("terrace_loads_total", "Another text", {{"tier", "ram"}, {"outcome", "miss"}}).Add();
  metrics.GetGauge("terrace_pinned_bytes", "Pinned").Set(-7);
  EXPECT_EQ(metrics.Text(),
            "# HELP terrace_loads_total Chunks asked for\n"
            "# TYPE terrace_loads_total counter\n"
            "terrace_loads_total{tier=\"ram\",outcome=\"hit\"} 3\n"
            "terrace_loads_total{tier=\"ram\",outcome=\"miss\"} 1\n"
            "# HELP terrace_pinned_bytes Pinned\n"
            "# TYPE terrace_pinned_bytes gauge\n"
            "terrace_pinned_bytes -7\n");
}

TEST(Metrics, LabelValuesAndHelpAreEscaped) {
  Metrics metrics;
  metrics.GetCounter("c_total", "a \\ b\n\"c\"", {{"l", "q\"b\\n\nend"}});
  EXPECT_EQ(metrics.Text(),
            "# HELP c_total a \\\\ b\\n\"c\"\n"
            "# TYPE c_total counter\n"
            "c_total{l=\"q\\\"b\\\\n\\nend\"} 0\n");
}

TEST(Metrics, TheSameNameAndLabelsAreTheSameObject) {
  Metrics metrics;
  Counter& first = metrics.GetCounter("c_total", "h", {{"a", "1"}});
  for (int i = 0; i < 100; ++i) metrics.GetCounter("c_total", "h", {{"a", std::to_string(i)}});
  EXPECT_EQ(&first, &metrics.GetCounter("c_total", "h", {{"a", "1"}}));
  EXPECT_NE(&first, &metrics.GetCounter("c_total", "h", {{"a", "2"}}));
}

TEST(Metrics, HistogramBucketsAreCumulativeFrom1MsTo131S) {
  Metrics metrics;
  Histogram& histogram = metrics.GetHistogram("h_seconds", "h", {{"tier", "ram"}});
  for (const double seconds :
       {0.0, 0.001, 0.0011, 0.5, 131.072, 132.0, -1.0, std::numeric_limits<double>::quiet_NaN()}) {
    histogram.Observe(seconds);
  }
  const std::string text = metrics.Text();
  for (const char* line : {
           "# TYPE h_seconds histogram\n",
           "h_seconds_bucket{tier=\"ram\",le=\"0.001\"} 4\n",
           "h_seconds_bucket{tier=\"ram\",le=\"0.002\"} 5\n",
           "h_seconds_bucket{tier=\"ram\",le=\"0.256\"} 5\n",
           "h_seconds_bucket{tier=\"ram\",le=\"0.512\"} 6\n",
           "h_seconds_bucket{tier=\"ram\",le=\"1.024\"} 6\n",
           "h_seconds_bucket{tier=\"ram\",le=\"131.072\"} 7\n",
           "h_seconds_bucket{tier=\"ram\",le=\"+Inf\"} 8\n",
           "h_seconds_sum{tier=\"ram\"} 263.5741\n",
           "h_seconds_count{tier=\"ram\"} 8\n",
       }) {
    EXPECT_NE(text.find(line), std::string::npos) << line << text;
  }
}

TEST(Metrics, ACallbackIsReadWhenAskedAndMayUseTheRegistry) {
  Metrics metrics;
  double value = 1.5;
  metrics.AddGaugeCallback("terrace_frames", "Frames", {{"tier", "ram"}}, [&] {
    metrics.GetCounter("reads_total", "Reads").Add();  // Would deadlock under the registry's lock.
    return value;
  });
  EXPECT_NE(metrics.Text().find("# TYPE terrace_frames gauge\nterrace_frames{tier=\"ram\"} 1.5\n"), std::string::npos);
  value = 8589934592.0;
  EXPECT_NE(metrics.Text().find("terrace_frames{tier=\"ram\"} 8589934592\n"), std::string::npos);
  EXPECT_NE(metrics.Text().find("reads_total 3\n"), std::string::npos);
}

TEST(Metrics, NoCountIsLostBetweenThreads) {
  Metrics metrics;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 1000; ++i) {
        metrics.GetCounter("c_total", "h").Add();
        metrics.GetHistogram("h_seconds", "h").Observe(0.01);
        if (i % 100 == 0) metrics.Text();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(metrics.GetCounter("c_total", "h").value(), 4000u);
  EXPECT_NE(metrics.Text().find("h_seconds_count 4000\n"), std::string::npos);
}

TEST(MetricsDeathTest, OneNameIsOneKindOfMetric) {
  Metrics metrics;
  metrics.GetCounter("c_total", "h");
  EXPECT_DEATH(metrics.GetGauge("c_total", "h"), "assertion failed");
}

}  // namespace
}  // namespace terrace
