// Two parts: mallopt() has glibc keep large blocks, and a layer before LibTorch's CPU allocator takes tensors
// from 1 MiB on from one BlockPool. Smaller ones come from LibTorch's own allocator. Always: the layer asks
// the pool whether it owns a block. So blocks from before the pool, and blocks that it could not give, go
// back to where they came from.
#include "cohort/memory/allocator.h"

#include <c10/core/CPUAllocator.h>
#include <dlfcn.h>
#include <malloc.h>

#include <array>
#include <climits>
#include <cstdlib>
#include <string>
#include <string_view>

#include "cohort/base/env.h"
#include "cohort/base/log.h"
#include "cohort/memory/internal/allocator_layers.h"
#include "cohort/memory/internal/block_pool.h"
#include "cohort/memory/process_memory.h"

namespace cohort::memory {
namespace {

// jemalloc, mimalloc or a sanitizer takes malloc's place and leaves glibc's mallopt without effect.
bool malloc_is_glibc() {
#ifdef __GLIBC__
  Dl_info info{};
  void* const address = ::dlsym(RTLD_DEFAULT, "malloc");
  if (address == nullptr || ::dladdr(address, &info) == 0 || info.dli_fname == nullptr) return false;
  return std::string_view(info.dli_fname).find("/libc.so") != std::string_view::npos ||
         std::string_view(info.dli_fname).find("/libc-2") != std::string_view::npos;
#else
  return false;
#endif
}

bool user_tuned_malloc() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  if (tunables != nullptr && std::string_view(tunables).find("glibc.malloc.") != std::string_view::npos)
    return true;
  return std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr || std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr;
}

// Note [One pool for tensors]
// glibc gives each thread but the first an arena of heaps of 64 MiB. A larger block is a mapping of its own
// there, whatever M_MMAP_THRESHOLD says, and heaps that become empty go back to the system: a placement that
// computes with a large batch pays for new pages at every operator. M_ARENA_MAX = 1 mends that too, for all
// threads and all sizes under one lock, and keeps a third more memory (docs/measurements/performance.md).
class PoolLayer final : public AllocatorLayer {
 public:
  static void install() {
    if (!LayeredAllocator::ends_at(c10::GetDefaultCPUAllocator())) return;
    static PoolLayer& instance = *new PoolLayer;  // leaked: blocks outlive statics
    LayeredAllocator::add(LayeredAllocator::Place::kPool, instance);
  }

  c10::DataPtr allocate(std::size_t bytes, LayeredAllocator& next) override {
    if (void* const block = bytes >= kLarge ? pool_.allocate(bytes) : nullptr) {
      c10::profiledCPUMemoryReporter().New(block, bytes);
      return {block, block, next.raw_deleter(), c10::Device(c10::DeviceType::CPU)};
    }
    return next.allocate(bytes);
  }
  bool take_back(void* block) override {
    if (!pool_.owns(block)) return false;
    c10::profiledCPUMemoryReporter().Delete(block);
    pool_.free(block);
    return true;
  }

 private:
  static constexpr std::size_t kLarge = std::size_t(1) << 20;

  // Addresses cost nothing; four times the memory leaves room for holes.
  BlockPool pool_{4 * static_cast<std::size_t>(system_memory().total_bytes)};
};

}  // namespace

bool tune_allocator() {
  static const std::array<std::string, 2> choices = {"tuned", "system"};
  if (base::env_choice("COHORT_ALLOCATOR", choices).value_or("tuned") == "system" || user_tuned_malloc())
    return false;
  if (!malloc_is_glibc()) {
    base::warn_once("memory.allocator", "malloc is not glibc's: tune_allocator() has no effect here");
    return false;
  }
#ifdef __GLIBC__
  // Some versions reject a threshold above 32 MiB (the most that one arena's heap holds); then blocks up to
  // that.
  const bool keeps_blocks =
      ::mallopt(M_MMAP_THRESHOLD, 1 << 30) == 1 || ::mallopt(M_MMAP_THRESHOLD, 32 << 20) == 1;
  PoolLayer::install();
  return keeps_blocks && ::mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1;
#else
  return false;
#endif
}

}  // namespace cohort::memory
