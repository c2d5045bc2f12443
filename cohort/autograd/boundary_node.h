#pragma once

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <utility>

/// Nodes by which a graph continues elsewhere, such as in another process.
namespace cohort::autograd {

/// When a node was made, by the thread that made it.
struct MadeBy {
  std::uint64_t thread = at::RecordFunction::currentThreadId();  ///< LibTorch's number of the thread
  std::uint64_t sequence_nr = at::sequence_number::peek();       ///< the thread's next node gets it
};

/// A node whose sequence number says when the engine is to run it, and not when it was made: DetachedGraph
/// asks `made_by` whether it belongs to a part.
class BoundaryNode : public torch::autograd::Node {
 public:
  BoundaryNode(std::uint64_t sequence_nr, MadeBy made_by) : Node(sequence_nr), made_by_(made_by) {}
  /// When it was made, whatever the sequence number of the node says.
  const MadeBy& made_by() const { return made_by_; }

 private:
  const MadeBy made_by_;
};

}  // namespace cohort::autograd
