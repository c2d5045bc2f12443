// A part belongs to one call, whose caller alone has its results. Its gradients come as a call; when that is
// answered, all that follows from them is done. The gradients of leaves stay with their part until somebody
// asks for sums: added as (((root + part) + part) ...), the root's first, then its last call's, then those of
// the calls that this one's handler made, the last first, and so on: the order in which one process would go
// backward.
//
// The part of an object has results that anybody may fetch. Each is a leaf here, so what uses it collects its
// gradient as that of any leaf, in the same order. The call that made the object comes after all of them,
// takes the sums out and continues: Note [Late calls].
//
// Note [Failed backwards]
// A failure travels along the calls of the backward: as an error to the caller of each part, and as a cancel,
// which says why, to those that the part has called. A worker that learns of it gives up all its calls of
// that backward, of other parts too. So the root and each part that runs learn of it, and those parts alone.
// It is the same where a caller dies or passes its deadline, as its calls are cancelled then. What a thread
// calls while it goes backward, in a second run of recompute() or in a hook, is a call of the backward too.
// Its waits end with the backward, whoever is to set the result (BackwardScope).
#include "cohort/rpc/internal/context_state.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones_like.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <unordered_set>

#include "cohort/autograd/graph_walk.h"
#include "cohort/base/error.h"
#include "cohort/rpc/internal/own_gradient.h"

namespace cohort::rpc {
namespace {

using torch::autograd::Edge;
using Tensors = std::vector<at::Tensor>;

constexpr const char* kMark = "cohort::rpc: ";  // before what a leaf is

// The leaves that the graph of `roots` leads to, in an order that depends on the graph alone.
std::vector<Edge> leaf_edges(const std::vector<Edge>& roots) {
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

void check_roots(const Tensors& roots) {
  if (roots.empty()) throw UsageError("rpc.backward", "there are no roots", "the losses");
  for (const at::Tensor& root : roots) {
    if (!autograd::needs_gradient(root)) {
      throw UsageError("rpc.backward", "a root needs no gradient",
                       "a loss that was computed within the context");
    }
    if (root.numel() != 1) {
      throw UsageError("rpc.backward", base::concat("a root has ", root.numel(), " elements"),
                       "a loss: one number");
    }
  }
}

[[noreturn]] void throw_late() {
  throw UsageError("rpc.backward", "a gradient comes for an object after those of all its users",
                   "to_here() in place of local_value(), and results that are waited for");
}

}  // namespace

bool any_defined(const Tensors& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.defined(); });
}

