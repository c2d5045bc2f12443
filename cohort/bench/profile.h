#pragma once

#include <torch/arg.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/bench/operator_row.h"

/// Which operators a piece of work spends its time in, over LibTorch's profiler.
namespace cohort::bench {

/// What profile() and Profiler record.
struct ProfileOptions {
  /// Steps before the first that is recorded: they fill caches and memory.
  TORCH_ARG(int, warm_up) = 3;
  /// Steps that are recorded.
  TORCH_ARG(int, steps) = 1;
  /// Operators on inputs of other shapes are rows of their own.
  TORCH_ARG(bool, shapes) = false;
};

/// What was recorded. A value: keep it, print it, write it.
class Profile {
 public:
  /// By time on GPUs, where there is any, then by time of their own, the longest first.
  const std::vector<OperatorRow>& operators() const { return operators_; }
  /// Wall-clock time of the recorded steps. On several threads the operators' times may add up to more.
  std::chrono::nanoseconds wall() const { return wall_; }
  /// How many steps the recording covered.
  std::int64_t steps() const { return steps_; }
  /// Events of the recording, over all steps: calls of operators, and work on GPUs.
  std::int64_t num_events() const { return num_events_; }

  /// The first `max_rows` operators as a table of text, times per step, and a line with what stands below.
  std::string table(std::size_t max_rows = 20) const;
  /// A Chrome trace (chrome://tracing, ui.perfetto.dev): this program's timeline (base/timeline.h) during the
  /// recording, below each of its threads a row with the operators that ran there, and a row for each stream
  /// of a GPU, under one clock.
  const std::string& trace() const { return trace_; }
  /// Writes the trace, atomically. Throws: SystemError naming the file.
  void write_trace(const std::filesystem::path& path) const;

 private:
  friend class Profiler;
  std::vector<OperatorRow> operators_;
  std::chrono::nanoseconds wall_{0};
  std::int64_t steps_ = 0;
  std::int64_t num_events_ = 0;
  std::string trace_;
};

/// Records the operators of all threads of this process from its construction to stop(); without stop() what
/// was recorded is dropped. Also records the timeline, unless that is recording already, which then
/// continues. Work on GPUs is recorded too where LibTorch's CUDA part is loaded and sees one; stop() then
/// waits for it. Threads: construct, stop and destroy on one thread. Throws: UsageError if a profiler of
/// LibTorch is running already.
class Profiler {
 public:
  explicit Profiler(const ProfileOptions& options = {});
  ~Profiler();
  Profiler(const Profiler&) = delete;
  Profiler& operator=(const Profiler&) = delete;

  /// Ends the recording; `steps` is how many steps it covered, for the figures per step. Throws: UsageError
  /// when called twice or with steps below 1.
  Profile stop(std::int64_t steps = 1);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

/// Calls `step` options.warm_up() times, records options.steps() more, and returns what was seen.
/// Throws: as Profiler; UsageError for steps below 1; whatever `step` throws.
///
///     std::string table = bench::profile([&] { train_step(); }, bench::ProfileOptions().steps(10)).table();
Profile profile(const std::function<void()>& step, const ProfileOptions& options = {});

}  // namespace cohort::bench
