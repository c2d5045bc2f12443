#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/core/generator_states.h"
#include "cohort/script/internal/execute/program.h"

/// What a run of a program or of its function changes outside, so that it can be restored.
namespace cohort::script {

/// Those of all generators that the operators of a tape may draw from; none where no operator draws.
struct GeneratorStates : core::GeneratorStates {
  explicit GeneratorStates(const Tape& tape);
};

/// Copies of inputs and captured tensors that a program, or its function, may write to: all that need no
/// gradient, as batch norms write to running statistics without saying so in their schema, and those that the
/// tape shows to be written to.
class GivenTensors {
 public:
  GivenTensors(const Program& program, const Frame& frame);
  ~GivenTensors();
  GivenTensors(const GivenTensors&) = delete;
  GivenTensors& operator=(const GivenTensors&) = delete;
  /// Puts the contents back where they have changed, and keeps those that were there. Versions do not move.
  /// A tensor that another thread has changed meanwhile, moving its version, stays as it is: a program moves
  /// none. What the program itself has written to that tensor stays too, as nothing distinguishes the
  /// two writes.
  void restore();
  /// Whether another thread has changed one before restore().
  bool was_disturbed() const { return was_disturbed_; }
  /// Returns which tensor has other contents now than restore() found; empty if none has.
  std::string difference_from_found() const;

 private:
  struct Kept {
    at::Tensor tensor, before, found;
    std::uint32_t version;
  };
  std::vector<Kept> kept_;
  bool was_disturbed_ = false;
  bool is_restored_ = false;
};

}  // namespace cohort::script
