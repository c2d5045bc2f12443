// A part belongs to one call, whose caller alone has its results. Its gradients come as a call; when that is answered, all that
// follows from them is done. The gradients of leaves stay with their part until somebody asks for sums: added as
// (((root + part) + part) ...), the root's first, then its last call's, then those of the calls that this one's handler made, the
// last first, and so on: the order in which one process would go backward.
#include "cohort/rpc/internal/contexts.h"

#include <ATen/SequenceNumber.h>
#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <unordered_map>
#include <unordered_set>

#include "cohort/autograd/graph_walk.h"
#include "cohort/base/error.h"

namespace cohort::rpc {
namespace {

using torch::autograd::Edge;
using Tensors = std::vector<at::Tensor>;

// Contexts that have ended are remembered, so that a call which was on its way does not make one anew.
constexpr std::size_t kMaxEnded = 256;
constexpr int kLowNumbers = 256;  // calls of a handler, as a rule

thread_local ContextScope* current_scope = nullptr;

// The leaves that the graph of `roots` leads to, in an order that depends on the graph alone.
std::vector<Edge> leaves_of(const std::vector<Edge>& roots) {
  std::vector<Edge> leaves;
  autograd::GraphWalk walk;
  std::unordered_set<const torch::autograd::Node*> seen;
  const auto visit = [&](const Edge& edge) {
    const auto* const leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(edge.function.get());
    if (leaf != nullptr && seen.insert(leaf).second) leaves.push_back(edge);
    walk.add(edge.function.get());
  };
  for (const Edge& edge : roots) visit(edge);
  while (auto* const node = walk.next()) {
    for (const Edge& edge : node->next_edges()) visit(edge);
  }
  return leaves;
}

}  // namespace

// A backward, of the roots or of a part, while it runs here.
class ContextState::Running {
 public:
  Running(ContextState& context, Backward backward) : context_(context) {
    const std::lock_guard lock(context_.mutex_);
    context_.backward_ = backward;
    ++context_.num_running_;
  }
  ~Running() {
    const std::lock_guard lock(context_.mutex_);
    --context_.num_running_;
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  ContextState& context_;
};

ContextState::ContextState(ContextId id, std::weak_ptr<const void> home)
    : id_(id), home_(std::move(home)), anchor_(at::empty({0}).requires_grad_()) {}

bool ContextState::note_callee(const std::string& worker) {
  const std::lock_guard lock(mutex_);
  if (!has_ended_) callees_.insert(worker);
  return !has_ended_;
}

std::set<std::string> ContextState::end() {
  const std::lock_guard lock(mutex_);
  has_ended_ = true;
  return callees_;
}

void ContextState::add_part(PartKey key, Part part) {
  const std::lock_guard lock(mutex_);
  parts_[key] = std::move(part);
}

bool ContextState::Earlier::operator()(const Order& a, const Order& b) const {
  if (a.first != b.first) return a.first < b.first;
  const auto [in_a, in_b] = std::mismatch(a.second.begin(), a.second.end(), b.second.begin(), b.second.end());
  if (in_a == a.second.end() || in_b == b.second.end()) return a.second.size() < b.second.size();
  return *in_a > *in_b;
}

void ContextState::add_gradients(Order order, const Gradients& gradients) {
  const std::lock_guard lock(mutex_);
  auto& known = gradients_[order];
  known.insert(known.end(), gradients.begin(), gradients.end());
}

std::vector<at::Tensor> ContextState::backward_part(PartKey key, Backward backward,
                                                    const Tensors& gradients) {
  Part part;
  {
    const std::lock_guard lock(mutex_);
    const auto found = parts_.find(key);
    if (found == parts_.end()) {
      throw UsageError("rpc.backward", "the graph of a call is gone",
                       "backward(..., keep_graph) before the last one");
    }
    part = found->second;
    if (!backward.keep_graph) parts_.erase(found);
  }
  const auto& needs = part.graph->needs_gradient();
  if (gradients.size() != static_cast<std::size_t>(std::count(needs.begin(), needs.end(), true))) {
    throw CommError("rpc.backward",
                    base::concat(gradients.size(), " gradients came for the results of a call"));
  }
  const std::size_t num_inputs = part.inputs_with_gradient.size();
  const Running running(*this, backward);
  const Tensors found = part.graph->backward(gradients, backward.keep_graph);
  Gradients of_leaves;
  for (std::size_t i = 0; i < part.graph->captured().size(); ++i) {
    const at::Tensor& leaf = part.graph->captured()[i];
    const at::Tensor& gradient = found[num_inputs + i];
    if (gradient.defined() && !leaf.is_same(anchor_)) of_leaves.emplace_back(leaf, gradient);
  }
  add_gradients({backward.number, part.path}, of_leaves);
  Tensors of_inputs;
  for (std::size_t i = 0; i < num_inputs; ++i) {
    if (part.inputs_with_gradient[i]) of_inputs.push_back(found[i]);
  }
  return of_inputs;
}

void ContextState::backward(const Tensors& roots, bool keep_graph) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++backward_.number;
  }
  const Running running(*this, {number, keep_graph});
  if (roots.empty()) throw UsageError("rpc.backward", "there are no roots", "the losses");
  std::vector<Edge> edges;
  Tensors gradients;
  for (const at::Tensor& root : roots) {
    if (!autograd::needs_gradient(root)) {
      throw UsageError("rpc.backward", "a root needs no gradient",
                       "a loss that was computed within the context");
    }
    if (root.numel() != 1) {
      throw UsageError("rpc.backward", base::concat("a root has ", root.numel(), " elements"),
                       "a loss: one number");
    }
    edges.push_back(autograd::edge_of(root));
    gradients.push_back(at::ones_like(root));
  }
  const std::vector<Edge> leaves = leaves_of(edges);
  if (leaves.empty()) return;
  const Tensors found = torch::autograd::Engine::get_default_engine().execute(
      edges, gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/false, leaves);
  Gradients of_leaves;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& leaf = static_cast<torch::autograd::AccumulateGrad&>(*leaves[i].function).variable;
    if (found[i].defined() && !leaf.is_same(anchor_)) of_leaves.emplace_back(leaf, found[i]);
  }
  add_gradients({number, {}}, of_leaves);
}

