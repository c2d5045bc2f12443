#include "cohort/bench/internal/accelerator.h"

#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace cohort::bench::detail {

bool has_accelerator() {
  return c10::impl::hasDeviceGuardImpl(c10::kCUDA) &&
         c10::impl::getDeviceGuardImpl(c10::kCUDA)->deviceCount() > 0;
}

void wait_for_accelerator() {
  if (!has_accelerator()) return;
  const auto* guard = c10::impl::getDeviceGuardImpl(c10::kCUDA);
  guard->synchronizeDevice(guard->getDevice().index());
}

}  // namespace cohort::bench::detail
