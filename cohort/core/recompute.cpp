#include "cohort/core/recompute.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/SequenceNumber.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <array>
#include <mutex>
#include <optional>
#include <unordered_set>

#include "cohort/core/error.h"

namespace cohort::core::checkpoint_detail {

// Note [Two runs with gradients on]
// The first run could do without a graph. It makes one all the same, and drops it at once:
//  - both runs take the same kernels, which for some operators depends on whether gradients are on;
//  - autocast keeps its casts of parameters for the rest of its scope; those made with gradients off would
//    later be used where gradients are on, and cut the parameters off;
//  - which results need a gradient, which parameters are used, and whether fn reaches a graph that is not an
//    input's, stands in the graph and nowhere else.
// The most memory that a step needs does not grow: backward holds one run's graph too.
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Node;

constexpr const char* kWhere = "core.checkpoint";

// The states of the generators that fn may draw from.
class RandomState {
 public:
  explicit RandomState(const Tensors& inputs) {
    take(at::detail::getDefaultCPUGenerator());
    std::unordered_set<int> seen;
    for (const at::Tensor& input : inputs) {
      if (!input.defined() || !input.is_cuda() || !seen.insert(input.get_device()).second) continue;
      take(at::globalContext().defaultGenerator(input.device()));
    }
  }
  void restore() {
    for (auto& [generator, state] : states_) {
      const std::lock_guard lock(generator.mutex());
      generator.set_state(state);
    }
  }

 private:
  void take(at::Generator generator) {
    const std::lock_guard lock(generator.mutex());
    states_.emplace_back(generator, generator.get_state());
  }
  std::vector<std::pair<at::Generator, at::Tensor>> states_;
};

class AutocastState {
 public:
  AutocastState() : cache_(at::autocast::is_autocast_cache_enabled()) {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kDevices[i]);
      dtypes_[i] = at::autocast::get_autocast_dtype(kDevices[i]);
    }
  }
  bool enabled() const { return enabled_[0] || enabled_[1]; }
  void restore() const {
    at::autocast::set_autocast_cache_enabled(cache_);
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      at::autocast::set_autocast_enabled(kDevices[i], enabled_[i]);
      at::autocast::set_autocast_dtype(kDevices[i], dtypes_[i]);
    }
  }

 private:
  static constexpr std::array kDevices{at::kCPU, at::kCUDA};
  bool cache_;
  std::array<bool, 2> enabled_{};
  std::array<at::ScalarType, 2> dtypes_{};
};

// The generators as they were in the first run, until the end of the scope.
class RandomScope {
 public:
  RandomScope(std::optional<RandomState>& state, const Tensors& inputs) {
    if (!state) return;
    before_.emplace(inputs);
    state->restore();
  }
  ~RandomScope() {
    if (before_) before_->restore();
  }
  RandomScope(const RandomScope&) = delete;
  RandomScope& operator=(const RandomScope&) = delete;

 private:
  std::optional<RandomState> before_;
};

// Autocast as it was in the first run, with casts of its own, until the end of the scope.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state) : used_(state.enabled() || before_.enabled()) {
    if (!used_) return;
    at::autocast::clear_cache();
    at::autocast::increment_nesting();
    state.restore();
  }
  ~AutocastScope() {
    if (!used_) return;
    at::autocast::clear_cache();
    at::autocast::decrement_nesting();
    before_.restore();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
  bool used_;
};

// What the second run changes and must not.
class ScopedBuffers {
 public:
  explicit ScopedBuffers(const Tensors& buffers) {
    for (const at::Tensor& buffer : buffers) {
      if (buffer.defined()) saved_.emplace_back(buffer, buffer.detach().clone());
    }
  }
  ~ScopedBuffers() {
    const at::NoGradGuard no_grad;
    // variable_data() has a version of its own: a batch norm elsewhere has saved these tensors for backward.
    for (auto& [buffer, value] : saved_) buffer.variable_data().copy_(value);
  }
  ScopedBuffers(const ScopedBuffers&) = delete;
  ScopedBuffers& operator=(const ScopedBuffers&) = delete;

 private:
  std::vector<std::pair<at::Tensor, at::Tensor>> saved_;
};

Tensors leaves_of(const Tensors& inputs) {
  Tensors leaves;
  for (const at::Tensor& input : inputs) {
    leaves.push_back(input.defined() ? input.detach().requires_grad_(input.requires_grad()) : input);
  }
  return leaves;
}

