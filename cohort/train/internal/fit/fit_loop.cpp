// The position of a run is a small state: epochs, steps, the place in the data, meters and the best so far.
// Each step seeds the generators from seed, step and rank, so a run that resumes makes the same steps.
// Ranks agree on stops and saves after each step. Nothing is written before the first step was made.
#include "cohort/train/internal/fit/fit_loop.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include <cstdio>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/signals.h"
#include "cohort/base/timeline.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/checkpoint/tensor_format.h"
#include "cohort/core/device.h"
#include "cohort/train/internal/fit/buffers.h"
#include "cohort/train/internal/fit/compatibility.h"
#include "cohort/train/internal/fit/evaluation.h"
#include "cohort/train/internal/fit/rank_coordinator.h"
#include "cohort/train/internal/fit/rates.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/internal/fit/save_policy.h"
#include "cohort/train/internal/fit/step_check.h"
#include "cohort/train/internal/fit/throughput.h"

namespace cohort::train {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

std::string numbered_name(const char* format, std::int64_t number) {
  char text[64];
  std::snprintf(text, sizeof text, format, static_cast<long long>(number));
  return text;
}

/// One call of Trainer::fit.
class FitLoop {
 public:
  FitLoop(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks, Task& task,
          data::Loader& train, data::Loader* eval)
      : options_(options),
        callbacks_(callbacks),
        task_(task),
        train_(train),
        eval_(options.eval_every() > 0 ? eval : nullptr),
        gradient_sync_(gradient_sync_of(options)),
        ranks_(gradient_sync_->group()),
        best_(options, ranks_.is_first()) {
    check_share(*gradient_sync_, train_, "training");
    check_has_batch(train_, "training");
    if (eval_ != nullptr) check_share(*gradient_sync_, *eval_, "evaluation");
    if (!options_.run_dir().empty())
      checkpoint::tensor_format(options_.checkpoint_format());  // before a step
    if (!options_.run_dir().empty() && ranks_.is_first()) {
      checkpoints_.emplace(
          options_.run_dir() / "checkpoints",
          checkpoint::RunCheckpointsOptions{.keep = options_.keep(), .format = options_.checkpoint_format()});
    }
    const bool saves = checkpoints_.has_value();
    data_ = describe_data(train_.dataset(), saves);
    if (saves && eval_ != nullptr) state_.eval_data = describe_data(eval_->dataset(), saves);
    if (options_.handle_signals()) signals_.emplace();
    task_.set_gradient_sync(gradient_sync_);
  }

  // A task that is used after the fit must not wait for ranks that have left it.
  ~FitLoop() { task_.set_gradient_sync(std::make_shared<parallel::GradientSync>()); }

  FitResult run() {
    // First of all: ranks that differ would make different collectives further down, and hang.
    ranks_.require_same("the run", consistency_fingerprint(options_, *gradient_sync_, train_, eval_));
    const bool resumed = resume();
    steps_per_epoch_ = train_.batches_per_epoch();
    start_ = {options_.epochs(), steps_per_epoch_, state_.epoch, state_.step, resumed};
    if (is_over()) return nothing_left();
    // After resume(): rank 0's values are sent to all, so they have to be the restored ones.
    gradient_sync_->begin(task_.parts());
    try_evaluation();
    if (ranks_.is_first()) warn_of_single_sample(task_, train_, options_.max_steps());
    state_.seed = options_.seed();
    state_.threads = at::get_num_threads();
    state_.world_size = ranks_.size();
    state_.global_batch_size = global_batch_size();
    state_.data = data_;
    state_.description = options_.description();
    notify([&](Callback& c) { c.on_fit_begin(start_); });
    save_policy_.begin();
    tracing_ = options_.trace_steps() > 0;
    if (tracing_) base::Timeline::start();
    while (!is_over() && !stopping_) run_epoch();
    finish();
    return result_;
  }

 private:
  /// Nothing was written so far, so that a run whose start is rejected, or fails in its first step, stays
  /// what it was. `batch`: that of the step, where it is at hand. Waits for an accelerator, once.
  void count_start(data::Batch* batch = nullptr) {
    if (counts_) return;
    take_pending_steps(batch);
    counts_ = true;
    // `last` is moved before the logs are cut: killed from here on, `auto` starts there too.
    if (checkpoints_ && start_.resumed) checkpoints_->go_back_to(result_.last_checkpoint);
    notify([&](Callback& c) { c.on_start_counts(start_); });
  }

