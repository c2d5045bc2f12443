// A step first gathers all gradients into the plans, and makes a plan anew where it no longer fits. Errors
// come before the first write, so a step that throws leaves parameters and state as they were. Then each
// bucket's kernel runs below autograd, and versions are counted here. A step whose flag on the accelerator is
// not known yet is counted at once, and taken back in synchronize_state() if it was not made.
#include "cohort/optim/fused.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/_sparse_coo_tensor_unsafe.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>
#include <c10/core/GradMode.h>

#include <algorithm>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::optim {
namespace {

using base::concat;

/// True if both lay out the same elements in memory in the same order. Note [Layouts]. Sizes are known to be
/// equal.
bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  const at::IntArrayRef left = a.strides();
  const at::IntArrayRef right = b.strides();
  if (left == right) return true;
  if (left.size() != right.size()) return false;
  const at::IntArrayRef sizes = a.sizes();
  for (std::size_t d = 0; d < sizes.size(); ++d)
    if (sizes[d] != 1 && left[d] != right[d]) return false;
  return true;
}

bool same_kind(const at::Tensor& a, const at::Tensor& b) {
  return a.dtype() == b.dtype() && a.device() == b.device();
}

bool is_dense(const at::Tensor& tensor) {
  return tensor.is_non_overlapping_and_dense();
}

/// True of what has other values, or none, where its elements lie.
bool is_lazy(const at::Tensor& tensor) {
  return tensor._is_zerotensor() || tensor.is_neg();
}

/// Returns a state tensor that fits `like`, keeping the values of `state` if there are any.
at::Tensor fitted(const at::Tensor& state, const at::Tensor& like, const std::string& name) {
  if (!state.defined()) return at::zeros_like(like);
  if (state.sizes() != like.sizes())
    throw UsageError("optim.step",
                     concat("a parameter changed its shape: ", name, " has shape ", state.sizes(),
                            ", the parameter ", like.sizes()),
                     "make a new optimizer after resizing parameters");
  if (same_kind(state, like) && same_layout(state, like) && is_dense(state)) return state;
  at::Tensor result = at::empty_like(like);
  result.copy_(state);
  return result;
}

void check_shape(const at::Tensor& gradient, const at::Tensor& parameter) {
  if (gradient.sizes() != parameter.sizes())
    throw UsageError("optim.step", concat("a gradient has shape ", gradient.sizes(), ", its parameter ",
                                          parameter.sizes()));
}

void check_gradient(const at::Tensor& gradient, const at::Tensor& parameter, const std::string& type) {
  if (gradient.layout() != at::kStrided)
    throw UsageError("optim.step",
                     concat(type, " does not step sparse gradients with these options: got layout ",
                            gradient.layout(), " for a parameter of shape ", parameter.sizes()),
                     "an embedding with sparse(false), or for it SGD without momentum and weight decay");
  check_shape(gradient, parameter);
}

// Zero values where `found_inf` is not 0, so that the step changes nothing. The host does not wait for it.
at::Tensor zero_where(const at::Tensor& found_inf, const at::Tensor& sparse) {
  const at::Tensor values = sparse._values();
  const at::Tensor is_finite = found_inf.to(values.device()).eq(0);
  return at::_sparse_coo_tensor_unsafe(sparse._indices(),
                                       at::where(is_finite, values, at::zeros_like(values)), sparse.sizes(),
                                       sparse.options(), sparse.is_coalesced());
}

}  // namespace

void FusedOptimizer::step() {
  step_with({});
}

void FusedOptimizer::step_unless(const NonFinite& found) {
  if (!found.on_cpu) step_with(found.on_device);
}

void FusedOptimizer::step_with(const at::Tensor& found_inf) {
  c10::NoGradGuard no_grad;
  struct Release {
    FusedOptimizer* optimizer;
    ~Release() { optimizer->release(); }
  } release_gradients{this};

  synchronize_state();
  plans_.resize(param_groups().size());
  for (std::size_t g = 0; g < plans_.size(); ++g) {
    check_options(param_groups()[g]);
    if (!gather(plans_[g], g)) {
      rebuild(plans_[g], g);
      gather(plans_[g], g);
    }
  }
  LateScalar flag(found_inf);
  // Nothing was written so far: an error above leaves the parameters as they were.
  for (std::size_t g = 0; g < plans_.size(); ++g) {
    for (const at::Tensor& parameter : plans_[g].sparse) {
      const at::Tensor& gradient = parameter.grad();
      run_sparse(param_groups()[g], parameter,
                 found_inf.defined() ? zero_where(found_inf, gradient) : gradient);
    }
  }
  // Autograd's wrappers of the kernels copy every list, and have nothing to do but count versions: we do
  // that.
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  for (std::size_t g = 0; g < plans_.size(); ++g)
    for (FusedBucket& bucket : plans_[g].buckets) run_bucket(g, bucket, found_inf);
  unread_ = std::move(flag);
}

void FusedOptimizer::run_bucket(std::size_t g, FusedBucket& bucket, const at::Tensor& found_inf) {
  ++bucket.step;
  at::Tensor& step = bucket.steps[0];
  if (step.is_cpu())
    *step.mutable_data_ptr<float>() = static_cast<float>(bucket.step);
  else
    step.fill_(static_cast<double>(bucket.step));
  for (std::size_t k = 0; k < bucket.owners.size(); ++k)
    if (!bucket.params[k].is_same(bucket.owners[k])) bucket.params[k].copy_(bucket.owners[k]);
  bucket.found_inf.reset();
  if (found_inf.defined()) bucket.found_inf = found_inf.to(bucket.params[0].device());
  run(param_groups()[g], bucket);
  bucket.found_inf.reset();
  for (const at::Tensor& owner : bucket.owners)
    if (!owner.is_inference()) owner.unsafeGetTensorImpl()->bump_version();
  for (std::size_t k = 0; k < bucket.owners.size(); ++k) {
    if (!bucket.params[k].is_same(bucket.owners[k])) bucket.owners[k].copy_(bucket.params[k]);
    param_state(g, bucket.indices[k]).step = bucket.step;
  }
}

