#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

/// What a run says while it goes: a bar on a terminal, plain lines elsewhere.
namespace cohort::train {

/// The numbers of one moment; what is not set is not shown.
struct ProgressNumbers {
  std::string phase = "train";  ///< train, eval
  std::int64_t epoch = 1;       ///< from 1
  std::int64_t epochs = 1;
  std::int64_t step = 0;   ///< steps done in this epoch
  std::int64_t steps = 0;  ///< steps of this epoch; 0: not known
  std::optional<double> loss;
  std::optional<double> accuracy;  ///< 0..1
  std::optional<double> lr;
  std::optional<double> samples_per_second;
  std::optional<double> data_wait;           ///< share of the time spent waiting for data, 0..1
  std::optional<std::int64_t> memory_bytes;  ///< resident bytes of the process
  std::optional<double> seconds_left;        ///< until the end of the run
};

/// Returns one line of at most `width` columns: what matters least is left out first.
std::string progress_bar_line(const ProgressNumbers& numbers, int width, bool unicode = true);

/// Returns the line of a log file: every number, nothing that moves.
std::string progress_plain_line(const ProgressNumbers& numbers);

/// "1:02:03", "4:05", "0:07"; "-" when not finite.
std::string format_duration(double seconds);
/// "1.8 GiB", "512 MiB".
std::string format_bytes(std::int64_t bytes);

/// How progress is shown: kAuto is kBar on a terminal and kPlain elsewhere.
enum class ProgressMode { kAuto, kBar, kPlain, kOff };
ProgressMode progress_mode(const std::string& name);  ///< of run.progress; throws ConfigError

/// Where progress is shown, and how often.
struct ProgressOptions {
  ProgressMode mode = ProgressMode::kAuto;
  std::int64_t log_every = 50;                  ///< steps between plain lines; 0: none
  std::chrono::milliseconds min_interval{100};  ///< between redraws of the bar
  std::FILE* out = stderr;
};

/// Shows progress on `options.out`. In kAuto a terminal gets a bar, anything else plain lines.
/// Threads: any, one at a time (a lock inside). Restores the cursor in the destructor.
///
///     Progress progress({.log_every = config.run.log_every});
///     progress.update(numbers);                 // every step: cheap, most calls draw nothing
///     progress.print("epoch 1/8: ...");         // a line that stays, above the bar
class Progress {
 public:
  explicit Progress(ProgressOptions options);
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// Shows `numbers`, unless that would be too soon after the last time.
  void update(const ProgressNumbers& numbers);
  /// Writes `line` (a newline is added) where it stays; the bar continues below it.
  void print(std::string_view line);
  /// Takes the bar away, until the next update.
  void clear();
  /// True when this is a bar: the caller may leave out what the bar shows.
  bool is_bar() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cohort::train
