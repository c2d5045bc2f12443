#pragma once

#include <ATen/core/Tensor.h>

#include <unordered_set>
#include <vector>

/// Which gradients a context gives out without a copy.
namespace cohort::rpc {

/// Dense tensors that share memory with another tensor of a list. LibTorch's nodes return views of one tensor
/// as gradients of several inputs.
class OverlappingTensors {
 public:
  explicit OverlappingTensors(const std::vector<at::Tensor>& tensors);
  bool has(const at::Tensor& tensor) const { return found_.count(tensor.unsafeGetTensorImpl()) > 0; }

 private:
  std::unordered_set<const c10::TensorImpl*> found_;
};

/// Returns a gradient of `leaf` that the caller owns. It has the memory of `gradient` where `gradient` is the
/// only tensor and its strides are those that a grad() has; else it is a copy. It decides as LibTorch's
/// AccumulateGrad does for grad().
at::Tensor own_gradient(const at::Tensor& leaf, const at::Tensor& gradient);

}  // namespace cohort::rpc
