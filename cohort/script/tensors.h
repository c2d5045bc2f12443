#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <vector>

/// Tensors that a scripted function takes and returns, and how one lies in memory.
namespace cohort::script {

using Tensors = std::vector<at::Tensor>;

/// How a tensor lies in its storage. Together with the storage it says which value a tensor is.
struct Layout {
  std::vector<std::int64_t> sizes;
  std::vector<std::int64_t> strides;
  std::int64_t offset = 0;  ///< elements from the storage's begin
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  c10::Device device = c10::kCPU;
  bool conjugate = false;  ///< whether its elements are read conjugated
  bool negative = false;   ///< whether its elements are read negated

  /// Reads how `tensor` lies now.
  static Layout of(const at::Tensor& tensor);
  bool operator==(const Layout&) const = default;
  /// Bytes of the elements.
  std::int64_t bytes() const;
  /// True if two elements may lie in the same place.
  bool may_overlap() const;
  /// Returns "Float [16, 64]".
  std::string str() const;
};

}  // namespace cohort::script
