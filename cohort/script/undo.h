#pragma once

#include <ATen/core/Generator.h>

#include <utility>
#include <vector>

#include "cohort/script/program.h"

/// What a run of a program or of its function changes outside, so that it can be put back.
namespace cohort::script {

/// The states of all generators that the operators of a tape may draw from, as they are when it is made; none
/// where no operator draws. Threads: nobody else draws from them meanwhile.
class GeneratorStates {
 public:
  explicit GeneratorStates(const Tape& tape);
  void put_back() const;
  /// True if operators of this thread draw from the generator that they drew from when it was made.
  bool is_current() const;

 private:
  void keep(at::Generator generator);

  at::Generator current_;
  std::vector<std::pair<at::Generator, at::Tensor>> kept_;
};

/// Copies of inputs and captured tensors that a program, or its function, may write to: all that need no
/// gradient, as batch norms write to running statistics without saying so in their schema, and those that the
/// tape shows to be written to.
class GivenTensors {
 public:
  GivenTensors(const Program& program, const Frame& frame);
  /// Puts the contents back where they have changed, and keeps those that were there. Versions do not move.
  void put_back();
  /// Returns which tensor has other contents now than put_back() found; empty if none has.
  std::string difference_from_found() const;

 private:
  struct Kept {
    at::Tensor tensor, before, found;
  };
  std::vector<Kept> kept_;
};

}  // namespace cohort::script