  FitResult nothing_left() {
    if (ranks_.is_first()) log_nothing_left(state_, options_);
    notify([&](Callback& c) { c.on_fit_begin(start_); });
    finish();
    return result_;
  }

  bool resume() {
    const std::string& from = options_.resume();
    if (from.empty()) return false;
    if (options_.run_dir().empty()) {
      throw UsageError("train.resume",
                       base::concat("asked to resume from \"", from, "\" without a run folder"),
                       "TrainerOptions().run_dir(...)");
    }
    const std::optional<checkpoint::LoadedCheckpoint> found =
        ranks_.share(ranks_.is_first() ? load_checkpoint(from) : std::nullopt);
    if (!found && from == "auto") {
      if (ranks_.is_first()) base::log_info("nothing to resume: starting from the beginning");
      return false;
    }
    if (!found) {
      throw DataError("train.resume",
                      base::concat("no checkpoint \"", from, "\" in ", options_.run_dir().string()),
                      "--resume auto, which starts afresh when there is none");
    }
    const RunState then = run_of(found->content.state);
    check_resumable(task_, then, found->folder, options_, global_batch_size(), ranks_.size());
    check_same_data(then.data, data_, found->folder);
    // restore() brings the data of the earlier start. What counts from here on is this start's.
    const DataOfRun eval_data = state_.eval_data;
    const bool keeps = options_.keep_optimizer_options();
    const std::vector<ParamGroups> own = param_groups_of(task_);
    state_ = restore(task_, found->content);
    if (eval_ != nullptr) state_.eval_data = eval_data;
    lr_ = current_lr(task_);  // for the report of an epoch that has no step left
    if (ranks_.is_first()) log_other_rates(own, param_groups_of(task_), keeps);
    if (keeps) set_param_groups(task_, own);
    keep_total(state_.meters);
    result_.last_checkpoint = found->folder;
    best_.continue_from(state_);
    in_epoch_ = true;
    if (ranks_.is_first()) {
      base::log_info(base::concat("resumed from ", found->folder.string(), ": epoch ", state_.epoch,
                                  ", step ", state_.step));
    }
    if (is_over()) return true;
    const double next = rate_of_step(task_, state_.step);
    // The program's groups hold rates before schedules; the run continues from the rates of its last step.
    if (keeps && state_.step > 0) apply_schedules(task_, state_.step - 1);
    if (ranks_.is_first()) {
      base::log_info(base::concat("learning rate: ", lr_, " at the last step, ", next, " at the next"));
    }
    return true;
  }

  std::optional<checkpoint::LoadedCheckpoint> load_checkpoint(const std::string& from) const {
    auto found = read_checkpoint(from);
    if (found) forget_lost_best(*found, *checkpoints_, state_.eval_data, options_.keep_best());
    return found;
  }

  std::optional<checkpoint::LoadedCheckpoint> read_checkpoint(const std::string& from) const {
    if (from == "auto") return checkpoints_->load_usable();
    const std::optional<std::filesystem::path> folder = checkpoints_->find(from);
    if (!folder) return std::nullopt;
    return checkpoint::LoadedCheckpoint{*folder, checkpoint::RunCheckpoints::load(*folder)};
  }

  /// Samples of one step over all ranks.
  std::int64_t global_batch_size() const { return train_.options().global_batch_size; }

  /// Meters continue from `total`, the sum over ranks, which one rank must hold alone.
  void keep_total(const std::map<std::string, MeterSet::Sum>& total) {
    meters_.restore(ranks_.is_first() ? total : std::map<std::string, MeterSet::Sum>());
  }

