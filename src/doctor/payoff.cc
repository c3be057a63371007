#include "doctor/payoff.h"

#include <array>
#include <cmath>
#include <cstdio>

namespace terrace::doctor {
namespace {

// Tokens a second of prefill: a CPU, small and large accelerators.
constexpr std::array kRates = {100.0, 1'000.0, 5'000.0, 10'000.0, 20'000.0, 50'000.0};
// Below this gain a load is hardly worth its trouble.
constexpr double kGainNote = 2;

std::string Whole(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.0f", value);
  return text.data();
}

std::string Gain(double value) {
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), value < 10 ? "%.1f" : "%.0f", value);
  return text.data();
}

void JudgeTier(const std::string& section, const Bandwidth& tier, double token_bytes, const Payoff& payoff,
               Report& report) {
  // One chunk after the other would pay the latency each time; they are loaded together, and pay it about once.
  const double chunk_s = payoff.chunk_tokens * token_bytes / tier.read;
  const double load_s = 16 * chunk_s + tier.latency_s;  // 16 chunks, a long prompt.
  const double tokens_per_s = 16 * payoff.chunk_tokens / load_s;
  const double gain = tokens_per_s / payoff.prefill_tokens_per_s;
  Finding finding{
      .id = "size.pays_" + section,
      .what = section + " loads " + Whole(tokens_per_s) + " tokens a second, " + Gain(gain) +
              " times as fast as prefill (" + Whole(payoff.prefill_tokens_per_s) + ")",
      .figures = {
          {"load_tokens_per_s", tokens_per_s}, {"prefill_tokens_per_s", payoff.prefill_tokens_per_s}, {"gain", gain}}};
  if (gain < 1) {
    finding.severity = Severity::kProblem;
    finding.what += ": a hit there does not pay, and Terrace computes instead";
    finding.remedy = "give it " + RateText(token_bytes * payoff.prefill_tokens_per_s) + " or more, halve the KV with " +
                     "--kv-type q8_0, or leave the tier out";
  } else if (gain < kGainNote) {
    finding.severity = Severity::kNote;
    finding.what += ": it pays little, and less when others use it too";
    finding.remedy = "more bandwidth, or half the KV with --kv-type q8_0";
  }
  report.Add(std::move(finding));
}

}  // namespace

void TellPayoff(const ModelSize& size, const Payoff& payoff, Report& report) {
  const auto token = static_cast<double>(size.bytes_per_token);
  const double chunk = token * payoff.chunk_tokens;
  const double users = token * 1000 * static_cast<double>(payoff.user_tokens);
  report.Add(
      {"size.token",
       Severity::kOk,
       std::to_string(size.bytes_per_token) + " bytes of KV a token (" + size.shape + ", " + size.type + ")",
       "",
       {{"bytes_per_token", token}, {"type", size.type}, {"context_tokens", static_cast<double>(size.context)}}});
  for (const std::string& note : size.notes) {
    report.Add({"size.model", Severity::kNote, note, "read the figures with that in mind", {}});
  }
  report.Add({"size.chunk",
              Severity::kOk,
              BytesText(chunk) + " a chunk of " + std::to_string(payoff.chunk_tokens) + " tokens",
              "",
              {{"chunk_bytes", chunk}, {"chunk_tokens", static_cast<double>(payoff.chunk_tokens)}}});
  report.Add({"size.users",
              Severity::kOk,
              BytesText(users) + " for 1,000 users of " + std::to_string(payoff.user_tokens) + " tokens each",
              "",
              {{"bytes", users}, {"tokens_per_user", static_cast<double>(payoff.user_tokens)}}});
  const auto tell = [&](const std::string& id, double rate, const std::string& why) {
    report.Add({id,
                Severity::kOk,
                "prefill at " + Whole(rate) + " tokens a second" + why + ": a hit pays above " +
                    RateText(token * rate) + " (" + Gain(token * rate * 8 / 1e9) + " Gbit/s)",
                "",
                {{"prefill_tokens_per_s", rate}, {"pays_above_bytes_per_s", token * rate}}});
  };
  if (payoff.prefill_tokens_per_s > 0) {
    tell("size.pays", payoff.prefill_tokens_per_s, ", as measured");
    for (const auto& [section, tier] : payoff.tiers) {
      if (tier.read > 0) JudgeTier(section, tier, token, payoff, report);
    }
  } else {
    for (const double rate : kRates) tell("size.pays_at_" + Whole(rate), rate, "");
  }
}

}  // namespace terrace::doctor
