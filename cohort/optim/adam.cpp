#include "cohort/optim/adam.h"

#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>

#include "cohort/base/error.h"

namespace cohort::optim {

using base::concat;

Adam::Adam(std::vector<at::Tensor> params, const AdamOptions& options)
    : Adam(std::vector<ParamGroup>{ParamGroup{.params = std::move(params)}}, options) {}

Adam::Adam(std::vector<ParamGroup> groups, const AdamOptions& options) : FusedOptimizer(std::move(groups)) {
  fill_options(ParamGroup{.lr = options.lr(),
                          .weight_decay = options.weight_decay(),
                          .beta1 = options.beta1(),
                          .beta2 = options.beta2(),
                          .eps = options.eps(),
                          .amsgrad = options.amsgrad(),
                          .maximize = options.maximize()});
  for (const ParamGroup& group : param_groups()) check_options(group);
}

void Adam::set_momentum(double momentum) {
  // A one-cycle schedule moves beta1, as PyTorch's OneCycleLR does with cycle_momentum.
  for (ParamGroup& group : param_groups()) group.beta1 = momentum;
}

std::vector<std::string> Adam::state_names() const {
  // PyTorch's names, so that state dicts are alike. The third is AMSGrad's (Reddi et al. 2018).
  return {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"};
}

std::vector<GroupOption> Adam::group_options() const {
  return {{"weight_decay", &ParamGroup::weight_decay},
          {"beta1", &ParamGroup::beta1},
          {"beta2", &ParamGroup::beta2},
          {"eps", &ParamGroup::eps},
          {"amsgrad", nullptr, &ParamGroup::amsgrad},
          {"maximize", nullptr, &ParamGroup::maximize}};
}

std::size_t Adam::states_used(const ParamGroup& group) const {
  return *group.amsgrad ? 3 : 2;
}

void Adam::run(const ParamGroup& group, FusedBucket& bucket) {
  // Kingma and Ba 2015, algorithm 1, with weight decay added to the gradient. The kernel corrects the bias by
  // the step count, so the count must be right before the call.
  at::_fused_adam_(bucket.params, bucket.grads, bucket.states[0], bucket.states[1], bucket.states[2],
                   bucket.steps, group.lr, group.beta1, group.beta2, group.weight_decay, group.eps,
                   *group.amsgrad, *group.maximize, {}, bucket.found_inf);
}

void AdamW::run(const ParamGroup& group, FusedBucket& bucket) {
  // Loshchilov and Hutter 2019, algorithm 2: weight decay is taken off the parameter, decoupled from the
  // gradient.
  at::_fused_adamw_(bucket.params, bucket.grads, bucket.states[0], bucket.states[1], bucket.states[2],
                    bucket.steps, group.lr, group.beta1, group.beta2, group.weight_decay, group.eps,
                    *group.amsgrad, *group.maximize, {}, bucket.found_inf);
}

void Adam::check_options(const ParamGroup& group) const {
  auto reject = [](const char* option, double value, const char* expected) {
    throw UsageError("optim.adam", concat(option, " is ", value, ", expected ", expected));
  };
  // Negations reject NaN too, which is also what an option that nobody set holds.
  if (!(group.lr >= 0)) reject("lr", group.lr, "0 or more");
  if (!(group.eps >= 0)) reject("eps", group.eps, "0 or more");
  if (!(group.beta1 >= 0 && group.beta1 < 1)) reject("beta1", group.beta1, "0 or more and below 1");
  if (!(group.beta2 >= 0 && group.beta2 < 1)) reject("beta2", group.beta2, "0 or more and below 1");
  if (!(group.weight_decay >= 0)) reject("weight_decay", group.weight_decay, "0 or more");
}

}  // namespace cohort::optim