  void run_epoch() {
    if (in_epoch_) {
      // Meters and times of the epoch are in the state too, and continue.
      train_.restore(state_.loader);
    } else {
      train_.set_epoch(state_.epoch);
      meters_.reset();
      state_.epoch_seconds = state_.wait_seconds = 0;
    }
    in_epoch_ = false;
    task_.set_training(true);
    Clock::time_point mark = Clock::now();
    bool complete = false;
    while (!stopping_ && !step_limit_reached()) {
      std::optional<data::Batch> batch = next_batch();
      if (!batch) {
        complete = true;
        break;
      }
      run_step(*batch);
      // Gives the batch's memory back to the loader before a report or a save, which take time.
      batch.reset();
      const double seconds = seconds_since(mark);
      mark = Clock::now();
      state_.epoch_seconds += seconds;
      report_step(seconds);
      const Clock::time_point last_save = save_policy_.last_save();
      poll_control_requests();
      save_if_due();
      if (save_policy_.last_save() != last_save) mark = Clock::now();  // saving is not training time
    }
    // An epoch that a step limit cuts short is evaluated and saved like any other, but does not count as
    // complete.
    if (complete || (step_limit_reached() && !stopping_)) end_epoch(complete);
  }

  std::optional<data::Batch> next_batch() {
    base::TimelineScope scope("data wait");
    const auto start = Clock::now();
    std::optional<data::Batch> batch = train_.next();
    add_wait(seconds_since(start));
    return batch;
  }

  void add_wait(double seconds) {
    state_.wait_seconds += seconds;
    throughput_.add_wait(seconds);
  }

  void run_step(data::Batch& batch) {
    if (!std::exchange(seen_first_batch_, true)) notify([&](Callback& c) { c.on_first_batch(batch); });
    // Nothing of the generators is saved: what a step draws follows from its number.
    core::reseed_generators(options_.seed(), static_cast<std::uint64_t>(state_.step),
                            static_cast<std::uint64_t>(ranks_.rank()));
    apply_schedules(task_, state_.step);
    lr_ = current_lr(task_);
    // A user's task averages by itself. One that forgets would train a model on each rank without an error.
    const std::int64_t averages = task_.num_averages();
    if (!options_.stop_on_non_finite()) buffers_.keep(task_);
    const std::chrono::nanoseconds waited = train_.counters().wait;
    const StepMetrics metrics = task_.train_step(batch);
    add_wait(std::chrono::duration<double>(train_.counters().wait - waited).count());  // for later parts
    const optim::NonFinite non_finite = task_.take_non_finite();
    if (!options_.stop_on_non_finite()) buffers_.restore_unless_finite(metrics, non_finite);
    if (ranks_.size() > 1 && task_.num_averages() == averages) {
      throw UsageError("train.step",
                       base::concat("train_step of this task did not average gradients over the ",
                                    ranks_.size(), " ranks: each would train a model of its own"),
                       "average_gradients(*optimizer, batch.size) between backward and step");
    }
    ranks_.step_done();
    // After the check above: a step that was rejected is not counted.
    ++state_.step;
    ++result_.steps;
    const data::LoaderState before = std::exchange(state_.loader, train_.state());
    throughput_.add_samples(ranks_.size() == 1 ? batch.whole_size
                                               : state_.loader.samples_consumed - before.samples_consumed);
    for (const CheckedStep& checked : step_check_.add(state_.step, metrics, non_finite)) {
      take(checked, checked.step == state_.step ? &batch : nullptr);
    }
    count_start(&batch);
    if (tracing_ && result_.steps >= options_.trace_steps()) write_trace();
  }

  /// `batch`: that of the step, where it is at hand.
  void take(const CheckedStep& checked, data::Batch* batch) {
    if (checked.is_finite()) {
      meters_.add(checked.metrics);
      return;
    }
    ++state_.non_finite_steps;
    if (options_.stop_on_non_finite()) {
      const bool is_first = checked.step == state_.step - result_.steps + 1;  // of this start
      throw_not_finite(
          checked, task_, batch,
          {state_.epoch + 1, ranks_.rank(), lr_, is_first ? result_.last_checkpoint.string() : ""});
    }
    base::log_warning(base::concat(subject_of(checked), " is not finite; continuing (",
                                   state_.non_finite_steps, " so far)"));
  }

  /// After this every step made so far is in the meters, or known not to be finite.
  void take_pending_steps(data::Batch* batch = nullptr) {
    if (const auto checked = step_check_.take_pending()) take(*checked, batch);
  }