ContextState::Backward ContextState::current_backward() const {
  const std::lock_guard lock(mutex_);
  if (num_running_ == 0) {
    throw UsageError("rpc.backward",
                     base::concat("the backward of another context leads through a call of context ",
                                  id_.number, " of worker ", id_.creator),
                     "detach() what goes from one context to another, or one context for both");
  }
  return backward_;
}

ContextState::Gradients ContextState::gradients() const {
  Gradients sums;
  std::unordered_map<const c10::TensorImpl*, std::size_t> place;
  const auto add = [&](const Gradients& gradients) {
    for (const auto& [leaf, gradient] : gradients) {
      const auto [known, is_new] = place.try_emplace(leaf.unsafeGetTensorImpl(), sums.size());
      if (is_new) {
        sums.emplace_back(leaf, gradient.clone());  // it may be another leaf's too
      } else {
        sums[known->second].second = at::add(sums[known->second].second, gradient);
      }
    }
  };
  const std::lock_guard lock(mutex_);
  for (const auto& [order, gradients] : gradients_) add(gradients);
  return sums;
}

ContextScope::ContextScope(std::shared_ptr<ContextState> context, CallPath path)
    : context_(std::move(context)), path_(std::move(path)), outer_(std::exchange(current_scope, this)) {
  // Numbers for the Send nodes of this scope's calls, below those of all nodes that the scope makes later.
  next_low_ = at::sequence_number::peek();
  for (int i = 0; i < kLowNumbers; ++i) last_low_ = at::sequence_number::get_and_increment();
}
// Scopes may end in another order than they began: a context that is replaced by the next one.
ContextScope::~ContextScope() {
  ContextScope** at = &current_scope;
  while (*at != nullptr && *at != this) at = &(*at)->outer_;
  if (*at == this) *at = outer_;
}
const std::shared_ptr<ContextState>& ContextScope::current() {
  static const std::shared_ptr<ContextState> none;
  return current_scope == nullptr ? none : current_scope->context_;
}
std::uint64_t ContextScope::next_low_number() {
  ContextScope& scope = *current_scope;
  if (scope.next_low_ > scope.last_low_)
    return at::sequence_number::get_and_increment();  // in the order of calls all the same
  return scope.next_low_++;
}

