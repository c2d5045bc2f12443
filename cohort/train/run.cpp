// A training run joins its ranks, opens the folder on rank 0, prepares a resume, and makes data, model and
// task. The folder is described only after the first step, so a start that is refused leaves an earlier run
// as it was. Training data is read ahead while the model is made. Sinks are on rank 0 alone. Training and
// validation must have the same classes: a class more in either would shift the labels behind it.
#include "cohort/train/run.h"

#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <nlohmann/json.hpp>
#include <optional>

#include "cohort/base/error.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/checkpoint/safetensors.h"
#include "cohort/comm/desync.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/core/device.h"
#include "cohort/train/classes.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/compatibility.h"
#include "cohort/train/internal/distributed_setup.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/model_runners.h"
#include "cohort/train/internal/profile_callback.h"
#include "cohort/train/internal/resume.h"
#include "cohort/train/internal/run_state.h"
#include "cohort/train/run_folder.h"
#include "cohort/train/sinks/sink_callbacks.h"
#include "cohort/train/trainer.h"
#include "cohort/train/weights.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

/// What to try where training and validation data of this kind have different classes.
const char* class_hint(const std::string& kind) {
  if (kind == "image_folder") return "the same class folders in both";
  if (kind != "idx") return "data sets that return the same classes()";
  return "IDX files of one data set (classes are 0 to the largest label); where no validation sample has the "
         "last labels, train.eval_every=0, and cohort eval after it, which takes labels as they are";
}

/// Data, model and task of a run, on the device that was asked for.
struct Parts {
  /// `trained`: the classes of a model that is evaluated, which those of the data are taken for by name.
  Parts(const config::Config& config, const parallel::GradientSync& gradient_sync, bool training,
        const std::vector<std::string>& trained = {})
      : device(core::resolve_device(device_of_rank(config.train.device)).device) {
    core::set_intra_op_threads(
        threads_of_rank(config.train.threads, config.distributed.model, gradient_sync));
    const bool channels_last = is_channels_last(config.train);
    const DatasetSetup datasets =
        dataset_setup(config.model, config.train, config.run, ranks_on_host(gradient_sync));
    const BatchPlan plan = batch_plan(config.train, config.distributed, config.data, gradient_sync.size());
    const LoaderSetup loaders{.plan = plan,
                              .device = device,
                              .seed = config.run.seed,
                              .rank = gradient_sync.rank(),
                              .world_size = gradient_sync.size()};
    if (training) {
      train_data = make_dataset(config.data, Split::kTrain, datasets);
      train_loader = make_loader(config.data, Split::kTrain, train_data, loaders);
      check_has_batch(*train_loader, "training");
      train_loader->start();  // reads ahead while the model is made
    }
    if (!training || config.train.eval_every > 0) {
      eval_data = with_trained_labels(make_dataset(config.data, Split::kVal, datasets), trained);
      check_same_classes(config.data.type);
      eval_loader = make_loader(config.data, Split::kVal, eval_data, loaders);
      check_has_batch(*eval_loader, "evaluation");
    }
    const std::size_t classes =
        !trained.empty() ? trained.size() : (training ? train_data : eval_data)->classes().size();
    const data::Field input = input_field(config.data, channels_last, training ? *train_data : *eval_data);
    torch::nn::AnyModule model = make_model(config.model, {.input = input,
                                                           .num_classes = static_cast<std::int64_t>(classes),
                                                           .device = device,
                                                           .seed = config.run.seed,
                                                           .channels_last = channels_last});
    std::shared_ptr<optim::Optimizer> optimizer;
    std::shared_ptr<const optim::LRSchedule> schedule;
    if (training) {
      const config::OptimConfig optim = scale_lr(config.optim, config.train, plan.global);
      if (gradient_sync.rank() == 0 && optim.lr != config.optim.lr) {
        base::log_info(base::concat("learning rate ", optim.lr, ": ", config.optim.lr, " for steps of ",
                                    plan.global, " samples (optim.lr_scaling ", config.optim.lr_scaling,
                                    ")"));
      }
      optimizer = make_optimizer(optim, *model.ptr());
      schedule = make_schedule(config.schedule, config.train, optim.lr, train_loader->batches_per_epoch());
    }
    task.emplace(model,
                 make_model_runner(config.distributed, model, device,
                                   {.input = input, .batch_size = plan.part, .optim = config.optim}),
                 optimizer, schedule, classification_options(config.train, config.optim.clip_norm, plan));
  }

  void warn_of_skipped() const {
    const auto warn = [](const char* kind, const std::unique_ptr<data::Loader>& loader) {
      const std::int64_t skipped = loader ? loader->counters().samples_skipped : 0;
      if (skipped == 0) return;
      base::log_warning(
          base::concat(skipped, " times a ", kind, " sample could not be read and was left out"));
    };
    warn("training", train_loader);
    warn("validation", eval_loader);
  }

