#pragma once

#include <torch/nn/modules/container/any.h>

#include <functional>
#include <string>
#include <vector>

#include "cohort/base/registry.h"
#include "cohort/models/options.h"

/// Models by name: ours, and a user's own, from a program or from a shared library given to `--load`.
///
///     torch::nn::AnyModule make_tiny(const cohort::models::ModelOptions& options) {
///       return torch::nn::AnyModule(Tiny(options.num_classes).ptr());
///     }
///     COHORT_REGISTER_MODEL("tiny", make_tiny);
namespace cohort::models {

/// Makes a model of its options: the type that register_model() takes.
using ModelFactory = std::function<torch::nn::AnyModule(const ModelOptions&)>;

/// Returns a new model, initialised from LibTorch's generator (torch::manual_seed).
/// Throws: UsageError for an unknown name, naming the nearest and all that exist, for an option out of range,
/// or for a name that two libraries registered; for a registered model ConfigError naming an option in
/// `extra` that its factory did not ask for, and what the factory throws, with the model's name in front.
torch::nn::AnyModule make_model(const ModelOptions& options);

/// Makes `factory` known as `name`. Throws: UsageError if the name is taken or empty. Threads: any.
void register_model(const std::string& name, ModelFactory factory);

/// Returns all names, sorted.
std::vector<std::string> model_names();

/// What COHORT_REGISTER_MODEL calls while a library loads, when nothing can catch: a name that is taken stays
/// with the first, and make_model(name) throws, naming both places.
bool register_model_at_load(const char* name, ModelFactory factory, const char* file, int line) noexcept;

}  // namespace cohort::models

/// Registers a model where it is written, at namespace scope.
#define COHORT_REGISTER_MODEL(name, factory) \
  COHORT_REGISTER_AT_LOAD(models::register_model_at_load, name, factory)
