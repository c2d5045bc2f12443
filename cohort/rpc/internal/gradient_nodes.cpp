// A call within a context leaves two nodes in the caller's graph. Receive stands before the results: it sends
// their gradients to the worker that was called. Send stands after the arguments: it waits for the answer, and
// hands it on as the arguments' gradients. An edge from Receive to Send keeps that order.
//
// Sequence numbers decide in which order the engine takes nodes that are ready: the highest first. Receive has
// one above all, so its gradients leave at once. Send has one below all, so it waits only when nothing else is
// left to do. So calls that do not depend on each other are under way together.
#include "cohort/rpc/internal/gradient_nodes.h"

#include <torch/csrc/autograd/functions/utils.h>

#include <limits>
#include <utility>

#include "cohort/autograd/boundary_node.h"
#include "cohort/autograd/detached_graph.h"
#include "cohort/base/error.h"
#include "cohort/base/threads/thread_pool.h"
#include "cohort/core/torch_compat.h"

namespace cohort::rpc {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using Tensors = std::vector<at::Tensor>;

// LibTorch gives AccumulateGrad the highest sequence number of all; this is the next.
constexpr std::uint64_t kFirst = std::numeric_limits<std::uint64_t>::max() - 1;

class Send : public autograd::BoundaryNode {
 public:
  Send(std::uint64_t sequence_nr, std::vector<Edge> edges)
      : BoundaryNode(sequence_nr, autograd::MadeBy()), num_arguments_(edges.size() - 1) {
    add_input_metadata(Node::undefined_input());
    set_next_edges(std::move(edges));
  }
  void await(base::Future<Encoded> gradients) { gradients_ = std::move(gradients); }
  Tensors apply(Tensors&& /*none*/) override {
    const base::ThreadPool::Waiting waiting;
    const Encoded encoded =
        std::exchange(gradients_, {}).get(base::Deadline::never());  // the call has a deadline of its own
    Reader in(encoded);
    Tensors gradients = decode_gradients(in);
    in.finish();
    if (gradients.size() != num_arguments_) {
      throw CommError("rpc.backward", base::concat("gradients of ", gradients.size(), " arguments came, of ",
                                                   num_arguments_, " that need one"));
    }
    gradients.emplace_back();  // of the anchor
    return gradients;
  }
  std::string name() const override { return "cohort::rpc::Send"; }

 private:
  const std::size_t num_arguments_;
  base::Future<Encoded> gradients_;
};

class Receive : public autograd::BoundaryNode {
 public:
  Receive(const autograd::MadeBy& made_by, SendGradients send)
      : BoundaryNode(kFirst, made_by), send_(std::move(send)) {}
  Tensors apply(Tensors&& gradients) override {
    static_cast<Send&>(*next_edge(0).function).await(send_(gradients));
    return Tensors(1);
  }
  std::string name() const override { return "cohort::rpc::Receive"; }

 private:
  const SendGradients send_;
};

}  // namespace

RecordedCall::RecordedCall(Encoded& arguments, const at::Tensor& anchor, std::uint64_t sequence_nr) {
  std::vector<Edge> edges;
  for (at::Tensor& tensor : arguments.tensors) {
    Edge edge = autograd::edge_of(tensor);
    tensor = tensor.detach();
    if (!edge.is_valid()) continue;
    tensor.requires_grad_();
    edges.push_back(std::move(edge));
  }
  // Each backward asks for the anchor. So the nodes run also where no argument needs a gradient: parameters of
  // the worker that was called may need one.
  edges.push_back(autograd::edge_of(anchor));
  send_ = Edge(COHORT_MAKE_NODE(Send, sequence_nr, std::move(edges)), 0);
}

void RecordedCall::attach(Encoded& results, SendGradients send) const {
  const auto& made_by = static_cast<const Send&>(*send_.function).made_by();
  const auto receive = COHORT_MAKE_NODE(Receive, made_by, std::move(send));
  receive->set_next_edges({send_});
  for (at::Tensor& tensor : results.tensors) {
    if (!tensor.requires_grad()) continue;
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, receive);
  }
}

Encoded encode_gradients(const Tensors& gradients) {
  Writer out;
  out.count(gradients.size());
  for (const at::Tensor& gradient : gradients) {
    out.tensor(gradient.defined() ? gradient.detach() : gradient);
  }
  return out.take();
}

Tensors decode_gradients(Reader& in) {
  Tensors gradients;
  for (std::size_t left = in.count(); left > 0; --left) gradients.push_back(in.tensor());
  return gradients;
}

}  // namespace cohort::rpc
