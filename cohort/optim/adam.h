#pragma once

#include <torch/arg.h>

#include "cohort/optim/fused.h"

namespace cohort::optim {

/// Options of Adam, each as in torch.optim.Adam.
struct AdamOptions {
  explicit AdamOptions(double lr = 1e-3) : lr_(lr) {}
  TORCH_ARG(double, lr);
  TORCH_ARG(double, beta1) = 0.9;
  TORCH_ARG(double, beta2) = 0.999;
  TORCH_ARG(double, eps) = 1e-8;
  TORCH_ARG(double, weight_decay) = 0;
  TORCH_ARG(bool, amsgrad) = false;
  TORCH_ARG(bool, maximize) = false;
};

/// Adam, equal to PyTorch's torch.optim.Adam(fused=True).
/// Throws: UsageError for options out of range and for sparse gradients.
/// Source: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015; weight decay as L2
/// penalty.
class Adam : public FusedOptimizer {
 public:
  explicit Adam(std::vector<at::Tensor> params, const AdamOptions& options = AdamOptions());
  explicit Adam(std::vector<ParamGroup> groups, const AdamOptions& options = AdamOptions());
  std::string type() const override { return "adam"; }
  void set_momentum(double momentum) override;

 protected:
  std::vector<std::string> state_names() const override;
  bool saves_step() const override { return true; }
  std::vector<GroupOption> group_options() const override;
  std::size_t states_used(const ParamGroup& group) const override;
  void run(const ParamGroup& group, FusedBucket& bucket) override;
  void check_options(const ParamGroup& group) const override;
};

/// Options of AdamW: Adam's, with weight decay of 1e-2.
struct AdamWOptions : AdamOptions {
  explicit AdamWOptions(double lr = 1e-3) : AdamOptions(lr) { weight_decay(1e-2); }
  AdamWOptions(const AdamOptions& options) : AdamOptions(options) {}  // what the setters return
};

/// Adam with decoupled weight decay, equal to PyTorch's torch.optim.AdamW(fused=True).
/// Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.
class AdamW : public Adam {
 public:
  explicit AdamW(std::vector<at::Tensor> params, const AdamWOptions& options = AdamWOptions())
      : Adam(std::move(params), options) {}
  explicit AdamW(std::vector<ParamGroup> groups, const AdamWOptions& options = AdamWOptions())
      : Adam(std::move(groups), options) {}
  std::string type() const override { return "adamw"; }

 protected:
  void run(const ParamGroup& group, FusedBucket& bucket) override;
};

}  // namespace cohort::optim
