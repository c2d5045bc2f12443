#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Event.h>

#include <optional>

namespace cohort::optim {

/// A scalar on an accelerator that the host reads later: it waits for what the accelerator had to do when
/// this was made, and not, as `item()` does, for all that was given to it since. Of a tensor on the CPU it is
/// that tensor.
class LateScalar {
 public:
  LateScalar() = default;
  explicit LateScalar(const at::Tensor& value);

  /// Whether there is a value to read.
  bool is_defined() const { return value_.defined(); }
  /// Blocking: until the accelerator has come to the value.
  double read() const;

 private:
  at::Tensor value_;  // on the host
  std::optional<c10::Event> ready_;
};

}  // namespace cohort::optim
