// A library whose names another one, plugin.cpp, has taken.
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include "cohort/data/dataset.h"
#include "cohort/models/registry.h"

COHORT_REGISTER_MODEL("plugin_net", [](const cohort::models::ModelOptions&) {
  return torch::nn::AnyModule(torch::nn::Linear(1, 1));
});
COHORT_REGISTER_DATASET(plugin_data,
                        [](const cohort::data::DatasetArgs&) -> std::shared_ptr<const cohort::data::Dataset> {
                          return nullptr;
                        });
