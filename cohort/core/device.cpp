// Cohort links LibTorch's CPU part alone; dlopen() adds the CUDA part when a GPU is asked for. Always: why no
// GPU can be used is a text and not an error. So "auto" can name it, and "cuda" can throw it. LibTorch looks
// for GPUs once: hooks that are still the base class show that it looked too early.
#include "cohort/core/device.h"

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <dlfcn.h>

#include <mutex>
#include <system_error>
#include <typeinfo>

#include "cohort/base/env.h"
#include "cohort/base/error.h"
#include "cohort/base/random.h"
#include "cohort/core/torch_compat.h"  // rejects a LibTorch that is too old

namespace cohort::core {
namespace {

// Why GPUs cannot be used, or nothing; libtorch_cuda.so is loaded when this returns nothing.
std::string gpu_trouble() {
  const std::string trouble = load_cuda(libtorch_folder());
  if (!trouble.empty()) return trouble;
  const at::CUDAHooksInterface& hooks = at::detail::getCUDAHooks();
  if (typeid(hooks) == typeid(at::CUDAHooksInterface)) {
    return "LibTorch had already looked for GPUs before its CUDA part was loaded (call resolve_device first "
           "in main, "
           "before any seed is set)";
  }
  if (!hooks.hasCUDA() || hooks.getNumGPUs() == 0)
    return "no GPU is visible (driver or CUDA_VISIBLE_DEVICES)";
  return "";
}

c10::Device gpu(const std::string& name, int index) {
  const std::string trouble = gpu_trouble();
  if (!trouble.empty()) {
    throw UsageError("core.device", base::concat("device ", name, " cannot be used: ", trouble),
                     "--device cpu or auto");
  }
  const int count = at::detail::getCUDAHooks().getNumGPUs();
  if (index >= count) {
    throw UsageError("core.device",
                     base::concat("device ", name, ": got GPU ", index, ", expected 0 to ", count - 1),
                     base::concat("cuda:", count - 1));
  }
  return {c10::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

}  // namespace

// The file that a function of LibTorch was loaded from. It may be a link, and the CUDA part lies beside what
// the link leads to.
std::filesystem::path libtorch_folder() {
  Dl_info info{};
  if (::dladdr(reinterpret_cast<void*>(&at::get_num_threads), &info) == 0 || info.dli_fname == nullptr)
    return {};
  std::error_code ignored;
  const std::filesystem::path file = std::filesystem::canonical(info.dli_fname, ignored);
  return (ignored ? std::filesystem::path(info.dli_fname) : file).parent_path();
}

std::string load_cuda(const std::filesystem::path& folder) {
  static std::mutex mutex;
  static bool loaded = false;
  const std::lock_guard lock(mutex);
  // Only success is remembered: a caller may try another folder.
  if (loaded) return "";
  const std::filesystem::path library = folder / "libtorch_cuda.so";
  if (!std::filesystem::exists(library)) {
    return base::concat("this LibTorch is a CPU build (", library.string(), " is not there)");
  }
  if (::dlopen(library.c_str(), RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    const char* why = ::dlerror();
    return base::concat("LibTorch's CUDA part does not load: ", why == nullptr ? library.c_str() : why);
  }
  loaded = true;
  return "";
}

bool cuda_is_built() {
  return std::filesystem::exists(libtorch_folder() / "libtorch_cuda.so");
}

ResolvedDevice resolve_device(const std::string& name) {
  if (name == "auto") {
    const std::string trouble = gpu_trouble();
    if (!trouble.empty()) return {c10::kCPU, base::concat("cpu, because ", trouble)};
    return {c10::Device(c10::kCUDA, 0),
            base::concat("cuda:0, because ", at::detail::getCUDAHooks().getNumGPUs(), " GPU(s) are visible")};
  }
  try {
    // A device is a placement without cores.
    if (name.find_first_of(",/") != std::string::npos || name.starts_with("cpu:")) throw ConfigError("", "");
    return {device_of(base::Placement::parse(name)), "as asked"};
  } catch (const ConfigError&) {
    throw UsageError("core.device", base::concat("device \"", name, "\" is unknown"),
                     "auto, cpu, cuda or cuda:K");
  }
}

c10::Device device_of(const base::Placement& placement) {
  if (placement.is_cpu()) return c10::kCPU;
  return gpu(placement.name, std::stoi(placement.device.substr(placement.device.find(':') + 1)));
}

int set_intra_op_threads(int threads, bool allow_more) {
  if (threads < 0) {
    throw UsageError("core.threads", base::concat("got ", threads, " threads, expected 0 (choose) or more"),
                     "0");
  }
  const int cores = base::usable_cores();
  if (threads == 0) {
    threads = static_cast<int>(base::env_int("OMP_NUM_THREADS", 1, 1 << 20).value_or(cores));
    allow_more = true;  // OMP_NUM_THREADS is the user's own word
  }
  if (threads > cores && !allow_more) {
    throw UsageError("core.threads",
                     base::concat("got ", threads, " threads for ", cores,
                                  " usable core(s), where they would be far slower"),
                     base::concat(cores, ", or COHORT_CORES=", threads, " when the count of cores is wrong"));
  }
  at::set_num_threads(threads);
  return threads;
}

void reseed_generators(std::uint64_t seed, std::uint64_t step, std::uint64_t rank) {
  at::manual_seed(base::generator_seed(seed, step, rank));
}

}  // namespace cohort::core
