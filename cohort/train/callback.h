#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>

namespace cohort::data {
struct Batch;
}

namespace cohort::train {

/// Where a run begins or resumes.
struct FitInfo {
  std::int64_t epochs = 0;
  std::int64_t steps_per_epoch = 0;
  std::int64_t first_epoch = 0;  ///< epochs completed before
  std::int64_t first_step = 0;   ///< steps completed before
  bool resumed = false;          ///< from a checkpoint
  bool continues = false;        ///< of an elastic run: another process wrote its files up to here
  int processes = 1;             ///< that train now
  std::string origin = {};       ///< of an elastic run: each of its starts has another one; else empty
};

/// One finished step. Rates are over the steps since the last report that was logged.
struct StepReport {
  std::int64_t epoch = 0;  ///< the running epoch, from 1
  std::int64_t epochs = 0;
  std::int64_t step = 0;           ///< steps completed in the run
  std::int64_t step_in_epoch = 0;  ///< from 1
  std::int64_t steps_per_epoch = 0;
  double lr = 0;
  double seconds = 0;                      ///< this step on this rank: input and update, without callbacks
  double samples_per_second = 0;           ///< of all ranks together
  double data_wait_share = 0;              ///< 0 to 1: share of wall time spent waiting for input
  double seconds_left = 0;                 ///< of the whole run, without evaluations
  bool logged = false;                     ///< `averages` is filled: every `log_every` steps
  std::map<std::string, double> averages;  ///< of this epoch so far
};

/// One finished epoch. Metrics of evaluation carry the prefix "val_", those of training "train_".
struct EpochReport {
  std::int64_t epoch = 0;  ///< from 1
  std::int64_t epochs = 0;
  std::int64_t step = 0;
  double lr = 0;                  ///< at the last step
  double seconds = 0;             ///< training, without evaluation and checkpoints
  double samples_per_second = 0;  ///< in training, of all ranks together
  double data_wait_share = 0;     ///< 0 to 1: share of `seconds` spent waiting for input
  bool evaluated = false;         ///< `metrics` has those of evaluation too
  bool best = false;              ///< evaluated, and strictly better than every epoch before
  std::map<std::string, double> metrics;
};

/// What a finished run tells.
struct FitResult {
  bool finished = false;                  ///< all epochs, or up to the step limit; false: a signal stopped it
  int signal = 0;                         ///< the signal that asked to stop, or 0
  int rank = 0;                           ///< of this process; -1: an elastic run ended without it
  std::int64_t epochs = 0;                ///< completed in the run
  std::int64_t steps = 0;                 ///< completed in the run
  std::map<std::string, double> metrics;  ///< of the last epoch
  double best = 0;                        ///< value of the named metric; meaningful when best_epoch > 0
  std::int64_t best_epoch = 0;            ///< from 1; 0: none was chosen
  std::filesystem::path last_checkpoint;  ///< empty when nothing was saved
};

/// Hears what Trainer does. Called on the training thread, in the order of registration. In an elastic run
/// (TrainerOptions::session) only process 0 calls, which may be another process after each change. A process
/// that becomes it later is told of the begin and of its first batch then.
class Callback {
 public:
  virtual ~Callback() = default;
  /// Before the first step, which may still fail: what an earlier start wrote stays as it is.
  virtual void on_fit_begin(const FitInfo&) {}
  /// The first step was made, or the first epoch had none left: from here on the start counts, and files of
  /// the run may be written. TrainerOptions::run_dir is there, made by rank 0. Before any report. Not called
  /// where nothing is left to do. In an elastic run it is called again when this process becomes the first
  /// one: what was written of steps after `first_step` and epochs after `first_epoch` is reported again.
  virtual void on_start_counts(const FitInfo&) {}
  /// Before the first step only: the batch as the model will see it. In an elastic run before the first step
  /// that this process makes as the first one, which may be after on_start_counts().
  virtual void on_first_batch(data::Batch&) {}
  /// After each step, logged or not.
  virtual void on_step_end(const StepReport&) {}
  /// After each epoch and its evaluation, before its checkpoint; also where a step limit cuts the epoch
  /// short. Not where a signal does.
  virtual void on_epoch_end(const EpochReport&) {}
  /// Before a checkpoint is written: whatever was reported so far must be in its file.
  virtual void on_save(std::int64_t /*step*/) {}
  /// At the end of fit(), also where a signal or a step limit ended it; not where it throws. Once, unless an
  /// elastic run makes steps after it, or this process becomes the first one again after another one was.
  virtual void on_fit_end(const FitResult&) {}
};

}  // namespace cohort::train
