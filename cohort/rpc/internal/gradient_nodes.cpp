// A call within a context leaves two nodes in the caller's graph. Receive stands before the results: it sends
// their gradients to the worker that was called. Send stands after the arguments: it waits for the answer,
// and hands it on as the arguments' gradients. An edge from Receive to Send keeps that order.
//
// Sequence numbers decide in which order the engine takes nodes that are ready: the highest first. Receive
// has one above all, so its gradients leave at once. Send has one below all, so it waits only when nothing
// else is left to do. So calls that do not depend on each other are under way together.
#include "cohort/rpc/internal/gradient_nodes.h"

#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <optional>
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

// LibTorch gives AccumulateGrad the highest sequence number of all. Those of Receives are below it, and far
// above all others. The last call's is the highest, so its gradients leave first: in Note [Late calls] it is
// waited for first.
constexpr std::uint64_t kFirst = std::numeric_limits<std::uint64_t>::max() / 2;

// Note [Late calls]
// The gradient of an object's value comes from all who fetched it. Nobody can count them: a user whose
// results the loss does not need sends nothing. So the call that made the object is late. It asks for the
// gradients of its arguments only when all calls are done that come later in its caller's program. Only those
// can have used the object, or somebody above the caller who got a reference from it. A call within which an
// object was made is late too, therefore, and so on up to the root.
//
// The Send of a late call asks itself, when its turn comes. Each backward of the caller begins at it too, as
// perhaps no result leads there. An edge from the Send of each later call to it keeps the order.
//
// Only the answer says whether an object was made. So a call that has none when a backward of its caller
// begins, or when its caller's handler ends, is late there. Its Send waits for the answer before it asks.
class Send : public autograd::BoundaryNode {
 public:
  Send(std::uint64_t sequence_nr, std::vector<Edge> edges)
      : BoundaryNode(sequence_nr, autograd::MadeBy()), num_arguments_(edges.size() - 1) {
    add_input_metadata(Node::undefined_input());
    edges.emplace_back();  // for run_before()
    set_next_edges(std::move(edges));
  }
  void make_late(const Callee& callee) {
    send_late_ = callee.send;
    wait_for_ = callee.answer_or_failure;
  }
  void run_before(Edge late) { next_edges().back() = std::move(late); }
  void take(const SendGradients& send, const Tensors& gradients) {
    // Before an object that nobody used there are no gradients, and the callee need not hear of it.
    if (std::ranges::none_of(gradients, [](const at::Tensor& gradient) { return gradient.defined(); }))
      return;
    if (send_late_) {
      of_results_ = gradients;
    } else {
      gradients_ = send(gradients);
    }
  }
  // What a backward that failed has left.
  void forget_gradients() {
    of_results_.clear();
    gradients_.reset();
  }
  Tensors apply(Tensors&& /*none*/) override {
    if (send_late_ && has_succeeded()) gradients_ = send_late_(std::exchange(of_results_, {}));
    if (!gradients_) return Tensors(num_arguments_ + 2);
    const base::ThreadPool::Waiting waiting;
    const Encoded encoded =
        std::exchange(gradients_, {})->get(base::Deadline::never());  // the call has a deadline of its own
    Reader in(encoded);
    Tensors gradients = decode_gradients(in);
    in.finish();
    if (gradients.empty()) gradients.resize(num_arguments_);  // nobody used the object
    if (gradients.size() != num_arguments_) {
      throw CommError("rpc.backward", base::concat("gradients of ", gradients.size(), " arguments came, of ",
                                                   num_arguments_, " that need one"));
    }
    gradients.resize(num_arguments_ + 2);  // the anchor, and the next late call
    return gradients;
  }
  std::string name() const override { return "cohort::rpc::Send"; }

 private:
  // Waits for the answer of a late call. One that failed has no part elsewhere.
  bool has_succeeded() const {
    if (!wait_for_) return true;
    base::Future<void> answer = wait_for_();  // throws if the backward has failed: no error of the call
    const base::ThreadPool::Waiting waiting;
    try {
      answer.get(base::Deadline::never());  // the call has a deadline of its own
    } catch (const std::exception&) {
      return false;
    }
    return true;
  }

