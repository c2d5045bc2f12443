#pragma once

#include "cohort/data/loader.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/callback.h"
#include "cohort/train/internal/elastic/elastic_coordinator.h"
#include "cohort/train/internal/elastic/state_text.h"
#include "cohort/train/internal/fit/fit_control.h"
#include "cohort/train/internal/fit/fit_progress.h"
#include "cohort/train/internal/fit/run_saver.h"
#include "cohort/train/task.h"

/// The membership of a fit in an elastic run. Internal to this module.
namespace cohort::train {

/// Enters generations, commits steps, and gives the state to processes that lack it.
///
/// Always: two processes that have committed as many steps have the same tensors, and the same StepState once
/// they are in one generation. Threads: one caller at a time.
class ElasticFit {
 public:
  /// Of the fit. All outlive this.
  struct Parts {
    Task& task;
    data::Loader& train;
    data::Loader* eval;  ///< null: nothing is evaluated
    parallel::VirtualRankSync& sync;
    ElasticCoordinator& ranks;
    FitProgress& progress;
    RunSaver& saver;
    FitControl& control;
  };

  /// Throws: UsageError for a task with several optimizers, or with parameters that are not on the CPU.
  explicit ElasticFit(const Parts& parts);
  ~ElasticFit();
  ElasticFit(const ElasticFit&) = delete;
  ElasticFit& operator=(const ElasticFit&) = delete;

  /// The state is that of a fit that has made no step. Before the first enter().
  void begin();
  /// Enters the newest generation. The fit is then where the last committed step has left it. Blocking.
  /// Throws: elastic::GenerationEnded where another one has begun meanwhile; as Session::enter(); UsageError
  /// where this process has another configuration.
  void enter();

  /// No process has the state of a step, or of a checkpoint.
  bool is_at_start() const { return committed() == 0; }
  /// Where no process has made a step: the fit has resumed, on all processes alike.
  void resume(const FitStart& start);

  /// The run has made a step, after which something may be left to do.
  bool has_step() const { return state_.run.step > start_.step; }
  bool is_done() const { return state_.is_done; }
  const FitStart& start() const { return start_; }
  const StepState& state() const { return state_; }
  /// Whether this process is the first one, and another one may have written the run's files since it was
  /// before. The next call returns false.
  bool take_opening();
  /// Of the start that this process begins as the one that writes. `start`: that of the run.
  FitInfo describe_opening(FitInfo start) const;

  /// The step that the fit has made counts. `metrics`: of the last epoch before it.
  void commit(const std::map<std::string, double>& metrics);
  /// Gives up the step that is being made: nothing of it remains.
  void give_up_step() { parts_.sync.abandon_step(); }
  /// All is made: the run ends where each process has called it. `metrics`: of the last epoch. Collective.
  void end(const std::map<std::string, double>& metrics);
  /// Stays in the run until it has ended: others may need the state. Blocking. Throws: as Session::finish().
  void leave() {
    parts_.ranks.session().set_stop_signal(state_.agreed.stop_signal);
    parts_.ranks.session().finish();
  }

 private:
  std::uint64_t committed() const;
  void take_decisions_of_first();
  void go_back();
  void set_shares(data::Loader& loader) const;
  void use_threads(int threads);
  elastic::StateSnapshot save() const;
  void load(const elastic::StateSnapshot& snapshot);

  const Parts parts_;
  FitStart start_;
  StepState state_;
  bool opens_ = true;
};

}  // namespace cohort::train
