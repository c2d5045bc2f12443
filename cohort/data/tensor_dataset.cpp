#include "cohort/data/tensor_dataset.h"

#include <cstring>

#include "cohort/base/error.h"
#include "cohort/data/check_index.h"

namespace cohort::data {

TensorDataset::TensorDataset(std::vector<at::Tensor> tensors, std::vector<std::string> names)
    : tensors_(std::move(tensors)) {
  if (tensors_.empty())
    throw UsageError("data.tensor_dataset", "no tensor was given", "TensorDataset({x, y})");
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    at::Tensor& tensor = tensors_[i];
    std::string name = i < names.size() ? names[i]
                       : i == 0         ? "input"
                       : i == 1         ? "target"
                                        : base::concat("field", i);
    if (tensor.dim() == 0) {
      throw UsageError("data.tensor_dataset",
                       "tensor '" + name + "' is a scalar, expected one row per sample");
    }
    if (i == 0) size_ = tensor.size(0);
    if (tensor.size(0) != size_) {
      throw UsageError("data.tensor_dataset", base::concat("tensor '", name, "' has ", tensor.size(0),
                                                           " rows, the first tensor has ", size_));
    }
    // A dense tensor of the CPU is not copied: it shares its memory with the caller's.
    tensor = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
    fields_.push_back({std::move(name), tensor.scalar_type(), tensor.sizes().slice(1).vec(), false});
    // Plain addresses, so that threads read rows without touching a tensor's reference count.
    bytes_.push_back(static_cast<const std::byte*>(tensor.const_data_ptr()));
    row_bytes_.push_back(static_cast<std::size_t>(fields_.back().bytes()));
  }
}

void TensorDataset::read(std::int64_t index, base::RandomStream&, std::span<std::byte* const> out) const {
  check_index("data.tensor_dataset", index, size_);
  for (std::size_t i = 0; i < out.size(); ++i) {
    std::memcpy(out[i], bytes_[i] + static_cast<std::size_t>(index) * row_bytes_[i], row_bytes_[i]);
  }
}

std::string TensorDataset::describe(std::int64_t index) const {
  return base::concat("row ", index);
}

}  // namespace cohort::data