// Note [Steps that are not made]. Plans are still those of that step.
void FusedOptimizer::synchronize_state() {
  const LateScalar flag = std::exchange(unread_, {});
  if (!flag.is_defined() || flag.read() == 0) return;
  for (std::size_t g = 0; g < plans_.size(); ++g) {
    for (FusedBucket& bucket : plans_[g].buckets) {
      --bucket.step;
      if (bucket.step == 0) plans_[g].valid = false;  // the first step is still to come
      for (const std::size_t index : bucket.indices) {
        ParamState& state = param_state(g, index);
        state.step = bucket.step;
        if (bucket.step == 0) std::fill(state.tensors.begin(), state.tensors.end(), at::Tensor());
      }
    }
  }
}

bool FusedOptimizer::is_sparse(const at::Tensor& parameter, const ParamGroup& group) const {
  const at::Tensor& gradient = parameter.grad();
  return gradient.defined() && gradient.layout() == at::kSparse && steps_sparse(group);
}

// Fetches the gradients into the plan. Returns false if the plan does not fit what it finds.
bool FusedOptimizer::gather(GroupBuckets& plan, std::size_t g) const {
  const ParamGroup& group = param_groups()[g];
  if (!plan.valid || plan.states != states_used(group)) return false;
  for (const at::Tensor& parameter : plan.idle)
    if (parameter.grad().defined()) return false;
  for (const at::Tensor& parameter : plan.sparse) {
    if (!is_sparse(parameter, group)) return false;
    check_shape(parameter.grad(), parameter);
  }
  for (FusedBucket& bucket : plan.buckets) {
    bucket.grads.clear();
    for (std::size_t k = 0; k < bucket.owners.size(); ++k) {
      const at::Tensor& owner = bucket.owners[k];
      const at::Tensor& stepped = bucket.params[k];
      const at::Tensor& gradient = owner.grad();
      if (!gradient.defined() || !owner.is_same(group.params[bucket.indices[k]])) return false;
      if (is_sparse(owner, group)) return false;
      check_gradient(gradient, owner, type());
      const at::Tensor& reference = plan.states > 0 ? bucket.states[0][k] : stepped;
      if (!same_kind(owner, bucket.params[0]) || !same_kind(reference, owner) ||
          reference.sizes() != owner.sizes())
        return false;
      if (stepped.is_same(owner) && (!same_layout(reference, owner) || !is_dense(owner))) return false;
      if (same_kind(gradient, owner) && same_layout(gradient, stepped) && !is_lazy(gradient)) {
        bucket.grads.push_back(gradient);
      } else {
        at::Tensor& copy = bucket.grad_cache[k];
        if (!copy.defined()) copy = at::empty_like(stepped);
        copy.copy_(gradient);
        bucket.grads.push_back(copy);
      }
    }
  }
  return true;
}

// Makes the plan anew from the gradients that there are now. Note [Plans].
void FusedOptimizer::rebuild(GroupBuckets& plan, std::size_t g) {
  const ParamGroup& group = param_groups()[g];
  const std::vector<std::string> names = state_names();
  plan.valid = false;
  plan.buckets.clear();
  plan.idle.clear();
  plan.sparse.clear();
  plan.states = states_used(group);
  for (std::size_t i = 0; i < group.params.size(); ++i) {
    const at::Tensor& parameter = group.params[i];
    if (!parameter.grad().defined()) {
      plan.idle.push_back(parameter);
      continue;
    }
    if (is_sparse(parameter, group)) {
      plan.sparse.push_back(parameter);
      continue;
    }
    check_gradient(parameter.grad(), parameter, type());
    ParamState& state = param_state(g, i);
    // A momentum that was off until now starts as on a first step.
    const bool fresh = plan.states > 0 && !state.tensors[0].defined();
    if (fresh) state.step = 0;
    if (!fresh && plan.states > 0 && state.step == 0) state.step = 1;  // loaded without a step count

    FusedBucket* bucket = nullptr;
    for (FusedBucket& candidate : plan.buckets)
      if (candidate.step == state.step && same_kind(candidate.params[0], parameter)) bucket = &candidate;
    if (!bucket) {
      bucket = &plan.buckets.emplace_back();
      bucket->step = state.step;
    }
    at::Tensor stepped = is_dense(parameter) ? parameter : at::empty(parameter.sizes(), parameter.options());
    for (std::size_t n = 0; n < plan.states; ++n) {
      state.tensors[n] = fitted(state.tensors[n], stepped, names[n]);
      bucket->states[n].push_back(state.tensors[n]);
    }
    bucket->indices.push_back(i);
    bucket->owners.push_back(parameter);
    bucket->params.push_back(std::move(stepped));
    bucket->grad_cache.emplace_back();
  }
  for (FusedBucket& bucket : plan.buckets) {
    const at::Tensor step = at::full({}, static_cast<double>(bucket.step),
                                     at::TensorOptions(at::kFloat).device(bucket.params[0].device()));
    bucket.steps.assign(bucket.params.size(), step);
    bucket.grads.reserve(bucket.params.size());
  }
  plan.valid = true;
}

void FusedOptimizer::release() noexcept {
  for (GroupBuckets& plan : plans_)
    for (FusedBucket& bucket : plan.buckets) bucket.grads.clear();
}

}  // namespace cohort::optim
