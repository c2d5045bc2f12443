// One mutex guards level, sink and the keys of warn_once(). A line is written under it, so lines do not mix,
// and a sink is called by one thread at a time. The log is made at its first use, and reads COHORT_LOG then.
// Surprising: a sink that logs waits for itself, as the mutex is not recursive. Always: to log throws nothing
// for a wrong COHORT_LOG. The first line says what is wrong with it.
#include "cohort/base/log.h"

#include <spdlog/sinks/stdout_color_sinks.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <array>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "cohort/base/env.h"
#include "cohort/base/error.h"

namespace cohort::base {
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

// A name that is none must not end the program from inside a log line, so it is the first thing logged
// instead.
LogLevel level_from_environment(std::string& trouble) {
  static const std::array<std::string, 5> names = {"debug", "info", "warning", "error", "off"};
  try {
    const std::optional<std::string> name = env_choice("COHORT_LOG", names);
    if (!name) return LogLevel::kInfo;
    return static_cast<LogLevel>(std::find(names.begin(), names.end(), *name) - names.begin());
  } catch (const ConfigError& error) {
    trouble = error.what();
    return LogLevel::kInfo;
  }
}

struct Log {
  Log() {
    stderr_logger =
        std::make_shared<spdlog::logger>("cohort", std::make_shared<spdlog::sinks::stderr_color_sink_mt>());
    stderr_logger->set_pattern("%H:%M:%S %^%l%$ %v");
    stderr_logger->set_level(to_spdlog(level));
    stderr_logger->flush_on(spdlog::level::warn);
    if (!trouble.empty()) stderr_logger->warn(spdlog::string_view_t(trouble.data(), trouble.size()));
  }

  std::mutex mutex;
  // Before `level`, whose making writes into it.
  std::string trouble;
  LogLevel level = level_from_environment(trouble);
  std::shared_ptr<spdlog::logger> stderr_logger;
  std::function<void(LogLevel, std::string_view)> sink;
  std::set<std::string, std::less<>> warned;
};

// It is leaked on purpose: other static destructors may still log.
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
  // Without the lock, which log() takes itself.
  log(LogLevel::kWarning, message);
}

}  // namespace cohort::base
