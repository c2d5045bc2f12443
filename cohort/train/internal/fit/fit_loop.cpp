// Each step seeds the generators from seed, step and rank (or virtual rank), so a run that resumes makes the
// same steps. Ranks agree on stops and saves after each step. Nothing is written before the first step was
// made. The parts of a fit are classes of their own: ranks, progress, steps, checkpoints, evaluation, reports;
// here is their order.
#include "cohort/train/internal/fit/fit_loop.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/timeline.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/internal/fit/compatibility.h"
#include "cohort/train/internal/fit/evaluation.h"
#include "cohort/train/internal/fit/fit_control.h"
#include "cohort/train/internal/fit/fit_progress.h"
#include "cohort/train/internal/fit/fit_ranks.h"
#include "cohort/train/internal/fit/fit_reports.h"
#include "cohort/train/internal/fit/rates.h"
#include "cohort/train/internal/fit/run_saver.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/internal/fit/step_runner.h"

namespace cohort::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_between(Clock::time_point start, Clock::time_point end) {
  return std::chrono::duration<double>(end - start).count();
}

/// One call of Trainer::fit.
class FitLoop {
 public:
  FitLoop(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks, Task& task,
          data::Loader& train, data::Loader* eval)
      : options_(options),
        task_(task),
        train_(train),
        ranks_(options),
        progress_(options, ranks_),
        steps_(options, task, ranks_),
        evaluation_(options, task, options.eval_every() > 0 ? eval : nullptr, ranks_.gradient_sync(), ranks_),
        saver_(options, ranks_),
        reports_(options, callbacks, ranks_),
        control_(options, ranks_) {
    check_share(ranks_.gradient_sync(), train_, "training");
    check_has_batch(train_, "training");
    if (evaluation_.loader() != nullptr) {
      check_share(ranks_.gradient_sync(), *evaluation_.loader(), "evaluation");
    }
    ranks_.join(task_);
  }

  FitResult run() {
    RunState& state = progress_.state;
    const DataOfRun data = describe_data(train_.dataset(), saver_.writes());
    if (saver_.writes() && evaluation_.loader() != nullptr) {
      state.eval_data = describe_data(evaluation_.loader()->dataset(), true);
    }
    // Only now: to describe data may take long, and Ctrl-C must end it. Nothing is lost that could be saved.
    control_.begin();
    // First of all: ranks that differ would make different collectives further down, and hang.
    ranks_.require_same(
        "the run", consistency_fingerprint(options_, ranks_.gradient_sync(), train_, evaluation_.loader()));
    const bool is_resumed = resume(data);
    const FitInfo start = {options_.epochs(), train_.batches_per_epoch(), state.epoch, state.step,
                           is_resumed};
    if (progress_.is_over()) {
      if (ranks_.is_first()) log_nothing_left(state, options_);
      reports_.fit_begins(start);
      return finish();
    }
    // After resume(): rank 0's values are sent to all, so they have to be the restored ones.
    ranks_.gradient_sync().begin(task_.parts());
    // What is wrong with evaluation is reported before the first epoch, not after it.
    evaluation_.try_it();
    if (ranks_.is_first()) warn_of_single_sample(task_, train_, options_.max_steps());
    state.seed = options_.seed();
    state.threads = at::get_num_threads();
    state.world_size = ranks_.size();
    state.virtual_ranks = num_virtual_ranks();
    state.instruction_set = instruction_set();
    state.global_batch_size = global_batch_size();
    state.data = data;
    state.description = options_.description();
    reports_.fit_begins(start);
    saver_.policy.begin();
    reports_.trace.begin();
    while (!progress_.is_over() && !control_.stopping()) run_epoch();
    return finish();
  }

 private:
  /// Nothing was written so far, so that a run whose start is rejected, or fails in its first step, stays
  /// what it was. `batch`: that of the step, where it is at hand. Waits for an accelerator, once.
  void count_start(data::Batch* batch = nullptr) {
    if (reports_.counts()) return;
    take_pending_step(batch);
    // `last` is moved before the logs are cut: killed from here on, `auto` starts there too.
    saver_.start_counts();
    reports_.start_counts();
  }

