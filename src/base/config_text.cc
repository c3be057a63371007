// What a value or a name in a configuration says, whatever it comes from.
#include <algorithm>
#include <cctype>
#include <charconv>
#include <cmath>
#include <limits>
#include <numeric>
#include <span>
#include <system_error>
#include <utility>

#include "base/config.h"
#include "base/text.h"

namespace terrace::config {
namespace {

// 100 years. Added to any clock, in nanoseconds, it overflows nothing.
constexpr uint64_t kDurationMsMax = 100ull * 365 * 24 * 3600 * 1000;

struct Unit {
  std::string_view name;
  uint64_t factor;
};

// Some read 0400 as octal, YAML 1.1 and C among them. Nobody should have to guess.
Result<void> RefuseLeadingZero(std::string_view text) {
  std::string_view number = Trimmed(text);
  if (number.starts_with('-')) number.remove_prefix(1);
  if (number.size() < 2 || number[0] != '0' || std::isdigit(static_cast<unsigned char>(number[1])) == 0) return {};
  return Fail(Code::kInvalid, Quoted(text) + " begins with a zero, which some read as octal; leave it out");
}

// "1.5 GiB" with the units given, "" being the unit of a bare number. Nothing if it is not such a number or more than
// `most`.
std::optional<uint64_t> ParseQuantity(std::string_view text, std::span<const Unit> units, uint64_t most) {
  text = Trimmed(text);
  const size_t digits = std::min(text.find_first_not_of("0123456789."), text.size());
  const std::string unit_name = Lower(Trimmed(text.substr(digits)));
  const auto unit = std::find_if(units.begin(), units.end(), [&](const Unit& u) { return Lower(u.name) == unit_name; });
  if (unit == units.end()) return std::nullopt;
  const char* end = text.data() + digits;
  uint64_t whole = 0;
  const auto [at, code] = std::from_chars(text.data(), end, whole);
  if (code != std::errc()) return std::nullopt;
  if (at == end) {
    if (whole > most / unit->factor) return std::nullopt;
    return whole * unit->factor;
  }
  if (unit->factor == 1 || end[-1] == '.') return std::nullopt;  // Half a byte; "5.", cut off.
  double number = 0;
  const auto [number_end, number_code] = std::from_chars(text.data(), end, number, std::chars_format::fixed);
  if (number_code != std::errc() || number_end != end) return std::nullopt;
  const double value = number * static_cast<double>(unit->factor);
  if (!(value < static_cast<double>(most))) return std::nullopt;
  return static_cast<uint64_t>(std::round(value));
}

// Edits from one to the other: insert, remove, replace a character.
size_t Distance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i);
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({replaced, row[j] + 1, row[j - 1] + 1});
    }
  }
  return row.back();
}

// "ram" of "ram-size": the first words of the other name.
bool FirstWords(std::string_view shorter, std::string_view longer) {
  return longer.size() > shorter.size() && longer.starts_with(shorter) && longer[shorter.size()] == '-';
}

// "max-cpu-sizee" of "max-local-cpu-size": all its words, two at least, in their order, with a slip in each at most.
bool LeavesOutWords(std::string_view shorter, std::string_view longer) {
  size_t words = 0;
  while (!shorter.empty()) {
    const std::string_view word = shorter.substr(0, shorter.find('-'));
    shorter.remove_prefix(std::min(word.size() + 1, shorter.size()));
    bool found = false;
    while (!found && !longer.empty()) {
      const std::string_view other = longer.substr(0, longer.find('-'));
      longer.remove_prefix(std::min(other.size() + 1, longer.size()));
      found = Distance(word, other) <= word.size() / 4;
    }
    if (!found) return false;
    ++words;
  }
  return words > 1;
}

}  // namespace

