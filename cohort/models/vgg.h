#pragma once

#include <torch/nn/pimpl.h>

#include <vector>

#include "cohort/models/model.h"
#include "cohort/models/options.h"
#include "cohort/models/stack.h"

namespace cohort::models {

/// VGG 11, 13, 16 or 19 with or without batch norm: options.name is vgg11, vgg11_bn, ... vgg19_bn.
/// Shapes: [N, in_channels, H, W] to [N, num_classes]; H and W at least 2 ^ pools.
/// Names and initial values: torchvision's. `width` scales the convolutions and the default head's two hidden
/// layers; the head `linear` is one layer, classifier.0, after a global average pool.
/// Throws: UsageError for an option out of range or an input that does not fit.
/// Source: Simonyan and Zisserman, "Very Deep Convolutional Networks", ICLR 2015; torchvision 0.28.
class VGGImpl : public Model<VGGImpl>, public core::LayerList {
 public:
  explicit VGGImpl(ModelOptions options);
  /// Returns logits, one for each class. Shapes and Throws: as above.
  at::Tensor forward(const at::Tensor& images);
  void reset() override;
  std::vector<core::NamedLayer> named_layers() override;
  const ModelOptions& options() const { return options_; }

  /// Convolutions, norms, ReLUs and max pools; an average pool follows.
  Stack features{nullptr};
  /// The head.
  Stack classifier{nullptr};

 private:
  void initialise();

  ModelOptions options_;
  std::shared_ptr<torch::nn::Module> avgpool_;
};
TORCH_MODULE(VGG);

}  // namespace cohort::models