  void report_step(double seconds) {
    throughput_.add_step(seconds);
    StepReport report;
    report.epoch = state_.epoch + 1;
    report.epochs = options_.epochs();
    report.step = state_.step;
    report.step_in_epoch = state_.step - state_.epoch * steps_per_epoch_;
    report.steps_per_epoch = steps_per_epoch_;
    report.lr = lr_;
    report.logged = options_.log_every() > 0 && state_.step % options_.log_every() == 0;
    if (report.logged) {
      take_pending_steps();
      // A collective: whether a step is logged follows from its number alone, so all ranks come here.
      report.averages = averages_of(ranks_.total(meters_));
      throughput_.set_wait(ranks_.sum(throughput_.wait()) / ranks_.size());
    }
    std::int64_t total = options_.epochs() * steps_per_epoch_;
    if (options_.max_steps() > 0) total = std::min(total, options_.max_steps());
    throughput_.fill(report, std::max<std::int64_t>(0, total - state_.step));
    notify([&](Callback& c) { c.on_step_end(report); });
    if (report.logged) throughput_.reset();
  }

  void end_epoch(bool complete) {
    take_pending_steps();
    EpochReport report;
    report.epoch = state_.epoch + 1;
    report.epochs = options_.epochs();
    report.step = state_.step;
    report.lr = lr_;
    report.seconds = state_.epoch_seconds;
    report.data_wait_share = state_.epoch_seconds > 0 ? state_.wait_seconds / state_.epoch_seconds : 0;
    report.samples_per_second =
        state_.epoch_seconds > 0 ? static_cast<double>(state_.loader.samples_consumed) / state_.epoch_seconds
                                 : 0;
    report.metrics = with_prefix("train_", averages_of(ranks_.total(meters_)));
    const bool last = report.epoch == options_.epochs() || !complete;
    if (eval_ != nullptr &&
        (last || SavePolicy::is_due(report.epoch, options_.eval_every(), options_.epochs()))) {
      const auto metrics = evaluate();
      if (stopping_) return;  // cut short by a signal: the evaluation is done again on resume
      report.metrics.merge(with_prefix("val_", metrics));
      report.evaluated = true;
      report.best = best_.choose(report, state_);
    }
    result_.metrics = report.metrics;
    count_start();
    notify([&](Callback& c) { c.on_epoch_end(report); });
    // Before the save: a run that resumes from it must not report this epoch again.
    state_.reported_step = state_.step;
    if (complete) {
      ++state_.epoch;
      state_.loader = {.epoch = state_.epoch, .samples_consumed = 0};
      meters_.reset();
      state_.epoch_seconds = state_.wait_seconds = 0;
    }
    // After the state has moved on, so that the checkpoint begins at the next epoch.
    if (report.best || last || save_policy_.is_due_after_epoch(report.epoch)) save(report.best);
    save_policy_.epoch_ended();
  }

  /// What is wrong with evaluation is said before the first epoch, not after it.
  void try_evaluation() {
    if (eval_ == nullptr) return;
    check_has_batch(*eval_, "evaluation");
    std::int64_t batches = options_.check_eval_batches();
    if (options_.max_eval_batches() > 0) batches = std::min(batches, options_.max_eval_batches());
    if (batches == 0) return;
    const auto metrics = evaluate_batches(task_, *eval_, batches, ranks_, [] { return false; });
    // None: no sample of these batches could be read, which is said elsewhere.
    if (!metrics.empty()) best_.check_reported(with_prefix("val_", metrics));
  }

  std::map<std::string, double> evaluate() {
    base::TimelineScope scope("evaluate");
    gradient_sync_->synchronize_buffers(task_.parts());
    return evaluate_batches(task_, *eval_, options_.max_eval_batches(), ranks_, [&] {
      poll_control_requests();
      return stopping_;
    });
  }

  /// Does what signals, and the clock, of this rank or another ask for.
  void poll_control_requests() {
    RankCoordinator::ControlRequests mine;
    if (signals_) {
      mine.save_now = signals_->take_save_request();
      mine.stop_signal = signals_->stop_signal();
    }
    mine.save_due = ranks_.is_first() && save_policy_.is_due_by_clock();
    const RankCoordinator::ControlRequests agreed = ranks_.agree(mine);
    // What was agreed on, never this rank's own wish: a save is a collective.
    if (agreed.save_now) save(false);
    if (agreed.save_due && !agreed.save_now) save_policy_.request();
    if (agreed.stop_signal != 0 && !stopping_) {
      stopping_ = true;
      result_.signal = agreed.stop_signal;
    }
  }

