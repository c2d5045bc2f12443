// Stands in for libtorch_cuda.so: loading it makes LibTorch report two GPUs, on which nothing can run.
#include <ATen/detail/CUDAHooksInterface.h>

#include <cstdlib>

namespace {

class CUDAHooks : public at::CUDAHooksInterface {
 public:
  explicit CUDAHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return getNumGPUs() > 0; }
  int getNumGPUs() const override {
    const char* count = std::getenv("FAKE_GPUS");
    return count == nullptr ? 2 : std::atoi(count);
  }
};

}  // namespace

namespace at {
using ::CUDAHooks;
REGISTER_CUDA_HOOKS(CUDAHooks);
}  // namespace at
