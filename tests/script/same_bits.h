#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace cohort::test {

/// Bitwise, NaNs included.
inline bool same_bits(const at::Tensor& a, const at::Tensor& b) {
  if (a.defined() != b.defined()) return false;
  if (!a.defined()) return true;
  if (a.sizes() != b.sizes() || a.scalar_type() != b.scalar_type()) return false;
  const auto bytes = [](const at::Tensor& t) {
    return t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(at::kByte);
  };
  return bytes(a).equal(bytes(b));
}

inline bool same_bits(const std::vector<at::Tensor>& a, const std::vector<at::Tensor>& b) {
  bool same = a.size() == b.size();
  for (std::size_t i = 0; same && i < a.size(); ++i) same = same_bits(a[i], b[i]);
  return same;
}

}  // namespace cohort::test
