#pragma once

#include <torch/nn/module.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/parallel/model_runner.h"
#include "cohort/pipeline/stage.h"

/// Where the layers of a model are cut for several placements. Internal to the model runners.
namespace cohort::train {

/// The code of what the runners of a configuration throw.
inline constexpr const char* kWhereRunner = "train.make_model_runner";

/// Consecutive layers on one placement.
struct PlacedLayers {
  std::size_t first = 0, last = 0;  ///< of the model's layers
  base::Placement placement;
};

/// A model's layers, and where they are cut: as options.device_map says, or where that is empty by measuring
/// the layers.
struct LayerCut {
  /// `in_parts`: each batch is cut into micro-batches, and all stages compute at the same time.
  /// Throws: ConfigError for a name that no layer has, or a layer without placement; UsageError for a model
  /// that is not known as a list of layers, or layers that cannot be measured.
  LayerCut(const parallel::ModelRunnerOptions& options, const std::shared_ptr<torch::nn::Module>& module,
           bool in_parts);

  std::vector<core::NamedLayer> layers;
  pipeline::Stage model;
  std::vector<PlacedLayers> placed;
};

/// Returns options.devices; where these are empty each core that the process may use, or each GPU.
std::vector<base::Placement> devices_of(const parallel::ModelRunnerOptions& options);

/// Returns the samples of a pipeline's micro-batch, also for a caller without a configuration, who has no
/// BatchPlan and gives none. Throws: UsageError for no micro-batch.
std::int64_t micro_batch_size(const parallel::ModelRunnerOptions& options);

}  // namespace cohort::train
