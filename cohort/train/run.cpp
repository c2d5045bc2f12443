// A training run joins its ranks, opens the folder on rank 0, prepares a resume, and makes data, model and
// task. The folder is described only after the first step, so a start that is rejected leaves an earlier run
// as it was. Sinks are on rank 0 alone. The configuration ends here: what is made gets the sections that it
// uses, and nothing changes the configuration of a run that has begun.
#include "cohort/train/run.h"

#include <ATen/Parallel.h>

#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/checkpoint/safetensors.h"
#include "cohort/comm/desync.h"
#include "cohort/comm/text_collectives.h"
#include "cohort/core/device.h"
#include "cohort/elastic/session.h"
#include "cohort/parallel/virtual_ranks/virtual_rank_sync.h"
#include "cohort/train/check_parts.h"
#include "cohort/train/classes.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/config_choices.h"
#include "cohort/train/internal/distributed_setup.h"
#include "cohort/train/internal/factories.h"
#include "cohort/train/internal/fit/run_state.h"
#include "cohort/train/internal/model_runners.h"
#include "cohort/train/internal/profile_callback.h"
#include "cohort/train/internal/resume.h"
#include "cohort/train/internal/run_data.h"
#include "cohort/train/run_folder.h"
#include "cohort/train/sinks/sink_callbacks.h"
#include "cohort/train/trainer.h"
#include "cohort/train/weights.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

/// Sets the threads of this process. Returns the device that it computes on. Collective.
at::Device prepare_device(const config::TrainConfig& train, const std::string& runner,
                          parallel::GradientSync& gradient_sync) {
  const at::Device device = core::resolve_device(device_of_rank(train.device)).device;
  core::set_intra_op_threads(threads_of_rank(train.threads, runner, gradient_sync));
  check_same_arithmetic(gradient_sync);
  return device;
}

/// Returns what a loader of this rank is made with.
LoaderSetup loader_setup(const BatchPlan& plan, at::Device device, std::int64_t seed,
                         const parallel::GradientSync& gradient_sync) {
  return {.plan = plan, .device = device, .seed = seed, .shares = gradient_sync.shares()};
}

/// Returns `optim` with the rate of steps of `global_batch_size` samples; `logs`: says so.
config::OptimConfig scaled_optim(const config::OptimConfig& optim, const config::TrainConfig& train,
                                 std::int64_t global_batch_size, bool logs) {
  config::OptimConfig scaled = scale_lr(optim, train, global_batch_size);
  if (logs && scaled.lr != optim.lr) {
    base::log_info(base::concat("learning rate ", scaled.lr, ": ", optim.lr, " for steps of ",
                                global_batch_size, " samples (optim.lr_scaling ", optim.lr_scaling, ")"));
  }
  return scaled;
}

/// Returns `config` as check_config() leaves it: a program may have made it. A misspelt schedule or hook is
/// an error in evaluation too, which asks for neither.
config::Config checked(config::Config config) {
  check_config(config);
  check_schedule_and_hook(config.distributed);
  check_parts(config);
  return config;
}

