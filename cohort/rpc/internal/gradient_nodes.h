#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "cohort/base/threads/future.h"
#include "cohort/core/torch_compat.h"
#include "cohort/rpc/encoded.h"

/// The two nodes by which a remote call stands in its caller's graph. Receive is the history of the results,
/// and leads to Send, which leads to the arguments: the gradient of the results is on its way while other
/// nodes run, and is waited for last.
namespace cohort::rpc {

/// Sends the gradients of the results (undefined where there is none), and returns what those of the
/// arguments will be. With no gradients at all, where the call may have made an object whose value was used.
using SendGradients = std::function<base::Future<Encoded>(const std::vector<at::Tensor>& gradients)>;

/// Where the gradients of a call's results go.
struct Callee {
  SendGradients send;
  /// Ready once the results have their history, with an error where the call failed. Not valid: there are no
  /// results.
  base::Future<void> answer = {};
  /// Ready as `answer`, or once the backward that runs has failed; `send` throws then.
  std::function<base::Future<void>()> answer_or_failure = nullptr;
};

/// A call within a context. Threads: any.
class RecordedCall {
 public:
  /// Cuts the tensors of `arguments` off from their graphs: those that need a gradient travel as leaves that
  /// require one. `anchor`: a leaf that each backward asks for. `sequence_nr`: below those of all nodes of
  /// the caller's graph.
  RecordedCall(Encoded& arguments, const at::Tensor& anchor, std::uint64_t sequence_nr, Callee callee);

  /// Gives the results that came a history: those that require a gradient. `is_late`: Note [Late calls].
  void attach(Encoded& results, bool is_late);
  /// A call that failed has no part in a backward. Returns what is left of it, for whoever may take the time
  /// to free it.
  std::shared_ptr<void> forget();
  /// Of a call that makes an object, which has no results.
  void make_late();

 private:
  friend std::vector<at::Tensor> late_calls(std::vector<std::shared_ptr<RecordedCall>>& calls);
  using NodePtr = decltype(torch::autograd::Edge::function);
  using WeakNodePtr = decltype(COHORT_WEAK_NODE(std::declval<NodePtr>()));

  RecordedCall(NodePtr send, Callee callee);
  void update_lateness(const NodePtr& send);

  const WeakNodePtr send_;  // the results keep it
  const Callee callee_;
  std::mutex mutex_;      // of all below
  NodePtr kept_;          // until the answer comes; of a late call longer
  bool is_late_ = false;  // as far as is known
  at::Tensor late_;       // of a call that late_calls() found to be late: its history is the node
};

/// Has each late call go backward after all that come later in `calls`, which are those of a handler, in the
/// order of its program. A call without an answer is late: it may make an object yet. Returns for each late
/// call a tensor at which each backward of the handler is to begin too. Takes calls out whose results nobody
/// has any more.
std::vector<at::Tensor> late_calls(std::vector<std::shared_ptr<RecordedCall>>& calls);

/// Tensors of which some may be undefined, as a value that travels.
Encoded encode_gradients(const std::vector<at::Tensor>& gradients);
std::vector<at::Tensor> decode_gradients(Reader& in);

}  // namespace cohort::rpc
