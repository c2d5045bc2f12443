#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "cohort/base/placement.h"
#include "cohort/core/generator_states.h"
#include "cohort/core/random_scope.h"
#include "cohort/pipeline/pipeline.h"

/// What the layers of a model cost, measured.
namespace cohort::pipeline {

/// One layer and one micro-batch. Times in milliseconds, the median of the repeats.
struct LayerProfile {
  std::string name;  ///< as the stage's list names it
  double forward = 0;
  double input_gradient = 0;          ///< with split; else half of the backward
  double weight_gradient = 0;         ///< the rest of it
  std::int64_t activation_bytes = 0;  ///< held from forward to backward
  std::int64_t parameter_bytes = 0;   ///< of its parameters alone, without their gradients
};

/// How layers are measured.
struct ProfileOptions {
  /// The first is timed. On the others, where they are on the same device, the layers run too meanwhile: what
  /// cores share (memory, caches) makes a layer of a pipeline slower than one that runs alone.
  std::vector<base::Placement> placements = {base::Placement::parse("cpu:0")};
  /// Runs that are timed, of which the median counts.
  int repeats = 5;
  /// Measures gradients of inputs and of weights separately, as zb_h1 computes them.
  bool split = false;
  /// For all repeats, from the call to the end.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
};

/// Runs the layers of `model`, a list, one after the other on a placement's thread, forward and backward. A
/// layer is on one placement at a time, so modules need not be safe for several threads.
/// Buffers and gradients of the model are afterwards what they were, and LibTorch's generators (the CPU's,
/// and that of the placement's GPU) where they were. Throws: UsageError where it is no list or a layer does
/// not hand one tensor on; what a layer throws; TimeoutError naming the thread, when late layers have ended;
/// it waits for them for another timeout.
std::vector<LayerProfile> profile_layers(const Stage& model, const at::Tensor& micro_batch,
                                         const ProfileOptions& options = {});

/// Puts buffers and gradients of stages back to what they were, when it ends.
class KeepState {
 public:
  explicit KeepState(const std::vector<Stage>& stages);
  ~KeepState();
  KeepState(const KeepState&) = delete;
  KeepState& operator=(const KeepState&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_, gradients_;
};

/// While it lives the calling thread, and the placements' threads that it gives work to, draw numbers of
/// their own. LibTorch's generators are where they were afterwards: the CPU's is left alone, and those of
/// GPUs among `devices` are core::ReseededGenerators.
class OwnNumbers {
 public:
  explicit OwnNumbers(const std::vector<c10::Device>& devices);
  OwnNumbers(const OwnNumbers&) = delete;
  OwnNumbers& operator=(const OwnNumbers&) = delete;

 private:
  OwnNumbers(const std::vector<c10::Device>& devices, const at::Generator& own);

  core::RandomScope scope_;
  core::ReseededGenerators gpus_;
};

}  // namespace cohort::pipeline
