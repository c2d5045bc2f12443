#pragma once

#include <string>
#include <utility>
#include <vector>

#include "cohort/script/program.h"

namespace cohort::script {

/// A run of a program's forward that leaves no trace: what it writes to (inputs, captured tensors) and the
/// random generators are as before. What it computed is kept, to be compared with what the function does.
/// Threads: one; nobody else uses those tensors meanwhile.
class Recheck {
 public:
  Recheck(const Program& program, const Tensors& inputs);
  /// Returns how the function's results, gradients (in step mode) and effects differ from the program's, bit
  /// by bit; empty if they do not. To be asked after the function has run on the same inputs.
  std::string difference(const Tensors& results, const Tensors& gradients = {}) const;

 private:
  void run(const Program& program, const Tensors& inputs);

  Tensors results_, gradients_;
  std::vector<std::pair<at::Tensor, at::Tensor>> written_;  // a tensor, and what the program left in it
  std::string error_;
};

}  // namespace cohort::script
