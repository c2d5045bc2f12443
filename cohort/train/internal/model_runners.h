#pragma once

#include <torch/nn/modules/container/any.h>

#include <cstdint>
#include <map>
#include <string>

#include "cohort/base/placement.h"
#include "cohort/config/types.h"
#include "cohort/data/dataset.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/train/batch_plan.h"

/// Model runners of a configuration, and those that run on several placements (docs/guide/train.md, "Several
/// placements").
namespace cohort::train {

/// The step that layers are measured on, where no placement is named for them. All of it has to be given.
struct MeasuredStep {
  data::Field input;          ///< what the model gets of a sample
  BatchPlan plan;             ///< part: samples of one forward on a rank; micro_batch
  config::OptimConfig optim;  ///< whose state lies beside the parameters
};

/// Returns the layers of distributed.device_map and where they are. Throws: as base::Placement::parse().
std::map<std::string, base::Placement> parse_device_map(const config::DistributedConfig& config);

/// Returns what `config` says of how a model is run. Throws: ConfigError for a placement that is not there.
parallel::ModelRunnerOptions model_runner_options(const config::DistributedConfig& config, at::Device device,
                                                  const MeasuredStep& step);

/// Returns how `config` says that `model`, of which it shares the modules, is run. With model_parallel and
/// pipeline layers are moved to their placements' devices. Layers without a placement are measured first, on
/// `step`. That takes a few steps' time and is logged.
/// Throws: ConfigError for a placement that is not there, a name that no layer has, or a layer without
/// placement; UsageError for a model that is not known as a list of layers.
parallel::ModelRunner make_model_runner(const config::DistributedConfig& config, torch::nn::AnyModule model,
                                        at::Device device, const MeasuredStep& step);

}  // namespace cohort::train
