#pragma once

#include <memory>
#include <optional>
#include <string>

#include "cohort/script/internal/execute/undo.h"

namespace cohort::script {

/// A run of a program that leaves no trace: what it writes to (inputs, captured tensors) and the random
/// generators are as before. What it computed is kept, to be compared with what the function does. Threads:
/// one at a time; nobody else uses those tensors meanwhile.
class Verification {
 public:
  /// Runs forward; a whole step for step mode.
  Verification(std::shared_ptr<const Program> program, const Tensors& inputs);
  /// Returns how the function's results, gradients (in step mode) and effects differ from the program's, bit
  /// by bit; empty if they do not. To be asked after the function has run on the same inputs.
  std::string difference(const Tensors& results, const Tensors& gradients = {});
  /// False if a difference says little: the generators then stood elsewhere than after the program, as the
  /// function sets a seed or another thread draws from them. Or captured tensors changed during the
  /// function's own run, whose tape is `tape`. After difference().
  bool is_alone(const Tape& tape) const {
    return drew_alone_ && !given_->was_disturbed() && !tape.captured_was_changed();
  }
  /// To be called before the function's own backward.
  void begin_backward();
  /// Runs backward from `grad_outputs`, and returns how `gradients`, what the function's own gave for inputs
  /// and captured tensors that need one, differ. Once. Empty, too, where that cannot be told: grad_outputs
  /// have other strides than were recorded, or backward writes to what it is handed.
  std::string difference_in_backward(const Tensors& grad_outputs, const Tensors& gradients);
  /// True if gradients of the results lie as those that the program was recorded with.
  bool takes(const Tensors& grad_outputs) const;

 private:
  void run(const Tensors& inputs);

  std::shared_ptr<const Program> program_;
  std::unique_ptr<Frame> frame_;  // with what backward reads
  Tensors results_, gradients_;
  std::optional<GivenTensors> given_;
  GeneratorStates::After after_;
  std::optional<GeneratorStates> states_;  // before backward, where that may draw
  bool drew_alone_ = false;
  std::string error_;
};

}  // namespace cohort::script
