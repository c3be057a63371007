// One line per event, logfmt: `time=... level=info event=tier_degraded tier=shared_fs reason=timeout`. The library is
// silent until a program calls log::SetSink. Event names are stable and listed in docs/reference/events.md.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <string_view>
#include <type_traits>

namespace terrace {
class Clock;
}

namespace terrace::log {

enum class Level { kDebug, kInfo, kWarn, kError };
Level LevelNamed(std::string_view name);  // "debug", "info", "warn", "error"; another: kInfo.

// A value of a field. Numbers print plainly; text is quoted only if it needs to be.
class Value {
 public:
  Value(std::string_view v) : text_(v) {}         // NOLINT(google-explicit-constructor)
  Value(const char* v) : text_(v) {}              // NOLINT(google-explicit-constructor)
  Value(const std::string& v) : text_(v) {}       // NOLINT(google-explicit-constructor)
  Value(bool v) : text_(v ? "true" : "false") {}  // NOLINT(google-explicit-constructor)
  template <class T>
    requires std::is_arithmetic_v<T>
  Value(T v) : text_(Number(v)) {}  // NOLINT(google-explicit-constructor)
  const std::string& text() const { return text_; }

 private:
  template <class T>
  static std::string Number(T v) {
    if constexpr (std::is_floating_point_v<T>) {
      return FromDouble(static_cast<double>(v));
    } else {
      return std::to_string(v);
    }
  }
  static std::string FromDouble(double v);  // 6 significant digits.
  std::string text_;
};

struct Field {
  std::string_view name;
  Value value;
};

// log::Info("frame_quarantined", {{"tier", "shared_fs"}, {"reason", "damaged"}});
// Thread-safe. The same event more than 10 times in a second is left out and counted: `suppressed=41` on the next one.
void Debug(std::string_view event, std::initializer_list<Field> fields = {});
void Info(std::string_view event, std::initializer_list<Field> fields = {});
void Warn(std::string_view event, std::initializer_list<Field> fields = {});
void Error(std::string_view event, std::initializer_list<Field> fields = {});

// Where lines go (without the newline) and from which level on; called from any thread, several at once. Null: nowhere.
// `clock` must outlive the last line; null is the system's. Call before threads start.
void SetSink(std::function<void(Level, std::string_view line)> sink, Level min_level = Level::kInfo,
             const Clock* clock = nullptr);
void LogToStderr(Level min_level = Level::kInfo);

}  // namespace terrace::log
