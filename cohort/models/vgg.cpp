// The layers come from a list of channels, in which 0 stands for a pool; pools beyond options.pools are left
// out. Options that do not fit are rejected before the first layer is made. The linear head pools to a single
// pixel, the default head to 7 x 7. A clone is built the same way, without drawing initial values. The lists
// are columns A, B, D and E of table 1 in Simonyan and Zisserman 2015, "Very Deep Convolutional Networks".
#include "cohort/models/vgg.h"

#include <torch/nn/init.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/pooling.h>

#include <map>
#include <string_view>
#include <utility>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/models/internal/checks.h"
#include "cohort/models/layers.h"
#include "cohort/models/observer.h"

namespace cohort::models {
namespace {

constexpr std::int64_t kPool = 0;

/// Channels of each convolution, and where the pools are.
const std::vector<std::int64_t>& layer_list(const ModelOptions& options) {
  static const std::map<std::string_view, std::vector<std::int64_t>> lists{
      {"vgg11", {64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0}},
      {"vgg13", {64, 64, 0, 128, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0}},
      {"vgg16", {64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0}},
      {"vgg19",
       {64, 64, 0, 128, 128, 0, 256, 256, 256, 256, 0, 512, 512, 512, 512, 0, 512, 512, 512, 512, 0}},
  };
  // The first five letters name the list; what is left must be "_bn" or nothing.
  const auto found = lists.find(std::string_view(options.name).substr(0, 5));
  const std::string_view rest =
      std::string_view(options.name).substr(std::min<std::size_t>(5, options.name.size()));
  if (found == lists.end() || (!rest.empty() && rest != "_bn")) {
    throw UsageError("models.vgg",
                     base::concat("no VGG is called ", options.name,
                                  ", expected vgg11, vgg13, vgg16 or vgg19, with _bn or without"));
  }
  return found->second;
}

bool has_batch_norm(const ModelOptions& options) {
  return options.name.ends_with("_bn");
}

bool linear_head(const ModelOptions& options) {
  return options.head == "linear";
}

// Each pool halves the image, and the last one must leave a pixel.
std::int64_t smallest_size(const ModelOptions& options) {
  return std::int64_t{1} << options.pools;
}

void check(const ModelOptions& options) {
  // Throws for an unknown name. The name comes first, as other messages quote it.
  layer_list(options);
  if (options.head != "default" && options.head != "linear") {
    throw UsageError("models.options",
                     base::concat(options.name, ": head is ", options.head, ", expected default or linear"));
  }
  if (options.pools < 0 || options.pools > 5) {
    throw UsageError("models.options",
                     base::concat(options.name, ": pools is ", options.pools, ", expected 0 to 5"));
  }
  if (linear_head(options)) {
    check_options(options, {"width", "pools", "head"});
  } else {
    check_options(options, {"width", "pools", "head", "dropout"});
  }
  check_image_size(options, smallest_size(options));
}

}  // namespace

VGGImpl::VGGImpl(ModelOptions options) : Model<VGGImpl>("VGG"), options_(std::move(options)) {
  check(options_);
  reset();
}

void VGGImpl::reset() {
  namespace nn = torch::nn;
  features = Stack();
  std::int64_t in_channels = options_.in_channels;
  std::int64_t pools = 0;
  for (const std::int64_t item : layer_list(options_)) {
    if (item == kPool) {
      if (pools++ < options_.pools) features->add(nn::MaxPool2d(nn::MaxPool2dOptions(2).stride(2)));
      continue;
    }
    const std::int64_t channels = scaled(options_, item);
    // With a bias also before a norm: torchvision has it, and state dicts are to fit.
    features->add(nn::Conv2d(nn::Conv2dOptions(in_channels, channels, 3).padding(1)));
    if (has_batch_norm(options_)) features->add(nn::BatchNorm2d(channels));
    features->add(nn::ReLU(nn::ReLUOptions(true)));
    in_channels = channels;
  }
  const std::int64_t side = linear_head(options_) ? 1 : 7;
  classifier = Stack();
  if (linear_head(options_)) {
    classifier->add(nn::Linear(in_channels, options_.num_classes));
  } else {
    const std::int64_t hidden = scaled(options_, 4096);
    classifier->add(nn::Linear(in_channels * side * side, hidden));
    classifier->add(nn::ReLU(nn::ReLUOptions(true)));
    classifier->add(nn::Dropout(options_.dropout));
    classifier->add(nn::Linear(hidden, hidden));
    classifier->add(nn::ReLU(nn::ReLUOptions(true)));
    classifier->add(nn::Dropout(options_.dropout));
    classifier->add(nn::Linear(hidden, options_.num_classes));
  }
  register_module("features", features);
  // Between features and classifier, in torchvision's order of registration.
  avgpool_ = register_module("avgpool", nn::AdaptiveAvgPool2d(side).ptr());
  register_module("classifier", classifier);
  if (!CloneScope::active()) initialise();
}

void VGGImpl::initialise() {
  namespace nn = torch::nn;
  for (const auto& module : modules(/*include_self=*/false)) {
    if (const auto* convolution = module->as<nn::Conv2d>()) {
      // torchvision's initial values. The paper (section 3.1) has to start its deep nets from trained layers
      // of a shallow one.
      nn::init::kaiming_normal_(convolution->weight, 0, torch::kFanOut, torch::kReLU);
      nn::init::zeros_(convolution->bias);
    } else if (const auto* linear = module->as<nn::Linear>()) {
      nn::init::normal_(linear->weight, 0, 0.01);
      nn::init::zeros_(linear->bias);
    }
  }
}

at::Tensor VGGImpl::forward(const at::Tensor& images) {
  check_images(options_, images, smallest_size(options_));
  auto& avgpool = static_cast<torch::nn::AdaptiveAvgPool2dImpl&>(*avgpool_);
  const at::Tensor pooled = observed(avgpool, features->forward(images));
  return classifier->forward(pooled.flatten(1));
}

std::vector<core::NamedLayer> VGGImpl::named_layers() {
  namespace nn = torch::nn;
  std::vector<core::NamedLayer> layers;
  add_layers(layers, "features", *features);
  layers.emplace_back("avgpool",
                      nn::AdaptiveAvgPool2d(std::static_pointer_cast<nn::AdaptiveAvgPool2dImpl>(avgpool_)));
  layers.emplace_back("flatten", flatten_layer());
  add_layers(layers, "classifier", *classifier);
  return layers;
}

}  // namespace cohort::models
