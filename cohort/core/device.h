#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <string>

/// Devices by name, and the state of LibTorch that belongs to a step.
namespace cohort::core {

struct ResolvedDevice {
  at::Device device = at::kCPU;
  std::string reason;  ///< why `auto` chose it; else empty
};

/// Returns the device for "auto", "cpu", "cuda" or "cuda:K". libtorch_cuda is loaded when a GPU is asked for,
/// so one program serves CPU and CUDA builds of LibTorch; `auto` takes the first GPU that answers. Throws:
/// UsageError for another name, and for a GPU that cannot be had, saying why.
ResolvedDevice resolve_device(const std::string& name);

/// True when this LibTorch has CUDA kernels beside its CPU library.
bool cuda_is_built();

/// Sets the seed of LibTorch's generators, which dropout uses, to a function of (seed, step, rank).
void reseed_generators(std::uint64_t seed, std::uint64_t step, std::uint64_t rank);

/// Sets the intra-op threads of the calling thread; 0: the cores that this process may use.
/// More threads than cores is said in a warning: OpenMP's threads spin, and a step can become twenty times
/// slower. Returns the number that was set.
int set_intra_op_threads(int num_threads);

}  // namespace cohort::core
