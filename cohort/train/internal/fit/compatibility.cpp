// Whatever ranks must agree on becomes a text, which they compare once before the run. A table names every
// option of the trainer, with those in which ranks may differ, so no option is forgotten. For a resumed run,
// what would make it another run is rejected; what only changes bits is warned of.
#include "cohort/train/internal/fit/compatibility.h"

#include <ATen/Parallel.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>

#include <algorithm>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/base/text/format_list.h"

namespace cohort::train {
namespace {

template <typename... Layers>
bool has_layer(const Task& task) {
  for (const parallel::NamedModule& entry : task.modules()) {
    for (const std::shared_ptr<torch::nn::Module>& layer : entry.module->modules()) {
      if (((layer->as<Layers>() != nullptr) || ...)) return true;
    }
  }
  return false;
}

/// Whether a rank gets a part of one sample where a batch has `samples` over all ranks.
bool has_single_sample(const data::LoaderOptions& options, std::int64_t samples) {
  const std::int64_t part = options.part_size();
  // Shares differ by one sample at most: the first rank's and the last one's are all there are.
  for (const std::int64_t rank : {std::int64_t{0}, options.world_size - 1}) {
    const std::int64_t share = (samples - rank + options.world_size - 1) / options.world_size;
    // The last part of a share has the rest, and every part has one sample where parts are of one.
    if (share > 0 && (part == 1 || share % part == 1)) return true;
  }
  return false;
}

bool has_batch_norm(const Task& task) {
  return has_layer<torch::nn::BatchNorm1dImpl, torch::nn::BatchNorm2dImpl, torch::nn::BatchNorm3dImpl>(task);
}

bool has_dropout(const Task& task) {
  return has_layer<torch::nn::DropoutImpl, torch::nn::Dropout2dImpl, torch::nn::Dropout3dImpl>(task);
}

/// How near to a straight run one is that resumes with another number of ranks.
std::string nearness(const Task& task) {
  // Batch norm first: it changes results more than dropout's numbers do.
  if (has_batch_norm(task)) {
    return "results continue as another run's: the model has batch norm, which is of each rank's share of a "
           "step";
  }
  if (has_dropout(task)) {
    return "results continue as another run's: the model has dropout, which draws other numbers on each rank";
  }
  return "results continue within rounding, not bit for bit";
}

}  // namespace

std::string missing_from(const std::vector<std::string>& some, const std::vector<std::string>& all) {
  base::TextList missing(" ");
  for (const std::string& name : all) {
    if (std::ranges::find(some, name) == some.end()) missing.add(name);
  }
  return missing.text();
}

void check_share(const parallel::GradientSync& gradient_sync, const data::Loader& loader, const char* which) {
  const data::LoaderOptions& options = loader.options();
  const parallel::ShareRange shares = gradient_sync.shares();
  if (options.rank == shares.first && options.num_shares == shares.count && options.world_size == shares.of) {
    return;
  }
  if (shares.count > 1 || options.num_shares > 1) {
    throw UsageError(
        "train.fit",
        base::concat("the ", which, " loader reads ", options.num_shares, " shares of ", options.world_size,
                     " from ", options.rank, " on, and this process computes ", shares.count, " of ",
                     shares.of, " from ", shares.first, " on"),
        "the gradient sync's shares() as rank, num_shares and world_size of LoaderOptions");
  }
  throw UsageError("train.fit",
                   base::concat("the ", which, " loader reads the share of rank ", options.rank, "/",
                                options.world_size, ", and this is rank ", shares.first, "/", shares.of),
                   "the group's rank() and size() as rank and world_size of LoaderOptions");
}

void check_has_batch(const data::Loader& loader, const char* which) {
  if (loader.batches_per_epoch() > 0) return;
  const std::int64_t samples = loader.dataset().size(), step = loader.options().global_batch_size;
  const bool dropped = samples > 0 && loader.options().drop_last;
  throw UsageError(
      "train.fit",
      base::concat("the ", which, " loader has no batch: its data set has ", samples, " samples",
                   dropped ? base::concat(", a step takes ", step, ", and drop_last leaves out less") : ""),
      dropped ? "a smaller batch size, or drop_last=false" : "a data set that is not empty");
}

void warn_of_single_sample(const Task& task, const data::Loader& train, std::int64_t max_steps) {
  const data::LoaderOptions& options = train.options();
  const std::int64_t full = options.global_batch_size, last = train.samples_per_epoch() % full;
  // A run that ends by max_steps within its first epoch never sees the last batch.
  const bool last_comes =
      !options.drop_last && last > 0 && (max_steps == 0 || max_steps >= train.batches_per_epoch());
  const bool in_full = train.samples_per_epoch() >= full && has_single_sample(options, full);
  const bool in_last = last_comes && has_single_sample(options, last);
  // Only a warning: batch norm in evaluation mode, or on more than one pixel, takes a single sample.
  if ((!in_full && !in_last) || !has_batch_norm(task)) return;
  const std::int64_t samples = in_full ? full : last;
  base::log_warning(base::concat(in_full ? "each batch has " : "the last batch of each epoch has ", samples,
                                 samples == 1 ? " sample" : " samples",
                                 options.world_size > 1 ? " over all ranks" : "",
                                 options.parts > 1 ? base::concat(" in ", options.parts, " parts") : "",
                                 ", so that a forward gets a single one, and the model has batch norm, which "
                                 "fails on a single value per "
                                 "channel. Try: drop_last, or another batch size"));
}

std::span<const ComparedOption> compared_options() {
  using Options = const TrainerOptions&;
  // Different values would make ranks leave the loop, save or evaluate at different steps, and then wait for
  // each other.
  static const std::vector<ComparedOption> kOptions = {
      {"epochs", [](Options o) { return base::concat(o.epochs()); }},
      {"max_steps", [](Options o) { return base::concat(o.max_steps()); }},
      {"max_eval_batches", [](Options o) { return base::concat(o.max_eval_batches()); }},
      {"seed", [](Options o) { return base::concat(o.seed()); }},
      {"gradient_sync", nullptr},  // its name is compared
      {"session", nullptr},        // of each process its own
      {"common", [](Options o) { return "\n" + o.common(); }},
      {"run_dir", [](Options o) -> std::string { return o.run_dir().empty() ? "is empty" : "is given"; }},
      {"resume", [](Options o) { return "'" + o.resume() + "'"; }},
      {"keep_optimizer_options", [](Options o) { return base::concat(o.keep_optimizer_options()); }},
      {"keep_best", nullptr},    // rank 0 reads the checkpoint
      {"description", nullptr},  // rank 0 writes it
      {"save_every", [](Options o) { return base::concat(o.save_every()); }},
      {"save_every_steps", [](Options o) { return base::concat(o.save_every_steps()); }},
      {"save_every_minutes", nullptr},  // rank 0 says when to save
      {"keep", nullptr},                // rank 0 removes checkpoints
      {"checkpoint_format", nullptr},   // rank 0 writes them
      {"best_metric", [](Options o) { return "'" + o.best_metric() + "'"; }},
      {"best_is_highest",
       [](Options o) -> std::string {
         if (!o.best_is_highest()) return "as its name says";
         return *o.best_is_highest() ? "true" : "false";
       }},
      {"eval_every", [](Options o) { return base::concat(o.eval_every()); }},
      {"check_eval_batches", [](Options o) { return base::concat(o.check_eval_batches()); }},
      {"log_every", [](Options o) { return base::concat(o.log_every()); }},
      {"trace_steps", [](Options o) { return base::concat(o.trace_steps()); }},
      {"stop_on_non_finite", [](Options o) { return base::concat(o.stop_on_non_finite()); }},
      {"handle_signals", nullptr},  // what one rank requests is requested by all
  };
  return kOptions;
}

std::string consistency_fingerprint(const TrainerOptions& options,
                                    const parallel::GradientSync& gradient_sync, const data::Loader& train,
                                    const data::Loader* eval) {
  std::string text = base::concat("gradient_sync ", gradient_sync.name(), "\n");
  for (const ComparedOption& option : compared_options()) {
    if (option.text != nullptr) text += base::concat(option.name, " ", option.text(options), "\n");
  }
  // Sizes, not contents: a fingerprint of the data may cost a pass over all names, and only rank 0 makes it.
  return text + base::concat("samples a step ", train.options().global_batch_size, "\ntraining samples ",
                             train.dataset().size(), "\nevaluation samples ",
                             eval == nullptr ? 0 : eval->dataset().size(), "\n");
}

DataOfRun describe_data(const data::Dataset& dataset, bool has_fingerprint) {
  return {.classes = dataset.classes(),
          .samples = dataset.size(),
          .fingerprint = has_fingerprint ? dataset.fingerprint() : ""};
}

void check_same_data(const DataOfRun& then, const DataOfRun& now, const std::filesystem::path& from) {
  const char* hint = "the data that the run began with, or a new run from its weights (model.weights)";
  // Other classes, or another order: the labels would mean something else to the model.
  if (!then.classes.empty() && !now.classes.empty() && then.classes != now.classes) {
    const std::string gone = missing_from(now.classes, then.classes),
                      added = missing_from(then.classes, now.classes);
    throw DataError("train.resume",
                    base::concat(from.string(), " was trained on other classes",
                                 gone.empty() && added.empty() ? ", or in another order" : "",
                                 gone.empty() ? "" : "; the training data lacks " + gone,
                                 added.empty() ? "" : "; it did not have " + added),
                    hint);
  }
  if (then.samples != 0 && then.samples != now.samples) {
    throw DataError("train.resume",
                    base::concat(from.string(), " was made with ", then.samples,
                                 " training samples, the training data has ", now.samples),
                    hint);
  }
  // Only a warning, as files that were renamed or packed anew may hold the same images.
  if (then.fingerprint.empty() || now.fingerprint.empty() || then.fingerprint == now.fingerprint) return;
  base::log_warning(base::concat("the training data is not what ", from.string(),
                                 " was made with: there are as many samples, with other names or sizes"));
}

void log_nothing_left(const RunState& state, const TrainerOptions& options) {
  const bool at_limit = options.max_steps() > 0 && state.step >= options.max_steps();
  base::log_info(at_limit ? base::concat("nothing is left to do: ", state.step, " of ", options.max_steps(),
                                         " steps are done")
                          : base::concat("nothing is left to do: ", state.epoch, " of ", options.epochs(),
                                         " epochs are complete"));
}

std::string instruction_set() {
  return at::get_cpu_capability();
}

void check_same_bits(const RunState& state, const std::filesystem::path& from, std::int64_t virtual_ranks) {
  const auto reject = [&](const auto& then, const auto& now, const char* what, const std::string& hint) {
    throw UsageError("train.resume",
                     base::concat(from.string(), " was made with ", then, what, ", this run has ", now),
                     hint);
  };
  if (state.virtual_ranks != virtual_ranks) {
    reject(state.virtual_ranks, virtual_ranks, " virtual ranks",
           base::concat("distributed.virtual_ranks=", state.virtual_ranks,
                        ", or start a new run from its weights"));
  }
  if (virtual_ranks == 0) return;
  // Both change the order in which an operator adds.
  if (state.threads != at::get_num_threads()) {
    reject(state.threads, at::get_num_threads(), " threads in each process, and has virtual ranks",
           base::concat("train.threads=", state.threads));
  }
  if (!state.instruction_set.empty() && state.instruction_set != instruction_set()) {
    reject(state.instruction_set, instruction_set(), " instructions, and has virtual ranks",
           "a processor that has them, with the environment variable ATEN_CPU_CAPABILITY where it has more");
  }
}

void check_resumable(const Task& task, const RunState& state, const std::filesystem::path& from,
                     const TrainerOptions& options, std::int64_t global_batch_size, int world_size) {
  if (state.seed != options.seed()) {
    throw UsageError(
        "train.resume",
        base::concat(from.string(), " was made with seed ", state.seed, ", asked for ", options.seed()),
        "the same seed, or start a new run from its weights");
  }
  // The number of the step would stand for another place in the data and in the schedule.
  if (state.global_batch_size != global_batch_size) {
    throw UsageError("train.resume",
                     base::concat(from.string(), " was made with ", state.global_batch_size,
                                  " samples a step, this run has ", global_batch_size),
                     base::concat("train.global_batch_size=", state.global_batch_size,
                                  ", or start a new run from its weights"));
  }
  if (state.virtual_ranks > 0) return;  // check_same_bits()
  if (state.world_size != world_size) {
    base::log_warning(base::concat("the checkpoint was made by ",
                                   base::format_count(state.world_size, "rank"), ", this run has ",
                                   world_size, ": ", nearness(task)));
  }
  const int threads = at::get_num_threads();
  if (state.threads != threads) {
    base::log_warning(base::concat("the checkpoint was made with ",
                                   base::format_count(state.threads, "thread"), ", this run has ", threads,
                                   ": results continue within rounding, not bit for bit"));
  }
}

}  // namespace cohort::train
