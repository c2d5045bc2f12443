#pragma once

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <vector>

#include "cohort/core/any_layer.h"
#include "cohort/models/model.h"
#include "cohort/models/options.h"
#include "cohort/models/stack.h"

namespace cohort::models {

/// Two 3 x 3 convolutions and a way around them. `shortcut` is null or the layers of that way.
class BasicBlockImpl : public Model<BasicBlockImpl>, public core::LayerHost {
 public:
  BasicBlockImpl(std::int64_t in_channels, std::int64_t channels, std::int64_t stride, Stack shortcut);
  /// Shapes: [N, in_channels, H, W] to [N, channels, H / stride, W / stride], rounded up.
  at::Tensor forward(const at::Tensor& input);
  core::AnyLayer* find_layer(const std::string& name) override;
  void reset() override;

  /// Layers by the names that their parameters have in torchvision.
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  core::AnyLayer bn1, bn2;
  torch::nn::ReLU relu{nullptr};
  Stack downsample{nullptr};

 private:
  std::int64_t in_channels_, channels_, stride_;
};
TORCH_MODULE(BasicBlock);

/// 1 x 1, 3 x 3 (which carries the stride) and 1 x 1 convolution, the last four times as wide.
class BottleneckImpl : public Model<BottleneckImpl>, public core::LayerHost {
 public:
  BottleneckImpl(std::int64_t in_channels, std::int64_t channels, std::int64_t stride, Stack shortcut);
  /// Shapes: [N, in_channels, H, W] to [N, 4 * channels, H / stride, W / stride], rounded up.
  at::Tensor forward(const at::Tensor& input);
  core::AnyLayer* find_layer(const std::string& name) override;
  void reset() override;

  /// Layers by the names that their parameters have in torchvision.
  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr}, conv3{nullptr};
  core::AnyLayer bn1, bn2, bn3;
  torch::nn::ReLU relu{nullptr};
  Stack downsample{nullptr};

 private:
  std::int64_t in_channels_, channels_, stride_;
};
TORCH_MODULE(Bottleneck);

/// ResNet 18, 34 or 50: options.name is resnet18, resnet34 or resnet50.
/// Shapes: [N, in_channels, H, W] to [N, num_classes]; any H and W. `width` scales every convolution.
/// Names and initial values: torchvision's (the stride of a bottleneck is in its 3 x 3 convolution).
/// The norms, torch::nn::BatchNorm2d at first, can be replaced (core/any_layer.h), and clones keep that.
/// Throws: UsageError for an option out of range or an input that does not fit.
/// Source: He et al., "Deep Residual Learning", CVPR 2016; torchvision 0.28.
class ResNetImpl : public Model<ResNetImpl>, public core::LayerHost, public core::LayerList {
 public:
  explicit ResNetImpl(ModelOptions options);
  /// Returns logits, one for each class. Shapes and Throws: as above.
  at::Tensor forward(const at::Tensor& images);
  core::AnyLayer* find_layer(const std::string& name) override;
  void reset() override;
  std::vector<core::NamedLayer> named_layers() override;
  const ModelOptions& options() const { return options_; }

  /// Layers by the names that their parameters have in torchvision.
  torch::nn::Conv2d conv1{nullptr};
  core::AnyLayer bn1;
  torch::nn::ReLU relu{nullptr};
  torch::nn::MaxPool2d maxpool{nullptr};
  Stack layer1{nullptr}, layer2{nullptr}, layer3{nullptr}, layer4{nullptr};
  torch::nn::AdaptiveAvgPool2d avgpool{nullptr};
  torch::nn::Linear fc{nullptr};

 private:
  template <typename Block>
  Stack make_layer(std::int64_t& in_channels, std::int64_t channels, int blocks, std::int64_t stride);
  template <typename Block>
  void make_layers(std::int64_t expansion, const int (&blocks)[4]);
  void initialise();

  ModelOptions options_;
};
TORCH_MODULE(ResNet);

}  // namespace cohort::models
