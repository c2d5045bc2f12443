#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <memory>

#include "cohort/config/config.h"
#include "cohort/data/loader.h"
#include "cohort/optim/optimizer.h"
#include "cohort/optim/schedule.h"
#include "cohort/parallel/gradient_sync.h"
#include "cohort/train/batch_plan.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/datasets.h"
#include "cohort/train/internal/input_fields.h"

/// Makes the parts of a run from its configuration. Everything here is a few lines over the public parts: a
/// program of one's own may use some of it, or none.
namespace cohort::train {

// Fields of a setup without a default have to be given: the compiler warns of one that is forgotten
// (-Wmissing-field-initializers), where any value would be taken for the run's.

/// What a loader is made with, besides the section data.
struct LoaderSetup {
  BatchPlan plan;
  at::Device device = at::kCPU;
  std::int64_t seed = 1;
  parallel::ShareRange shares = {};  ///< that it reads of each global batch
};

/// A loader with the batch sizes of the plan, and the workers and order of `config` (training shuffles,
/// evaluation does not).
std::unique_ptr<data::Loader> make_loader(const config::DataConfig& config, Split split,
                                          std::shared_ptr<const data::Dataset> dataset,
                                          const LoaderSetup& setup);

/// What a model is made with, besides the section model.
struct ModelSetup {
  data::Field input;         ///< of a sample; the shape's first two extents are channels and image size
  std::int64_t num_classes;  ///< of the data; taken where model.num_classes is 0
  at::Device device = at::kCPU;
  std::int64_t seed = 1;  ///< of the initial values
  bool channels_last = true;
};

/// The model with initial values from the seed, or from model.weights. Throws: ConfigError for classes that
/// it does not have; DataError.
torch::nn::AnyModule make_model(const config::ModelConfig& config, const ModelSetup& setup);

/// `optim` with the learning rate that optim.lr_scaling makes of it, where a step has
/// `global_batch_size` samples over all ranks.
/// Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1 (linear).
config::OptimConfig scale_lr(config::OptimConfig optim, const config::TrainConfig& train,
                             std::int64_t global_batch_size);

/// How `cohort train` computes a step.
ClassificationOptions classification_options(const config::TrainConfig& config, double clip_norm,
                                             const BatchPlan& plan);

std::shared_ptr<optim::Optimizer> make_optimizer(const config::OptimConfig& config,
                                                 const torch::nn::Module& model);
/// Tensors of its size that the optimizer keeps for a parameter.
double states_per_parameter(const config::OptimConfig& config);

/// The schedule in steps, for an optimizer that begins at `lr`: its length is the run's, train.epochs or
/// train.max_steps, whichever ends first. Throws: UsageError for no steps in an epoch, or a name that is no
/// schedule's.
std::shared_ptr<const optim::LRSchedule> make_schedule(const config::ScheduleConfig& config,
                                                       const config::TrainConfig& train, double lr,
                                                       std::int64_t steps_per_epoch);

/// Throws: UsageError for a schedule of pipelines or a communication hook that no registry has, also where no
/// step asks for it.
void check_schedule_and_hook(const config::DistributedConfig& config);

/// Throws: UsageError for a name in `config` that no registry has, before anything is read or made.
void check_names(const config::Config& config);

}  // namespace cohort::train