/// For a model whose parameters come from a checkpoint: the file that a run began with may be gone.
config::ModelConfig without_weights(config::ModelConfig config) {
  config.weights.clear();
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

/// The configuration holds the optimizer's options, and not the checkpoint: a resume may change them.
TrainerOptions trainer_options(const config::TrainConfig& train, const config::RunConfig& run,
                               const fs::path& folder) {
  return TrainerOptions()
      .epochs(train.epochs)
      .max_steps(train.max_steps)
      .max_eval_batches(train.max_eval_steps)
      .seed(static_cast<std::uint64_t>(run.seed))
      .run_dir(folder)
      .resume(run.resume)
      .save_every(run.save_every)
      .save_every_steps(run.save_every_steps)
      .save_every_minutes(run.save_every_minutes)
      .keep(run.keep)
      .checkpoint_format(run.checkpoint_format)
      .best_metric(run.best_metric)
      .best_is_highest(config::best_is_max(run))
      .eval_every(train.eval_every)
      .log_every(run.log_every)
      .trace_steps(run.trace)
      .stop_on_non_finite(stops_on_nonfinite(train))
      .handle_signals(true)
      .keep_optimizer_options(true);
}

/// Writes what the run is once its first step was made.
class DescribeRun : public Callback {
 public:
  DescribeRun(const RunFolder& folder, config::Config config, std::string command)
      : folder_(folder), config_(std::move(config)), command_(std::move(command)) {}
  void on_start_counts(const FitInfo& info) override {
    if (!info.continues) folder_.describe(config_, command_, info.processes, info.origin);
  }

 private:
  const RunFolder& folder_;
  config::Config config_;
  std::string command_;
};

/// Logs how the run begins, on the first process of an elastic run, which is not known before.
class LogStart : public Callback {
 public:
  explicit LogStart(std::function<void()> log) : log_(std::move(log)) {}
  void on_fit_begin(const FitInfo&) override { log_(); }

 private:
  std::function<void()> log_;
};

/// Returns `config` of a process of an elastic run, which resumes by itself: processes that come later are
/// given the same command.
config::Config elastic_config(config::Config config, std::int64_t virtual_ranks) {
  const std::int64_t given = config.distributed.virtual_ranks;
  if (given > 0 && given != virtual_ranks) {
    throw ConfigError("train.run",
                      base::concat("distributed.virtual_ranks is ", given,
                                   ", and the agent has started this process for ", virtual_ranks),
                      base::concat("cohort run --elastic --virtual-ranks ", given));
  }
  config.distributed.virtual_ranks = virtual_ranks;
  config.train.threads = elastic_threads(config.train.threads);
  if (config.run.resume.empty()) config.run.resume = "auto";
  check_config(config);
  return config;
}

void check_elastic_device(at::Device device) {
  if (device.is_cpu()) return;
  throw ConfigError("train.run",
                    base::concat("distributed.elastic is true and train.device is ", device.str(),
                                 ": an elastic run computes on the CPU"),
                    "train.device=cpu, or distributed.elastic=false");
}

void add_sinks(Trainer& trainer, const config::RunConfig& run, const std::string& title,
               const fs::path& folder) {
  trainer.add_callback(std::make_shared<ProgressCallback>(
      ProgressOptions{.mode = progress_mode(run.progress), .log_every = run.log_every}));
  trainer.add_callback(std::make_shared<MetricsCallback>(folder, title));
}

void add_tensorboard(Trainer& trainer, const config::DataConfig& data, std::int64_t log_images,
                     const fs::path& folder) {
  const bool is_ours = data::is_own_dataset(data.type);  // others do their own normalizing
  trainer.add_callback(std::make_shared<TensorBoardCallback>(
      folder / "tensorboard", static_cast<int>(log_images), is_ours ? data.mean : std::vector<double>{},
      is_ours ? data.std : std::vector<double>{}));
}

void log_start(const fs::path& folder, const RunData& data, const parallel::GradientSync& gradient_sync,
               const std::string& runner, at::Device device) {
  const std::int64_t num_validation = data.evaluation() != nullptr ? data.evaluation()->dataset().size() : 0;
  const std::string ranks = gradient_sync.size() == 1 ? ""
                                                      : base::concat(gradient_sync.size(), " ranks (",
                                                                     gradient_sync.name(), "), each ");
  base::log_info(base::concat("run folder ", folder.string(), ", ", data.training().dataset().size(),
                              " training and ", num_validation, " validation samples, ", ranks,
                              runner == config::DistributedConfig().model ? "" : runner + ", ", "device ",
                              device.str(), ", ", at::get_num_threads(), " threads"));
}

}  // namespace

