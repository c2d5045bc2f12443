#include "cohort/optim/sgd.h"

#include <ATen/ops/_fused_sgd.h>

#include "cohort/base/error.h"

namespace cohort::optim {

using base::concat;

SGD::SGD(std::vector<at::Tensor> params, const SGDOptions& options)
    : SGD(std::vector<ParamGroup>{ParamGroup{.params = std::move(params)}}, options) {}

SGD::SGD(std::vector<ParamGroup> groups, const SGDOptions& options) : FusedOptimizer(std::move(groups)) {
  fill_options(ParamGroup{.lr = options.lr(),
                          .weight_decay = options.weight_decay(),
                          .momentum = options.momentum(),
                          .dampening = options.dampening(),
                          .nesterov = options.nesterov(),
                          .maximize = options.maximize()});
  for (const ParamGroup& group : param_groups()) check_options(group);
}

void SGD::set_momentum(double momentum) {
  for (ParamGroup& group : param_groups()) group.momentum = momentum;
}

std::vector<GroupOption> SGD::group_options() const {
  return {{"weight_decay", &ParamGroup::weight_decay},
          {"momentum", &ParamGroup::momentum},
          {"dampening", &ParamGroup::dampening},
          {"nesterov", nullptr, &ParamGroup::nesterov},
          {"maximize", nullptr, &ParamGroup::maximize}};
}

std::size_t SGD::states_used(const ParamGroup& group) const {
  // No buffer without momentum: it would double the memory of the parameters for nothing.
  return group.momentum != 0 ? 1 : 0;
}

void SGD::run(const ParamGroup& group, FusedBucket& bucket) {
  // A first step sets the buffer to the gradient instead of scaling it.
  const bool first = group.momentum != 0 && bucket.step == 1;
  // Sutskever et al. 2013, in PyTorch's form: the learning rate multiplies the buffer and is not inside it.
  // So a change of the rate acts on the momentum at once.
  at::_fused_sgd_(bucket.params, bucket.grads, bucket.states[0], group.weight_decay, group.momentum, group.lr,
                  group.dampening, *group.nesterov, *group.maximize, first, {}, bucket.found_inf);
}

// PyTorch cannot decay weights by a sparse gradient either. Its momentum keeps a sparse buffer, whose entries
// grow with each row that ever had a gradient, and which a checkpoint cannot hold.
bool SGD::steps_sparse(const ParamGroup& group) const {
  return group.momentum == 0 && group.weight_decay == 0;
}

void SGD::run_sparse(const ParamGroup& group, const at::Tensor& parameter, const at::Tensor& gradient) {
  parameter.add_(gradient, *group.maximize ? group.lr : -group.lr);
}

void SGD::check_options(const ParamGroup& group) const {
  if (!(group.lr >= 0)) throw UsageError("optim.sgd", concat("lr is ", group.lr, ", expected 0 or more"));
  if (!(group.momentum >= 0))
    throw UsageError("optim.sgd", concat("momentum is ", group.momentum, ", expected 0 or more"));
  if (!(group.weight_decay >= 0))
    throw UsageError("optim.sgd", concat("weight_decay is ", group.weight_decay, ", expected 0 or more"));
  if (*group.nesterov && (group.momentum == 0 || group.dampening != 0))
    throw UsageError("optim.sgd", concat("nesterov needs momentum above 0 and no dampening: got momentum ",
                                         group.momentum, " and dampening ", group.dampening));
}

}  // namespace cohort::optim
