#include "base/log.h"

#include <charconv>
#include <chrono>
#include <cstdio>
#include <ctime>
#include <map>
#include <mutex>
#include <optional>
#include <utility>

#include "base/clock.h"

namespace terrace::log {
namespace {

constexpr uint64_t kLinesPerSecond = 10;  // Of one event.

struct Recent {
  TimePoint window_start;
  uint64_t lines = 0;       // In this window.
  uint64_t suppressed = 0;  // Since the last line that came out.
};

struct State {
  std::function<void(Level, std::string_view)> sink;  // Set before threads start, as the next two.
  Level min_level = Level::kInfo;
  const Clock* clock = nullptr;
  std::mutex mutex;
  std::map<std::string, Recent, std::less<>> recent;  // Guarded by mutex. As many entries as the code has event names.
};

// Never destroyed: threads may log while the process ends.
State& TheState() {
  static State& state = *new State;
  return state;
}

const char* LevelName(Level level) {
  switch (level) {
    case Level::kDebug: return "debug";
    case Level::kInfo: return "info";
    case Level::kWarn: return "warn";
    case Level::kError: return "error";
  }
  return "unknown";
}

bool IsControl(char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }

bool NeedsQuotes(std::string_view text) {
  if (text.empty()) return true;
  for (const char c : text) {
    if (c == ' ' || c == '=' || c == '"' || IsControl(c)) return true;
  }
  return false;
}

// A value can't end its line or pass for another field; bytes above 0x7f (UTF-8) stay as they are.
void AppendValue(std::string* line, std::string_view text) {
  if (!NeedsQuotes(text)) {
    *line += text;
    return;
  }
  *line += '"';
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      *line += '\\';
      *line += c;
    } else if (c == '\n') {
      *line += "\\n";
    } else if (c == '\t') {
      *line += "\\t";
    } else if (IsControl(c)) {
      static constexpr char kHex[] = "0123456789abcdef";
      *line += "\\u00";
      *line += kHex[static_cast<unsigned char>(c) >> 4];
      *line += kHex[static_cast<unsigned char>(c) & 15];
    } else {
      *line += c;
    }
  }
  *line += '"';
}

void AppendField(std::string* line, std::string_view name, std::string_view value) {
  *line += ' ';
  *line += name;
  *line += '=';
  AppendValue(line, value);
}

std::string TimeText(uint64_t wall_ns) {
  const auto seconds = static_cast<std::time_t>(wall_ns / 1'000'000'000);
  std::tm utc{};
  gmtime_r(&seconds, &utc);
  char text[40];
  const size_t length = std::strftime(text, sizeof text, "%Y-%m-%dT%H:%M:%S", &utc);
  std::snprintf(text + length, sizeof text - length, ".%03uZ", static_cast<unsigned>(wall_ns / 1'000'000 % 1000));
  return text;
}

// How many lines of this event were left out before this one; nothing if this one is to be left out too.
std::optional<uint64_t> Admit(State* state, std::string_view event, TimePoint now) {
  std::lock_guard lock(state->mutex);
  auto found = state->recent.find(event);
  if (found == state->recent.end()) found = state->recent.emplace(event, Recent{.window_start = now}).first;
  Recent& recent = found->second;
  if (now - recent.window_start >= std::chrono::seconds(1)) {
    recent.window_start = now;
    recent.lines = 0;
  }
  if (recent.lines == kLinesPerSecond) {
    ++recent.suppressed;
    return std::nullopt;
  }
  ++recent.lines;
  return std::exchange(recent.suppressed, 0);
}

void Write(Level level, std::string_view event, std::initializer_list<Field> fields) {
  State& state = TheState();
  if (state.sink == nullptr || level < state.min_level) return;
  const std::optional<uint64_t> suppressed = Admit(&state, event, state.clock->Now());
  if (!suppressed) return;
  std::string line = "time=" + TimeText(state.clock->WallNs());
  AppendField(&line, "level", LevelName(level));
  AppendField(&line, "event", event);
  for (const Field& field : fields) AppendField(&line, field.name, field.value.text());
  if (*suppressed > 0) AppendField(&line, "suppressed", std::to_string(*suppressed));
  state.sink(level, line);
}

}  // namespace

std::string Value::FromDouble(double v) {
  char buffer[32];
  const auto end = std::to_chars(buffer, buffer + sizeof buffer, v, std::chars_format::general, 6).ptr;
  return {buffer, end};
}

void Debug(std::string_view event, std::initializer_list<Field> fields) { Write(Level::kDebug, event, fields); }
void Info(std::string_view event, std::initializer_list<Field> fields) { Write(Level::kInfo, event, fields); }
void Warn(std::string_view event, std::initializer_list<Field> fields) { Write(Level::kWarn, event, fields); }
void Error(std::string_view event, std::initializer_list<Field> fields) { Write(Level::kError, event, fields); }

void SetSink(std::function<void(Level, std::string_view)> sink, Level min_level, const Clock* clock) {
  static const SystemClock system_clock;
  State& state = TheState();
  state.sink = std::move(sink);
  state.min_level = min_level;
  state.clock = clock != nullptr ? clock : &system_clock;
  std::lock_guard lock(state.mutex);
  state.recent.clear();
}

void LogToStderr(Level min_level) {
  // One call a line: lines of several threads, and of several processes on one terminal, don't mix.
  SetSink(
      [](Level, std::string_view line) {
        const std::string whole = std::string(line) + "\n";
        std::fwrite(whole.data(), 1, whole.size(), stderr);
      },
      min_level);
}

Level LevelNamed(std::string_view name) {
  if (name == "debug") return Level::kDebug;
  if (name == "warn") return Level::kWarn;
  return name == "error" ? Level::kError : Level::kInfo;
}

}  // namespace terrace::log
