// Each function turns a section of the configuration into the options of a public part, and checks what spans
// both. Nothing is decided here that a part could decide: keys become fields, and names go to the registries.
// check_names() asks all registries before anything is read or made, so a misspelt name costs no time. The
// length of a schedule is counted in steps, saturating, so a huge number of epochs cannot overflow.
#include "cohort/train/internal/factories.h"

#include <ATen/Context.h>

#include <cmath>
#include <limits>

#include "cohort/base/error.h"
#include "cohort/base/text/choice.h"
#include "cohort/base/text/nearest_name.h"
#include "cohort/checkpoint/run_checkpoints.h"
#include "cohort/checkpoint/safetensors.h"
#include "cohort/checkpoint/state_dict.h"
#include "cohort/checkpoint/tensor_format.h"
#include "cohort/comm/backend.h"
#include "cohort/config/keys.h"
#include "cohort/data/sampler_factory.h"
#include "cohort/models/memory_format.h"
#include "cohort/models/registry.h"
#include "cohort/optim/factory.h"
#include "cohort/optim/schedule_factory.h"
#include "cohort/parallel/comm_hook.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/pipeline/schedule.h"
#include "cohort/train/internal/config_choices.h"
#include "cohort/train/weights.h"

namespace cohort::train {
namespace fs = std::filesystem;
namespace {

// In steps. A quarter of the largest number, so that the sum of two lengths does not overflow.
constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max() / 4;

// check_config() lets at most one of the three lengths be set.
std::int64_t warmup_steps(const config::ScheduleConfig& schedule, std::int64_t steps_per_epoch,
                          std::int64_t total) {
  if (schedule.warmup_steps > 0) return schedule.warmup_steps;
  if (schedule.warmup_epochs > 0) {
    return std::llround(schedule.warmup_epochs * static_cast<double>(steps_per_epoch));
  }
  return std::llround(schedule.warmup_fraction * static_cast<double>(total));
}

}  // namespace

std::unique_ptr<data::Loader> make_loader(const config::DataConfig& config, Split split,
                                          std::shared_ptr<const data::Dataset> dataset,
                                          const LoaderSetup& setup) {
  const bool training = split == Split::kTrain;
  data::LoaderOptions options;
  options.batch_size = training ? setup.plan.step : setup.plan.evaluation;
  // A global batch need not divide by the ranks. In evaluation each rank has a batch of the same size.
  if (training) {
    options.global_batch_size = setup.plan.global;
    options.parts = setup.plan.loader_parts;
  }
  options.rank = setup.shares.first;
  options.num_shares = setup.shares.count;
  options.world_size = setup.shares.of;
  // Evaluation keeps the order and every sample, whatever section data says of training.
  options.last_batch = training ? last_batch_of(config) : data::LastBatchPolicy::kKeep;
  options.workers = static_cast<int>(config.workers);
  options.prefetch = static_cast<int>(config.prefetch);
  options.shuffle = training && config.shuffle;
  options.drop_last = training && config.drop_last;
  options.pin_memory = config.pin_memory;
  options.device = setup.device;
  options.seed = static_cast<std::uint64_t>(setup.seed);
  options.on_error = on_error_of(config);
  // Without a sampler of its own the loader makes PyTorch's distributed one.
  const bool has_sampler = config.sampler != "auto" || !config.sampler_options.empty();
  if (training && has_sampler) {
    // Options without a name are those of the sampler that auto takes.
    options.sampler = data::make_sampler({.name = config.sampler == "auto" ? "distributed" : config.sampler,
                                          .size = dataset->size(),
                                          .world_size = setup.shares.of,
                                          .shuffle = options.shuffle,
                                          .seed = options.seed,
                                          .last_batch = options.last_batch,
                                          .extra = config.sampler_options});
  }
  return std::make_unique<data::Loader>(std::move(dataset), options);
}

torch::nn::AnyModule make_model(const config::ModelConfig& config, const ModelSetup& setup) {
  models::ModelOptions options;
  options.name = config.name;
  options.num_classes = config.num_classes > 0 ? config.num_classes : setup.num_classes;
  if (options.num_classes == 0) {
    throw ConfigError("train.make_model",
                      "model.num_classes is 0 and the data does not say how many classes it has",
                      "model.num_classes=N");
  }
  if (setup.num_classes > options.num_classes) {
    throw ConfigError("train.make_model",
                      base::concat("model.num_classes is ", options.num_classes, " but the data has ",
                                   setup.num_classes, " classes"),
                      "model.num_classes=0, which counts them");
  }
  const std::vector<std::int64_t>& shape = setup.input.shape;
  options.in_channels = shape.empty() ? 1 : shape[0];
  options.image_size = shape.size() < 2 ? 1 : shape[1];
  options.width = config.width;
  options.dropout = config.dropout;
  options.pools = config.pools;
  options.head = config.head;
  options.extra = config.options;
  // So initial values depend on the seed alone, and not on what has drawn random numbers before.
  at::manual_seed(static_cast<std::uint64_t>(setup.seed));
  torch::nn::AnyModule model = models::make_model(options);
  if (!config.weights.empty()) {
    checkpoint::load_module_state(*model.ptr(), read_weights(config.weights));
  }
  model.ptr()->to(setup.device);
  if (setup.channels_last) models::set_memory_format(*model.ptr(), at::MemoryFormat::ChannelsLast);
  return model;
}

config::OptimConfig scale_lr(config::OptimConfig optim, const config::TrainConfig& train,
                             std::int64_t global_batch_size) {
  const double ratio =
      static_cast<double>(global_batch_size) / static_cast<double>(lr_base_size(optim, train));
  constexpr base::Choice<double (*)(double)> kFactors[] = {{"none", [](double) { return 1.0; }},
                                                           {"linear", [](double r) { return r; }},
                                                           {"sqrt", [](double r) { return std::sqrt(r); }}};
  optim.lr *=
      base::choose<ConfigError>("train.scale_lr", "optim.lr_scaling", optim.lr_scaling, kFactors)(ratio);
  return optim;
}

ClassificationOptions classification_options(const config::TrainConfig& config, double clip_norm,
                                             const BatchPlan& plan) {
  return ClassificationOptions()
      .label_smoothing(config.label_smoothing)
      .accumulate(plan.task_parts)
      .clip_norm(clip_norm)
      .bf16(is_bf16(config))
      .script(config.script);
}

namespace {

optim::OptimizerOptions optimizer_options(const config::OptimConfig& config) {
  optim::OptimizerOptions options;
  options.name = config.name;
  options.lr = config.lr;
  options.weight_decay = config.weight_decay;
  options.extra = config.options;
  // An optimizer rejects an option that it does not have. The table of keys says whose options these are.
  const auto is_used = [&](const char* key) {
    const std::vector<std::string>& names = config::find_key(key)->used_values;
    return std::ranges::find(names, config.name) != names.end();
  };
  if (is_used("optim.momentum")) {
    options.momentum = config.momentum;
    options.nesterov = config.nesterov;
  }
  if (is_used("optim.betas")) {
    options.beta1 = config.betas.at(0);
    options.beta2 = config.betas.at(1);
    options.eps = config.eps;
  }
  return options;
}

}  // namespace

std::shared_ptr<optim::Optimizer> make_optimizer(const config::OptimConfig& config,
                                                 const torch::nn::Module& model) {
  std::vector<optim::ParamGroup> groups;
  if (config.no_decay_on_norm_and_bias) {
    groups = optim::split_decay(optim::named_parameters(model), config.weight_decay);
  } else {
    groups.push_back({.params = model.parameters()});
  }
  return optim::make_optimizer(optimizer_options(config), std::move(groups));
}

// Asks an optimizer of a single number, so that one from a library is counted too.
double states_per_parameter(const config::OptimConfig& config) {
  const at::Tensor parameter = at::zeros({1});
  const auto optimizer = optim::make_optimizer(optimizer_options(config), {{.params = {parameter}}});
  return static_cast<double>(optimizer->state_bytes(optimizer->param_groups().front(), parameter)) /
         static_cast<double>(parameter.nbytes());
}

std::shared_ptr<const optim::LRSchedule> make_schedule(const config::ScheduleConfig& config,
                                                       const config::TrainConfig& train, double lr,
                                                       std::int64_t steps_per_epoch) {
  if (steps_per_epoch < 1) {
    throw UsageError("train.make_schedule",
                     base::concat("steps_per_epoch: got ", steps_per_epoch, ", expected at least 1"));
  }
  optim::ScheduleOptions options;
  options.name = config.name;
  options.total_steps = train.epochs > kNever / steps_per_epoch ? kNever : train.epochs * steps_per_epoch;
  if (train.max_steps > 0) options.total_steps = std::min(options.total_steps, train.max_steps);
  options.unit_steps = counts_epochs(config) ? steps_per_epoch : 1;
  options.lr = lr;
  options.warmup_steps =
      std::min(options.total_steps, warmup_steps(config, steps_per_epoch, options.total_steps));
  options.warmup_start = config.warmup_start;
  options.milestones = config.milestones;
  options.step_size = config.step_size;
  options.gamma = config.gamma;
  options.eta_min = config.eta_min;
  options.one_cycle = {.pct_start = config.pct_start,
                       .linear_anneal = anneals_linearly(config),
                       .cycle_momentum = config.cycle_momentum,
                       .base_momentum = config.base_momentum,
                       .max_momentum = config.max_momentum,
                       .div_factor = config.div_factor,
                       .final_div_factor = config.final_div_factor,
                       .three_phase = config.three_phase};
  options.extra = config.options;
  return optim::make_schedule(options);
}

void check_schedule_and_hook(const config::DistributedConfig& config) {
  pipeline::parse_schedule(config.schedule);
  parallel::check_comm_hook_name(config.comm_hook);
}

void check_names(const config::Config& config) {
  data::check_dataset_name(config.data.type);
  data::check_sampler_name(config.data.sampler);
  optim::check_optimizer_name(config.optim.name);
  optim::check_schedule_name(config.schedule.name);
  parallel::model_runner_type(config.distributed.model);
  check_schedule_and_hook(config.distributed);
  parallel::gradient_sync_type(config.distributed.gradients);
  comm::check_backend_name(config.distributed.backend);
  checkpoint::tensor_format(config.run.checkpoint_format);
}

}  // namespace cohort::train
