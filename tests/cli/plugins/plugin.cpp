// A shared library as a user writes it: a model and a data set that the program finds by name, and an
// operator that the model calls.
#include <ATen/ATen.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/modules/linear.h>

#include "cohort/base/log.h"
#include "cohort/data/dataset.h"
#include "cohort/models/registry.h"
#include "cohort/ops/operator.h"

namespace {

at::Tensor scale_shift(const at::Tensor& x, double scale, double shift) {
  cohort::base::warn_once("cohort_test.scale_shift",
                          "cohort_test::scale_shift was called");  // a test reads it
  return x * scale + shift;
}

/// By its name, as one calls an operator of another library.
at::Tensor call_scale_shift(const at::Tensor& x, double scale, double shift) {
  static const auto op =
      cohort::ops::find<at::Tensor(const at::Tensor&, double, double)>("cohort_test::scale_shift");
  return op.call(x, scale, shift);
}

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  explicit NetImpl(std::int64_t classes) : classes(classes) { reset(); }
  void reset() override { linear = register_module("linear", torch::nn::Linear(16, classes)); }
  at::Tensor forward(at::Tensor x) { return call_scale_shift(linear->forward(x.flatten(1)), 2, -1); }
  std::int64_t classes;
  torch::nn::Linear linear{nullptr};
};
TORCH_MODULE(Net);

class Points : public cohort::data::ExampleDataset {
 public:
  std::int64_t size() const override { return 64; }
  std::vector<at::Tensor> get(std::int64_t index, cohort::base::RandomStream& random) const override {
    return {at::full({1, 4, 4}, random.uniform(), at::kFloat), at::scalar_tensor(index % 4, at::kLong)};
  }
};

}  // namespace

TORCH_LIBRARY(cohort_test, library) {
  cohort::ops::define(library, "scale_shift(Tensor x, float scale, float shift) -> Tensor")
      .composite(&scale_shift)
      .backward([](const cohort::ops::Call& call, const std::vector<at::Tensor>& gradients) {
        cohort::base::warn_once("cohort_test.scale_shift_backward",
                                "backward of cohort_test::scale_shift was called");
        return std::vector<at::Tensor>{gradients[0] * call.argument<double>(1)};
      });
}

COHORT_REGISTER_MODEL("plugin_net", [](const cohort::models::ModelOptions& options) {
  return torch::nn::AnyModule(Net(options.num_classes));
});
COHORT_REGISTER_DATASET(plugin_data,
                        [](const cohort::data::DatasetArgs&) { return std::make_shared<const Points>(); });
