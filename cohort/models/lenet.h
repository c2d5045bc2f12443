#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include "cohort/models/model.h"
#include "cohort/models/options.h"

namespace cohort::models {

/// LeNet-5 with ReLU and max pooling: conv1 (6 of 5 x 5), conv2 (16 of 5 x 5), fc1 (120), fc2 (84), fc3.
/// Shapes: [N, in_channels, S, S] to [N, num_classes], S = image_size. Below 32 pixels conv1 pads by 2, so
/// that 28 and 32 both reach fc1 as 16 x 5 x 5; the smallest is 12. Initial values: LibTorch's defaults,
/// drawn in the order above. Throws: UsageError for an option out of range or an input of another size.
/// Source: LeCun et al., "Gradient-Based Learning", Proc. IEEE 1998; differs in activation, pooling and
/// output.
class LeNet5Impl : public Model<LeNet5Impl> {
 public:
  explicit LeNet5Impl(ModelOptions options);
  /// Returns logits, one for each class. Shapes and Throws: as above.
  at::Tensor forward(const at::Tensor& images);
  void reset() override;
  const ModelOptions& options() const { return options_; }

  /// Layers by the names that their parameters have.
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr}, fc3{nullptr};
  torch::nn::ReLU relu{nullptr};
  torch::nn::MaxPool2d pool{nullptr};

 private:
  ModelOptions options_;
};
TORCH_MODULE(LeNet5);

}  // namespace cohort::models
