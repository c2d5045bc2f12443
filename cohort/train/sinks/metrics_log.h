#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

/// The numbers of a run in two files that other programs read: `metrics.jsonl` and `metrics.csv`.
namespace cohort::train {

/// Named numbers in the order in which they are written.
using MetricValues = std::vector<std::pair<std::string, double>>;

/// A row: `step` counts optimizer steps since the start of the run, `epoch` from 1.
struct MetricRow {
  std::int64_t epoch = 0;
  std::int64_t step = 0;
  MetricValues values;

  /// Returns the value named `name`, or nothing.
  std::optional<double> find(const std::string& name) const;
};

/// Appends rows to `metrics.jsonl` (an object per line, `"type": "step"` or `"epoch"`) and epochs to
/// `metrics.csv`. NaN and infinity are `null` in JSON, `nan` and `inf` in CSV.
///
///     MetricsLog log(run_dir);
///     log.truncate_after(checkpoint_step, checkpoint_epochs);  // on resume
///     log.write_step(step, epoch, {{"loss", 0.3}, {"lr", 0.1}});
///     log.write_epoch(step, epoch, {{"train_loss", 0.3}, {"val_accuracy", 0.91}});
///
/// Ownership: owns both files. Threads: one caller at a time. Each row reaches the kernel before the call
/// returns. Throws: SystemError naming the file, when it cannot be written (no space left).
class MetricsLog {
 public:
  /// Opens the files in `folder`, which exists, and reads the epochs that are there already.
  explicit MetricsLog(std::filesystem::path folder);
  ~MetricsLog();
  MetricsLog(const MetricsLog&) = delete;
  MetricsLog& operator=(const MetricsLog&) = delete;

  /// Removes step rows after `step` and epoch rows after `epochs` (epochs that the checkpoint has finished),
  /// so that the resumed run writes them again, without gap or repeat. A half-written last line is removed
  /// too. (0, 0) starts afresh. Atomic: a file is replaced whole.
  void truncate_after(std::int64_t step, std::int64_t epochs);

  /// Appends the averages after a step to metrics.jsonl.
  void write_step(std::int64_t step, std::int64_t epoch, const MetricValues& values);
  /// Appends a finished epoch to both files.
  void write_epoch(std::int64_t step, std::int64_t epoch, const MetricValues& values);

  /// Returns the epoch rows so far, those of the run before a resume included: what curves.svg shows.
  const std::vector<MetricRow>& epochs() const;

 private:
  struct Files;
  std::unique_ptr<Files> files_;
};

}  // namespace cohort::train