  /// A class that only one of the folders has would shift every label after it.
  void check_same_classes(const std::string& kind) const {
    if (!train_data) return;
    const auto train = train_data->classes();
    const auto val = eval_data->classes();
    if (train == val || train.empty() || val.empty()) return;
    throw DataError("train.run",
                    base::concat("the training and the validation data have different classes; in one only:",
                                 missing_from(val, train), missing_from(train, val)),
                    class_hint(kind));
  }

  at::Device device;
  std::shared_ptr<const data::Dataset> train_data, eval_data;
  std::unique_ptr<data::Loader> train_loader, eval_loader;
  std::optional<ClassificationTask> task;
};

/// Returns `config` as check_config() leaves it: a program may have made it.
config::Config checked(config::Config config) {
  check_config(config);
  return config;
}

/// For a model whose parameters come from a checkpoint: the file that a run began with may be gone.
config::Config without_weights(config::Config config) {
  config.model.weights.clear();
  return config;
}

/// What all ranks must have alike: all but where data lies, and what a host has.
std::string common_text(config::Config config) {
  config.data.path = config.data.train = config.data.val = "";
  config.data.workers = config.data.prefetch = 0;
  config.run.dir = config.run.progress = "";
  config.train.threads = 0;
  config.train.device = "";
  config.distributed.nproc_per_node = 1;
  return dump_config(config);
}

/// How this process began is no part of what the run is.
std::string description_of(config::Config config) {
  config.run.resume.clear();
  return dump_config(config);
}

TrainerOptions trainer_options(const config::Config& config, const fs::path& folder) {
  return TrainerOptions()
      .epochs(config.train.epochs)
      .max_steps(config.train.max_steps)
      .max_eval_batches(config.train.max_eval_steps)
      .seed(static_cast<std::uint64_t>(config.run.seed))
      .run_dir(folder)
      .resume(config.run.resume)
      .save_every(config.run.save_every)
      .save_every_steps(config.run.save_every_steps)
      .save_every_minutes(config.run.save_every_minutes)
      .keep(config.run.keep)
      .checkpoint_format(config.run.checkpoint_format)
      .best_metric(config.run.best_metric)
      .best_is_highest(config::best_is_max(config.run))
      .eval_every(config.train.eval_every)
      .log_every(config.run.log_every)
      .trace_steps(config.run.trace)
      .stop_on_non_finite(config.train.on_nonfinite == "stop")
      .handle_signals(true)
      .keep_optimizer_options(true)
      .description(description_of(config));
}

/// Writes what the run is once its first step was made.
class DescribeRun : public Callback {
 public:
  DescribeRun(const RunFolder& folder, config::Config config, std::string command, int world_size)
      : folder_(folder), config_(std::move(config)), command_(std::move(command)), world_size_(world_size) {}
  void on_start_counts(const FitInfo&) override { folder_.describe(config_, command_, world_size_); }

 private:
  const RunFolder& folder_;
  config::Config config_;
  std::string command_;
  int world_size_;
};

void add_sinks(Trainer& trainer, const config::Config& config, const fs::path& folder) {
  const std::string title = config.run.name.empty() ? config.model.name : config.run.name;
  trainer.add_callback(std::make_shared<ProgressCallback>(
      ProgressOptions{.mode = progress_mode(config.run.progress), .log_every = config.run.log_every}));
  trainer.add_callback(std::make_shared<MetricsCallback>(folder, title));
  if (config.run.tensorboard) {
    const bool is_ours = data::is_own_dataset(config.data.type);  // others do their own normalizing
    trainer.add_callback(
        std::make_shared<TensorBoardCallback>(folder / "tensorboard", static_cast<int>(config.run.log_images),
                                              is_ours ? config.data.mean : std::vector<double>{},
                                              is_ours ? config.data.std : std::vector<double>{}));
  }
}

}  // namespace

