#pragma once

#include <vector>

#include "cohort/pipeline/internal/backward_gate.h"
#include "cohort/pipeline/split_graph.h"
#include "cohort/pipeline/stage.h"

/// One micro-batch in one stage, from its forward to the end of its backward.
namespace cohort::pipeline {

/// Cut off from what came before: its own graph, which goes back by itself, on the thread that says so.
/// Threads: forward and gradients on one.
class StageRun {
 public:
  /// Runs the stage. `requires_grad` says for which inputs a gradient will be wanted. With `split`, weight
  /// gradients are computed later than input gradients (SplitGraph). `random`: as Stage::forward().
  StageRun(const Stage& stage, const Tensors& inputs, const std::vector<bool>& requires_grad, bool split,
           const std::optional<core::RandomKey>& random = std::nullopt);

  const Tensors& outputs() const { return outputs_; }
  /// Where gradients of the inputs come in.
  const BackwardGate& gate() const { return gate_; }
  /// The inputs whose gradient will be wanted and that the stage wrote to.
  const std::vector<std::size_t>& written() const { return written_; }
  /// Adds the gradients of the parameters to grad(), and returns those of the inputs (undefined where there
  /// is none; nobody else has their memory), given those of the outputs (undefined: none came).
  Tensors backward(const Tensors& gradients);
  /// Returns the gradients of the inputs alone.
  Tensors input_gradients(Tensors gradients);
  /// Adds those of the parameters.
  void weight_gradients();

 private:
  void forward(const Stage& stage);

  std::optional<core::RandomKey> random_;
  BackwardGate gate_;
  Tensors leaves_, outputs_;
  std::vector<std::size_t> written_;
  SplitGraph graph_;
};

}  // namespace cohort::pipeline
