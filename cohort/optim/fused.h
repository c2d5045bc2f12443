#pragma once

#include <array>
#include <optional>

#include "cohort/optim/late_scalar.h"
#include "cohort/optim/optimizer.h"

/// How SGD, Adam and AdamW call LibTorch's fused kernels: one call per group, dtype, device and step count.
///
/// Note [Plans]
/// The kernels take lists of tensors. Building them anew cost more than the arithmetic on small parameters,
/// so each group keeps a plan: lists by (dtype, device, step count), with one step tensor that fills every
/// slot. A step only fetches the gradients; the plan is made again when a gradient appears or vanishes, a
/// parameter is moved or converted, or an option that changes the lists is switched. Gradients are freed
/// after each step, so a plan never keeps memory alive.
///
/// Note [Layouts]
/// The CPU kernels walk raw memory from first to last element and never look at strides: a gradient laid out
/// unlike its parameter would be read in the wrong order, in silence. Equal strides of a dense parameter
/// (channels-last too) go straight in; other gradients (or those of another dtype) are first copied into the
/// parameter's layout, and parameters with gaps are stepped in a dense copy.
///
/// Note [Steps that are not made]
/// A flag on an accelerator says whether a gradient is not finite; the kernels read it and then change
/// nothing. The host, which counts steps, must not wait for it: it counts the step, keeps the flag, and takes
/// the count back when it looks at the flag, at the next step or when the state is read. The flag is copied
/// to the host when it is made, so that looking does not wait for the forward and backward of the step after
/// it.
namespace cohort::optim {

/// The most state tensors that a kernel takes per parameter.
inline constexpr std::size_t kMaxStates = 3;

/// Parameters that go into one call of a kernel; every list has the same length.
struct FusedBucket {
  std::vector<std::size_t> indices;    ///< in the group
  std::vector<at::Tensor> owners;      ///< the parameters
  std::vector<at::Tensor> params;      ///< what is stepped: the owner, or its dense copy
  std::vector<at::Tensor> grads;       ///< filled during a step only
  std::vector<at::Tensor> grad_cache;  ///< copies in the parameter's layout; undefined where not needed
  /// By state_names(); empty where a step uses fewer.
  std::array<std::vector<at::Tensor>, kMaxStates> states;
  std::vector<at::Tensor> steps;        ///< one tensor in every slot
  std::int64_t step = 0;                ///< steps done
  std::optional<at::Tensor> found_inf;  ///< during a step only: 1 where no step is to be made
};

/// The common part of SGD, Adam and AdamW: states_used() is at most kMaxStates.
class FusedOptimizer : public Optimizer {
 public:
  using Optimizer::Optimizer;
  void step() final;
  void step_unless(const NonFinite& found) final;

 protected:
  /// Calls the kernel. `bucket.step` already counts this step.
  virtual void run(const ParamGroup& group, FusedBucket& bucket) = 0;
  /// Returns whether run_sparse() steps gradients of layout Sparse (COO) with the options of `group`.
  virtual bool steps_sparse(const ParamGroup& /*group*/) const { return false; }
  /// Steps a parameter whose gradient is sparse. It has no state.
  virtual void run_sparse(const ParamGroup& /*group*/, const at::Tensor& /*parameter*/,
                          const at::Tensor& /*gradient*/) {}
  /// Throws UsageError for options that can never work.
  virtual void check_options(const ParamGroup& group) const = 0;
  void synchronize_state() override;
  void state_loaded() override {
    plans_.clear();
    unread_ = {};
  }

 private:
  struct GroupBuckets {
    bool valid = false;
    std::size_t states = 0;
    std::vector<FusedBucket> buckets;
    std::vector<at::Tensor> idle;    // parameters without a gradient
    std::vector<at::Tensor> sparse;  // parameters with a sparse gradient
  };

  void step_with(const at::Tensor& found_inf);
  void run_bucket(std::size_t group, FusedBucket& bucket, const at::Tensor& found_inf);
  bool is_sparse(const at::Tensor& parameter, const ParamGroup& group) const;
  bool gather(GroupBuckets& plan, std::size_t group) const;
  void rebuild(GroupBuckets& plan, std::size_t group);
  void release() noexcept;

  std::vector<GroupBuckets> plans_;
  LateScalar unread_;  // the flag of the last step, where it is not known yet. Note [Steps that are not made]
};

}  // namespace cohort::optim
