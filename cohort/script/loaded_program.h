#pragma once

#include <concepts>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cohort/script/tensors.h"

namespace cohort::script {

struct LoadedRecording;

/// Text that goes along with a file.
using Metadata = std::map<std::string, std::string>;

/// What load() returns: the programs of one file, with tensors of their own, which those share. Copies share
/// all. Threads: any, unless the function writes to what it captured, which is then one caller's at a time.
class LoadedProgram {
 public:
  /// `file` is what messages name.
  LoadedProgram(std::string file, Metadata metadata, std::vector<LoadedRecording> recordings);

  /// Returns the tensors of what the function returned, in the order of core::flatten_tensors, without
  /// gradients. Of several programs for such inputs the one recorded under the caller's autocast and
  /// inference mode runs, else the first. Autocast of the caller's is no part of it.
  /// Throws: UsageError naming the input whose type, sizes, strides or device were not recorded, and those
  /// that were; where an input needs a gradient; for another default type than when it was recorded.
  Tensors operator()(const Tensors& inputs) const;
  template <std::same_as<at::Tensor>... Inputs>
  Tensors operator()(const Inputs&... inputs) const {
    return (*this)(Tensors{inputs...});
  }

  /// The inputs that each program takes; Undefined stands for an undefined tensor.
  std::vector<std::vector<Layout>> inputs() const;
  /// What went along with the file when it was saved.
  const Metadata& metadata() const;
  /// Says for each program what it takes and what it is made of.
  std::string explain() const;

 private:
  struct Impl;
  std::shared_ptr<const Impl> impl_;
};

}  // namespace cohort::script