  /// `data`: what this start trains with. Returns whether there was a checkpoint to resume from.
  bool resume(const DataOfRun& data) {
    const DataOfRun eval_data = progress_.state.eval_data;
    const std::optional<checkpoint::LoadedCheckpoint> found = saver_.find(eval_data);
    if (!found) return false;
    const RunState then = run_of(found->content.state);
    check_same_bits(then, found->folder, num_virtual_ranks());
    check_resumable(task_, then, found->folder, options_, global_batch_size(), ranks_.size());
    check_same_data(then.data, data, found->folder);
    const std::vector<ParamGroups> own = param_groups_of(task_);
    progress_.continue_from(restore(task_, found->content));
    RunState& state = progress_.state;
    // The checkpoint brings the data of the earlier start. What counts from here on is this start's.
    if (evaluation_.loader() != nullptr) state.eval_data = eval_data;
    steps_.read_lr();  // for the report of an epoch that has no step left
    const bool keeps = options_.keep_optimizer_options();
    if (ranks_.is_first()) log_other_rates(own, param_groups_of(task_), keeps);
    if (keeps) set_param_groups(task_, own);
    evaluation_.best().continue_from(state);
    if (ranks_.is_first()) {
      base::log_info(base::concat("resumed from ", found->folder.string(), ": epoch ", state.epoch, ", step ",
                                  state.step));
    }
    if (progress_.is_over()) return true;
    const double next = rate_of_step(task_, state.step);
    // The program's groups hold rates before schedules; the run continues from the rates of its last step.
    if (keeps && state.step > 0) apply_schedules(task_, state.step - 1);
    if (ranks_.is_first()) {
      base::log_info(
          base::concat("learning rate: ", steps_.lr(), " at the last step, ", next, " at the next"));
    }
    return true;
  }

  /// Samples of one step over all ranks.
  std::int64_t global_batch_size() const { return train_.options().global_batch_size; }

  std::int64_t num_virtual_ranks() const {
    const parallel::VirtualRankSync* const sync = ranks_.gradient_sync().virtual_ranks();
    return sync == nullptr ? 0 : sync->num_virtual_ranks();
  }

  /// All steps of the epoch were made.
  bool no_step_left() const {
    const std::int64_t left = train_.samples_per_epoch() - progress_.state.loader.samples_consumed;
    return left <= 0 || (train_.options().drop_last && left < global_batch_size());
  }

  void run_epoch() {
    progress_.begin_epoch(train_);
    task_.set_training(true);
    Clock::time_point mark = Clock::now();
    bool complete = false;
    while (!control_.stopping() && !progress_.step_limit_reached()) {
      const Clock::time_point step_begin = Clock::now();
      std::optional<data::Batch> batch = next_batch();
      if (!batch) {
        complete = true;
        break;
      }
      const double input_seconds = seconds_between(step_begin, Clock::now());
      const double update_seconds = run_step(*batch);
      // Gives the batch's memory back to the loader before a report or a save, which take time.
      batch.reset();
      const Clock::time_point step_end = Clock::now();
      add_training_time(seconds_between(mark, step_end));
      mark = step_end;
      report_step(input_seconds + update_seconds);
      const Clock::time_point last_save = saver_.policy.last_save();
      poll_control_requests();
      save_if_due();
      if (saver_.policy.last_save() != last_save) mark = Clock::now();  // saving is not training time
    }
    if (control_.stopping() && !complete) return;  // its last step may be made: it ends on resume
    // An epoch that a step limit cuts short is evaluated and saved like any other, but does not count as
    // complete. At the limit the loader is not asked for a batch that would not be used.
    end_epoch(complete || no_step_left());
  }

  std::optional<data::Batch> next_batch() {
    base::TimelineScope scope("data wait");
    const auto start = Clock::now();
    std::optional<data::Batch> batch = train_.next();
    add_wait(seconds_between(start, Clock::now()));
    return batch;
  }

  void add_wait(double seconds) {
    progress_.state.wait_seconds += seconds;
    reports_.throughput.add_wait(seconds);
  }

  /// Adds a step with the callbacks and polls before it, which are training time too.
  void add_training_time(double seconds) {
    progress_.state.epoch_seconds += seconds;
    reports_.throughput.add_step(seconds);
  }

  /// Returns the seconds of the update. The callbacks of a first step, and the writing of a trace, do not
  /// count.
  double run_step(data::Batch& batch) {
    reports_.batch_loaded(batch);
    const std::chrono::nanoseconds waited = train_.counters().wait;
    const Clock::time_point update_begin = Clock::now();
    const std::vector<CheckedStep> known = steps_.run(batch, progress_.state.step);
    const double seconds = seconds_between(update_begin, Clock::now());
    add_wait(std::chrono::duration<double>(train_.counters().wait - waited).count());  // for later parts
    const std::int64_t consumed_before = progress_.state.loader.samples_consumed;
    progress_.step_made(train_.state());
    const std::int64_t consumed = progress_.state.loader.samples_consumed - consumed_before;
    reports_.throughput.add_samples(train_.options().world_size == 1 ? batch.whole_size : consumed);
    for (const CheckedStep& checked : known) {
      take(checked, checked.step == progress_.state.step ? &batch : nullptr);
    }
    count_start(&batch);
    reports_.trace.step_made(progress_.steps_made());
    return seconds;
  }