std::uint32_t version_of(const at::Tensor& tensor) {
  return tensor.defined() && !tensor.is_inference() ? tensor._version() : 0;
}

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? concat(tensor.scalar_type(), tensor.sizes()) : "undefined";
}

}  // namespace

struct Runs::State : torch::CustomClassHolder {
  struct Result {
    bool needs_gradient = false;
    std::string text;
  };

  State(CheckpointOptions with, Tensors of)
      : options(std::move(with)), inputs(std::move(of)), leaves(leaves_of(inputs)) {
    for (const at::Tensor& input : inputs) {
      versions.push_back(version_of(input));
      requires_grad.push_back(input.defined() && input.requires_grad());
      defined.push_back(input.defined());
    }
    if (options.preserve_rng_state) random.emplace(inputs);
  }

  void check_graph(const Tensors& results);
  void check_leaves() const;
  void check_second(const Tensors& again) const;
  Tensors backward(const Tensors& saved, const Tensors& gradients);

  CheckpointOptions options;
  Tensors inputs, leaves;  // of the first run; empty after it
  std::vector<bool> defined, requires_grad;
  std::vector<std::uint32_t> versions;
  std::uint64_t first_sequence = at::sequence_number::peek();
  std::optional<RandomState> random;
  AutocastState autocast;
  Run again;
  std::vector<Result> results;
  std::vector<std::pair<at::Tensor, std::uint32_t>> captured;  // parameters that fn used, and their versions
};

namespace {

// A function of the inputs (and of a tensor that makes it one where no input needs a gradient) whose results
// are there already.
struct Checkpoint : torch::autograd::Function<Checkpoint> {
  static Tensors forward(AutogradContext* context, at::TensorList /*edges*/, const Tensors& results,
                         const Tensors& to_save, const c10::intrusive_ptr<torch::CustomClassHolder>& state) {
    context->set_materialize_grads(false);
    context->save_for_backward(to_save);
    context->saved_data["state"] = c10::IValue::make_capsule(state);
    return results;
  }

  static Tensors backward(AutogradContext* context, const Tensors& gradients);
};

}  // namespace

Runs::Runs(CheckpointOptions options, Tensors inputs)
    : state_(c10::make_intrusive<State>(std::move(options), std::move(inputs))) {}
Runs::~Runs() = default;

const Tensors& Runs::leaves() const {
  return state_->leaves;
}

Tensors Runs::attach(const Tensors& results, Run again) {
  State& state = *state_;
  for (std::size_t i = 0; i < state.inputs.size(); ++i) {
    if (version_of(state.inputs[i]) == state.versions[i]) continue;
    throw UsageError(kWhere,
                     concat("fn changed its input ", i, " ", describe(state.inputs[i]),
                            " in place, which its second run would start from"),
                     "the operator that does not work in place");
  }
  state.check_graph(results);
  Tensors attached = results, ends;
  for (const at::Tensor& result : results) {
    const bool needs = result.defined() && result.requires_grad();
    state.results.push_back({needs, describe(result)});
    if (needs) ends.push_back(result.detach());
  }
  Tensors edges, to_save;
  for (const at::Tensor& input : state.inputs) {
    if (input.defined()) to_save.push_back(input);
    if (input.defined() && input.requires_grad()) edges.push_back(input);
  }
  state.again = std::move(again);
  state.inputs.clear();
  state.leaves.clear();
  if (ends.empty()) return attached;
  edges.push_back(at::empty({0}).requires_grad_());
  ends = Checkpoint::apply(at::TensorList(edges), ends, to_save,
                           c10::intrusive_ptr<torch::CustomClassHolder>(state_));
  for (std::size_t i = 0, end = 0; i < attached.size(); ++i) {
    if (state.results[i].needs_gradient) attached[i] = ends[end++];
  }
  return attached;
}

