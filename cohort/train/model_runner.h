#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/modules/container/any.h>

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/config/config.h"
#include "cohort/data/dataset.h"
#include "cohort/pipeline/pipeline.h"

namespace cohort::train {

/// How a step calls its model: by itself, or on several placements (docs/guide/train.md, "Several
/// placements").
struct ModelRunner {
  /// Returns the mean over the samples of a (micro-)batch.
  using Loss = std::function<at::Tensor(const at::Tensor& logits, const at::Tensor& target)>;
  struct Step {
    at::Tensor loss;    ///< of the whole batch, times `scale`
    at::Tensor logits;  ///< [N, ...]
  };

  /// Returns what the model makes of a batch, with its graph where gradients are on.
  std::function<at::Tensor(const at::Tensor& input)> forward;
  /// Forward, loss and backward as one, where these overlap: adds to the parameters' grad() those of the loss
  /// times `scale`, and returns tensors without graph. Empty: forward, and then the loss's own backward.
  std::function<Step(const at::Tensor& input, const at::Tensor& target, const Loss& loss, double scale)>
      step = nullptr;
};

/// How `config.distributed` says that `model`, of which it shares the modules, is called. With model_parallel
/// and pipeline layers are moved to their placements' devices; where no placement is named for them they are
/// measured first, on batches of the configuration's size, which takes a few steps' time and is logged.
/// `input`: what the model gets of a sample, where that is not picture_field().
/// Throws: ConfigError for a placement that is not there, a name that no layer has, or a layer without
/// placement; UsageError for a model that is not known as a list of layers.
ModelRunner make_model_call(const Config& config, torch::nn::AnyModule model, at::Device device,
                            const std::optional<data::Field>& input = {});

/// What strategy pipeline makes of a model: its layers in stages.
struct PipelineParts {
  std::vector<pipeline::Stage> stages;
  pipeline::PipelineOptions options;
};

/// Returns what make_model_call() makes a pipeline of, which moves nothing yet. Throws: as it.
PipelineParts pipeline_parts(const Config& config, const std::shared_ptr<torch::nn::Module>& model,
                             at::Device device, const std::optional<data::Field>& input = {});
/// How a step calls that pipeline.
ModelRunner pipeline_call(PipelineParts parts, at::Device device);

/// Returns distributed.devices; where it is empty each core that the process may use, or each GPU.
/// Throws: ConfigError for a placement that is not there.
std::vector<base::Placement> placements_of(const DistributedConfig& config, at::Device device);

/// Returns the entry of `by_name` for a layer: the longest name that is the layer's, or that the layer's
/// begins with ("layer4" for "layer4.0"); null where there is none.
template <typename T>
const std::pair<const std::string, T>* entry_of_layer(const std::map<std::string, T>& by_name,
                                                      const std::string& layer) {
  const std::pair<const std::string, T>* best = nullptr;
  for (const auto& entry : by_name) {
    const bool covers = layer == entry.first || layer.starts_with(entry.first + ".");
    if (covers && (best == nullptr || entry.first.size() > best->first.size())) best = &entry;
  }
  return best;
}

/// Whether the strategy runs the model on threads of placements, so that the process itself needs none.
bool uses_placements(const DistributedConfig& config);

}  // namespace cohort::train
