#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cohort/core/part_count.h"
#include "cohort/core/result_views.h"

/// What a function that runs in a graph of its own (graph_part.h) gets in place of its inputs.
namespace cohort::core {

/// Leaves that need a gradient are cut off and stay leaves, to which no operator may write. Other inputs are
/// cut off in a way that lets the function write to them (a module that begins with ReLU in place, or that
/// scales its input by a parameter), and inputs and results are in the end what they would be without a cut.
/// An input that is given twice is handed over twice.
///
///     GraphPart graph(inputs);
///     StandIns stand_ins("script.function", inputs, graph.leaves());
///     Tensors results = fn(stand_ins.tensors());
///     stand_ins.look_at(results);
///     results = graph.end(results);
///     ... give `results` their history: nodes whose edges go to `inputs` ...
///     stand_ins.settle(results);
///
/// Threads: settle() runs where nobody uses the inputs at the same time.
class StandIns {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// kOwn has the stand-ins of views that may be written to count their changes for themselves (PartCount).
  enum class Counts : std::uint8_t { kOfInputs, kOwn };

  /// `leaves`: of `inputs`. `where`: for messages.
  StandIns(const char* where, const Tensors& inputs, const Tensors& leaves,
           Counts counts = Counts::kOfInputs);

  const Tensors& tensors() const { return handed_; }
  /// Of what the function returned; after look_at().
  const ResultViews& result_views() const { return result_views_; }
  /// Looks at what the function returned, and adds what results are views of (ResultViews), and the inputs
  /// that it wrote to: those are results too. Throws: UsageError where another input would see that, as it
  /// shares the memory of such a one.
  void look_at(Tensors& results);
  /// Gives inputs that were written to the history and the shape of their results, takes those off again, and
  /// makes results that are inputs, or views of them, just that: who writes to either changes both.
  /// Throws: UsageError where an input that is a view got another shape.
  void settle(Tensors& results);
  /// Of those that count for themselves; once all are settled that share a memory.
  std::vector<PartCount> counts() const;

 private:
  const char* where_;
  Tensors inputs_;
  Tensors handed_;
  std::vector<std::size_t> may_be_written_;     // inputs, each once
  std::vector<torch::autograd::Edge> entries_;  // of those, as they began; invalid without a gradient
  std::vector<PartCount> counts_;
  std::size_t num_results_ = 0;
  std::vector<std::size_t> written_;  // inputs
  struct View {
    std::size_t result, input;
    bool is_input;  // itself
  };
  std::vector<View> views_;
  ResultViews result_views_;
};

}  // namespace cohort::core
