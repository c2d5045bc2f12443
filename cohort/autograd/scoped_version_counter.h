#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

namespace cohort::autograd {

/// How often a tensor was changed in place; 0 where that is not counted: undefined and inference tensors.
inline std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? static_cast<std::uint32_t>(tensor._version()) : 0;
}

/// The count of changes of a part of a tensor, apart from the tensor's own. LibTorch gives a tensor and all
/// its views one count, by which backward tells that what it saved was changed since. Several functions at a
/// time that each have a part, and may write to it, would take each other's changes for such ones.
///
///     ScopedVersionCounter count(part, whole);   // before functions run on the parts
///     ...
///     count.publish();                // when all have run, for every part
///     count.sync();                   // then, for every part
///     ...
///     count.propagate();                 // before the backward of the part's function
///
/// Threads: each call where nobody changes the tensors at the same time.
class ScopedVersionCounter {
 public:
  /// Gives `part` a count of its own. `whole`: a tensor whose memory it is a part of, or is.
  ScopedVersionCounter(const at::Tensor& part, const at::Tensor& whole);
  /// Counts the changes of the part as such of the whole.
  void publish();
  /// Changes of the whole up to here are none to the part.
  void sync();
  /// Counts a change of the whole since as one of the part.
  void propagate();

 private:
  c10::VariableVersion part_, whole_;  // the counts themselves
  std::uint32_t seen_ = 0;             // of the whole's
};

}  // namespace cohort::autograd
