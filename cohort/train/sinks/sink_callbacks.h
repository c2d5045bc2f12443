#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cohort/data/image.h"
#include "cohort/train/callback.h"
#include "cohort/train/sinks/metrics_log.h"
#include "cohort/train/sinks/progress.h"
#include "cohort/train/sinks/tensorboard.h"

/// Callbacks that write what Trainer reports: to the terminal, to files, to TensorBoard.
namespace cohort::train {

/// A bar on a terminal, plain lines elsewhere; a line per epoch in both.
class ProgressCallback : public Callback {
 public:
  explicit ProgressCallback(ProgressOptions options);
  void on_step_end(const StepReport& report) override;
  void on_epoch_end(const EpochReport& report) override;
  void on_fit_end(const FitResult& result) override;

 private:
  std::map<std::string, double> last_averages_;
  std::int64_t memory_bytes_ = 0;
  Progress progress_;
};

/// metrics.jsonl, metrics.csv and, at the end, curves.svg in `folder`.
class MetricsCallback : public Callback {
 public:
  MetricsCallback(std::filesystem::path folder, std::string title);
  void on_start_counts(const FitInfo& info) override;
  void on_step_end(const StepReport& report) override;
  void on_epoch_end(const EpochReport& report) override;
  void on_fit_end(const FitResult& result) override;

 private:
  std::filesystem::path folder_;
  std::string title_;
  std::optional<MetricsLog> log_;  // opened when the run begins: one that is rejected leaves its files alone
};

/// TensorBoard event files in `folder`: scalars, the learning rate, and the first `images` inputs of the run.
class TensorBoardCallback : public Callback {
 public:
  /// `mean` and `std` undo Normalize, per channel; empty: the input is in 0..1.
  TensorBoardCallback(std::filesystem::path folder, int images, std::vector<double> mean,
                      std::vector<double> std);
  void on_start_counts(const FitInfo& info) override;
  void on_first_batch(data::Batch& batch) override;
  void on_step_end(const StepReport& report) override;
  void on_epoch_end(const EpochReport& report) override;
  void on_save(std::int64_t step) override;
  void on_fit_end(const FitResult& result) override;

 private:
  std::filesystem::path folder_;
  int images_;
  std::vector<double> mean_;
  std::vector<double> std_;
  std::vector<data::Image> first_images_;  // of the first batch, until the start counts
  std::optional<TensorBoardWriter> writer_;
};

}  // namespace cohort::train
