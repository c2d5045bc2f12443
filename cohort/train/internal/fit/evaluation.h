#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <string>

#include "cohort/data/loader.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/train/callback.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/task.h"
#include "cohort/train/trainer_options.h"

/// Evaluation, and which evaluated epoch is the best. Internal to this module.
namespace cohort::train {

/// Returns the averages of sums that MeterSet::sums() returned.
std::map<std::string, double> averages_of(const std::map<std::string, MeterSet::Sum>& sums);

/// Returns `metrics` with `prefix` before each name.
std::map<std::string, double> with_prefix(const std::string& prefix,
                                          const std::map<std::string, double>& metrics);

/// How batches are evaluated.
struct EvaluateOptions {
  std::int64_t max_batches = 0;  ///< 0: all
  /// Of the generators' seeds, which are a function of it, the batch and the virtual rank; not set: they are
  /// not seeded. With virtual ranks an `eval_step` that draws has the same numbers on any number of
  /// processes.
  std::optional<std::uint64_t> seed = std::nullopt;
  std::function<bool()> stop = [] { return false; };  ///< ends it early
};

/// Returns means of `eval_step` over all ranks. Collective.
std::map<std::string, double> evaluate_batches(Task& task, data::Loader& loader, RankCoordinator& ranks,
                                               const EvaluateOptions& options);

/// Returns the seed of an evaluation with `gradient_sync`: of `options` where it has virtual ranks.
std::optional<std::uint64_t> evaluation_seed(const TrainerOptions& options,
                                             parallel::GradientSync& gradient_sync);

/// Takes the best out of `found`, which the run with `checkpoints` resumes from, and logs why, where epochs
/// that follow cannot be compared with it: it was evaluated on other data than `eval_data` (or `keep_best` is
/// false), or its checkpoint is not among `checkpoints`.
void forget_lost_best(checkpoint::LoadedCheckpoint& found, const checkpoint::RunCheckpoints& checkpoints,
                      const DataOfRun& eval_data, bool keep_best);

/// The metric by which the best epoch is chosen.
class BestMetric {
 public:
  /// `logs`: warnings and notes go to the log. Throws: UsageError where neither the options nor the metric's
  /// name say whether more of it is better.
  BestMetric(const TrainerOptions& options, bool logs);

  /// Throws: UsageError unless `evaluated` (with the prefix val_) has the metric that was named.
  void check_reported(const std::map<std::string, double>& evaluated) const;

  /// The run resumes from `state`: forgets a best that was chosen by another metric, and says so.
  void continue_from(RunState& state) const;

  void set_logs(bool logs) { logs_ = logs; }

  /// Returns true where `report` is the best so far, which `state` then says too. A metric that is not there,
  /// or is NaN, is a warning.
  bool choose(const EpochReport& report, RunState& state) const;

 private:
  std::string name_;  // empty: val_accuracy, or val_loss
  std::optional<bool> more_is_better_;
  bool logs_;
};

/// The evaluations of a fit.
class FitEvaluation {
 public:
  /// `loader`: null, where nothing is evaluated. All must outlive this. Throws: as BestMetric.
  FitEvaluation(const TrainerOptions& options, Task& task, data::Loader* loader,
                parallel::GradientSync& gradient_sync, RankCoordinator& ranks);

  data::Loader* loader() const { return loader_; }
  const BestMetric& best() const { return best_; }
  /// Whether warnings and notes of best() go to the log.
  void set_logs(bool logs) { best_.set_logs(logs); }

  /// Whether there is one after epoch `epoch`, from 1 on. `is_last`: no other epoch follows.
  bool is_due(std::int64_t epoch, bool is_last) const;
  /// Returns the averages over all ranks after `step`; ends early when `stop` says so. Collective.
  std::map<std::string, double> evaluate(std::int64_t step, const std::function<bool()>& stop);
  /// Evaluates the first batches, before a step. Collective. Throws: UsageError where there is no batch, and
  /// where the metric that chooses the best is not reported; what the task and the loader throw.
  void try_it();

 private:
  const TrainerOptions& options_;
  Task& task_;
  data::Loader* loader_;
  parallel::GradientSync& gradient_sync_;
  RankCoordinator& ranks_;
  BestMetric best_;
};

}  // namespace cohort::train