RunResult run_training(const config::Config& given, const std::string& command,
                       std::shared_ptr<elastic::Session> session) {
  config::Config asked = checked(given);
  check_names(asked);
  if (session == nullptr) session = join_elastic_run(asked.distributed, asked.comm, command);
  const bool is_elastic = session != nullptr;
  std::optional<RunFolder> folder;  // rank 0's, or of each process of an elastic run
  if (is_elastic) {
    asked = elastic_config(asked, session->virtual_ranks());
    folder.emplace(RunFolder::join(asked.run));
  }
  const std::shared_ptr<parallel::GradientSync> gradient_sync =
      join_ranks(asked.distributed, asked.comm, common_text(asked));
  const bool is_first = gradient_sync->rank() == 0;  // of an elastic run each may come to be
  std::optional<comm::DesyncWatch> watch;
  if (gradient_sync->size() > 1) watch.emplace(comm::watch_for_desync(*gradient_sync->group()));
  if (is_first) {
    for (const std::string& warning : asked.warnings) base::log_warning(warning);
  }
  const fs::path path = run_on_rank0_and_broadcast(*gradient_sync, [&] {
                          if (!folder)
                            folder.emplace(RunFolder::open(asked.run, run_name(asked.run, asked.model)));
                          return nlohmann::json(folder->path().string());
                        }).get<std::string>();
  Resumption resumption = prepare_resume(asked, *gradient_sync, path);
  // Process 0 finds the checkpoint, once it is known which process that is.
  if (is_elastic) resumption.config.run.resume = asked.run.resume;
  const config::Config& config = resumption.config;

  const at::Device device = prepare_device(config.train, config.distributed.model, *gradient_sync);
  if (is_elastic) check_elastic_device(device);
  const BatchPlan plan = batch_plan(config.train, config.distributed, config.data, gradient_sync->size());
  RunData data(config.data,
               dataset_setup(config.model, config.train, config.run.seed,
                             is_elastic ? elastic_processes_on_host() : ranks_on_host(*gradient_sync)),
               loader_setup(plan, device, config.run.seed, *gradient_sync));
  data.open_training(!is_elastic);
  if (config.train.eval_every > 0) data.open_evaluation();
  const ModelSetup setup = data.model_setup();
  const torch::nn::AnyModule model =
      make_model(resumption.is_resumed ? without_weights(config.model) : config.model, setup);
  const config::OptimConfig optim =
      scaled_optim(config.optim, config.train, plan.global, is_first && !is_elastic);
  const auto optimizer = make_optimizer(optim, *model.ptr());
  const auto schedule =
      make_schedule(config.schedule, config.train, optim.lr, data.training().batches_per_epoch());
  const MeasuredStep measured{.input = setup.input, .plan = plan, .optim = config.optim};
  ClassificationTask task(model, make_model_runner(config.distributed, model, device, measured), optimizer,
                          schedule, classification_options(config.train, config.optim.clip_norm, plan));

  const auto log = [&] { log_start(path, data, *gradient_sync, config.distributed.model, device); };
  if (is_first && !is_elastic) log();
  if (is_first && !is_elastic && gradient_sync->virtual_ranks() != nullptr) {
    base::log_info(parallel::describe_virtual_ranks(config.distributed.virtual_ranks, gradient_sync->size()));
  }
  Trainer trainer(trainer_options(config.train, config.run, path)
                      .description(description_of(config))
                      .gradient_sync(gradient_sync)
                      .session(session)
                      .common(is_elastic ? common_text(asked) : "")
                      .keep_best(resumption.keep_best));
  if (is_elastic) trainer.add_callback(std::make_shared<LogStart>(log));
  if (folder) trainer.add_callback(std::make_shared<DescribeRun>(*folder, config, command));
  if (is_first) add_sinks(trainer, config.run, run_name(config.run, config.model), path);
  if (is_first && config.run.tensorboard) {
    add_tensorboard(trainer, config.data, config.run.log_images, path);
  }
  std::shared_ptr<ProfileCallback> profile;
  if (is_first && config.run.profile > 0) {
    profile = std::make_shared<ProfileCallback>(path / "profile.json", config.run.profile);
    trainer.add_callback(profile);
  }
  RunResult result{trainer.fit(task, data.training(), data.evaluation()), path, gradient_sync->rank(),
                   profile ? profile->table() : ""};
  if (is_elastic) result.rank = result.fit.rank;
  data.warn_of_skipped();
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
  config::Config config = checked(given);
  config.distributed.elastic = false;  // an evaluation alone is not
  for (const std::string& warning : config.warnings) base::log_warning(warning);
  const std::shared_ptr<parallel::GradientSync> gradient_sync =
      join_ranks(config.distributed, config.comm, common_text(config));
  // Each rank has read its own, beside a run that saves perhaps another one.
  if (gradient_sync->size() > 1)
    comm::require_same(*gradient_sync->group(), "the checkpoint", trained.checkpoint);
  const at::Device device = prepare_device(config.train, config.distributed.model, *gradient_sync);
  const BatchPlan plan = batch_plan(config.train, config.distributed, config.data, gradient_sync->size());
  RunData data(config.data,
               dataset_setup(config.model, config.train, config.run.seed, ranks_on_host(*gradient_sync)),
               loader_setup(plan, device, config.run.seed, *gradient_sync));
  data.open_evaluation(trained.classes.value_or(std::vector<std::string>()));
  const ModelSetup setup = data.model_setup();
  const torch::nn::AnyModule model = make_model(without_weights(config.model), setup);
  const MeasuredStep measured{.input = setup.input, .plan = plan, .optim = config.optim};
  ClassificationTask task(model, make_model_runner(config.distributed, model, device, measured), nullptr,
                          nullptr, classification_options(config.train, config.optim.clip_norm, plan));
  restore_modules(task, trained.tensors);
  auto metrics =
      Trainer(TrainerOptions().max_eval_batches(config.train.max_eval_steps).gradient_sync(gradient_sync))
          .evaluate(task, *data.evaluation());
  data.warn_of_skipped();
  return metrics;
}

}  // namespace cohort::train
