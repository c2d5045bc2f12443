#pragma once

#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/data/loader.h"
#include "cohort/train/callback.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

namespace cohort::train {

/// Trains a Task: epochs and steps, evaluation, reports, checkpoints, exact resume.
///
///     Trainer trainer(TrainerOptions().epochs(8).run_dir("runs/first").resume("auto"));
///     FitResult result = trainer.fit(task, train_loader, &eval_loader);
///
/// A run on the CPU that was killed at any moment and resumed ends with bitwise the same parameters as one
/// that was not, at the same number of threads and ranks and for any number of loader workers; on a GPU up to
/// the order in which kernels add. With several ranks every call is collective, callbacks hear averages over
/// all, and a signal that one rank got makes all stop, or save, after the same step. Threads: one caller at a
/// time.
class Trainer {
 public:
  /// Throws: UsageError for no epochs, and for a best_metric whose name does not say whether more is better.
  explicit Trainer(TrainerOptions options);

  /// Appends a callback, for all later calls of fit().
  void add_callback(std::shared_ptr<Callback> callback);

  /// Trains until `epochs` are complete, `max_steps` are done or a signal asks to stop; blocks until then.
  /// Throws: NumericError for a loss that is not finite (naming step and, where known, module); DataError for
  /// a checkpoint that cannot be used; whatever the task and the loader throw.
  FitResult fit(Task& task, data::Loader& train, data::Loader* eval = nullptr);

  /// Means of `eval_step` over `loader`, each under its own name.
  std::map<std::string, double> evaluate(Task& task, data::Loader& loader);

  /// Options as they were given.
  const TrainerOptions& options() const { return options_; }

 private:
  TrainerOptions options_;
  std::vector<std::shared_ptr<Callback>> callbacks_;
};

/// Loads the parameters and buffers of `checkpoint` ("last", "best" in run_dir, or a folder or file) into the
/// task. Throws: DataError listing the names and shapes that differ.
void load_model(Task& task, const std::filesystem::path& checkpoint);

}  // namespace cohort::train
