#include "cohort/core/device.h"

#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include <charconv>
#include <filesystem>

#include "cohort/core/cpu.h"
#include "cohort/core/error.h"
#include "cohort/core/log.h"
#include "cohort/core/random.h"

namespace cohort::core {
namespace {

namespace fs = std::filesystem;

/// The folder of the libtorch_cpu.so that this process runs with.
fs::path library_folder() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&at::get_num_threads), &info) == 0 || info.dli_fname == nullptr)
    return {};
  return fs::path(info.dli_fname).parent_path();
}

/// Loads libtorch_cuda once. Returns why it cannot be had, or "".
const std::string& cuda_problem() {
  static const std::string problem = []() -> std::string {
    const fs::path library = library_folder() / "libtorch_cuda.so";
    if (!fs::exists(library))
      return "this LibTorch is a CPU build (no libtorch_cuda.so in " + library_folder().string() + ")";
    if (dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) return dlerror();
    try {
      if (!at::globalContext().hasCUDA()) return "no GPU or no driver answers";
      if (at::accelerator::deviceCount() == 0) return "no GPU is visible";
    } catch (const std::exception& error) {
      return error.what();
    }
    return "";
  }();
  return problem;
}

}  // namespace

bool cuda_is_built() {
  return fs::exists(library_folder() / "libtorch_cuda.so");
}

ResolvedDevice resolve_device(const std::string& name) {
  if (name == "cpu") return {at::kCPU, ""};
  if (name == "auto") {
    if (cuda_problem().empty()) return {at::Device(at::kCUDA, 0), "a GPU answers"};
    return {at::kCPU, cuda_problem()};
  }
  int index = 0;
  bool valid = name == "cuda";
  if (name.starts_with("cuda:")) {
    const auto [end, error] = std::from_chars(name.data() + 5, name.data() + name.size(), index);
    valid = error == std::errc() && end == name.data() + name.size() && index >= 0;
  }
  if (!valid)
    throw UsageError("core.device", concat("unknown device \"", name, "\""), "auto, cpu, cuda or cuda:K");
  if (!cuda_problem().empty())
    throw UsageError("core.device", concat("no ", name, ": ", cuda_problem()), "--device cpu");
  const int count = at::accelerator::deviceCount();
  if (index >= count) {
    throw UsageError("core.device", concat("no ", name, ": this machine shows ", count, " GPUs"),
                     "a smaller number");
  }
  return {at::Device(at::kCUDA, static_cast<at::DeviceIndex>(index)), ""};
}

void reseed_generators(std::uint64_t seed, std::uint64_t step, std::uint64_t rank) {
  at::manual_seed(generator_seed(seed, step, rank));
}

int set_intra_op_threads(int num_threads) {
  const int cores = usable_cores();
  if (num_threads == 0) num_threads = cores;
  if (num_threads > cores) {
    log_warning(
        concat(num_threads, " threads on ", cores, " usable cores: expect a step to be many times slower"));
  }
  at::set_num_threads(num_threads);
  return num_threads;
}

}  // namespace cohort::core
