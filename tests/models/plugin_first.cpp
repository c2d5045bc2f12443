// A user's library with one model.
#include <torch/nn/modules/linear.h>

#include "cohort/models/registry.h"

namespace {

torch::nn::AnyModule make_plugin_model(const cohort::models::ModelOptions& options) {
  return torch::nn::AnyModule(torch::nn::Linear(options.in_channels, options.num_classes));
}

COHORT_REGISTER_MODEL("plugin_model", make_plugin_model);

}  // namespace