RecordedPlace ContextScope::next_place() {
  ContextScope& scope = *current_scope;
  RecordedPlace place{scope.context_->id(), scope.path_};
  place.path.push_back(scope.num_calls_++);
  return place;
}

std::shared_ptr<ContextState> Contexts::create() {
  const std::lock_guard lock(mutex_);
  const ContextId id{self_, next_number_++};
  return contexts_[id] = std::make_shared<ContextState>(id, mark_);
}
std::shared_ptr<ContextState> Contexts::find_or_make(ContextId id) {
  const std::lock_guard lock(mutex_);
  if (const auto found = contexts_.find(id); found != contexts_.end()) return found->second;
  const auto context = std::make_shared<ContextState>(id, mark_);
  if (down_.count(id.creator) > 0 || std::find(ended_.begin(), ended_.end(), id) != ended_.end()) {
    context->end();
  } else {
    contexts_.emplace(id, context);
  }
  return context;
}
std::shared_ptr<ContextState> Contexts::find_if_here(ContextId id) const {
  const std::lock_guard lock(mutex_);
  const auto found = contexts_.find(id);
  return found != contexts_.end() ? found->second : nullptr;
}
std::shared_ptr<ContextState> Contexts::find(ContextId id) const {
  if (std::shared_ptr<ContextState> found = find_if_here(id)) return found;
  throw UsageError("rpc.context", base::concat("context ", id.number, " of worker ", id.creator,
                                               " has ended, or no call of it came here"));
}
std::shared_ptr<void> Contexts::end(ContextId id, std::set<std::string>& callees) {
  const std::lock_guard lock(mutex_);
  if (std::find(ended_.begin(), ended_.end(), id) == ended_.end()) ended_.push_back(id);
  if (ended_.size() > kMaxEnded) ended_.pop_front();
  const auto found = contexts_.find(id);
  if (found == contexts_.end()) return nullptr;
  std::shared_ptr<ContextState> context = std::move(found->second);
  contexts_.erase(found);
  callees = context->end();
  return context;
}
std::shared_ptr<void> Contexts::on_down(std::int32_t worker) {
  auto ended = std::make_shared<std::vector<std::shared_ptr<ContextState>>>();
  const std::lock_guard lock(mutex_);
  down_.insert(worker);
  for (auto at = contexts_.begin(); at != contexts_.end();) {
    if (at->first.creator != worker) {
      ++at;
      continue;
    }
    at->second->end();
    ended->push_back(std::move(at->second));
    at = contexts_.erase(at);
  }
  return ended;
}
std::size_t Contexts::size() const {
  const std::lock_guard lock(mutex_);
  return contexts_.size();
}

RecordedPart::RecordedPart(std::shared_ptr<ContextState> context, ContextState::PartKey key, CallPath path,
                           Encoded& arguments)
    : context_(std::move(context)), key_(key) {
  part_.path = std::move(path);
  static constexpr autograd::DetachedGraph::Words kWords{
      "rpc.context", "pass it as an argument, or detach() it", "the call and its backward"};
  for (const at::Tensor& tensor : arguments.tensors) {
    part_.inputs_with_gradient.push_back(autograd::needs_gradient(tensor));
  }
  part_.graph = std::make_shared<autograd::DetachedGraph>(arguments.tensors, kWords);
  arguments.tensors = part_.graph->leaves();
}

void RecordedPart::end(Encoded& results, bool answers_later) {
  // The detached graph knows only what this thread computed while the handler ran.
  if (answers_later || std::this_thread::get_id() != thread_) {
    for (at::Tensor& tensor : results.tensors) tensor = tensor.detach();
    return;
  }
  results.tensors = part_.graph->end(results.tensors);
  bool needs_gradient = false;
  for (std::size_t i = 0; i < results.tensors.size(); ++i) {
    at::Tensor& tensor = results.tensors[i];
    tensor = tensor.detach();
    if (!part_.graph->needs_gradient()[i]) continue;
    tensor.requires_grad_();
    needs_gradient = true;
  }
  if (needs_gradient) context_->add_part(key_, std::move(part_));
}

}  // namespace cohort::rpc
