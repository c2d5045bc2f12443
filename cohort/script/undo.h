#pragma once

#include <ATen/core/Generator.h>

#include <optional>
#include <utility>
#include <vector>

#include "cohort/core/random_scope.h"
#include "cohort/script/program.h"

/// What a run of a program or of its function changes outside, so that it can be put back.
namespace cohort::script {

/// The states of all generators that the operators of a tape may draw from, as they are when it is made; none
/// where no operator draws. Threads: others may draw from the CPU's generators meanwhile.
class GeneratorStates {
 public:
  explicit GeneratorStates(const Tape& tape);

  /// Where the generators of this thread stood.
  struct After {
    at::Tensor scope, global;
    /// True if they stand there now.
    bool holds() const;
  };
  /// While it lives, operators of this thread draw what they drew when the states were taken: on the CPU from
  /// copies of generators, so that those of other threads go on; the GPUs' own ones are put back at the end.
  class Again {
   public:
    explicit Again(const GeneratorStates& states);
    ~Again();
    Again(const Again&) = delete;
    Again& operator=(const Again&) = delete;
    After after() const;

   private:
    const GeneratorStates& states_;
    std::vector<std::pair<at::Generator, at::Tensor>> before_;
    at::Generator scope_, global_;
    std::optional<core::RandomScope> draws_;
  };

 private:
  void keep(at::Generator generator);

  bool draws_ = false;
  at::Generator scope_, global_;  // copies; scope_ is undefined outside of a RandomScope
  std::vector<std::pair<at::Generator, at::Tensor>> kept_;
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
  void put_back();
  /// Returns which tensor has other contents now than put_back() found; empty if none has.
  std::string difference_from_found() const;

 private:
  struct Kept {
    at::Tensor tensor, before, found;
  };
  std::vector<Kept> kept_;
  bool is_put_back_ = false;
};

}  // namespace cohort::script
