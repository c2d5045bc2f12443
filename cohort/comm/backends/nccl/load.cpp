// NCCL stands in a library of its own, loaded when a group over it is made: linked here, every program would
// load LibTorch's CUDA part, a gigabyte, also for work on the CPU.
#include <dlfcn.h>

#include <filesystem>

#include "cohort/base/error.h"
#include "cohort/comm/internal/backend.h"
#include "cohort/core/device.h"

namespace cohort::comm {
namespace {

using Make = void (*)(const BackendOptions&, BackendInstance&);

Make load() {
  core::resolve_device("cuda");  // LibTorch's CUDA part, or why there is no GPU
  Dl_info own{};
  ::dladdr(reinterpret_cast<const void*>(&nccl_absent), &own);
  const auto library = std::filesystem::path(own.dli_fname).parent_path() / COHORT_NCCL_LIBRARY;
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* const symbol = handle == nullptr ? nullptr : ::dlsym(handle, "cohort_make_nccl");
  if (symbol == nullptr) {
    throw UsageError("comm.nccl", base::concat("cannot load ", library.string(), ": ", ::dlerror()),
                     "LD_LIBRARY_PATH to the folder that holds libnccl.so.2");
  }
  return reinterpret_cast<Make>(symbol);
}

}  // namespace

std::string nccl_absent() {
  return "";
}

BackendInstance make_nccl(const BackendOptions& options) {
  static const Make make = load();
  BackendInstance made;
  make(options, made);
  return made;
}

}  // namespace cohort::comm
