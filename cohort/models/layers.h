#pragma once

#include <memory>
#include <string>
#include <vector>

#include "cohort/core/any_layer.h"
#include "cohort/models/stack.h"

namespace cohort::models {

/// Returns the layers of a ResNet, a VGG, an MLP, or of another core::LayerList, with their names in the
/// model ("layer1.0", "features.3"). What a pipeline cuts.
///
///     for (const auto& [name, layer] : models::layers_of(model.ptr())) names.push_back(name);
///
/// Throws: UsageError naming another model.
std::vector<core::NamedLayer> layers_of(const std::shared_ptr<torch::nn::Module>& model);

/// Returns torch::nn::Flatten from dimension 1, which the model does not hold: in evaluation mode, as who
/// sets the model's mode does not reach it, and a layer in training says that random numbers may be drawn.
core::AnyLayer flatten_layer();

/// Adds the layers of a stack that is registered as `name`.
void add_layers(std::vector<core::NamedLayer>& layers, const std::string& name, StackImpl& stack);

}  // namespace cohort::models
