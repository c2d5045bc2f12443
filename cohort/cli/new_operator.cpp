// A table: the files of `cohort new operator`, as texts. A test compiles those for the CPU as a user would.
// The operator has all parts that one can have: kernel, meta kernel, gradient, autocast rule, checks. So a
// user deletes and changes, and invents nothing. Files of CUDA come only with --cuda.
#include "cohort/cli/internal/new_files.h"

namespace cohort::cli {
namespace {

// The user builds it against an installed Cohort. The kernel for GPUs is left out, with a message, where it
// cannot be built: one folder then serves machines with and without CUDA.
constexpr std::string_view kOperatorCMake =
    R"--(# The operator @NAME@: a library for `cohort ... --load`, and its test.
#
#   cmake -B build -DCMAKE_PREFIX_PATH=WHERE-COHORT-IS-INSTALLED
#   cmake --build build && ctest --test-dir build --output-on-failure
cmake_minimum_required(VERSION 3.22)
project(@NAME@ LANGUAGES CXX)
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release)
endif()

find_package(Cohort @VERSION@ REQUIRED)

set(sources @NAME@.cpp)
# A kernel for GPUs may stand beside: @NAME@.cu with the kernel, @NAME@_cuda.cpp that registers it. Both need a CUDA
# LibTorch and a CUDA toolkit; without them the operator is the CPU's alone.
if(EXISTS "${CMAKE_CURRENT_SOURCE_DIR}/@NAME@.cu")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER AND TARGET LibTorch::c10_cuda)
    enable_language(CUDA)
    list(APPEND sources @NAME@.cu @NAME@_cuda.cpp)
    link_libraries(LibTorch::c10_cuda)
    add_compile_definitions(@NAME@_HAS_CUDA)
  else()
    message(STATUS "no compiler for CUDA, or no CUDA build of LibTorch: @NAME@.cu is left out")
  endif()
endif()

add_library(@NAME@ MODULE ${sources})
target_link_libraries(@NAME@ PRIVATE cohort::ops)

enable_testing()
add_executable(@NAME@_test @NAME@_test.cpp ${sources})
target_link_libraries(@NAME@_test PRIVATE cohort::ops)
add_test(NAME @NAME@ COMMAND @NAME@_test)
)--";

// C++ callers use this function. Users of --load use the operator's name.
constexpr std::string_view kHeader = R"--(#pragma once

#include <ATen/core/Tensor.h>

/// Returns scale * x * x, element by element. Dtypes: float32, float64.
at::Tensor @NAME@(const at::Tensor& x, double scale);
)--";

// The function is small, but shows what is easily got wrong: inputs of any strides, several dtypes, an
// argument that is no tensor, and a gradient that needs an input.
constexpr std::string_view kOperatorSource =
    R"--(// The operator @NAME@::@NAME@: what it computes, its gradient, its shapes. Change the schema, the loop and the
// gradient to yours; @NAME@_test says whether they agree.
#include "@NAME@.h"

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <cohort/core/parallel.h>
#include <cohort/ops/operator.h>

#include <cstdint>
#include <vector>

namespace {

namespace ops = cohort::ops;

// The values. Called below autograd, with CPU tensors of any strides.
at::Tensor forward_cpu(const at::Tensor& x, double scale) {
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "@NAME@", [&] {
    const auto* from = in.const_data_ptr<scalar_t>();
    auto* to = out.mutable_data_ptr<scalar_t>();
    const auto factor = static_cast<scalar_t>(scale);
    cohort::core::parallel_for(in.numel(), 1 << 15, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) to[i] = factor * from[i] * from[i];
    });
  });
  return out;
}

// The same without values: sizes, strides, dtype.
at::Tensor forward_meta(const at::Tensor& x, double) {
  return at::empty(x.sizes(), x.options());
}

// One gradient for each tensor among the arguments. Made of LibTorch's operators, it can be differentiated
// again.
std::vector<at::Tensor> backward(const ops::Call& call, const std::vector<at::Tensor>& gradients) {
  return {gradients[0] * (2 * call.argument<double>(1)) * call.tensor(0)};
}

}  // namespace

TORCH_LIBRARY(@NAME@, library) {
  ops::define(library, "@NAME@(Tensor x, float scale) -> Tensor")
      .cpu(&forward_cpu)
      .meta(&forward_meta)
      .autocast(ops::Autocast::kFloat32)
      .backward(&backward);
}

at::Tensor @NAME@(const at::Tensor& x, double scale) {
  static const auto op = ops::find<at::Tensor(const at::Tensor&, double)>("@NAME@::@NAME@");
  return op.call(x, scale);
}
)--";

// The library's sources are linked in, since a MODULE cannot be linked to. gradcheck needs double: with
// float32 its finite differences drown in rounding.
constexpr std::string_view kTest =
    R"--(// Do the values, the gradient, the schema and the shapes of @NAME@ agree? Exit status 0 says yes.