RunResult run_training(const config::Config& given, const std::string& command) {
  const config::Config asked = checked(given);
  check_names(asked);
  const std::shared_ptr<parallel::GradientSync> gradient_sync =
      join_ranks(asked.distributed, asked.comm, common_text(asked));
  const bool is_first = gradient_sync->rank() == 0;
  std::optional<comm::DesyncWatch> watch;
  if (gradient_sync->size() > 1) watch.emplace(comm::watch_for_desync(*gradient_sync->group()));
  if (is_first) {
    for (const std::string& warning : asked.warnings) base::log_warning(warning);
  }
  std::optional<RunFolder> folder;  // rank 0's
  const fs::path path = run_on_rank0_and_broadcast(*gradient_sync, [&] {
                          folder.emplace(RunFolder::open(asked));
                          return nlohmann::json(folder->path().string());
                        }).get<std::string>();
  const Resumption resumption = prepare_resume(asked, *gradient_sync, path);
  const config::Config& config = resumption.config;
  Parts parts(resumption.goes_on ? without_weights(config) : config, *gradient_sync, true);
  const std::string ranks = gradient_sync->size() == 1 ? ""
                                                       : base::concat(gradient_sync->size(), " ranks (",
                                                                      gradient_sync->name(), "), each ");
  const std::string runner = config.distributed.model == "plain" ? "" : config.distributed.model + ", ";
  if (is_first) {
    base::log_info(base::concat("run folder ", path.string(), ", ", parts.train_data->size(),
                                " training and ", parts.eval_data ? parts.eval_data->size() : 0,
                                " validation samples, ", ranks, runner, "device ", parts.device.str(), ", ",
                                at::get_num_threads(), " threads"));
  }
  Trainer trainer(trainer_options(config, path).gradient_sync(gradient_sync).keep_best(resumption.keep_best));
  if (folder) {
    trainer.add_callback(std::make_shared<DescribeRun>(*folder, config, command, gradient_sync->size()));
  }
  if (is_first) add_sinks(trainer, config, path);
  std::shared_ptr<ProfileCallback> profile;
  if (is_first && config.run.profile > 0) {
    profile = std::make_shared<ProfileCallback>(path / "profile.json", config.run.profile);
    trainer.add_callback(profile);
  }
  RunResult result{trainer.fit(*parts.task, *parts.train_loader, parts.eval_loader.get()), path,
                   gradient_sync->rank(), profile ? profile->table() : ""};
  parts.warn_of_skipped();
  return result;
}

config::Config limit_to_fast_dev_run(config::Config config) {
  config.train.max_steps = 2;
  config.train.max_eval_steps = 2;
  config.train.epochs = 1;
  config.train.eval_every = std::min<std::int64_t>(config.train.eval_every, 1);
  config.run.log_every = 1;
  // A folder that --resume never takes for a run.
  config.run.name = run_name(config.run, config.model) + "-dev";
  if (!config.run.resume.empty()) {
    config.warnings.push_back("run.resume is left out: --fast-dev-run starts afresh, in a folder of its own");
    config.run.resume.clear();
    config.run.dir.clear();
  }
  return config;
}

std::map<std::string, double> run_evaluation(const config::Config& given, const fs::path& checkpoint) {
  const config::Config config = checked(given);
  return run_evaluation(config, read_trained_weights(checkpoint));
}

std::map<std::string, double> run_evaluation(const config::Config& given, const TrainedWeights& trained) {
  const config::Config config = checked(given);
  for (const std::string& warning : config.warnings) base::log_warning(warning);
  const std::shared_ptr<parallel::GradientSync> gradient_sync =
      join_ranks(config.distributed, config.comm, common_text(config));
  // Each rank has read its own, beside a run that saves perhaps another one.
  if (gradient_sync->size() > 1)
    comm::require_same(*gradient_sync->group(), "the checkpoint", trained.checkpoint);
  Parts parts(without_weights(config), *gradient_sync, false,
              trained.classes.value_or(std::vector<std::string>()));
  restore_modules(*parts.task, trained.tensors);
  auto metrics =
      Trainer(TrainerOptions().max_eval_batches(config.train.max_eval_steps).gradient_sync(gradient_sync))
          .evaluate(*parts.task, *parts.eval_loader);
  parts.warn_of_skipped();
  return metrics;
}

void load_model(Task& task, const fs::path& checkpoint) {
  restore_modules(task, read_weights(checkpoint));
}

namespace {

std::string library_being_loaded;  // read by end_while_loading

// dlopen does not let exceptions through: one thrown while the library's globals are made ends the process.
// What can be done is to say what it was, and of which library.
[[noreturn]] void end_while_loading() {
  std::string what = "an exception that is no std::exception";
  try {
    if (const auto error = std::current_exception()) std::rethrow_exception(error);
  } catch (const std::exception& error) {
    what = base::message_of(error);
  } catch (...) {
  }
  std::fprintf(stderr, "cohort: [train.load_plugin] %s threw while it was loaded: %s\n",
               library_being_loaded.c_str(), what.c_str());
  std::_Exit(2);
}

}  // namespace

void load_plugin(const fs::path& library) {
  library_being_loaded = library.string();
  const std::terminate_handler before = std::set_terminate(end_while_loading);
  void* handle = nullptr;
  try {
    handle = dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL);
  } catch (...) {  // a dlopen that does let it through, such as the address sanitizer's
    end_while_loading();
  }
  std::set_terminate(before);
  if (handle == nullptr) {
    const char* reason = dlerror();
    throw UsageError("train.load_plugin", base::concat("cannot load ", library.string(), ": ", reason),
                     "build it against this Cohort and LibTorch (docs/guide/plugins.md), and give its path "
                     "with a slash in it");
  }
}

}  // namespace cohort::train
