#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "cohort/core/any_layer.h"

namespace cohort::models {

/// Returns the layers of a ResNet, VGG or MLP, with their names in the model ("layer1.0", "features.3"): run
/// one after the other they are the model, whose modules they share. What a pipeline cuts.
/// A forward of the model's own checks its input first; the layers do not.
/// Throws: UsageError naming another model.
std::vector<std::pair<std::string, core::AnyLayer>> layers_of(
    const std::shared_ptr<torch::nn::Module>& model);

}  // namespace cohort::models
