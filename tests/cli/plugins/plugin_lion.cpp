// Lion (Chen et al. 2023): a step takes the sign of a running average of gradients. So a parameter has one
// tensor of state.
#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>  // at::NoGradGuard
#include <cohort/optim/factory.h>

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace {

using cohort::optim::ParamGroup;

class Lion : public cohort::optim::Optimizer {
 public:
  Lion(std::vector<ParamGroup> groups, const ParamGroup& defaults) : Optimizer(std::move(groups)) {
    fill_options(defaults);  // also makes room for a tensor of each name in state_names()
  }
  std::string type() const override { return "lion"; }

  void step() override {
    const at::NoGradGuard no_grad;
    for (std::size_t g = 0; g < param_groups().size(); ++g) {
      ParamGroup& group = param_groups()[g];
      for (std::size_t i = 0; i < group.params.size(); ++i) {
        at::Tensor& parameter = group.params[i];
        const at::Tensor& gradient = parameter.grad();
        if (!gradient.defined()) continue;
        at::Tensor& average = param_state(g, i).tensors[0];  // "exp_avg"
        if (!average.defined()) average = at::zeros_like(parameter);
        parameter.mul_(1 - group.lr * group.weight_decay);
        parameter.sub_(at::lerp(gradient, average, group.beta1).sign(), group.lr);
        average.lerp_(gradient, 1 - group.beta2);
      }
    }
  }

 protected:
  std::vector<std::string> state_names() const override { return {"exp_avg"}; }
  std::vector<cohort::optim::GroupOption> group_options() const override {
    return {{"weight_decay", &ParamGroup::weight_decay},
            {"beta1", &ParamGroup::beta1},
            {"beta2", &ParamGroup::beta2}};
  }
};

COHORT_REGISTER_OPTIMIZER("lion", [](const cohort::optim::OptimizerOptions& options,
                                     std::vector<ParamGroup> groups) {
  return std::make_unique<Lion>(std::move(groups),
                                ParamGroup{.lr = options.lr.value_or(1e-4),
                                           .weight_decay = options.weight_decay.value_or(0),
                                           .beta1 = options.extra.number("beta1", 0.9),
                                           .beta2 = options.extra.number("beta2", 0.99)});
});

}  // namespace
