#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

/// A part of a computation whose graph is its own: docs/guide/parallel.md, "The graph boundary".
namespace cohort::autograd {

/// Whether a backward may start at `tensor`, or undefined. Not at a view that was taken without gradients of
/// a tensor that requires one, though it says that it requires one too.
bool needs_gradient(const at::Tensor& tensor);

/// Where a backward starts at `tensor`; invalid where none may.
torch::autograd::Edge edge_of(const at::Tensor& tensor);
/// edge_of() of each tensor, in their order.
std::vector<torch::autograd::Edge> edges_of(const std::vector<at::Tensor>& tensors);

/// Returns tensors cut off from their graphs, which need a gradient where they did; undefined ones stay.
std::vector<at::Tensor> leaf_inputs(const std::vector<at::Tensor>& tensors);

/// Returns proxies for leaves, with the same memory, that are neither leaves nor views, so that what begins
/// with an operator in place (a stage that begins with ReLU) can be run on them. For tensors that nobody else
/// uses later: their values change. Those that need no gradient stay themselves.
std::vector<at::Tensor> non_leaf_proxies(const std::vector<at::Tensor>& leaves);

/// The graph of one forward, from its inputs to its results and no further, so that backward can go through
/// it alone: on another thread, beside others, or later.
///
///     autograd::DetachedGraph part(inputs);                                  // on the thread that computes
///     std::vector<at::Tensor> results = part.end(flatten_tensors(fn(part.leaves())));
///     ...
///     // Of the inputs, then of captured().
///     std::vector<at::Tensor> gradients = part.backward(gradients_of_results, false);
///
/// Parameters that fn uses are found in the graph; backward returns their gradients and leaves theirs alone.
/// Threads: one caller at a time; backward runs where it is called.
class DetachedGraph {
 public:
  using Tensors = std::vector<at::Tensor>;
  /// What messages say.
  struct Words {
    const char* where = "autograd.detached_graph";         ///< prefix of messages: module.operation
    const char* as_input = "hand it over as an input";     ///< to a tensor with a graph of its own
    const char* between = "its forward and its backward";  ///< when no parameter may change; null: they may
  };

  /// A backward that is not the part's own may reach an input: from a tensor that fn put
  /// aside, or from a result if end() was not called. It throws, or continues to the input's own graph.
  enum class ForeignBackward : std::uint8_t { kThrows, kContinues };

  /// Cuts `inputs` off from their graphs: leaf_inputs().
  explicit DetachedGraph(const Tensors& inputs) : DetachedGraph(inputs, Words()) {}
  DetachedGraph(const Tensors& inputs, const Words& words,
                ForeignBackward foreign_backward = ForeignBackward::kThrows);

  /// What fn gets in their place.
  const Tensors& leaves() const { return leaves_; }
  /// Ends the forward: returns `results` cut off from the graph, which this keeps.
  /// Throws: UsageError where fn reaches a graph that is not its inputs'.
  Tensors end(const Tensors& results);
  /// Returns the name of a node that `results` reach and that belongs to another graph than the inputs',
  /// which end() rejects; empty where there is none. Before end().
  std::string outside(const Tensors& results) const;

  /// Which results have a gradient. After end().
  const std::vector<bool>& needs_gradient() const { return needs_gradient_; }
  /// The parameters, or other leaves, that fn used and that need a gradient, in an order that depends on the
  /// graph alone. After end().
  const Tensors& captured() const { return captured_; }

  /// Returns the gradients of the inputs (undefined for those that need none) and of captured(), given those
  /// of the results, of which some may be undefined. `wanted` may leave out some of what is returned; empty
  /// is all. Without `keep_graph` the graph is gone afterwards. Two gradients may be the same tensor;
  /// otherwise those that lie dense, and could become a grad(), share no memory. Hooks of captured() do not
  /// run: the gradients continue in another graph and meet them there. Threads: parts that share parameters
  /// may go backward at the same time. Throws: as check_captured(); UsageError on the second call without
  /// keep_graph.
  Tensors backward(const Tensors& gradients, bool keep_graph, const std::vector<bool>& wanted = {});
  /// Frees the graph; captured() stays.
  void release();
  /// Throws: UsageError where a captured tensor was changed since end().
  void check_captured() const;

 private:
  class Walk;
  void make_exits();

  Words words_;
  Tensors leaves_;
  Tensors captured_;
  std::vector<bool> needs_gradient_;
  std::vector<torch::autograd::Edge> inputs_;   // to the leaves; invalid where none needs a gradient
  std::vector<torch::autograd::Edge> results_;  // of those with a gradient
  std::vector<torch::autograd::Edge> exits_;    // to captured_: see Note [Exits]
  std::vector<std::uint32_t> versions_;         // of captured_
  std::uint64_t first_sequence_;
  bool released_ = false;
};

/// Returns `tensor`, copied if somebody else has its memory, so that who gets it may write to it. Operators
/// return one tensor, or views of it, as gradients of several inputs, and what becomes a grad() is written
/// to.
at::Tensor clone_if_shared(at::Tensor tensor);

/// Returns a + b, whichever of them is sparse.
at::Tensor sum_of(const at::Tensor& a, const at::Tensor& b);

/// Adds values from first to last as a tree of pairs, whose shape depends on their number alone, as in
/// ((0 + 1) + (2 + 3)) + 4. Undefined ones are left out of it. The values may be changed.
at::Tensor pairwise_sum(std::vector<at::Tensor> values);

}  // namespace cohort::autograd