  const std::size_t num_arguments_;
  std::optional<base::Future<Encoded>> gradients_;  // of the arguments
  SendGradients send_late_;
  std::function<base::Future<void>()> wait_for_;
  Tensors of_results_;
};

class Receive : public autograd::BoundaryNode {
 public:
  Receive(const Send& send, SendGradients send_gradients)
      : BoundaryNode(kFirst + send.sequence_nr(), send.made_by()), send_(std::move(send_gradients)) {}
  Tensors apply(Tensors&& gradients) override {
    static_cast<Send&>(*next_edge(0).function).take(send_, gradients);
    return Tensors(1);
  }
  std::string name() const override { return "cohort::rpc::Receive"; }

 private:
  const SendGradients send_;
};

auto make_send(Encoded& arguments, const at::Tensor& anchor, std::uint64_t sequence_nr) {
  std::vector<Edge> edges;
  for (at::Tensor& tensor : arguments.tensors) {
    Edge edge = autograd::edge_of(tensor);
    tensor = tensor.detach();
    if (!edge.is_valid()) continue;
    tensor.requires_grad_();
    edges.push_back(std::move(edge));
  }
  // Each backward asks for the anchor. So the nodes run also where no argument needs a gradient: parameters
  // of the worker that was called may need one.
  edges.push_back(autograd::edge_of(anchor));
  return COHORT_MAKE_NODE(Send, sequence_nr, std::move(edges));
}

}  // namespace

RecordedCall::RecordedCall(Encoded& arguments, const at::Tensor& anchor, std::uint64_t sequence_nr,
                           Callee callee)
    : RecordedCall(make_send(arguments, anchor, sequence_nr), std::move(callee)) {}

RecordedCall::RecordedCall(NodePtr send, Callee callee)
    : send_(COHORT_WEAK_NODE(send)), callee_(std::move(callee)), kept_(std::move(send)) {}

void RecordedCall::attach(Encoded& results, bool is_late) {
  const NodePtr node = send_.lock();
  const std::lock_guard lock(mutex_);
  is_late_ = is_late;
  const auto receive = COHORT_MAKE_NODE(Receive, static_cast<const Send&>(*node), callee_.send);
  receive->set_next_edges({Edge(node, 0)});
  for (at::Tensor& tensor : results.tensors) {
    if (!tensor.requires_grad()) continue;
    tensor = tensor.detach();
    torch::autograd::set_history(tensor, receive);
  }
  if (!is_late) kept_ = nullptr;
}

void RecordedCall::make_late() {
  const std::lock_guard lock(mutex_);
  is_late_ = true;
}

// Under the mutex, by the thread of the scope, while no backward of the scope runs.
void RecordedCall::update_lateness(const NodePtr& send) {
  const bool has_answer = !callee_.answer.valid() || callee_.answer.ready();
  const bool is_late = is_late_ || !has_answer;
  if (is_late == late_.defined()) return;
  static_cast<Send&>(*send).make_late(is_late ? callee_ : Callee());
  late_ = is_late ? at::empty({0}) : at::Tensor();
  if (is_late) torch::autograd::set_history(late_, send);
}

std::shared_ptr<void> RecordedCall::forget() {
  const std::lock_guard lock(mutex_);
  is_late_ = false;
  using Left = std::pair<NodePtr, at::Tensor>;
  return std::make_shared<Left>(std::exchange(kept_, nullptr), std::exchange(late_, at::Tensor()));
}

Tensors late_calls(std::vector<std::shared_ptr<RecordedCall>>& calls) {
  Tensors late;
  Edge last;
  std::erase_if(calls, [&](const std::shared_ptr<RecordedCall>& call) {
    const auto send = call->send_.lock();
    if (send == nullptr) return true;
    static_cast<Send&>(*send).forget_gradients();
    static_cast<Send&>(*send).run_before(last);
    const std::lock_guard lock(call->mutex_);
    call->update_lateness(send);
    if (call->late_.defined()) {
      last = Edge(send, 0);
      late.push_back(call->late_);
    }
    return false;
  });
  return late;
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
