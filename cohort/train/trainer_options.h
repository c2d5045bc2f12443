#pragma once

#include <torch/arg.h>

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "cohort/parallel/gradient_sync.h"

namespace cohort::elastic {
class Session;
}

namespace cohort::train {

/// How a Trainer runs, saves and stops.
struct TrainerOptions {
  /// Epochs of the whole run, those before a resume included.
  TORCH_ARG(std::int64_t, epochs) = 1;
  /// Stops after so many steps of the whole run; 0: no limit.
  TORCH_ARG(std::int64_t, max_steps) = 0;
  /// Evaluates at most so many batches; 0: all.
  TORCH_ARG(std::int64_t, max_eval_batches) = 0;
  /// LibTorch's generators are a function of it, the step and the rank before each step, or of the virtual
  /// rank before each of its shares: core::reseed_generators().
  TORCH_ARG(std::uint64_t, seed) = 1;
  /// How several ranks work together; null: one process alone. The loaders read its shares().
  /// Rank 0 writes checkpoints and trace, and all resume from what it reads.
  TORCH_ARG(std::shared_ptr<parallel::GradientSync>, gradient_sync) = nullptr;

  /// The elastic run that this process is of; null: none. Then `gradient_sync` is a VirtualRankSync without a
  /// group, the loaders read all its shares, and Trainer sets which of them are this process's, after each
  /// change of the run's processes. One optimizer, on the CPU; a task that reports its metrics
  /// (Task::report_metrics).
  TORCH_ARG(std::shared_ptr<elastic::Session>, session) = nullptr;
  /// What all ranks must have alike, as a text of lines: `cohort train` puts the configuration there.
  TORCH_ARG(std::string, common) = "";

  /// Folder for `checkpoints/` and `trace.json`; empty: nothing is written.
  TORCH_ARG(std::filesystem::path, run_dir) = {};
  /// "" starts afresh; "auto" resumes from the last checkpoint if there is one; "last", "best" or a path must
  /// exist.
  TORCH_ARG(std::string, resume) = "";
  /// On resume, learning rates and other options of the optimizers are what the program made them, not those
  /// of the checkpoint. Schedules begin from them.
  TORCH_ARG(bool, keep_optimizer_options) = false;
  /// false: on resume best is chosen anew, as evaluation is another one than before.
  TORCH_ARG(bool, keep_best) = true;
  /// A text that checkpoints keep as it is: `cohort train` puts the configuration there.
  TORCH_ARG(std::string, description) = "";
  /// Epochs between checkpoints (the first and the last epoch are saved too); 0: none by epoch.
  TORCH_ARG(std::int64_t, save_every) = 1;
  /// Steps between checkpoints; 0: none by step.
  TORCH_ARG(std::int64_t, save_every_steps) = 0;
  /// Minutes between checkpoints; 0: none by time.
  TORCH_ARG(double, save_every_minutes) = 0;
  /// Periodic checkpoints that are kept, newest first; 0: all.
  TORCH_ARG(std::int64_t, keep) = 3;
  /// Of the tensors in checkpoints: one of checkpoint::tensor_format_names().
  TORCH_ARG(std::string, checkpoint_format) = "safetensors";
  /// The metric that chooses `best` among evaluated epochs; empty: val_accuracy, or val_loss where there is
  /// none.
  TORCH_ARG(std::string, best_metric) = "";
  /// Whether more of it is better; not set: as its name says (loss, error, rmse, accuracy, f1, ...).
  TORCH_ARG(std::optional<bool>, best_is_highest) = std::nullopt;

  /// Epochs between evaluations (the first and the last epoch are evaluated too); 0: never.
  TORCH_ARG(std::int64_t, eval_every) = 1;
  /// Batches evaluated before the first step, so that metrics with another name and data that cannot be read
  /// are found before the first epoch; 0: none.
  TORCH_ARG(std::int64_t, check_eval_batches) = 1;
  /// Steps between reports with averages.
  TORCH_ARG(std::int64_t, log_every) = 50;
  /// Steps recorded on the timeline, from the first on; 0: none.
  TORCH_ARG(std::int64_t, trace_steps) = 0;
  /// false: a step whose loss is not finite is counted and the run continues.
  TORCH_ARG(bool, stop_on_non_finite) = true;
  /// Finish the step, save and return on SIGINT, SIGTERM and SIGHUP; save and continue at SIGUSR1.
  TORCH_ARG(bool, handle_signals) = false;
};

}  // namespace cohort::train
