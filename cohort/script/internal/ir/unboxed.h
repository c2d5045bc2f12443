#pragma once

#include <memory>

#include "cohort/script/internal/ir/tape.h"

namespace cohort::script {

/// An operator with its arguments in place, whose kernel is called without a stack of IValues.
class Unboxed {
 public:
  virtual ~Unboxed() = default;
  /// Runs it on `values`, by slot; what it makes goes there too.
  virtual void run(Tensors& values) const = 0;
};

/// Returns `call` unboxed; null where its operator's signature is none of the common ones. A new result goes
/// to slot `result`; kUndefined: it is dropped.
std::unique_ptr<const Unboxed> unbox(const OperatorCall& call, int result);

}  // namespace cohort::script
