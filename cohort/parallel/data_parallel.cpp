// Inputs are cut as torch.chunk() cuts, and results are joined on one device. The number of parts comes from
// the inputs, so a small batch may use fewer placements than there are. A number without dimensions is not
// cut: every part gets it. Always: all inputs that are cut give the same number of parts, or the call is
// rejected. Surprising: a result that only some replicas have is an error, and not a gap.
#include "cohort/parallel/data_parallel.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "cohort/base/error.h"

namespace cohort::parallel::data_parallel_detail {
namespace {

std::int64_t size_along(const at::Tensor& tensor, std::int64_t dim) {
  const std::int64_t at = dim < 0 ? dim + tensor.dim() : dim;
  if (at >= 0 && at < tensor.dim()) return tensor.size(at);
  throw UsageError("parallel.scatter",
                   base::concat("an input ", tensor.scalar_type(), tensor.sizes(), " has no dimension ", dim),
                   "DataParallelOptions::dim, the dimension of the samples");
}

// The size of all parts but the last ones.
std::int64_t part_size(std::int64_t size, std::size_t most) {
  // As torch.chunk() cuts: rounded up, so the last parts may be smaller or missing.
  const auto parts = static_cast<std::int64_t>(most);
  return std::max<std::int64_t>(1, (size + parts - 1) / parts);
}

}  // namespace

std::size_t num_chunks(const Tensors& tensors, std::size_t most, std::int64_t dim) {
  if (most == 0) throw UsageError("parallel.scatter", "there are no placements", "at least one");
  std::size_t count = 0;
  const at::Tensor* first = nullptr;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.dim() == 0) continue;
    const std::int64_t size = size_along(tensor, dim);
    const std::int64_t each = part_size(size, most);
    const auto parts = static_cast<std::size_t>(std::max<std::int64_t>(1, (size + each - 1) / each));
    if (first != nullptr && parts != count) {
      throw UsageError("parallel.scatter",
                       base::concat("inputs of ", first->sizes(), " and ", tensor.sizes(), " are cut into ",
                                    count, " and ", parts, " parts along dimension ", dim),
                       "inputs with the same number of samples");
    }
    count = parts;
    first = &tensor;
  }
  // With nothing to cut, every placement runs.
  return first == nullptr ? most : count;
}

at::Tensor chunk(const at::Tensor& tensor, std::size_t index, std::size_t count, std::size_t most,
                 std::int64_t dim) {
  if (tensor.dim() == 0 || count == 1) return tensor;
  const std::int64_t size = size_along(tensor, dim), each = part_size(size, most);
  const std::int64_t begin = static_cast<std::int64_t>(index) * each;
  return tensor.narrow(dim, begin, std::min(each, size - begin));
}

at::Tensor join(const Tensors& tensors, std::int64_t dim, c10::Device device) {
  Tensors here;
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined() != tensors.front().defined()) {
      throw UsageError("parallel.gather", "a result is there on some replicas only",
                       "results of the same structure from every replica");
    }
    if (tensor.defined()) here.push_back(tensor.to(device));
  }
  if (here.empty()) return {};
  // Numbers, such as losses, become a vector, as in torch.nn.DataParallel.
  return here.front().dim() == 0 ? at::stack(here) : at::cat(here, dim);
}

BoundaryOptions boundary_options(const torch::nn::Module& module, const DataParallelOptions& options) {
  BoundaryOptions boundary;
  boundary.timeout = options.timeout;
  // An evaluation draws nothing, and so must not move what training draws next.
  boundary.random = module.is_training() ? core::RandomKey::draw() : core::RandomKey{};
  return boundary;
}

}  // namespace cohort::parallel::data_parallel_detail
