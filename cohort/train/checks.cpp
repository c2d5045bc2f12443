#include "cohort/train/checks.h"

#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>

#include "cohort/core/error.h"
#include "cohort/core/log.h"

namespace cohort::train {
namespace {

template <typename... Layers>
bool has_layer(const Task& task) {
  for (const Task::NamedModule& entry : task.modules()) {
    for (const std::shared_ptr<torch::nn::Module>& layer : entry.module->modules()) {
      if (((layer->as<Layers>() != nullptr) || ...)) return true;
    }
  }
  return false;
}

bool has_batch_norm(const Task& task) {
  return has_layer<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(task);
}

bool has_dropout(const Task& task) {
  return has_layer<torch::nn::DropoutImpl, torch::nn::Dropout2dImpl, torch::nn::Dropout3dImpl>(task);
}

/// How near to a straight run one is that goes on with another number of ranks.
std::string nearness(const Task& task) {
  if (has_batch_norm(task)) {
    return "results go on as another run's: the model has batch norm, which is of each rank's share of a "
           "step";
  }
  if (has_dropout(task)) {
    return "results go on as another run's: the model has dropout, which draws other numbers on each rank";
  }
  return "results go on within rounding, not bit for bit";
}

}  // namespace

std::string missing_from(const std::vector<std::string>& some, const std::vector<std::string>& all) {
  std::string missing;
  for (const std::string& name : all) {
    if (std::ranges::find(some, name) == some.end()) missing += " " + name;
  }
  return missing;
}

void check_share(const Strategy& strategy, const data::Loader& loader, const char* which) {
  const data::LoaderOptions& options = loader.options();
  if (options.rank == strategy.rank() && options.world_size == strategy.size()) return;
  throw UsageError(
      "train.fit",
      core::concat("the ", which, " loader reads the share of rank ", options.rank, "/", options.world_size,
                   ", and this is rank ", strategy.rank(), "/", strategy.size()),
      "the group's rank() and size() as rank and world_size of LoaderOptions");
}

void check_has_batch(const data::Loader& loader, const char* which) {
  if (loader.batches_per_epoch() > 0) return;
  const std::int64_t samples = loader.dataset().size(), step = loader.options().global_batch_size;
  const bool dropped = samples > 0 && loader.options().drop_last;
  throw UsageError(
      "train.fit",
      core::concat("the ", which, " loader has no batch: its data set has ", samples, " samples",
                   dropped ? core::concat(", a step takes ", step, ", and drop_last leaves out less") : ""),
      dropped ? "a smaller batch size, or drop_last=false" : "a data set that is not empty");
}

void warn_of_single_sample(const Task& task, const data::Loader& train, std::int64_t max_steps) {
  const data::LoaderOptions& options = train.options();
  const std::int64_t last = train.samples_per_epoch() % options.global_batch_size;
  // Shares of the last batch differ by one sample: one of them has a single sample, or all have more, or
  // none.
  const bool single = last > 0 && last < 2 * options.world_size;
  const bool comes = max_steps == 0 || max_steps >= train.batches_per_epoch();
  if (options.drop_last || !single || !comes || !has_batch_norm(task)) return;
  core::log_warning(core::concat(
      "the last batch of each epoch has ", last,
      options.world_size > 1 ? " samples over all ranks" : " sample",
      ", and the model has batch norm, which fails on a single value per channel. Try: drop_last, or another "
      "batch size"));
}

std::string creed(const TrainerOptions& o, const Strategy& strategy, const data::Loader& train,
                  const data::Loader* eval) {
  return core::concat(
      "strategy ", strategy.name(), "\nepochs ", o.epochs(), "\nmax_steps ", o.max_steps(),
      "\nmax_eval_batches ", o.max_eval_batches(), "\nseed ", o.seed(), "\nresume '", o.resume(),
      "'\nsave_every ", o.save_every(), "\nsave_every_steps ", o.save_every_steps(), "\neval_every ",
      o.eval_every(), "\ntrace_steps ", o.trace_steps(), "\nwrites a run folder ", !o.run_dir().empty(),
      "\nlog_every ", o.log_every(), "\nbest_metric ", o.best_metric(), "\nbest_is_highest ",
      o.best_is_highest() ? (*o.best_is_highest() ? "true" : "false") : "by name", "\ncheck_eval_batches ",
      o.check_eval_batches(), "\nstop_on_non_finite ", o.stop_on_non_finite(), "\nhandle_signals ",
      o.handle_signals(), "\nsamples a step ", train.options().global_batch_size, "\ntraining samples ",
      train.dataset().size(), "\nevaluation samples ", eval == nullptr ? 0 : eval->dataset().size(), "\n");
}

DataOfRun describe_data(const data::Dataset& dataset, bool has_fingerprint) {
  return {.classes = dataset.classes(),
          .samples = dataset.size(),
          .fingerprint = has_fingerprint ? dataset.fingerprint() : ""};
}

void check_same_data(const DataOfRun& then, const DataOfRun& now, const std::filesystem::path& from) {
  const char* hint = "the data that the run began with, or a new run from its weights (model.weights)";
  if (!then.classes.empty() && !now.classes.empty() && then.classes != now.classes) {
    const std::string gone = missing_from(now.classes, then.classes),
                      added = missing_from(then.classes, now.classes);
    throw DataError("train.resume",
                    core::concat(from.string(), " was trained on other classes",
                                 gone.empty() && added.empty() ? ", or in another order" : "",
                                 gone.empty() ? "" : "; the training data lacks" + gone,
                                 added.empty() ? "" : "; it did not have" + added),
                    hint);
  }
  if (then.samples != 0 && then.samples != now.samples) {
    throw DataError("train.resume",
                    core::concat(from.string(), " was made with ", then.samples,
                                 " training samples, the training data has ", now.samples),
                    hint);
  }
  if (then.fingerprint.empty() || now.fingerprint.empty() || then.fingerprint == now.fingerprint) return;
  core::log_warning(core::concat("the training data is not what ", from.string(),
                                 " was made with: there are as many samples, with other names or sizes"));
}

void log_nothing_left(const RunState& state, const TrainerOptions& options) {
  const bool at_limit = options.max_steps() > 0 && state.step >= options.max_steps();
  core::log_info(at_limit ? core::concat("nothing is left to do: ", state.step, " of ", options.max_steps(),
                                         " steps are done")
                          : core::concat("nothing is left to do: ", state.epoch, " of ", options.epochs(),
                                         " epochs are complete"));
}

void check_goes_on(const Task& task, const RunState& state, const std::filesystem::path& from,
                   const TrainerOptions& options, std::int64_t global_batch_size, int world_size) {
  if (state.seed != options.seed()) {
    throw UsageError(
        "train.resume",
        core::concat(from.string(), " was made with seed ", state.seed, ", asked for ", options.seed()),
        "the same seed, or start a new run from its weights");
  }
  if (state.global_batch_size != global_batch_size) {
    throw UsageError("train.resume",
                     core::concat(from.string(), " was made with ", state.global_batch_size,
                                  " samples a step, this run has ", global_batch_size),
                     core::concat("train.global_batch_size=", state.global_batch_size,
                                  ", or start a new run from its weights"));
  }
  if (state.world_size != world_size) {
    core::log_warning(core::concat("the checkpoint was made by ", state.world_size, " ranks, this run has ",
                                   world_size, ": ", nearness(task)));
  }
  const int threads = at::get_num_threads();
  if (state.threads != threads) {
    core::log_warning(core::concat("the checkpoint was made with ", state.threads, " threads, this run has ",
                                   threads, ": results go on within rounding, not bit for bit"));
  }
}

}  // namespace cohort::train
