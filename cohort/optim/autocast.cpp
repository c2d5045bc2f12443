#include "cohort/optim/autocast.h"

#include <ATen/autocast_mode.h>

#include "cohort/base/error.h"

namespace cohort::optim {

Autocast::Autocast(c10::DeviceType device, c10::ScalarType dtype, bool enabled)
    : device_(device),
      previous_dtype_(at::autocast::get_autocast_dtype(device)),
      previous_enabled_(at::autocast::is_autocast_enabled(device)) {
  // Before the thread's state is changed: no destructor runs after an error here.
  if (dtype != at::kBFloat16 && dtype != at::kHalf)
    throw UsageError("optim.autocast", base::concat("got dtype ", dtype, ", expected BFloat16 or Half"));
  at::autocast::set_autocast_enabled(device, enabled);
  at::autocast::set_autocast_dtype(device, dtype);
  at::autocast::increment_nesting();
}

Autocast::~Autocast() {
  // The cache holds weights that were cast. After the outermost scope an optimizer may change the weights.
  if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(device_, previous_enabled_);
  at::autocast::set_autocast_dtype(device_, previous_dtype_);
}

}  // namespace cohort::optim
