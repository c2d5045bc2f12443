// A shared library as a user writes it: a model and a data set that the program finds by name.
#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include "cohort/data/dataset.h"
#include "cohort/models/registry.h"

namespace {

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  explicit NetImpl(std::int64_t classes) : classes(classes) { reset(); }
  void reset() override { linear = register_module("linear", torch::nn::Linear(16, classes)); }
  at::Tensor forward(at::Tensor x) { return linear->forward(x.flatten(1)); }
  std::int64_t classes;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Net);

class Points : public cohort::data::ExampleDataset {
 public:
  std::int64_t size() const override { return 64; }
  std::vector<at::Tensor> get(std::int64_t index, cohort::core::RandomStream& random) const override {
    return {at::full({1, 4, 4}, random.uniform(), at::kFloat), at::scalar_tensor(index % 4, at::kLong)};
  }
};

}  // namespace

COHORT_REGISTER_MODEL("plugin_net", [](const cohort::models::ModelOptions& options) {
  return torch::nn::AnyModule(Net(options.num_classes));
});
COHORT_REGISTER_DATASET(plugin_data,
                        [](const cohort::data::DatasetArgs&) { return std::make_shared<const Points>(); });