// A backward, of the roots or of a part, while it runs here. None begins of one that has failed. A part may
// outlast its backward, which has failed, and may even begin late: so the context's number never becomes
// less, and what a part does is of its own backward.
class ContextState::Running {
 public:
  Running(ContextState& context, Backward backward)
      : context_(context), backward_(backward), here_(context.failures_, backward.number) {
    const std::lock_guard lock(context_.mutex_);
    context_.check_not_failed(backward.number);
    if (backward.number >= context_.backward_.number) context_.backward_ = backward;
    ++context_.num_running_;
    innermost = this;
  }
  ~Running() {
    innermost = before_;
    const std::lock_guard lock(context_.mutex_);
    if (--context_.num_running_ == 0) context_.failures_->clear();
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

  /// That of this thread, where LibTorch's engine runs the nodes of the CPU; else the latest. Under the
  /// mutex.
  static Backward current(const ContextState& context) {
    const Running* running = innermost;
    while (running != nullptr && &running->context_ != &context) running = running->before_;
    return running == nullptr ? context.backward_ : running->backward_;
  }

 private:
  static inline thread_local const Running* innermost = nullptr;
  ContextState& context_;
  const Backward backward_;
  const Running* const before_ = innermost;
  const BackwardScope here_;
};

ContextState::ContextState(ContextId id, ContextProtocol::CopyId copy, std::weak_ptr<const void> home)
    : id_(id), copy_(copy), home_(std::move(home)), anchor_(at::empty({0}).requires_grad_()) {}

void ContextState::add_record(CallKey key, CallRecord record) {
  const std::lock_guard lock(mutex_);
  for (const at::Tensor& value : record.values) {
    if (value.defined()) values_[value.unsafeGetTensorImpl()].tensor = value;
  }
  records_[key] = std::move(record);
}

void ContextState::add_fetch(CallKey key, CallPath path, Encoded& value) {
  CallRecord record;
  record.path = std::move(path);
  for (at::Tensor& tensor : value.tensors) {
    if (!autograd::needs_gradient(tensor)) continue;
    if (!tensor.is_leaf()) {
      throw UsageError("rpc.context", "the value of an object has a graph that this context has not recorded",
                       "detach() it, or make the object within the context");
    }
    check_leaf(tensor);
    record.fetched.push_back(tensor);
    // It goes out as a new leaf. Its gradient comes to backward_part(), which adds it to that of `fetched`.
    tensor = tensor.detach().requires_grad_();
  }
  if (!record.fetched.empty()) add_record(key, std::move(record));
}

// A leaf's name is its own as long as it lives, whichever contexts have ended meanwhile.
void ContextState::mark_argument(const at::Tensor& leaf) const {
  torch::autograd::impl::set_name(leaf, base::concat(kMark, "an argument of an earlier call, in context ",
                                                     id_.number, " of worker ", id_.creator));
}

void ContextState::mark_value(const at::Tensor& leaf) const {
  torch::autograd::impl::set_name(leaf, base::concat(kMark, "the value of an object of context ", id_.number,
                                                     " of worker ", id_.creator));
}

void ContextState::check_leaf(const at::Tensor& leaf) const {
  const std::string& mark = leaf.name();
  if (!mark.starts_with(kMark) || is_value(leaf)) return;
  throw UsageError(
      "rpc.context", base::concat("a gradient would end at ", mark.substr(std::string_view(kMark).size())),
      "a result of the call in place of what its handler keeps, one context for both, or detach()");
}

bool ContextState::is_value(const at::Tensor& tensor) const {
  const std::lock_guard lock(mutex_);
  return tensor.defined() && values_.count(tensor.unsafeGetTensorImpl()) > 0;
}

bool ContextState::Earlier::operator()(const Order& a, const Order& b) const {
  if (a.first != b.first) return a.first < b.first;
  const auto [in_a, in_b] = std::mismatch(a.second.begin(), a.second.end(), b.second.begin(), b.second.end());
  if (in_a == a.second.end() || in_b == b.second.end()) return a.second.size() < b.second.size();
  // Of two calls of one handler the later one first, as one process goes backward.
  return *in_a > *in_b;
}

void ContextState::add_gradients(Order order, const Gradients& gradients) {
  const std::lock_guard lock(mutex_);
  check_not_failed(order.first);
  for (const auto& [leaf, gradient] : gradients) {
    const auto value = values_.find(leaf.unsafeGetTensorImpl());
    if (value == values_.end()) continue;
    if (value->second.last_backward == order.first) {
      throw_late();
    }
    if (!value->second.has_graph) {
      throw UsageError("rpc.backward", "the graph of an object is gone",
                       "backward(..., keep_graph) before the last one");
    }
  }
  auto& known = gradients_[order];
  for (const auto& [leaf, gradient] : gradients) {
    if (const auto value = values_.find(leaf.unsafeGetTensorImpl()); value != values_.end()) {
      Value& of_object = value->second;
      // A later backward has come here before the news that this one has failed.
      if (order.first < std::max(of_object.last_gradient, of_object.last_backward)) continue;
      if (std::exchange(of_object.last_gradient, order.first) != order.first) {
        count_untaken(order.first, {.count = 1});
      }
    }
    known.push_back({leaf, gradient});
  }
}

// Under the mutex. Of an earlier backward, which has failed, nobody asks any more.
void ContextState::count_untaken(std::uint64_t backward, const UntakenGradients& more) {
  if (backward < untaken_in_) return;
  if (backward > untaken_in_) untaken_ = {};
  untaken_in_ = backward;
  untaken_.count += more.count;
  if (untaken_.lost_worker.empty()) untaken_.lost_worker = more.lost_worker;
}

void ContextState::add_untaken(std::uint64_t backward, const UntakenGradients& more) {
  const std::lock_guard lock(mutex_);
  count_untaken(backward, more);
}

UntakenGradients ContextState::take_untaken(std::uint64_t backward) {
  const std::lock_guard lock(mutex_);
  return backward == untaken_in_ ? std::exchange(untaken_, {}) : UntakenGradients();
}

// At the end of the root's backward, when all answers are here.
void ContextState::check_all_taken(std::uint64_t backward) {
  check_not_failed(backward);
  const UntakenGradients untaken = take_untaken(backward);
  if (untaken.count == 0) return;
  const std::string what = base::concat(
      "gradients of ", untaken.count, untaken.count == 1 ? " tensor" : " tensors", " of objects are lost: ");
  if (!untaken.lost_worker.empty()) {
    throw PeerError("rpc.backward",
                    base::concat(what, untaken.lost_worker, " is gone, and a call to it has made objects"));
  }
  throw UsageError(
      "rpc.backward",
      what + "a call that made an object did not go backward, as it has failed or was recomputed",
      "objects of calls that have succeeded; within autograd::recompute() none that others use");
}

// Of the object's tensors, in the order of the parts that used them. Drops what earlier backwards have left,
// which have failed.
Tensors ContextState::take_gradients(const CallRecord& record, std::uint64_t number, bool keep_graph) {
  check_not_failed(number);
  Tensors sums(record.values.size());
  const auto place_of = [&](const at::Tensor& leaf) {
    return std::find_if(record.values.begin(), record.values.end(),
                        [&](const at::Tensor& value) { return value.is_same(leaf); });
  };
  for (auto& [order, gradients] : gradients_) {
    if (order.first > number) break;
    std::erase_if(gradients, [&, is_of_this = order.first == number](const Collected& collected) {
      const auto place = place_of(collected.leaf);
      if (place == record.values.end()) return false;
      if (!is_of_this) return true;
      at::Tensor& sum = sums[static_cast<std::size_t>(place - record.values.begin())];
      sum = sum.defined() ? autograd::sum_of(sum, collected.gradient) : collected.gradient;
      return true;
    });
  }
  const bool is_used = any_defined(sums);
  for (const at::Tensor& value : record.values) {
    if (!value.defined()) continue;
    Value& known = values_.at(value.unsafeGetTensorImpl());
    if (known.last_gradient == number) count_untaken(number, {.count = -1});
    if (known.last_gradient <= number) known.last_gradient = 0;
    known.last_backward = std::max(known.last_backward, number);
    if (is_used && !keep_graph) known.has_graph = false;
  }
  return sums;
}

Tensors ContextState::backward_part(CallKey key, Backward backward, Tensors gradients) {
  const Running running(*this, backward);
  try {
    return run_part(key, backward, std::move(gradients));
  } catch (...) {
    fail(backward.number, std::current_exception());
    throw;
  }
}

Tensors ContextState::run_part(CallKey key, Backward backward, Tensors gradients) {
  CallRecord record;
  bool keep_graph = false;
  {
    const std::lock_guard lock(mutex_);
    const auto found = records_.find(key);
    if (found == records_.end()) {
      if (gradients.empty()) return {};
      throw UsageError("rpc.backward", "the graph of a call is gone",
                       "backward(..., keep_graph) before the last one");
    }
    record = found->second;
    // Late calls may lead to objects that only a later backward needs.
    keep_graph = backward.keep_graph || record.num_late > 0;
    if (!record.values.empty()) gradients = take_gradients(record, backward.number, keep_graph);
    if (!any_defined(gradients) && record.num_late == 0) return {};
    // Before it runs: a second backward through the part finds nothing, and says so.
    if (!keep_graph) records_.erase(found);
  }
  Tensors of_inputs;
  Gradients of_leaves;
  if (record.graph == nullptr) {
    for (std::size_t i = 0; i < record.fetched.size(); ++i) {
      if (gradients.at(i).defined()) of_leaves.emplace_back(record.fetched[i], gradients[i]);
    }
    if (record.fetched.empty()) of_inputs = std::move(gradients);
  } else {
    of_inputs = backward_graph(record, keep_graph, std::move(gradients), of_leaves);
  }
  add_gradients({backward.number, record.path}, of_leaves);
  return of_inputs;
}

// Through the graph of a handler.
Tensors ContextState::backward_graph(const CallRecord& record, bool keep_graph, Tensors gradients,
                                     Gradients& of_leaves) const {
  const auto& needs = record.graph->needs_gradient();
  const std::size_t num_results =
      static_cast<std::size_t>(std::count(needs.begin(), needs.end(), true)) - record.num_late;
  if (gradients.empty()) gradients.resize(num_results);
  if (gradients.size() != num_results) {
    throw CommError("rpc.backward",
                    base::concat(gradients.size(), " gradients came for the results of a call"));
  }
  // Late calls get a turn and no gradient: Note [Late calls].
  for (std::size_t i = 0; i < record.num_late; ++i) gradients.push_back(at::empty({0}));
  const Tensors found = record.graph->backward(gradients, keep_graph);
  const std::size_t num_inputs = record.inputs_with_gradient.size();
  for (std::size_t i = 0; i < record.graph->captured().size(); ++i) {
    const at::Tensor& leaf = record.graph->captured()[i];
    const at::Tensor& gradient = found[num_inputs + i];
    if (gradient.defined() && !leaf.is_same(anchor_)) of_leaves.emplace_back(leaf, gradient);
  }
  Tensors of_inputs;
  for (std::size_t i = 0; i < num_inputs; ++i) {
    if (record.inputs_with_gradient[i]) of_inputs.push_back(found[i]);
  }
  return of_inputs;
}

int ContextState::num_running() const {
  const std::lock_guard lock(mutex_);
  return num_running_;
}

void ContextState::backward(const Tensors& roots, const Tensors& late,
                            dist_autograd::BackwardOptions options) {
  std::uint64_t number = 0;
  {
    const std::lock_guard lock(mutex_);
    number = ++backward_.number;
  }
  const Running running(*this, {number, options.keep_graph});
  try {
    run(number, roots, late, options);
  } catch (...) {
    fail(number, std::current_exception());
    throw;
  }
}

void ContextState::run(std::uint64_t number, const Tensors& roots, const Tensors& late,
                       dist_autograd::BackwardOptions options) {
  check_roots(roots);
  std::vector<Edge> edges;
  Tensors gradients;
  for (const at::Tensor& root : roots) {
    edges.push_back(autograd::edge_of(root));
    gradients.push_back(at::ones_like(root));
  }
  for (const at::Tensor& tensor : late) {
    edges.push_back(autograd::edge_of(tensor));
    gradients.push_back(at::empty({0}));
  }
  const std::vector<Edge> leaves = leaf_edges(edges);
  if (leaves.empty()) return;
  for (const Edge& edge : leaves) {
    check_leaf(static_cast<torch::autograd::AccumulateGrad&>(*edge.function).variable);
  }
  // Late calls may lead to objects that only a later backward needs.
  const bool keep_graph = options.keep_graph || !late.empty();
  auto& engine = torch::autograd::Engine::get_default_engine();
  if (options.into_grad) {
    for (const Edge& edge : leaves) {
      if (is_value(static_cast<torch::autograd::AccumulateGrad&>(*edge.function).variable)) throw_late();
    }
    engine.execute(edges, gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/true);
    return check_all_taken(number);
  }
  const Tensors found =
      engine.execute(edges, gradients, keep_graph, /*create_graph=*/false, /*accumulate_grad=*/false, leaves);
  Gradients of_leaves;
  for (std::size_t i = 0; i < leaves.size(); ++i) {
    const at::Tensor& leaf = static_cast<torch::autograd::AccumulateGrad&>(*leaves[i].function).variable;
    if (found[i].defined() && !leaf.is_same(anchor_)) of_leaves.emplace_back(leaf, found[i]);
  }
  add_gradients({number, {}}, of_leaves);
  check_all_taken(number);
}

ContextState::Backward ContextState::current_backward() const {
  const std::lock_guard lock(mutex_);
  if (num_running_ == 0) {
    throw UsageError("rpc.backward",
                     base::concat("the backward of another context leads through a call of context ",
                                  id_.number, " of worker ", id_.creator),
                     "detach() what goes from one context to another, or one context for both");
  }
  const Backward backward = Running::current(*this);
  check_not_failed(backward.number);
  return backward;
}

void ContextState::check_not_failed(std::uint64_t backward) const {
  if (const std::exception_ptr error = failures_->error_of(backward)) std::rethrow_exception(error);
}

// The gradients of a leaf, in the order in which they are added.
struct ContextState::SumOfLeaf {
  std::vector<Collected*> parts;  // those that were asked for
  bool is_of_program = false, is_of_calls = false;
  at::Tensor total;

