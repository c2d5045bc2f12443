#include "cohort/core/part_count.h"

namespace cohort::core {

PartCount::PartCount(const at::Tensor& part, const at::Tensor& whole)
    : part_(0), whole_(whole.unsafeGetTensorImpl()->version_counter()) {
  part.unsafeGetTensorImpl()->set_version_counter(part_);
  look();
}

void PartCount::hand_on() {
  whole_.set_version(whole_.current_version() + part_.current_version());
}

void PartCount::look() {
  seen_ = whole_.current_version();
}

void PartCount::follow() {
  if (whole_.current_version() == seen_) return;
  look();
  part_.bump();
}

}  // namespace cohort::core
