#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

namespace torch::nn {
class AnyModule;
}

/// A model as a table: layers, shapes, parameters, bytes and FLOPs.
namespace cohort::models {

/// One call of one leaf layer.
struct LayerRow {
  std::string name;                        ///< qualified, as in named_modules(): "layer1.0.conv1"
  std::string type;                        ///< class of the layer: "Conv2d"
  std::vector<std::int64_t> output_shape;  ///< with the batch dimension
  /// Numbers of the layer's own parameters; 0 at later calls of a layer that is used more than once.
  std::int64_t num_parameters = 0;
  /// Of parameters and buffers.
  std::int64_t num_bytes = 0;
  /// See summarize.
  std::int64_t flops = 0;
};

/// What summarize() saw of a model.
struct ModelSummary {
  std::string type;
  std::vector<std::int64_t> input_shape;
  std::vector<std::int64_t> output_shape;
  std::vector<LayerRow> rows;  ///< in the order in which layers ran
  /// Over the whole model, layers that were not seen to run included.
  std::int64_t num_parameters = 0;
  /// Numbers of those that require a gradient.
  std::int64_t num_trainable_parameters = 0;
  /// Numbers of all buffers, such as running statistics.
  std::int64_t num_buffers = 0;
  std::int64_t parameter_bytes = 0;
  std::int64_t buffer_bytes = 0;
  /// Of the outputs of the layers that were seen: about what training keeps for backward.
  std::int64_t activation_bytes = 0;
  /// Sum over `rows`: of one forward.
  std::int64_t flops = 0;
  /// Multiply-adds of convolutions and linear layers alone: what papers and torchvision list as "GFLOPS".
  std::int64_t multiply_adds = 0;
  /// False when the model does not report its layers: rows then lists its leaf modules without shapes and
  /// FLOPs.
  bool observed = false;
};

/// Runs `model` once on zeros of `input_shape`, in evaluation mode and without gradients, and returns what
/// was seen. FLOPs of one forward of the whole batch, a multiply-add being 2: convolution 2 * kernel *
/// in_channels / groups and linear 2 * in_features per output value (biases not counted), batch norm 2 and
/// ReLU 1 per value, max pool kernel per output value, average pool 1 per input value; dropout, reshaping and
/// the additions of residual blocks 0. Leaves the model's mode, parameters and buffers as they were.
ModelSummary summarize(torch::nn::AnyModule& model, at::IntArrayRef input_shape);

/// Returns the table that `cohort summary` prints, and the totals below it.
std::string to_text(const ModelSummary& summary);

}  // namespace cohort::models
