// An evaluation always reads its loader's epoch 0; sums, not means, are added up over ranks, and each virtual
// rank's share is a batch of its own. A best is
// compared only with values of the same metric, direction and data. A run that resumes with another metric or
// other data forgets the best, and says so. A value that is not a number is never the best, and a best that
// is not a number is replaced.
#include "cohort/train/internal/fit/evaluation.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/timeline.h"
#include "cohort/checkpoint/known.h"
#include "cohort/config/best_metric.h"
#include "cohort/core/device.h"
#include "cohort/train/internal/fit/compatibility.h"
#include "cohort/train/internal/fit/save_policy.h"

namespace cohort::train {
namespace {

std::string names_of(const std::map<std::string, double>& metrics) {
  base::TextList names;
  for (const auto& [name, value] : metrics) names.add(name);
  return names.empty() ? "none" : names.text();
}

/// The metric that is taken where none is named.
std::string usual_metric(const std::map<std::string, double>& metrics) {
  // Accuracy first: it is what a classifier is for, and the loss may rise while it still gets better.
  for (const char* name : {"val_accuracy", "val_loss"}) {
    if (metrics.contains(name)) return name;
  }
  return "";
}

/// False where it is known that they differ.
bool is_same_data(const DataOfRun& a, const DataOfRun& b) {
  if (a.samples != 0 && b.samples != 0 && a.samples != b.samples) return false;
  return a.fingerprint.empty() || b.fingerprint.empty() || a.fingerprint == b.fingerprint;
}

}  // namespace

std::map<std::string, double> averages_of(const std::map<std::string, MeterSet::Sum>& sums) {
  MeterSet meters;
  meters.restore(sums);
  return meters.averages();
}

std::map<std::string, double> with_prefix(const std::string& prefix,
                                          const std::map<std::string, double>& metrics) {
  std::map<std::string, double> result;
  for (const auto& [name, value] : metrics) result[prefix + name] = value;
  return result;
}

std::optional<std::uint64_t> evaluation_seed(const TrainerOptions& options,
                                             parallel::GradientSync& gradient_sync) {
  return gradient_sync.virtual_ranks() != nullptr ? std::optional(options.seed()) : std::nullopt;
}

std::map<std::string, double> evaluate_batches(Task& task, data::Loader& loader, RankCoordinator& ranks,
                                               const EvaluateOptions& options) {
  at::NoGradGuard no_grad;
  task.set_training(false);
  // The same order and the same random numbers each time, so that two evaluations can be compared.
  loader.set_epoch(0);
  MeterSet meters;
  const std::int64_t max_batches = options.max_batches;
  for (std::int64_t batches = 0; max_batches == 0 || batches < max_batches; ++batches) {
    ranks.check_evaluation();
    std::optional<data::Batch> batch = loader.next();
    // stop() is a collective on several ranks. Shares have equally many batches, so all call it equally
    // often.
    if (!batch || options.stop()) break;
    // A rank's share of the last batch may be empty.
    do {
      if (options.seed) {
        core::reseed_generators(*options.seed, static_cast<std::uint64_t>(batches),
                                static_cast<std::uint64_t>(batch->share));
      }
      if (batch->size > 0) meters.add(task.eval_step(*batch));
    } while (batch->advance());  // the next virtual rank's
  }
  task.set_training(true);
  return averages_of(ranks.total(meters));
}

void forget_lost_best(checkpoint::LoadedCheckpoint& found, const checkpoint::RunCheckpoints& checkpoints,
                      const DataOfRun& eval_data, bool keep_best) {
  RunState then;
  std::optional<std::filesystem::path> best;
  try {
    then = run_of(found.content.state);
    best = checkpoints.best_of(found.folder);
  } catch (const DataError&) {
    return;  // all ranks say so when they have it
  }
  if (then.best_epoch == 0) return;
  std::string why;
  if (!keep_best || !is_same_data(then.eval_data, eval_data)) {
    why = "was chosen on other validation data";
  } else if (!best || !checkpoint::may_be_folder(*best)) {
    why = "is not in " + checkpoints.folder().string();
  }
  if (why.empty()) return;
  base::log_info(base::concat("the best so far, of epoch ", then.best_epoch, ", ", why,
                              ": best is chosen anew, from the next evaluated epoch on"));
  // In what rank 0 has read, before it is sent: all ranks then know of no best.
  found.content.state["run"]["best_epoch"] = 0;
}

BestMetric::BestMetric(const TrainerOptions& options, bool logs)
    : name_(options.best_metric()), more_is_better_(options.best_is_highest()), logs_(logs) {
  if (name_.empty()) return;
  if (!more_is_better_) more_is_better_ = config::more_is_better(name_);
  if (!more_is_better_) {
    throw UsageError(
        "train.Trainer",
        base::concat("best_metric: the name \"", name_, "\" does not say whether more of it is better"),
        "best_is_highest(true) or best_is_highest(false)");
  }
}

void BestMetric::check_reported(const std::map<std::string, double>& evaluated) const {
  // What a training step reports is not known yet.
  if (name_.empty() || name_.starts_with("train_") || evaluated.contains(name_)) return;
  throw UsageError(
      "train.best",
      base::concat("there is no metric \"", name_, "\"; evaluation reports ", names_of(evaluated)),
      "one of these, or a metric of training such as train_loss, as best_metric (run.best_metric); "
      "check_eval_batches(0), where not every batch has it");
}

void BestMetric::continue_from(RunState& state) const {
  if (state.best_metric.empty()) return;
  const std::string name = name_.empty() ? state.best_metric : name_;
  const bool more = more_is_better_.value_or(state.best_is_highest);
  if (state.best_metric == name && state.best_is_highest == more) return;
  if (state.best_epoch != 0 && logs_) {
    base::log_info(base::concat("best was chosen by ", state.best_is_highest ? "most " : "least ",
                                state.best_metric, " and is now by ", more ? "most " : "least ", name,
                                ": the next evaluated epoch is the best so far"));
  }
  state.best_epoch = 0;
  state.best = 0;
  state.best_metric = name;
  state.best_is_highest = more;
}

bool BestMetric::choose(const EpochReport& report, RunState& state) const {
  std::string name = name_.empty() ? state.best_metric : name_;
  if (name.empty()) name = usual_metric(report.metrics);
  const auto found = report.metrics.find(name);
  const bool is_there = found != report.metrics.end();
  if (!is_there || std::isnan(found->second)) {
    if (!logs_) return false;
    const std::string why = is_there ? name + " is not a number"
                            : name.empty()
                                ? "no best_metric is named; there are " + names_of(report.metrics)
                                : "there is no metric " + name + "; there are " + names_of(report.metrics);
    base::log_warning(base::concat("epoch ", report.epoch, " cannot be the best: ", why));
    return false;
  }
  const double value = found->second;
  const bool more = more_is_better_             ? *more_is_better_
                    : name == state.best_metric ? state.best_is_highest
                                                : config::more_is_better(name).value_or(true);
  const bool has_best = state.best_epoch != 0 && !std::isnan(state.best);
  // Strictly better: of equal epochs the first stays the best. NaN never gets here.
  if (has_best && !(more ? value > state.best : value < state.best)) return false;
  state.best = value;
  state.best_epoch = report.epoch;
  state.best_metric = name;
  state.best_is_highest = more;
  return true;
}

FitEvaluation::FitEvaluation(const TrainerOptions& options, Task& task, data::Loader* loader,
                             parallel::GradientSync& gradient_sync, RankCoordinator& ranks)
    : options_(options),
      task_(task),
      loader_(loader),
      gradient_sync_(gradient_sync),
      ranks_(ranks),
      best_(options, ranks.is_first()) {}

bool FitEvaluation::is_due(std::int64_t epoch, bool is_last) const {
  return loader_ != nullptr &&
         (is_last || SavePolicy::is_due(epoch, options_.eval_every(), options_.epochs()));
}

std::map<std::string, double> FitEvaluation::evaluate(std::int64_t step, const std::function<bool()>& stop) {
  if (const auto found = ranks_.find_evaluation(step)) return *found;
  base::TimelineScope scope("evaluate");
  gradient_sync_.synchronize_buffers(task_.parts());
  auto metrics = evaluate_batches(task_, *loader_, ranks_,
                                  {.max_batches = options_.max_eval_batches(),
                                   .seed = evaluation_seed(options_, gradient_sync_),
                                   .stop = stop});
  ranks_.keep_evaluation(step, metrics);
  return metrics;
}

void FitEvaluation::try_it() {
  if (loader_ == nullptr) return;
  check_has_batch(*loader_, "evaluation");
  std::int64_t batches = options_.check_eval_batches();
  if (options_.max_eval_batches() > 0) batches = std::min(batches, options_.max_eval_batches());
  if (batches == 0) return;
  const auto metrics = evaluate_batches(
      task_, *loader_, ranks_, {.max_batches = batches, .seed = evaluation_seed(options_, gradient_sync_)});
  // None: no sample of these batches could be read, which is reported elsewhere.
  if (!metrics.empty()) best_.check_reported(with_prefix("val_", metrics));
}

}  // namespace cohort::train