  void save_if_due() {
    const bool ends_epoch = state_.loader.samples_consumed >= train_.samples_per_epoch();
    if (save_policy_.is_due_after_step(state_.step, ends_epoch)) save(false);
  }

  void save(bool best) {
    take_pending_steps();  // no checkpoint of a step that may be about to end the run
    save_policy_.saving();
    if (options_.run_dir().empty()) return;
    check_parameters(task_, state_.step);
    count_start();
    save_policy_.saved(state_.step);
    base::TimelineScope scope("checkpoint");
    // All ranks give their sums, also those that do not write. keep_total() then leaves the sums to one rank,
    // or they would count once more for each rank.
    state_.meters = ranks_.total(meters_);
    keep_total(state_.meters);
    if (!checkpoints_) return;  // rank 0 writes
    notify([&](Callback& c) { c.on_save(state_.step); });
    const bool between_epochs = state_.loader.samples_consumed == 0;
    const std::string name = between_epochs ? numbered_name("epoch_%04lld", state_.epoch)
                                            : numbered_name("step_%08lld", state_.step);
    result_.last_checkpoint = checkpoints_->save(name, capture(task_, state_), {.is_best = best});
  }

  void finish() {
    take_pending_steps();
    if (stopping_ && save_policy_.saved_step() != state_.step) save(false);
    if (tracing_) write_trace();
    result_.finished = !stopping_;
    result_.epochs = state_.epoch;
    result_.steps = state_.step;
    result_.best = state_.best;
    result_.best_epoch = state_.best_epoch;
    notify([&](Callback& c) { c.on_fit_end(result_); });
  }

  void write_trace() {
    tracing_ = false;
    base::Timeline::stop();
    if (!options_.run_dir().empty()) ranks_.write_trace(options_.run_dir() / "trace.json");
  }

  bool is_over() const { return state_.epoch >= options_.epochs() || (step_limit_reached() && reported()); }
  bool reported() const { return state_.reported_step == state_.step; }  // else a signal came first
  bool step_limit_reached() const { return options_.max_steps() > 0 && state_.step >= options_.max_steps(); }

  template <typename Fn>
  void notify(const Fn& fn) {
    for (const std::shared_ptr<Callback>& callback : callbacks_) fn(*callback);
  }

  const TrainerOptions& options_;
  const std::vector<std::shared_ptr<Callback>>& callbacks_;
  Task& task_;
  data::Loader& train_;
  data::Loader* eval_;  // null: nothing is evaluated
  std::shared_ptr<parallel::GradientSync> gradient_sync_;
  RankCoordinator ranks_;
  std::optional<checkpoint::RunCheckpoints> checkpoints_;  // rank 0's
  std::optional<base::TrainingSignals> signals_;
  const BestMetric best_;

  FitInfo start_;
  DataOfRun data_;
  RunState state_;
  MeterSet meters_;
  StepCheck step_check_;
  KeptBuffers buffers_;
  FitResult result_;
  std::int64_t steps_per_epoch_ = 0;
  bool tracing_ = false;   // the timeline records for trace.json, not for somebody else
  bool counts_ = false;    // the start: its first step was made
  bool in_epoch_ = false;  // the first epoch resumes from a checkpoint
  bool stopping_ = false;
  bool seen_first_batch_ = false;
  double lr_ = 0;
  SavePolicy save_policy_{options_};
  Throughput throughput_;
};

}  // namespace

std::shared_ptr<parallel::GradientSync> gradient_sync_of(const TrainerOptions& options) {
  return options.gradient_sync() != nullptr ? options.gradient_sync()
                                            : std::make_shared<parallel::GradientSync>();
}

FitResult run_fit_loop(const TrainerOptions& options, const std::vector<std::shared_ptr<Callback>>& callbacks,
                       Task& task, data::Loader& train, data::Loader* eval) {
  return FitLoop(options, callbacks, task, train, eval).run();
}

}  // namespace cohort::train
