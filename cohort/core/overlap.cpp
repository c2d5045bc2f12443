// Two tensors with the same strides meet where some steps along the dimensions bridge their distance. The
// search goes from the largest stride to the smallest. At each it tries only the steps from which the smaller
// strides can still reach the rest. Always: the answer is never a false "no". Where strides differ, the
// ranges of memory decide.
#include "cohort/core/overlap.h"

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

namespace cohort::core {
namespace {

// A dimension of two tensors: by how many strides an element of one can be ahead of one of the other.
struct Dim {
  std::int64_t stride, least, most;
};

// None where strides differ. From the largest stride to the smallest.
std::optional<std::vector<Dim>> common_dims(const at::Tensor& a, const at::Tensor& b) {
  if (a.dim() != b.dim() || a.dtype() != b.dtype()) return std::nullopt;
  std::vector<Dim> dims;
  for (std::int64_t i = 0; i < a.dim(); ++i) {
    if (a.size(i) > 1 && b.size(i) > 1 && a.stride(i) != b.stride(i)) return std::nullopt;
    const std::int64_t stride = a.size(i) > 1 ? a.stride(i) : b.stride(i);
    if (stride != 0) dims.push_back({stride, 1 - b.size(i), a.size(i) - 1});
  }
  std::ranges::sort(dims, std::ranges::greater(), &Dim::stride);
  return dims;
}

std::int64_t floor_div(std::int64_t a, std::int64_t b) {
  return a / b - (a % b < 0 ? 1 : 0);
}

// Whether some steps along these dimensions lead that far.
bool can_reach(std::span<const Dim> dims, std::int64_t distance) {
  if (dims.empty()) return distance == 0;
  const Dim& dim = dims.front();
  const auto rest = dims.subspan(1);
  std::int64_t least = 0, most = 0;  // of the rest
  for (const Dim& each : rest) {
    least += each.stride * each.least;
    most += each.stride * each.most;
  }
  const std::int64_t first = std::max(dim.least, -floor_div(most - distance, dim.stride));
  const std::int64_t last = std::min(dim.most, floor_div(distance - least, dim.stride));
  for (std::int64_t steps = first; steps <= last; ++steps) {
    if (can_reach(rest, distance - steps * dim.stride)) return true;
  }
  return false;
}

// In bytes from the begin of the storage.
std::pair<std::int64_t, std::int64_t> range_of(const at::Tensor& tensor) {
  std::int64_t last = tensor.storage_offset();
  for (std::int64_t i = 0; i < tensor.dim(); ++i) last += tensor.stride(i) * (tensor.size(i) - 1);
  const auto bytes = static_cast<std::int64_t>(tensor.itemsize());
  return {tensor.storage_offset() * bytes, (last + 1) * bytes};
}

}  // namespace

// Not if each stride steps over all that smaller ones reach.
bool may_overlap(const at::Tensor& tensor) {
  std::vector<std::pair<std::int64_t, std::int64_t>> dims;  // stride, size
  for (std::int64_t i = 0; i < tensor.dim(); ++i) {
    if (tensor.size(i) != 1) dims.emplace_back(tensor.stride(i), tensor.size(i));
  }
  std::sort(dims.begin(), dims.end());
  std::int64_t reached = 0;
  for (const auto& [stride, size] : dims) {
    if (stride <= reached) return true;
    reached += stride * (size - 1);
  }
  return false;
}

bool may_overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_alias_of(b) || a.numel() == 0 || b.numel() == 0) return false;
  const auto [a_begin, a_end] = range_of(a);
  const auto [b_begin, b_end] = range_of(b);
  if (a_end <= b_begin || b_end <= a_begin) return false;
  if (may_overlap(a) || may_overlap(b)) return true;
  const auto dims = common_dims(a, b);
  return !dims || can_reach(*dims, b.storage_offset() - a.storage_offset());
}

std::size_t first_place(const std::vector<at::Tensor>& tensors, std::size_t place) {
  std::size_t first = 0;
  while (!tensors[first].is_same(tensors[place])) ++first;
  return first;
}

}  // namespace cohort::core
