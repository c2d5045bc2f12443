#pragma once

#include <functional>
#include <string>
#include <string_view>

/// The library's log: a line at a time, to stderr, from any thread.
///
/// The library never prints results; it warns. Level and sink belong to the program.
namespace cohort::base {

/// How much a line matters, in ascending order. kOff is a level for set_log_level() alone: nothing is
/// written.
enum class LogLevel { kDebug, kInfo, kWarning, kError, kOff };

/// Sets the lowest level that is written. The default is kInfo, or what COHORT_LOG (debug, info, warning,
/// error, off) says when the first line is written.
void set_log_level(LogLevel level);

/// Sends every line, already below no level filter, to `sink` instead of stderr; an empty function restores
/// stderr. Threads: `sink` is called by one thread at a time.
void set_log_sink(std::function<void(LogLevel, std::string_view)> sink);

/// Writes one line if `level` is at least the level that is set. Threads: any; lines do not mix. Blocking:
/// until the sink has taken the line, so a sink must not log.
void log(LogLevel level, std::string_view message);
/// As log(), with the level in the name.
inline void log_debug(std::string_view message) {
  log(LogLevel::kDebug, message);
}
inline void log_info(std::string_view message) {
  log(LogLevel::kInfo, message);
}
inline void log_warning(std::string_view message) {
  log(LogLevel::kWarning, message);
}
inline void log_error(std::string_view message) {
  log(LogLevel::kError, message);
}

/// Writes `message` as a warning the first time that `key` is seen in this process: for what has no effect
/// here.
void warn_once(std::string_view key, std::string_view message);

}  // namespace cohort::base
