#include "cohort/core/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdlib>
#include <memory>
#include <mutex>
#include <set>

namespace cohort::core {
namespace {

spdlog::level::level_enum to_spdlog(LogLevel level) {
  switch (level) {
    case LogLevel::kDebug:
      return spdlog::level::debug;
    case LogLevel::kInfo:
      return spdlog::level::info;
    case LogLevel::kWarning:
      return spdlog::level::warn;
    case LogLevel::kError:
      return spdlog::level::err;
    case LogLevel::kOff:
      return spdlog::level::off;
  }
  return spdlog::level::info;
}

LogLevel level_from_environment() {
  const char* text = std::getenv("COHORT_LOG");
  const std::string_view name = text == nullptr ? "" : text;
  if (name == "debug") return LogLevel::kDebug;
  if (name == "warning") return LogLevel::kWarning;
  if (name == "error") return LogLevel::kError;
  if (name == "off") return LogLevel::kOff;
  return LogLevel::kInfo;
}

struct Log {
  Log() {
    stderr_logger =
        std::make_shared<spdlog::logger>("cohort", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    stderr_logger->set_pattern("%H:%M:%S %^%l%$ %v");
    stderr_logger->set_level(to_spdlog(level));
    stderr_logger->flush_on(spdlog::level::warn);
  }

  std::mutex mutex;
  LogLevel level = level_from_environment();
  std::shared_ptr<spdlog::logger> stderr_logger;
  std::function<void(LogLevel, std::string_view)> sink;
  std::set<std::string, std::less<>> warned;
};

// Leaked on purpose: other static destructors may still log.
Log& the_log() {
  static Log* instance = new Log;
  return *instance;
}

}  // namespace

void set_log_level(LogLevel level) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  state.level = level;
  state.stderr_logger->set_level(to_spdlog(level));
}

void set_log_sink(std::function<void(LogLevel, std::string_view)> sink) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  state.sink = std::move(sink);
}

void log(LogLevel level, std::string_view message) {
  Log& state = the_log();
  std::lock_guard lock(state.mutex);
  if (level < state.level) return;
  if (state.sink) {
    state.sink(level, message);
  } else {
    state.stderr_logger->log(to_spdlog(level), spdlog::string_view_t(message.data(), message.size()));
  }
}

void warn_once(std::string_view key, std::string_view message) {
  {
    Log& state = the_log();
    std::lock_guard lock(state.mutex);
    if (!state.warned.emplace(key).second) return;
  }
  log(LogLevel::kWarning, message);
}

}  // namespace cohort::core