  // accumulate_into_grad() asks for the two sums of such a leaf, which have different hooks. So neither is
  // added to the other.
  bool is_of_both() const { return is_of_program && is_of_calls; }
};

// Under the mutex.
std::vector<ContextState::SumOfLeaf> ContextState::collect_by_leaf(Of of) {
  std::vector<SumOfLeaf> sums;
  std::unordered_map<const c10::TensorImpl*, std::size_t> places;
  for (auto& [order, gradients] : gradients_) {
    const bool is_of_calls = !order.second.empty();
    for (Collected& collected : gradients) {
      const c10::TensorImpl* const leaf = collected.leaf.unsafeGetTensorImpl();
      const bool is_wanted = of == Of::kAll || is_of_calls == (of == Of::kCalls);
      // A backward that succeeded has taken those of objects: check_all_taken(). So it is of one that failed.
      if (values_.count(leaf) > 0) continue;
      const auto [place, is_new] = places.try_emplace(leaf, sums.size());
      if (is_new) sums.emplace_back();
      SumOfLeaf& sum = sums[place->second];
      (is_of_calls ? sum.is_of_calls : sum.is_of_program) = true;
      if (is_wanted) sum.parts.push_back(&collected);
    }
  }
  std::erase_if(sums, [](const SumOfLeaf& sum) { return sum.parts.empty(); });
  return sums;
}

ContextState::Gradients ContextState::gradients(Of of) {
  const at::NoGradGuard no_grad;
  const std::lock_guard lock(mutex_);
  std::vector<SumOfLeaf> sums = collect_by_leaf(of);
  Tensors all;
  for (const auto& [order, gradients] : gradients_) {
    for (const Collected& collected : gradients) all.push_back(collected.gradient);
  }
  const OverlappingTensors overlapping(all);
  all.clear();  // own_gradient() counts references
  Gradients given;
  for (SumOfLeaf& sum : sums) {
    const Collected& first = *sum.parts.front();
    if (sum.parts.size() > 1) {
      sum.total = first.gradient;
      for (std::size_t i = 1; i < sum.parts.size(); ++i) {
        sum.total = autograd::sum_of(sum.total, sum.parts[i]->gradient);
      }
    } else if (sum.is_of_both() || (!first.is_own && overlapping.has(first.gradient))) {
      sum.total = first.gradient.clone();
    } else {
      sum.total = first.is_own ? first.gradient : own_gradient(first.leaf, first.gradient);
    }
    given.emplace_back(first.leaf, sum.total);
  }
  // After the loop: of two leaves with one gradient both get a copy, as in PyTorch.
  for (const SumOfLeaf& sum : sums) {
    if (sum.is_of_both()) continue;
    for (Collected* const part : sum.parts) part->gradient.reset();
    *sum.parts.front() = {sum.parts.front()->leaf, sum.total, /*is_own=*/true};
  }
  for (auto& [order, gradients] : gradients_) {
    std::erase_if(gradients, [](const Collected& collected) { return !collected.gradient.defined(); });
  }
  return given;
}

}  // namespace cohort::rpc
