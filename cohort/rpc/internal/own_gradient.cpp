#include "cohort/rpc/internal/own_gradient.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace cohort::rpc {
namespace {

// The addresses of a tensor's elements: from the first to the end of the last.
struct MemoryRange {
  std::uintptr_t begin, end;
  const c10::TensorImpl* tensor;
};

MemoryRange range_of(const at::Tensor& tensor) {
  std::int64_t last = 0;
  for (std::int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + static_cast<std::size_t>(last + 1) * tensor.element_size(),
          tensor.unsafeGetTensorImpl()};
}

}  // namespace

OverlappingTensors::OverlappingTensors(const std::vector<at::Tensor>& tensors) {
  std::vector<MemoryRange> ranges;
  for (const at::Tensor& tensor : tensors) {
    const bool is_dense = tensor.layout() == at::kStrided && !tensor.is_nested() && tensor.has_storage();
    if (is_dense && tensor.numel() > 0) {
      ranges.push_back(range_of(tensor));
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const MemoryRange& a, const MemoryRange& b) { return a.begin < b.begin; });
  const MemoryRange* longest = nullptr;  // of those before: the one that ends last
  for (const MemoryRange& range : ranges) {
    if (longest != nullptr && range.begin < longest->end && range.tensor != longest->tensor) {
      found_.insert(range.tensor);
      found_.insert(longest->tensor);
    }
    if (longest == nullptr || range.end > longest->end) longest = &range;
  }
}

at::Tensor own_gradient(const at::Tensor& leaf, const at::Tensor& gradient) {
  const at::NoGradGuard no_grad;
  at::Tensor none, own;
  torch::autograd::AccumulateGrad::accumulateGrad(leaf, none, gradient, /*num_expected_refs=*/1,
                                                  [&](at::Tensor&& result) { own = std::move(result); });
  return own;
}

}  // namespace cohort::rpc