Result<int64_t> ParseInt(std::string_view text) {
  if (const Result<void> plain = RefuseLeadingZero(text); !plain) return tl::unexpected(plain.error());
  const std::string_view number = Trimmed(text);
  int64_t value = 0;
  const auto [end, code] = std::from_chars(number.data(), number.data() + number.size(), value);
  if (code != std::errc() || end != number.data() + number.size()) {
    return Fail(Code::kInvalid, Quoted(text) + " is not a whole number");
  }
  return value;
}

Result<uint64_t> ParseBytes(std::string_view text) {
  static constexpr Unit kUnits[] = {{"", 1},
                                    {"B", 1},
                                    {"KB", 1000},
                                    {"MB", 1000'000},
                                    {"GB", 1000'000'000},
                                    {"TB", 1000'000'000'000},
                                    {"KiB", 1ull << 10},
                                    {"MiB", 1ull << 20},
                                    {"GiB", 1ull << 30},
                                    {"TiB", 1ull << 40}};
  if (const Result<void> plain = RefuseLeadingZero(text); !plain) return tl::unexpected(plain.error());
  const auto bytes = ParseQuantity(text, kUnits, std::numeric_limits<uint64_t>::max());
  if (!bytes) return Fail(Code::kInvalid, Quoted(text) + " is not a size; write 512MiB, 5GB or a number of bytes");
  return *bytes;
}

Result<bool> ParseBool(std::string_view text) {
  const std::string lower = Lower(Trimmed(text));
  if (lower == "true" || lower == "1" || lower == "yes" || lower == "on") return true;
  if (lower == "false" || lower == "0" || lower == "no" || lower == "off") return false;
  return Fail(Code::kInvalid, Quoted(text) + " is neither true nor false; write true, 1, yes, on or false, 0, no, off");
}

Result<int64_t> ParseDurationMs(std::string_view text) {
  static constexpr Unit kUnits[] = {{"", 1}, {"ms", 1}, {"s", 1000}, {"m", 60'000}, {"h", 3600'000}};
  if (const Result<void> plain = RefuseLeadingZero(text); !plain) return tl::unexpected(plain.error());
  const auto ms = ParseQuantity(text, kUnits, kDurationMsMax);
  if (!ms) {
    return Fail(Code::kInvalid, Quoted(text) +
                                    " is not a duration; write 250ms, 5s, 2m, 1h or a number of milliseconds, "
                                    "at most 100 years");
  }
  return static_cast<int64_t>(*ms);
}

// YAML::Load stops there in silence, and YAML::LoadAll (0.7) never comes back from some inputs of seven bytes.
std::optional<size_t> SecondDocument(std::string_view yaml) {
  bool content = false;
  for (size_t number = 1; !yaml.empty(); ++number) {
    const size_t end = std::min(yaml.find('\n'), yaml.size());
    const std::string_view line = yaml.substr(0, end);
    yaml.remove_prefix(std::min(end + 1, yaml.size()));
    const bool marker = (line.starts_with("---") || line.starts_with("...")) &&
                        (line.size() == 3 || std::isspace(static_cast<unsigned char>(line[3])) != 0);
    if (marker && content) return number;
    const std::string_view trimmed = Trimmed(line);
    content |= !marker && !trimmed.empty() && trimmed[0] != '#' && line[0] != '%';
  }
  return std::nullopt;
}

std::optional<std::string> Nearest(std::string_view name, const std::vector<std::string>& known) {
  const std::string wanted = Lower(Replaced(name, '_', '-'));
  std::optional<std::string> nearest;
  size_t best = std::numeric_limits<size_t>::max();
  for (const std::string& candidate : known) {
    const std::string other = Lower(Replaced(candidate, '_', '-'));
    const size_t distance = Distance(wanted, other);
    // One slip for every four characters and one for free; or a word too many or too few at the end; or some left out.
    const bool close = distance <= 1 + wanted.size() / 4 || FirstWords(wanted, other) || FirstWords(other, wanted) ||
                       LeavesOutWords(wanted, other);
    if (close && distance < best) {
      best = distance;
      nearest = candidate;
    }
  }
  return nearest;
}

}  // namespace terrace::config
