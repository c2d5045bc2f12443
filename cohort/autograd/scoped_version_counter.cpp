#include "cohort/autograd/scoped_version_counter.h"

namespace cohort::autograd {

ScopedVersionCounter::ScopedVersionCounter(const at::Tensor& part, const at::Tensor& whole)
    : part_(0), whole_(whole.unsafeGetTensorImpl()->version_counter()) {
  part.unsafeGetTensorImpl()->set_version_counter(part_);
  sync();
}

void ScopedVersionCounter::publish() {
  whole_.set_version(whole_.current_version() + part_.current_version());
}

void ScopedVersionCounter::sync() {
  seen_ = whole_.current_version();
}

void ScopedVersionCounter::propagate() {
  if (whole_.current_version() == seen_) return;
  sync();
  part_.bump();
}

}  // namespace cohort::autograd
