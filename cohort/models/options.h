#pragma once

#include <cstdint>
#include <string>

#include "cohort/base/text/named_options.h"

namespace cohort::models {

/// What a model is made from. A model rejects an option that it does not have when it is set to anything but
/// the default, so that nothing is ignored in silence; docs/guide/models.md says which model has which.
struct ModelOptions {
  /// A registered name: vgg16_bn, resnet50, lenet5, mlp, or a user's own.
  std::string name;
  /// How many numbers the last layer gives for a sample.
  std::int64_t num_classes = 1000;
  /// 1 for gray images, 3 for colour.
  std::int64_t in_channels = 3;
  /// Height and width in pixels. VGG and ResNet take any size that is large enough at every forward; LeNet5
  /// and MLP are built for this one.
  std::int64_t image_size = 224;
  /// VGG, ResNet: factor on the number of channels of every layer, rounded, at least 1.
  double width = 1.0;
  /// VGG's default head: probability with which a hidden value is dropped.
  double dropout = 0.5;
  /// VGG: how many of the five max pools are kept, counted from the input.
  std::int64_t pools = 5;
  /// VGG: `default` (torchvision's three linear layers) or `linear` (global average pool and one).
  std::string head = "default";
  /// Options of one model only, by name. mlp: `hidden`, for instance "512,512". A registered model reads its
  /// own, `options.extra.integer("depth", 3)`; make_model rejects those that it does not ask for.
  base::NamedOptions extra;
};

}  // namespace cohort::models
