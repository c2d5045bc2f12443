#pragma once

#include <torch/arg.h>

#include "cohort/optim/fused.h"

namespace cohort::optim {

/// Options of SGD, each as in torch.optim.SGD.
struct SGDOptions {
  explicit SGDOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, momentum) = 0;
  TORCH_ARG(double, dampening) = 0;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, nesterov) = false;
  TORCH_ARG(bool, maximize) = false;
};

/// Stochastic gradient descent, bit-equal to PyTorch's torch.optim.SGD(fused=True). torch::optim::SGD has the
/// same bits but for the last numel % 16 elements of a tensor, where the fused kernel rounds a product that
/// LibTorch's vectors do not. Sparse gradients (COO) are stepped without momentum and weight decay, with the
/// bits of torch.optim.SGD: only rows that have a gradient change. Throws: UsageError for options out of
/// range, and for sparse gradients with momentum or weight decay.
class SGD : public FusedOptimizer {
 public:
  explicit SGD(std::vector<at::Tensor> params, const SGDOptions& options = SGDOptions());
  explicit SGD(std::vector<ParamGroup> groups, const SGDOptions& options = SGDOptions());
  std::string type() const override { return "sgd"; }
  void set_momentum(double momentum) override;

 protected:
  std::vector<std::string> state_names() const override { return {"momentum_buffer"}; }
  std::vector<GroupOption> group_options() const override;
  std::size_t states_used(const ParamGroup& group) const override;
  void run(const ParamGroup& group, FusedBucket& bucket) override;
  bool steps_sparse(const ParamGroup& group) const override;
  void run_sparse(const ParamGroup& group, const at::Tensor& parameter, const at::Tensor& gradient) override;
  void check_options(const ParamGroup& group) const override;
};

}  // namespace cohort::optim
