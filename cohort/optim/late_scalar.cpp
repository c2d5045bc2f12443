#include "cohort/optim/late_scalar.h"

#include <ATen/ops/empty.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace cohort::optim {

LateScalar::LateScalar(const at::Tensor& value) : value_(value) {
  if (!value.defined() || value.is_cpu()) return;
  const c10::NoGradGuard no_grad;
  // Only a copy to pinned memory lets the host continue.
  value_ = at::empty({}, value.options().device(at::kCPU).pinned_memory(true));
  value_.copy_(value.detach().reshape({}), /*non_blocking=*/true);
  ready_.emplace(value.device().type());
  ready_->record(c10::impl::VirtualGuardImpl(value.device().type()).getStream(value.device()));
}

double LateScalar::read() const {
  if (ready_) ready_->synchronize();
  return value_.item<double>();
}

}  // namespace cohort::optim
