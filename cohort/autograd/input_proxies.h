#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cohort/autograd/output_aliases.h"
#include "cohort/autograd/scoped_version_counter.h"

/// What a function that runs in a graph of its own (detached_graph.h) gets in place of its inputs.
namespace cohort::autograd {

/// Leaves that need a gradient are cut off and stay leaves, to which no operator may write. Other inputs are
/// cut off in a way that lets the function write to them (a module that begins with ReLU in place, or that
/// scales its input by a parameter), and inputs and results are in the end what they would be without a cut.
/// An input that is given twice is handed over twice.
///
///     autograd::DetachedGraph graph(inputs);
///     autograd::InputProxies input_proxies("script.function", inputs, graph.leaves());
///     std::vector<at::Tensor> results = fn(input_proxies.tensors());
///     input_proxies.observe(results);
///     results = graph.end(results);
///     ... give `results` their history: nodes whose edges go to `inputs` ...
///     input_proxies.write_back(results);
///
/// Threads: write_back() runs where nobody uses the inputs at the same time.
class InputProxies {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// kOwn has the proxies of views that may be written to count their changes for themselves
  /// (ScopedVersionCounter).
  enum class Counts : std::uint8_t { kOfInputs, kOwn };

  /// `leaves`: of `inputs`. `where`: for messages.
  InputProxies(const char* where, const Tensors& inputs, const Tensors& leaves,
               Counts counts = Counts::kOfInputs);

  /// What the function gets, in the order of the inputs.
  const Tensors& tensors() const { return handed_; }
  /// Of what the function returned; after observe().
  const OutputAliases& output_aliases() const { return output_aliases_; }
  /// Looks at what the function returned, and adds what results are views of (OutputAliases), and the inputs
  /// that it wrote to: those are results too. Throws: UsageError where another input would see that, as it
  /// shares the memory of such a one.
  void observe(Tensors& results);
  /// Gives inputs that were written to the history and the shape of their results, takes those off again, and
  /// makes results that are inputs, or views of them, just that: who writes to either changes both.
  /// Throws: UsageError where an input that is a view got another shape.
  void write_back(Tensors& results);
  /// Of those that count for themselves; once write_back() was called for all that share a memory.
  std::vector<ScopedVersionCounter> counts() const;

 private:
  const char* where_;
  Tensors inputs_;
  Tensors handed_;
  std::vector<std::size_t> may_be_written_;     // inputs, each once
  std::vector<torch::autograd::Edge> entries_;  // of those, as they began; invalid without a gradient
  std::vector<ScopedVersionCounter> counts_;
  std::size_t num_results_ = 0;
  std::vector<std::size_t> written_;  // inputs
  struct View {
    std::size_t result, input;
    bool is_input;  // itself
  };
  std::vector<View> views_;
  OutputAliases output_aliases_;
};

}  // namespace cohort::autograd
