// A Layout is a plain value, so handles of one view have equal layouts.
#include "cohort/script/tensors.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "cohort/base/error.h"

namespace cohort::script {

Layout Layout::of(const at::Tensor& tensor) {
  return {.sizes = tensor.sizes().vec(),
          .strides = tensor.strides().vec(),
          .offset = tensor.storage_offset(),
          .dtype = tensor.scalar_type(),
          .device = tensor.device(),
          .conjugate = tensor.is_conj(),
          .negative = tensor.is_neg()};
}

std::int64_t Layout::bytes() const {
  return std::accumulate(sizes.begin(), sizes.end(), static_cast<std::int64_t>(c10::elementSize(dtype)),
                         std::multiplies<>());
}

bool Layout::may_overlap() const {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride and size
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    if (sizes[i] == 0) return false;
    if (sizes[i] > 1) dims.emplace_back(strides[i], sizes[i]);
  }
  // By stride, each dimension must step over all elements of those before it. This is enough, but not exact:
  // sizes (3, 2) with strides (2, 3) do not overlap, and count as if they did.
  std::ranges::sort(dims);
  std::int64_t last = 0;  // the farthest element of the dimensions before
  for (const auto& [stride, size] : dims) {
    if (stride <= last) return true;
    last += stride * (size - 1);
  }
  return false;
}

std::string Layout::str() const {
  return base::concat(dtype, " ", c10::IntArrayRef(sizes));
}

}  // namespace cohort::script
