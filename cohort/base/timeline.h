#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

/// What the threads of this process did and when, as a Chrome trace (chrome://tracing, ui.perfetto.dev).
///
///     base::Timeline::start();
///     { base::TimelineScope scope("forward"); loss = model->forward(x); }
///     base::Timeline::stop();
///     base::Timeline::write("trace.json");
///
/// While it is stopped a scope costs one relaxed load. Memory is bounded: see start().
/// Names are literals; one that is made at run time goes through intern().
/// Threads: any; `start`, `stop` and `write` by one at a time.
namespace cohort::base {

/// The events of this process: one record for all threads, so every function is static.
class Timeline {
 public:
  /// The clock of all times that are recorded.
  using Clock = std::chrono::steady_clock;

  /// Forgets what was recorded and begins to record, at most `max_events` of 48 bytes each; what comes after
  /// is counted (otherData.dropped_events) and dropped.
  static void start(std::size_t max_events = 1 << 20);
  /// Ends the recording. What was recorded stays, for json() and write().
  static void stop();
  /// Whether it records now: one relaxed load.
  static bool enabled() { return enabled_.load(std::memory_order_relaxed); }

  /// Names the calling thread in the timeline, whether recording or not.
  static void name_thread(std::string_view name);
  /// Returns the name of the thread with the system's number `thread`, or of a track; empty where it has
  /// none.
  static std::string thread_name(int thread);
  /// Names the process, such as "rank 3": traces of several ranks can be joined.
  static void name_process(std::string_view name);
  /// A number that changes over time.
  static void counter(const char* name, double value);
  /// Something that happened now, a mark without length on the calling thread.
  static void instant(const char* name);
  /// Records [begin, now).
  static void complete(const char* name, Clock::time_point begin);
  /// The same with a number, and on a row of its own where `track` says so.
  struct Detail {
    int track = 0;              ///< from track(); 0: the calling thread
    const char* key = nullptr;  ///< a literal
    double value = 0;           ///< shown beside the event, under `key`
  };
  /// Records [begin, now) with what `detail` says.
  static void complete(const char* name, Clock::time_point begin, const Detail& detail);
  /// A point of an arrow, which leads from span to span, also from one process to another. All points of an
  /// arrow have its name and its id.
  struct ArrowPoint {
    /// Which one: the letters are those of the format.
    enum class Type : char { kBegin = 's', kNext = 't', kEnd = 'f' };
    Type type = Type::kBegin;
    std::uint64_t id = 0;
    int track = 0;                               ///< from track(); 0: the calling thread
    std::optional<Clock::time_point> time = {};  ///< else now
  };
  /// Records a point in the span that its row has at its time.
  static void arrow(const char* name, const ArrowPoint& point);
  /// Returns a row of the timeline that is no thread, the same one for the same name. What is recorded on a
  /// row must nest, as on a thread.
  static int track(std::string_view name);
  /// Returns a copy of `name` that lives as long as the process, the same one for the same text.
  static const char* intern(std::string_view name);

  /// Returns the trace as JSON.
  static std::string json();
  /// Writes it, atomically. Throws: SystemError naming the file.
  static void write(const std::filesystem::path& path);

  /// For traces of several processes: the events as json() has them, without what stands around them, under
  /// the number `process`, named `name` unless name_process() was called, with times since `zero`, which must
  /// not be after origin().
  static std::string events(int process, std::string_view name, Clock::time_point zero);
  /// When start() was called.
  static Clock::time_point origin();
  /// How many events were not recorded, because there was no room for them, since start().
  static std::size_t dropped();

 private:
  static std::atomic<bool> enabled_;
};

/// Records the time between its construction and its destruction under `name`.
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

}  // namespace cohort::base
