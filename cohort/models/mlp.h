#pragma once

#include <torch/nn/pimpl.h>

#include <vector>

#include "cohort/models/model.h"
#include "cohort/models/options.h"
#include "cohort/models/stack.h"

namespace cohort::models {

/// Linear layers with ReLU between them: layers.0, layers.2, ... hold the parameters.
/// Shapes: [N, in_channels, S, S] or [N, in_channels * S * S] to [N, num_classes], S = image_size.
/// options.extra["hidden"] lists the hidden sizes, "512,512" by default; "" makes one linear layer.
/// Initial values: LibTorch's defaults, drawn from the first layer to the last.
/// Throws: UsageError for an option out of range or an input of another size.
class MLPImpl : public Model<MLPImpl>, public core::LayerList {
 public:
  explicit MLPImpl(ModelOptions options);
  /// Returns logits, one for each class. Shapes and Throws: as above.
  at::Tensor forward(const at::Tensor& input);
  void reset() override;
  std::vector<core::NamedLayer> named_layers() override;
  const ModelOptions& options() const { return options_; }

  /// The layers and the ReLUs between them, in the order of the run.
  Stack layers{nullptr};

 private:
  ModelOptions options_;
  std::vector<std::int64_t> hidden_;
};
TORCH_MODULE(MLP);

}  // namespace cohort::models
