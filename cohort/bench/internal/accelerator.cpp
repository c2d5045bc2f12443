#include "cohort/bench/internal/accelerator.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace cohort::bench::detail {

bool has_accelerator() {
  // Through c10's registry, so that this library links nothing of CUDA.
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
         c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0;
}

void wait_for_accelerator() {
  if (!has_accelerator()) return;
  // The current device alone: work on others belongs to whoever started it there.
  const auto* guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  guard->synchronizeDevice(guard->getDevice().index());
}

}  // namespace cohort::bench::detail
