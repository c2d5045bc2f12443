#pragma once

#include <torch/csrc/autograd/edge.h>

#include <vector>

#include "cohort/script/tape.h"

/// What a body gets in place of its inputs while it is recorded with gradients on.
namespace cohort::script {

/// Those that need no gradient are handed over themselves. Leaves are cut off and stay leaves, to which no
/// operator may write. Other inputs are cut off in a way that lets the body write to them: that is not
/// replayed, but the call in which it is found out leaves everything as the body itself would have.
///
///     StandIns stand_ins(inputs, graph.leaves());
///     Tensors results = body(stand_ins.tensors());
///     stand_ins.look_at(results);
///     ... give `results` their history: nodes whose edges go to `inputs` ...
///     stand_ins.settle(results);
class StandIns {
 public:
  /// `leaves`: of `inputs`, which must outlive this.
  StandIns(const Tensors& inputs, const Tensors& leaves);

  const Tensors& tensors() const { return handed_; }
  /// Looks at what the body returned, and adds the inputs that it wrote to behind: those are results too.
  /// Throws: UsageError where another input with a gradient shares the memory of such a one.
  void look_at(Tensors& results);
  /// Gives inputs that were written to the history and the shape of their results, takes those off again, and
  /// makes results that are inputs, or views of them, just that: who writes to either changes both.
  /// Throws: UsageError where an input that is a view got another shape.
  void settle(Tensors& results) const;

 private:
  const Tensors& inputs_;
  Tensors handed_;
  std::vector<torch::autograd::Edge> entries_;  // of those that may be written to, as they began
  std::size_t num_results_ = 0;
  std::vector<std::size_t> written_;  // inputs
  struct View {
    std::size_t result, input;
    bool is_input;  // itself
  };
  std::vector<View> views_;
};

}  // namespace cohort::script
