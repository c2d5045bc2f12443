#include <ATen/EmptyTensor.h>
#include <c10/core/Allocator.h>

#include "cohort/base/error.h"
#include "cohort/comm/backends/shm/internal/arena.h"
#include "cohort/comm/backends/shm/shm.h"

namespace cohort::comm {
namespace {

class ArenaAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* const data = shm::arena_allocate(bytes);
    return {data, data, &shm::arena_free, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &shm::arena_free; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

at::Tensor shared_empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) {
    throw UsageError("comm.shm",
                     base::concat("a shared tensor is on the CPU, not on ", options.device().str()));
  }
  static ArenaAllocator allocator;
  at::Tensor tensor = at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                c10::typeMetaToScalarType(options.dtype()), std::nullopt);
  return tensor.requires_grad_(options.requires_grad());
}

bool is_shared(const at::Tensor& tensor) {
  return tensor.device().is_cpu() && tensor.defined() &&
         shm::arena_find(tensor.storage().data(), tensor.storage().nbytes()).has_value();
}

}  // namespace cohort::comm