#include <ATen/ATen.h>
#include <cohort/core/device.h>
#include <cohort/ops/check.h>

#include <cstdio>
#include <exception>
#include <vector>

#include "@NAME@.h"

namespace {

using Tensors = std::vector<at::Tensor>;
namespace ops = cohort::ops;

void check() {
  [[maybe_unused]] const at::Device gpu = cohort::core::resolve_device("auto").device;  // the CPU where there is none
  at::manual_seed(1);
  const at::Tensor x = at::randn({2, 3}, at::kDouble).requires_grad_();
  const auto function = [](const Tensors& in) { return Tensors{@NAME@(in[0], 2.5)}; };
  if (!at::allclose(@NAME@(x, 2.5), 2.5 * x * x)) throw ops::CheckError("@NAME@", "the values are wrong");
  ops::opcheck("@NAME@::@NAME@", {x, 2.5});
  ops::gradcheck(function, {x});
  ops::gradgradcheck(function, {x});
#ifdef @NAME@_HAS_CUDA
  if (gpu.is_cpu()) return;
  const at::Tensor there = x.detach().to(gpu).requires_grad_(), y = @NAME@(there, 2.5);
  y.sum().backward();
  if (!at::allclose(y.cpu(), 2.5 * x * x)) throw ops::CheckError("@NAME@", "the GPU's values are wrong");
  if (!at::allclose(there.grad().cpu(), 5 * x)) throw ops::CheckError("@NAME@", "the GPU's gradient is wrong");
#endif
}

}  // namespace

int main() {
  try {
    check();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  std::puts("@NAME@: values, gradients, schema and shapes agree");
}
)--";

// Two files, so that nvcc compiles a kernel without LibTorch's headers. The grid is bounded, and each thread
// strides over the tensor: any size fits.
constexpr std::string_view kCudaKernel =
    R"--(// The CUDA kernel of @NAME@. LibTorch's headers stay out of this file: they take long to compile with nvcc.
#include <cuda_runtime.h>

#include <cstdint>

namespace {

template <typename T>
__global__ void @NAME@_kernel(const T* from, T* to, T scale, std::int64_t numel) {
  const std::int64_t stride = static_cast<std::int64_t>(gridDim.x) * blockDim.x;
  for (std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < numel; i += stride) {
    to[i] = scale * from[i] * from[i];
  }
}

template <typename T>
cudaError_t launch(const T* from, T* to, double scale, std::int64_t numel, cudaStream_t stream) {
  if (numel == 0) return cudaSuccess;
  constexpr int kThreads = 256;
  const std::int64_t wanted = (numel + kThreads - 1) / kThreads;
  const auto blocks = static_cast<unsigned>(wanted < 65535 ? wanted : 65535);
  @NAME@_kernel<<<blocks, kThreads, 0, stream>>>(from, to, static_cast<T>(scale), numel);
  return cudaGetLastError();
}

}  // namespace

cudaError_t @NAME@_launch(const float* from, float* to, double scale, std::int64_t numel, cudaStream_t stream) {
  return launch(from, to, scale, numel, stream);
}
cudaError_t @NAME@_launch(const double* from, double* to, double scale, std::int64_t numel, cudaStream_t stream) {
  return launch(from, to, scale, numel, stream);
}
)--";

// The host's compiler builds the other file. Schema and gradient come from the operator's source: this only
// adds a kernel for one more device.
constexpr std::string_view kCudaSource = R"--(// Registers the CUDA kernel of @NAME@ beside the CPU's.
#include <ATen/Dispatch.h>
#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <cstdint>

cudaError_t @NAME@_launch(const float* from, float* to, double scale, std::int64_t numel, cudaStream_t stream);
cudaError_t @NAME@_launch(const double* from, double* to, double scale, std::int64_t numel, cudaStream_t stream);

namespace {

at::Tensor forward_cuda(const at::Tensor& x, double scale) {
  const c10::cuda::CUDAGuard device(x.device());
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty(x.sizes(), x.options());
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "@NAME@", [&] {
    C10_CUDA_CHECK(@NAME@_launch(in.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), scale, in.numel(),
                                 c10::cuda::getCurrentCUDAStream()));
  });
  return out;
}

}  // namespace

TORCH_LIBRARY_IMPL(@NAME@, CUDA, library) {
  library.impl("@NAME@", &forward_cuda);
}
)--";

}  // namespace

const std::vector<NewFile>& operator_files() {
  static const std::vector<NewFile> files = {
      {"CMakeLists.txt", kOperatorCMake}, {"@NAME@.h", kHeader},
      {"@NAME@.cpp", kOperatorSource},    {"@NAME@_test.cpp", kTest},
      {"@NAME@.cu", kCudaKernel, true},   {"@NAME@_cuda.cpp", kCudaSource, true},
  };
  return files;
}

}  // namespace cohort::cli
