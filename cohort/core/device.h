#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <filesystem>
#include <string>

#include "cohort/base/placement.h"

/// The device that a user names, and how many threads one operator uses.
namespace cohort::core {

/// A device, and why it is that one: "auto" says why there is no GPU.
struct ResolvedDevice {
  c10::Device device{c10::kCPU};
  std::string reason;  ///< for a log: why this device, in words
};

/// Returns the device named "auto", "cpu", "cuda" (the same as cuda:0) or "cuda:K", ready for use.
/// "auto" is the first GPU when LibTorch can use one, else the CPU, with the reason.
/// Cohort links LibTorch's CPU part; the first call that asks for a GPU loads libtorch_cuda.so from the
/// folder that libtorch_cpu.so came from. Call it first in main: LibTorch looks for GPUs only once (seeding
/// its generator does that too), and a GPU part that comes later stays unseen, which is an error here.
/// Throws: UsageError for another name, and when a GPU was asked for and cannot be used, saying why.
ResolvedDevice resolve_device(const std::string& name);

/// Returns the device of a placement, loading what it needs. Throws: as resolve_device.
c10::Device device_of(const base::Placement& placement);

/// Loads libtorch_cuda.so from `folder`, once; returns an empty string, or why GPUs cannot be used.
std::string load_cuda(const std::filesystem::path& folder);

/// True when this LibTorch is a CUDA build, whether or not a GPU is there.
bool cuda_is_built();

/// Returns the folder that libtorch_cpu.so was loaded from.
std::filesystem::path libtorch_folder();

/// Sets how many threads one operator uses on the CPU, and returns that number. 0 means OMP_NUM_THREADS when
/// it is set, else as many as there are usable cores (LibTorch alone counts the machine's, and does not know
/// of a container's quota). Results repeat bitwise at a fixed number of threads, not across numbers. Throws:
/// UsageError when `threads` is above the usable cores, unless `allow_more`: threads above the cores spin
/// against each other and collapse.
int set_intra_op_threads(int threads = 0, bool allow_more = false);

/// Reseeds LibTorch's global generators (the CPU's, and each GPU's when GPUs are in use), which dropout draws
/// from, with generator_seed(seed, step, rank). A call before each step makes the generators' state a
/// function of these three, so that no checkpoint needs to hold it.
void reseed_generators(std::uint64_t seed, std::uint64_t step, std::uint64_t rank);

}  // namespace cohort::core
