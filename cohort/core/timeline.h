#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <string>

/// What the threads of this process did and when, as a Chrome trace (chrome://tracing, ui.perfetto.dev).
///
///     core::Timeline::start();
///     { core::TimelineScope scope("forward"); loss = model->forward(x); }
///     core::Timeline::stop();
///     core::Timeline::write("trace.json");
///
/// While it is stopped a scope costs one relaxed load.
/// Threads: any; `start`, `stop` and `write` by one at a time.
namespace cohort::core {

class Timeline {
 public:
  using Clock = std::chrono::steady_clock;

  /// Forgets what was recorded and begins to record, at most `max_events`; what comes after is counted and
  /// dropped.
  static void start(std::size_t max_events = 1 << 20);
  static void stop();
  static bool enabled() { return enabled_.load(std::memory_order_relaxed); }

  /// Names the calling thread in the picture.
  static void name_thread(const std::string& name);
  /// A number that changes over time.
  static void counter(const char* name, double value);
  /// Records [begin, now). `name` must outlive the timeline: a literal.
  static void complete(const char* name, Clock::time_point begin);

  /// Returns the trace as JSON.
  static std::string json();
  /// Writes it, atomically. Throws: SystemError naming the file.
  static void write(const std::filesystem::path& path);

 private:
  static std::atomic<bool> enabled_;
};

/// Records the time between its construction and its destruction under `name`, a literal.
class TimelineScope {
 public:
  explicit TimelineScope(const char* name) : name_(Timeline::enabled() ? name : nullptr) {
    if (name_ != nullptr) begin_ = Timeline::Clock::now();
  }
  ~TimelineScope() {
    if (name_ != nullptr) Timeline::complete(name_, begin_);
  }
  TimelineScope(const TimelineScope&) = delete;
  TimelineScope& operator=(const TimelineScope&) = delete;

 private:
  const char* name_;
  Timeline::Clock::time_point begin_;
};

}  // namespace cohort::core
