// reset() registers modules in torchvision's order and under its names, so state dicts of both fit. In a
// clone, norms and shortcuts are clones of the original's, not new layers, and no initial values are drawn.
// The norms are held as AnyLayer, so that they can be replaced; convolutions are called by their type. The
// layers are those of He et al. 2016, "Deep Residual Learning", table 1. As in torchvision a bottleneck has
// its stride in the 3 x 3 convolution. Additions and ReLUs work in place: no backward needs what they write
// over.
#include "cohort/models/resnet.h"

#include <torch/nn/init.h>
#include <torch/nn/modules/batchnorm.h>

#include <utility>

#include "cohort/base/error.h"
#include "cohort/base/text/choice.h"
#include "cohort/models/internal/checks.h"
#include "cohort/models/layers.h"
#include "cohort/models/observer.h"

namespace cohort::models {
namespace {

namespace nn = torch::nn;

nn::Conv2d convolution(std::int64_t in, std::int64_t out, std::int64_t kernel, std::int64_t stride) {
  // No bias: a norm follows, which would take it off again.
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

nn::ReLU in_place_relu() {
  return nn::ReLU(nn::ReLUOptions(true));
}

/// Adds the way around to `value`, in place, and applies the ReLU.
at::Tensor join(at::Tensor value, const at::Tensor& input, Stack& downsample, nn::ReLUImpl& relu) {
  // `value` is the output of a norm, whose backward needs its input only.
  value += downsample ? downsample->forward(input) : input;
  return observed(relu, value);
}

/// A norm for `channels`; in a clone, which starts with the original's, a clone of that.
core::AnyLayer norm(const core::AnyLayer& before, std::int64_t channels) {
  if (before && CloneScope::active()) return before.clone();
  return nn::BatchNorm2d(channels);
}

constexpr std::int64_t expansion_of(const BasicBlock*) {
  return 1;
}
constexpr std::int64_t expansion_of(const Bottleneck*) {
  return 4;
}

struct ResNetShape {
  bool has_bottlenecks;
  int blocks[4];
};

constexpr base::Choice<ResNetShape> kResNetShapes[] = {
    {"resnet18", {false, {2, 2, 2, 2}}},
    {"resnet34", {false, {3, 4, 6, 3}}},
    {"resnet50", {true, {3, 4, 6, 3}}},
};

}  // namespace

BasicBlockImpl::BasicBlockImpl(std::int64_t in_channels, std::int64_t channels, std::int64_t stride,
                               Stack shortcut)
    : Model<BasicBlockImpl>("BasicBlock"),
      downsample(std::move(shortcut)),
      in_channels_(in_channels),
      channels_(channels),
      stride_(stride) {
  reset();
}

// Only norms can be exchanged, which is what SyncBatchNorm needs.
core::AnyLayer* BasicBlockImpl::find_layer(const std::string& name) {
  return name == "bn1" ? &bn1 : name == "bn2" ? &bn2 : nullptr;
}

void BasicBlockImpl::reset() {
  // The order of registration is the order of parameters() and of a state dict: torchvision's.
  conv1 = register_module("conv1", convolution(in_channels_, channels_, 3, stride_));
  bn1 = norm(bn1, channels_);
  register_module("bn1", bn1.ptr());
  relu = register_module("relu", in_place_relu());
  conv2 = register_module("conv2", convolution(channels_, channels_, 3, 1));
  bn2 = norm(bn2, channels_);
  register_module("bn2", bn2.ptr());
  if (downsample) {
    // A clone starts with the original's layers and must not share them.
    if (CloneScope::active()) downsample = Stack(std::dynamic_pointer_cast<StackImpl>(downsample->clone()));
    register_module("downsample", downsample);
  }
}

at::Tensor BasicBlockImpl::forward(const at::Tensor& input) {
  at::Tensor value = observed(*relu, observed(bn1, observed(*conv1, input)));
  value = observed(bn2, observed(*conv2, value));
  return join(std::move(value), input, downsample, *relu);
}

BottleneckImpl::BottleneckImpl(std::int64_t in_channels, std::int64_t channels, std::int64_t stride,
                               Stack shortcut)
    : Model<BottleneckImpl>("Bottleneck"),
      downsample(std::move(shortcut)),
      in_channels_(in_channels),
      channels_(channels),
      stride_(stride) {
  reset();
}

core::AnyLayer* BottleneckImpl::find_layer(const std::string& name) {
  return name == "bn1" ? &bn1 : name == "bn2" ? &bn2 : name == "bn3" ? &bn3 : nullptr;
}

void BottleneckImpl::reset() {
  conv1 = register_module("conv1", convolution(in_channels_, channels_, 1, 1));
  bn1 = norm(bn1, channels_);
  register_module("bn1", bn1.ptr());
  // The paper has the stride in conv1. Here it is torchvision's "ResNet v1.5", whose weights users load.
  conv2 = register_module("conv2", convolution(channels_, channels_, 3, stride_));
  bn2 = norm(bn2, channels_);
  register_module("bn2", bn2.ptr());
  conv3 = register_module("conv3", convolution(channels_, channels_ * 4, 1, 1));
  bn3 = norm(bn3, channels_ * 4);
  register_module("bn3", bn3.ptr());
  relu = register_module("relu", in_place_relu());
  if (downsample) {
    if (CloneScope::active()) downsample = Stack(std::dynamic_pointer_cast<StackImpl>(downsample->clone()));
    register_module("downsample", downsample);
  }
}

at::Tensor BottleneckImpl::forward(const at::Tensor& input) {
  at::Tensor value = observed(*relu, observed(bn1, observed(*conv1, input)));
  value = observed(*relu, observed(bn2, observed(*conv2, value)));
  value = observed(bn3, observed(*conv3, value));
  return join(std::move(value), input, downsample, *relu);
}

ResNetImpl::ResNetImpl(ModelOptions options) : Model<ResNetImpl>("ResNet"), options_(std::move(options)) {
  check_options(options_, {"width"});
  reset();
}

template <typename Block>
Stack ResNetImpl::make_layer(std::int64_t& in_channels, std::int64_t channels, int blocks,
                             std::int64_t stride) {
  const std::int64_t out_channels = channels * expansion_of(static_cast<const Block*>(nullptr));
  Stack downsample{nullptr};
  if (stride != 1 || in_channels != out_channels) {
    // Made before the blocks, as torchvision does: initial values are drawn in the order in which layers are
    // made.
    downsample = Stack();
    downsample->add(convolution(in_channels, out_channels, 1, stride));
    downsample->add(nn::BatchNorm2d(out_channels));
  }
  Stack layer;
  for (int index = 0; index < blocks; ++index) {
    layer->add(
        Block(in_channels, channels, index == 0 ? stride : 1, index == 0 ? downsample : Stack(nullptr)));
    in_channels = out_channels;
  }
  return layer;
}

template <typename Block>
void ResNetImpl::make_layers(std::int64_t expansion, const int (&blocks)[4]) {
  std::int64_t in_channels = scaled(options_, 64);
  layer1 = register_module("layer1", make_layer<Block>(in_channels, scaled(options_, 64), blocks[0], 1));
  layer2 = register_module("layer2", make_layer<Block>(in_channels, scaled(options_, 128), blocks[1], 2));
  layer3 = register_module("layer3", make_layer<Block>(in_channels, scaled(options_, 256), blocks[2], 2));
  layer4 = register_module("layer4", make_layer<Block>(in_channels, scaled(options_, 512), blocks[3], 2));
  avgpool = register_module("avgpool", nn::AdaptiveAvgPool2d(1));
  fc = register_module("fc", nn::Linear(scaled(options_, 512) * expansion, options_.num_classes));
}

core::AnyLayer* ResNetImpl::find_layer(const std::string& name) {
  return name == "bn1" ? &bn1 : nullptr;
}

void ResNetImpl::reset() {
  const std::int64_t channels = scaled(options_, 64);
  conv1 = register_module(
      "conv1",
      nn::Conv2d(nn::Conv2dOptions(options_.in_channels, channels, 7).stride(2).padding(3).bias(false)));
  bn1 = norm(bn1, channels);
  register_module("bn1", bn1.ptr());
  relu = register_module("relu", in_place_relu());
  maxpool = register_module("maxpool", nn::MaxPool2d(nn::MaxPool2dOptions(3).stride(2).padding(1)));
  const ResNetShape& shape =
      base::choose<UsageError>("models.resnet", "name of a ResNet", options_.name, kResNetShapes);
  if (shape.has_bottlenecks) {
    make_layers<Bottleneck>(4, shape.blocks);
  } else {
    make_layers<BasicBlock>(1, shape.blocks);
  }
  // The original's values are copied over a clone's: to draw some would only move the generator.
  if (!CloneScope::active()) initialise();
}

void ResNetImpl::initialise() {
  for (const auto& module : modules(/*include_self=*/false)) {
    if (const auto* convolution = module->as<nn::Conv2d>()) {
      // He et al. 2015, "Delving Deep into Rectifiers", equation 14: the variance of the gradient stays the
      // same through the layers. Norms and the linear layer keep LibTorch's own initial values.
      nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
    }
  }
}

at::Tensor ResNetImpl::forward(const at::Tensor& images) {
  check_images(options_, images, 1);
  at::Tensor value = observed(*maxpool, observed(*relu, observed(bn1, observed(*conv1, images))));
  value = layer4->forward(layer3->forward(layer2->forward(layer1->forward(value))));
  return observed(*fc, observed(*avgpool, value).flatten(1));
}

std::vector<core::NamedLayer> ResNetImpl::named_layers() {
  std::vector<core::NamedLayer> layers{{"conv1", conv1}, {"bn1", bn1}, {"relu", relu}, {"maxpool", maxpool}};
  add_layers(layers, "layer1", *layer1);
  add_layers(layers, "layer2", *layer2);
  add_layers(layers, "layer3", *layer3);
  add_layers(layers, "layer4", *layer4);
  layers.emplace_back("avgpool", avgpool);
  layers.emplace_back("flatten", flatten_layer());
  layers.emplace_back("fc", fc);
  return layers;
}

}  // namespace cohort::models
