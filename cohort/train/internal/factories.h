#pragma once

#include <torch/nn/modules/container/any.h>

#include <memory>
#include <optional>

#include "cohort/config/config.h"
#include "cohort/data/loader.h"
#include "cohort/optim/optimizer.h"
#include "cohort/optim/schedule.h"
#include "cohort/train/classification.h"
#include "cohort/train/internal/batch_plan.h"
#include "cohort/train/internal/input_fields.h"

/// Makes the parts of a run from its configuration. Everything here is a few lines over the public parts: a
/// program of one's own may use some of it, or none.
namespace cohort::train {

/// Which of the two data sets.
enum class Split { kTrain, kVal };

/// `ranks_on_host`: processes of the run on this machine, each with a data set of its own: they share the
/// memory that data.cache may take, half of what is available, three quarters of it for training data.
/// Throws: ConfigError, DataError.
std::shared_ptr<const data::Dataset> make_dataset(const config::Config& config, Split split,
                                                  int ranks_on_host = 1);
/// The bytes that one of these data sets may take.
std::int64_t cache_bytes(Split split, std::int64_t available_bytes, int ranks_on_host);

/// Which part of each global batch is read: that of `rank` of `world_size`.
struct Share {
  int rank = 0;
  int world_size = 1;
};

/// A loader with the batch sizes of `plan`, and the configuration's workers and order (training shuffles, evaluation does not).
std::unique_ptr<data::Loader> make_loader(const config::Config& config, Split split,
                                          std::shared_ptr<const data::Dataset> dataset, at::Device device,
                                          const BatchPlan& plan, Share share = {});

/// The model with initial values from `run.seed`, or from `model.weights`, on `device` in
/// `train.memory_format`. `num_classes` is used where the configuration says 0. `input`: what it gets of a
/// sample, where that is not image_field(); channels and image size are the shape's first two extents.
torch::nn::AnyModule make_model(const config::Config& config, std::int64_t num_classes, at::Device device,
                                const std::optional<data::Field>& input = {});

/// `config.optim` with the learning rate that optim.lr_scaling makes of it, where a step has
/// `global_batch_size` samples over all ranks.
/// Source: Goyal et al., "Accurate, Large Minibatch SGD", 2017, section 2.1 (linear).
config::OptimConfig scale_lr(const config::Config& config, std::int64_t global_batch_size);

/// How `cohort train` computes a step.
ClassificationOptions classification_options(const config::Config& config, const BatchPlan& plan);

std::shared_ptr<optim::Optimizer> make_optimizer(const config::OptimConfig& config,
                                                 const torch::nn::Module& model);
/// Tensors of its size that the optimizer keeps for a parameter.
double states_per_parameter(const config::OptimConfig& config);

/// The schedule in steps, for an optimizer that begins at `config.optim.lr`: its length is the run's,
/// train.epochs or train.max_steps, whichever ends first. Throws: UsageError for no steps in an epoch, or a
/// name that is no schedule's.
std::shared_ptr<const optim::LRSchedule> make_schedule(const config::Config& config,
                                                       std::int64_t steps_per_epoch);

/// Throws: UsageError for a name in `config` that no registry has, before anything is read or made.
void check_names(const config::Config& config);

}  // namespace cohort::train