  /// `batch`: that of the step, where it is at hand.
  void take(const CheckedStep& checked, data::Batch* batch) {
    if (checked.is_finite()) {
      progress_.add(checked.metrics);
      return;
    }
    RunState& state = progress_.state;
    ++state.non_finite_steps;
    if (options_.stop_on_non_finite()) {
      const bool is_first = checked.step == state.step - progress_.steps_made() + 1;  // of this start
      throw_not_finite(checked, task_, batch,
                       {state.epoch + 1, ranks_.rank(), steps_.lr(), is_first ? saver_.last().string() : ""});
    }
    base::log_warning(base::concat(subject_of(checked), " is not finite; continuing (",
                                   state.non_finite_steps, " so far)"));
  }

  /// After this every step made so far is in the meters, or known not to be finite.
  void take_pending_step(data::Batch* batch = nullptr) {
    if (const auto checked = steps_.take_pending()) take(*checked, batch);
  }

  void report_step(double seconds) {
    if (reports_.is_logged(progress_.state.step)) take_pending_step();
    reports_.step_ended(progress_, steps_.lr(), seconds);
  }

  void end_epoch(bool complete) {
    take_pending_step();
    RunState& state = progress_.state;
    EpochReport report = reports_.epoch_report(progress_, steps_.lr());
    const bool is_last = report.epoch == options_.epochs() || progress_.step_limit_reached();
    if (evaluation_.is_due(report.epoch, is_last)) {
      const auto metrics = evaluation_.evaluate([this] {
        poll_control_requests();
        return control_.stopping();
      });
      if (control_.stopping()) return;  // cut short by a signal: the evaluation is done again on resume
      report.metrics.merge(with_prefix("val_", metrics));
      report.evaluated = true;
      report.best = evaluation_.best().choose(report, state);
    }
    count_start();
    reports_.epoch_ended(report);
    // Before the save: a run that resumes from it must not report this epoch again.
    state.reported_step = state.step;
    if (complete) progress_.complete_epoch();
    // After the state has moved on, so that the checkpoint begins at the next epoch.
    if (report.best || is_last || saver_.policy.is_due_after_epoch(report.epoch)) save(report.best);
    saver_.policy.epoch_ended();
  }

  void poll_control_requests() {
    const RankCoordinator::ControlRequests agreed = control_.poll(saver_.policy);
    if (agreed.save_now) save(false);
    if (agreed.save_due && !agreed.save_now) saver_.policy.request();
  }

  void save_if_due() {
    if (saver_.policy.is_due_after_step(progress_.state.step, no_step_left())) save(false);
  }

  void save(bool is_best) {
    take_pending_step();  // no checkpoint of a step that may be about to end the run
    saver_.policy.saving();
    if (!saver_.saves()) return;
    check_parameters(task_, progress_.state.step);
    count_start();
    saver_.policy.saved(progress_.state.step);
    base::TimelineScope scope("checkpoint");
    // All ranks give their sums, also those that do not write.
    progress_.total_meters();
    if (!saver_.writes()) return;
    reports_.saving(progress_.state.step);
    saver_.write(task_, progress_.state, is_best);
  }

  FitResult finish() {
    take_pending_step();
    const RunState& state = progress_.state;
    if (control_.stopping() && saver_.policy.saved_step() != state.step) save(false);
    reports_.trace.end();
    FitResult result;
    result.finished = !control_.stopping();
    result.signal = control_.stop_signal();
    result.epochs = state.epoch;
    result.steps = state.step;
    result.best = state.best;
    result.best_epoch = state.best_epoch;
    result.last_checkpoint = saver_.last();
    return reports_.fit_ends(std::move(result));
  }

  const TrainerOptions& options_;
  Task& task_;
  data::Loader& train_;
  FitRanks ranks_;
  FitProgress progress_;
  StepRunner steps_;
  FitEvaluation evaluation_;
  RunSaver saver_;
  FitReports reports_;
  FitControl control_;
};

}  // namespace

FitResult run_fit_loop(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks,
                       Task& task, data::Loader& train, data::Loader* eval) {
  return FitLoop(options, callbacks, task, train, eval).run();
}

}  // namespace cohort::train