// Notes which parameters fn used. A node that is older than the call belongs to a graph outside, which the
// second run's backward would go through, and free, as if it were its own.
void Runs::State::check_graph(const Tensors& of) {
  std::unordered_set<const Node*> seen;
  std::vector<Node*> open;
  const auto visit = [&](const torch::autograd::Edge& edge) {
    Node* const node = edge.function.get();
    if (node != nullptr && seen.insert(node).second) open.push_back(node);
  };
  std::unordered_set<const at::TensorImpl*> own;
  for (const at::Tensor& leaf : leaves) own.insert(leaf.unsafeGetTensorImpl());
  for (const at::Tensor& result : of) {
    if (result.defined() && result.requires_grad()) visit(torch::autograd::impl::gradient_edge(result));
  }
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      const at::Tensor& variable = leaf->variable;
      if (own.count(variable.unsafeGetTensorImpl()) == 0) {
        captured.emplace_back(variable, version_of(variable));
      }
      continue;
    }
    // Sequence numbers are a thread's own. The cast of a parameter that autocast has kept is made anew.
    const bool older =
        node->sequence_nr() < first_sequence && node->thread_id() == at::RecordFunction::currentThreadId();
    const bool kept_cast = autocast.enabled() && node->name() == "ToCopyBackward0";
    if (older && !kept_cast) {
      throw UsageError(
          kWhere,
          concat("fn uses a tensor with a graph of its own (", node->name(), ") that is not an input"),
          "hand it to fn as an input: core::checkpoint(fn, x, tensor)");
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge);
  }
}

void Runs::State::check_leaves() const {
  for (const auto& [tensor, version] : captured) {
    if (version_of(tensor) == version) continue;
    throw UsageError(
        kWhere, concat("a parameter ", describe(tensor), " that fn uses was changed between its two runs"),
        "step the optimizer after backward");
  }
}

void Runs::State::check_second(const Tensors& second) const {
  if (second.size() != results.size()) {
    throw UsageError(kWhere, concat("fn returned ", results.size(), " tensors, and ", second.size(),
                                    " when it ran again in backward"));
  }
  for (std::size_t i = 0; i < second.size(); ++i) {
    if (!results[i].needs_gradient) continue;
    const std::string text = describe(second[i]);
    if (text == results[i].text && second[i].requires_grad()) continue;
    throw UsageError(
        kWhere,
        concat("result ", i, " of fn was ", results[i].text, ", and when it ran again in backward ", text,
               second[i].defined() && !second[i].requires_grad() ? " without gradient" : ""),
        "an fn that depends on its inputs and on nothing that changes until backward");
  }
}

Tensors Runs::State::backward(const Tensors& saved, const Tensors& gradients) {
  check_leaves();
  Tensors full(defined.size());
  for (std::size_t i = 0, place = 0; i < full.size(); ++i) {
    if (defined[i]) full[i] = saved[place++];
  }
  const Tensors again_leaves = leaves_of(full);
  const ScopedBuffers keep(options.buffers);
  Tensors ends, end_gradients;
  {
    const at::AutoGradMode gradients_on(true);
    const AutocastScope autocast_as_before(autocast);
    const RandomScope random_as_before(random, full);
    const Tensors second = again(again_leaves);
    check_second(second);
    for (std::size_t i = 0, end = 0; i < second.size(); ++i) {
      if (!results[i].needs_gradient) continue;
      const at::Tensor& gradient = gradients[end++];
      if (!gradient.defined()) continue;
      ends.push_back(second[i]);
      end_gradients.push_back(gradient);
    }
  }
  if (!ends.empty()) torch::autograd::backward(ends, end_gradients);
  Tensors result;
  for (std::size_t i = 0; i < again_leaves.size(); ++i) {
    if (requires_grad[i]) result.push_back(again_leaves[i].grad());
  }
  result.resize(result.size() + 1 + 3);  // of the tensor that no input stands for, and of what is no tensor
  return result;
}

namespace {

Tensors Checkpoint::backward(AutogradContext* context, const Tensors& gradients) {
  if (at::GradMode::is_enabled()) {
    throw UsageError(kWhere, "backward with create_graph goes through a recomputed part, which has no graph",
                     "the plain call fn(inputs...) where second derivatives are taken");
  }
  if (!torch::autograd::Engine::get_default_engine().is_checkpoint_valid()) {
    throw UsageError(kWhere,
                     "torch::autograd::grad(), or backward() with `inputs`, goes through a recomputed part, "
                     "whose parameters get their gradients by backward() alone",
                     "loss.backward(), and read the gradients with grad()");
  }
  // Ends the second backward through one graph with LibTorch's message, and a changed input too.
  const Tensors saved = context->get_saved_variables();
  const auto state = context->saved_data["state"].toCapsule();
  return static_cast<Runs::State&>(*state).backward(saved, gradients);
}

}  // namespace
}  // namespace cohort::core::checkpoint_detail
