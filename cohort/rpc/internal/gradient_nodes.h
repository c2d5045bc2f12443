#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <vector>

#include "cohort/base/threads/future.h"
#include "cohort/rpc/encoded.h"

/// The two nodes by which a remote call stands in its caller's graph. Receive is the history of the results, and leads to Send,
/// which leads to the arguments: the gradient of the results is on its way while other nodes run, and is waited for last.
namespace cohort::rpc {

/// Sends the gradients of the results (undefined where there is none), and returns what those of the arguments will be.
using SendGradients = std::function<base::Future<Encoded>(const std::vector<at::Tensor>& gradients)>;

/// A call within a context, until its answer comes.
class RecordedCall {
 public:
  /// Cuts the tensors of `arguments` off from their graphs: those that need a gradient travel as leaves that require one.
  /// `anchor`: a leaf that each backward asks for. `sequence_nr`: below those of all nodes of the caller's graph.
  RecordedCall(Encoded& arguments, const at::Tensor& anchor, std::uint64_t sequence_nr);

  /// Gives the results that came a history: those that require a gradient.
  void attach(Encoded& results, SendGradients send) const;

 private:
  torch::autograd::Edge send_;
};

/// Tensors of which some may be undefined, as a value that travels.
Encoded encode_gradients(const std::vector<at::Tensor>& gradients);
std::vector<at::Tensor> decode_gradients(Reader& in);

}  // namespace cohort::rpc
