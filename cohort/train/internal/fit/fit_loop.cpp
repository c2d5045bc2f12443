// Each step seeds the generators from seed, step and rank (or virtual rank), so a run that resumes makes the
// same steps. Ranks agree on stops and saves after each step. Nothing is written before the first step was
// made. The parts of a fit are classes of their own: ranks, progress, steps, checkpoints, evaluation,
// reports; here is their order. In an elastic run each step is committed, and what follows it may be made
// again: by others, or by the same processes, whenever the processes of the run change.
#include "cohort/train/internal/fit/fit_loop.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/timeline.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/internal/elastic/elastic_fit.h"
#include "cohort/train/internal/elastic/run_files.h"
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
        fit_ranks_(options),
        ranks_(fit_ranks_.coordinator()),
        progress_(options, ranks_),
        steps_(options, task, ranks_),
        evaluation_(options, task, options.eval_every() > 0 ? eval : nullptr, gradient_sync(), ranks_),
        saver_(options, ranks_),
        reports_(options, callbacks, ranks_),
        files_(saver_, reports_, progress_),
        control_(options, ranks_) {
    check_share(gradient_sync(), train_, "training");
    check_has_batch(train_, "training");
    if (evaluation_.loader() != nullptr) check_share(gradient_sync(), *evaluation_.loader(), "evaluation");
    fit_ranks_.join(task_);
    if (ElasticCoordinator* const ranks = fit_ranks_.elastic()) {
      elastic_.emplace(ElasticFit::Parts{task_, train_, evaluation_.loader(),
                                         *gradient_sync().virtual_ranks(), *ranks, progress_, saver_,
                                         control_});
      steps_.set_part_listener([ranks](const data::Batch& part) { ranks->add_part(part); });
    }
  }

  FitResult run() {
    RunState& state = progress_.state;
    const bool may_write = saver_.saves() && ranks_.may_write();
    const DataOfRun data = describe_data(train_.dataset(), may_write);
    if (may_write && evaluation_.loader() != nullptr) {
      state.eval_data = describe_data(evaluation_.loader()->dataset(), true);
    }
    // Only now: to describe data may take long, and Ctrl-C must end it. Nothing is lost that could be saved.
    if (!elastic_) control_.begin();
    // First of all: ranks that differ would make different collectives further down, and hang.
    ranks_.require_same("the run",
                        consistency_fingerprint(options_, gradient_sync(), train_, evaluation_.loader()));
    if (elastic_) return run_elastic(data);
    const bool is_resumed = resume(data);
    const FitInfo start = start_info(is_resumed);
    if (progress_.is_over()) {
      if (ranks_.is_first()) log_nothing_left(state, options_);
      reports_.fit_begins(start);
      return finish();
    }
    // After resume(): rank 0's values are sent to all, so they have to be the restored ones.
    gradient_sync().begin(task_.parts());
    // What is wrong with evaluation is reported before the first epoch, not after it.
    evaluation_.try_it();
    if (ranks_.is_first()) warn_of_single_sample(task_, train_, options_.max_steps());
    describe_run(data);
    reports_.fit_begins(start);
    saver_.policy.begin();
    reports_.trace.begin();
    while (!progress_.is_over() && !control_.stopping()) run_epoch();
    return finish();
  }

 private:
  parallel::GradientSync& gradient_sync() const { return fit_ranks_.gradient_sync(); }

  FitInfo start_info(bool is_resumed) const {
    const RunState& state = progress_.state;
    return {.epochs = options_.epochs(),
            .steps_per_epoch = train_.batches_per_epoch(),
            .first_epoch = state.epoch,
            .first_step = state.step,
            .resumed = is_resumed,
            .processes = ranks_.size()};
  }

  /// After a resume: the checkpoint says these of another start.
  void describe_run(const DataOfRun& data) {
    RunState& state = progress_.state;
    state.seed = options_.seed();
    state.threads = at::get_num_threads();
    state.world_size = elastic_ ? 1 : ranks_.size();
    state.virtual_ranks = num_virtual_ranks();
    state.instruction_set = instruction_set();
    state.global_batch_size = global_batch_size();
    state.data = data;
    state.description = options_.description();
    state.went_back_to = saver_.goes_back_to();
  }

  /// Makes the run with processes that come and go.
  FitResult run_elastic(const DataOfRun& data) {
    gradient_sync().begin(task_.parts());
    // It is not known yet whose virtual ranks are computed here: one is tried.
    if (evaluation_.loader() != nullptr) evaluation_.loader()->set_shares(0, 1);
    evaluation_.try_it();
    describe_run(data);
    elastic_->begin();
    files_.begin_elastic(options_.run_dir(), *elastic_, *fit_ranks_.elastic(), num_virtual_ranks());
    for (bool is_first_time = true; true;) {
      try {
        elastic_->enter();
        files_.enter();
        control_.begin();  // a process that waits to enter ends by a signal
        if (elastic_->is_at_start()) start_together(data);
        begin_generation(std::exchange(is_first_time, false));
        while (!elastic_->is_done() && !progress_.is_over() && !control_.stopping()) run_epoch();
        FitResult result = finish();
        if (!elastic_->is_done()) elastic_->end(result.metrics);
        elastic_->leave();
        return result;
      } catch (const elastic::RunEnded& news) {
        // This process was not in the last generation: in reserve, or given up.
        if (!news.has_succeeded()) throw;
        return result_of(elastic_->state().run, news.stop_signal(), -1);
      } catch (const elastic::GenerationEnded& news) {
        base::log_info(base::concat("after step ", elastic_->state().run.step, ": ", news.what()));
        elastic_->give_up_step();
      }
    }
  }

  /// No process has made a step, and all have the state of one of them: they resume together, or begin.
  void start_together(const DataOfRun& data) {
    // First: resume() changes the state, and nothing may wait from there on until it is committed.
    const std::string description = fit_ranks_.elastic()->text_of_first(options_.description());
    const bool is_resumed = resume(data);
    if (is_resumed) describe_run(data);
    progress_.state.description = description;
    if (is_resumed) elastic_->resume({progress_.state.step, progress_.state.epoch, saver_.last().string()});
  }

  void begin_generation(bool is_first_time) {
    reports_.set_last_metrics(elastic_->state().metrics);
    evaluation_.set_logs(ranks_.is_first());
    steps_.read_lr();
    owes_step_ = elastic_->has_step();
    owed_checkpoint_.reset();
    if (is_first_time) {
      if (progress_.is_over() && ranks_.is_first()) log_nothing_left(progress_.state, options_);
      reports_.fit_begins(elastic_->describe_opening(start_info(false)));
      saver_.policy.begin();
      reports_.trace.begin();
    }
    if (!elastic_->take_opening()) return;
    if (!is_first_time) reports_.start_anew(elastic_->describe_opening(start_info(false)));
    files_.forget_opened();
  }

  /// Nothing was written so far, so that a run whose start is rejected, or fails in its first step, stays
  /// what it was. `batch`: that of the step, where it is at hand. Waits for an accelerator, once.
  void count_start(data::Batch* batch = nullptr) {
    if (reports_.counts()) return;
    take_pending_step(batch);
    files_.open();
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
    const parallel::VirtualRankSync* const sync = gradient_sync().virtual_ranks();
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
    // What follows a step that was made before the processes changed.
    if (std::exchange(owes_step_, false)) {
      count_start();
      end_step(0);
    }
    Clock::time_point mark = Clock::now();
    bool complete = false;
    while (!control_.stopping() && !progress_.step_limit_reached()) {
      ranks_.check_members();
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
      const Clock::time_point last_save = saver_.policy.last_save();
      end_step(input_seconds + update_seconds);
      if (saver_.policy.last_save() != last_save) mark = Clock::now();  // saving is not training time
    }
    if (control_.stopping() && !complete) return;  // its last step may be made: it ends on resume
    // An epoch that a step limit cuts short is evaluated and saved like any other, but does not count as
    // complete. At the limit the loader is not asked for a batch that would not be used.
    end_epoch(complete || no_step_left());
  }

  /// What follows a step, which took `seconds`.
  void end_step(double seconds) {
    files_.write("a step is not reported", [&] { report_step(seconds); });
    poll_control_requests();
    save_if_due();
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
    owed_checkpoint_.reset();
    reports_.batch_loaded(batch);
    const std::chrono::nanoseconds waited = train_.counters().wait;
    const Clock::time_point update_begin = Clock::now();
    if (elastic_) fit_ranks_.elastic()->begin_step();
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
    if (elastic_) elastic_->commit(reports_.last_metrics());
    count_start(&batch);
    if (reports_.trace.is_over(progress_.steps_made())) {
      files_.write("the trace is not written", [&] { reports_.trace.end(); });
    }
    return seconds;
  }

  /// `batch`: that of the step, where it is at hand.
  void take(CheckedStep checked, data::Batch* batch) {
    // Metrics are of this process's virtual ranks. All processes know the same of the average.
    if (elastic_ && !task_.last_average().ok()) checked.loss_is_finite = false;
    if (checked.is_finite()) {
      if (elastic_) return progress_.add(fit_ranks_.elastic()->heard().sums);
      return progress_.add(checked.metrics);
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
      const auto metrics = evaluation_.evaluate(state.step, [this] {
        poll_control_requests();
        return control_.stopping();
      });
      if (control_.stopping()) return;  // cut short by a signal: the evaluation is done again on resume
      report.metrics.merge(with_prefix("val_", metrics));
      report.evaluated = true;
      report.best = evaluation_.best().choose(report, state);
    }
    count_start();
    reports_.set_last_metrics(report.metrics);  // on each process alike, whether it may write or not
    files_.write("an epoch is not reported", [&] { reports_.epoch_ended(report); });
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
    base::TimelineScope scope("checkpoint");
    // All ranks give their sums, also those that do not write.
    progress_.total_meters();
    const bool is_saved =
        !saver_.writes() || files_.write("no checkpoint is saved", [&] { write_checkpoint(is_best); });
    owed_checkpoint_ = is_saved ? std::nullopt : std::optional(is_best);
    if (is_saved) saver_.policy.saved(progress_.state.step);
  }

  void write_checkpoint(bool is_best) {
    files_.sync_ledger();  // it must not be older than the checkpoint
    reports_.saving(progress_.state.step);
    saver_.write(task_, progress_.state, is_best);
  }

  FitResult finish() {
    take_pending_step();
    const RunState& state = progress_.state;
    const bool is_saved = saver_.policy.saved_step() == state.step || owed_checkpoint_;
    if (control_.stopping() && !is_saved) save(false);
    FitResult result = result_of(state, control_.stop_signal(), ranks_.rank());
    result.metrics = reports_.last_metrics();  // also where this process may not write
    const auto write_end = [&] {
      reports_.trace.end();
      if (owed_checkpoint_) {
        write_checkpoint(*std::exchange(owed_checkpoint_, std::nullopt));
        saver_.policy.saved(state.step);
      }
      files_.sync_ledger();
      result.last_checkpoint = saver_.last();
      result = reports_.fit_ends(std::move(result));
    };
    files_.write_last("the end is not reported", write_end);
    return result;
  }

  const TrainerOptions& options_;
  Task& task_;
  data::Loader& train_;
  FitRanks fit_ranks_;
  RankCoordinator& ranks_;
  FitProgress progress_;
  StepRunner steps_;
  FitEvaluation evaluation_;
  RunSaver saver_;
  FitReports reports_;
  RunFiles files_;
  FitControl control_;
  std::optional<ElasticFit> elastic_;  // of an elastic run
  bool owes_step_ = false;             // what follows the last step is to be made, maybe once more
  // Of this state, which save() could not write: whether it is the best.
  std::optional<bool> owed_checkpoint_;
};

}  // namespace

FitResult run_fit_loop(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks,
                       Task& task, data::Loader& train, data::Loader* eval) {
  return FitLoop(options, callbacks, task, train, eval).run();
}

}  // namespace cohort::train
