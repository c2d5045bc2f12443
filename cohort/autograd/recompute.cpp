// The first run makes a graph, drops it, and gives the results to one node that saves the inputs. In backward
// that node runs fn again on the saved inputs, and goes back through the graph of this second run. Always:
// the parameters that fn uses are inputs of the node, and their gradients are its results. So they are added
// up, and their hooks run, in the caller's graph, and never within the second run. What a run can change is
// set as it was in the first run: random numbers, autocast, buffers. Results and parameters are compared
// between the runs.
#include "cohort/autograd/recompute.h"

#include <ATen/autocast_mode.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/zeros_like.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/internal/recompute_node.h"
#include "cohort/autograd/output_aliases.h"
#include "cohort/autograd/run_state.h"
#include "cohort/autograd/scoped_version_counter.h"
#include "cohort/base/error.h"
#include "cohort/base/log.h"
#include "cohort/core/generator_states.h"

namespace cohort::autograd {
namespace {

std::atomic<std::unique_ptr<RunState> (*)()> take_run_state{nullptr};

}  // namespace

bool set_run_state(std::unique_ptr<RunState> (*take)()) {
  take_run_state = take;
  return true;
}

}  // namespace cohort::autograd

namespace cohort::autograd::recompute_detail {

// Note [Two runs with gradients on]
// The first run could do without a graph. It makes one all the same, and drops it at once:
//  - both runs take the same kernels, which for some operators depends on whether gradients are on;
//  - autocast keeps its casts of parameters for the rest of its scope; those made with gradients off would
//    later be used where gradients are on, and cut the parameters off;
//  - which results need a gradient, which parameters are used, and whether fn reaches a graph that is not an
//    input's, stands in the graph and nowhere else.
// The most memory that a step needs does not grow: backward holds one run's graph too.
namespace {

constexpr const char* kWhere = "autograd.recompute";
constexpr DetachedGraph::Words kWords{
    .where = kWhere,
    .as_input = "hand it to fn as an input: autograd::recompute(fn, x, tensor)",
    .between = "its two runs"};

// Note [Random numbers of the second run]
// On the CPU the second run draws from copies of the first run's generators, through a RandomScope.
// LibTorch's global generator is not touched: other threads draw from it meanwhile, or run a second time
// themselves. Operators on a GPU cannot be given a generator. There the GPU's own one is set for the second
// run, as in PyTorch.
// Copies do not do for an fn that seeds the global generator, or draws from it on a thread of its own or
// without an operator. Then the copies end elsewhere than the generators did after the first run. Such an fn
// runs once more, with the global generator itself set for that run, as PyTorch always does.

std::vector<c10::Device> devices_of(const Tensors& inputs) {
  std::vector<c10::Device> devices;
  for (const at::Tensor& input : inputs) {
    if (input.defined()) devices.push_back(input.device());
  }
  return devices;
}

using After = core::GeneratorStates::After;

bool same(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() == b.defined() && (!a.defined() || at::equal(a, b));
}

class AutocastState {
 public:
  AutocastState() : cache_(at::autocast::is_autocast_cache_enabled()) {
    for (std::size_t i = 0; i < kDevices.size(); ++i) {
      enabled_[i] = at::autocast::is_autocast_enabled(kDevices[i]);
      dtypes_[i] = at::autocast::get_autocast_dtype(kDevices[i]);
    }
  }
  bool enabled() const { return enabled_[0] || enabled_[1]; }
  bool caches() const { return cache_; }
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

// Autocast as it was in the first run, with casts of its own, until the end of the scope. A first run without
// the cache has a second run without it, which leaves the cache to the thread that uses it.
class AutocastScope {
 public:
  explicit AutocastScope(const AutocastState& state)
      : used_(state.enabled() || before_.enabled()), clears_(state.caches()) {
    if (!used_) return;
    if (clears_) at::autocast::clear_cache();
    at::autocast::increment_nesting();
    state.restore();
  }
  ~AutocastScope() {
    if (!used_) return;
    if (clears_) at::autocast::clear_cache();
    at::autocast::decrement_nesting();
    before_.restore();
  }
  AutocastScope(const AutocastScope&) = delete;
  AutocastScope& operator=(const AutocastScope&) = delete;

 private:
  AutocastState before_;
  bool used_, clears_;
};

// Note [Buffers of second runs]
// What the second run changes and must not. Several may run at once, on one module: a value that one of them
// finds may be half another's. So buffers keep the value that they had when none ran, and get it back when
// none runs any more.
class ScopedBuffers {
 public:
  // Delegates, so that the destructor undoes what was counted before a clone() threw.
  explicit ScopedBuffers(const Tensors& buffers) : ScopedBuffers() {
    const std::lock_guard lock(mutex());
    buffers_.reserve(buffers.size());
    for (const at::Tensor& buffer : buffers) {
      if (!buffer.defined()) continue;
      const auto* const key = buffer.unsafeGetTensorImpl();
      if (all().count(key) == 0) all().emplace(key, Saved{buffer.detach().clone()});
      ++all().at(key).num_runs;
      buffers_.push_back(buffer);
    }
  }
  ~ScopedBuffers() {
    const at::NoGradGuard no_grad;
    const std::lock_guard lock(mutex());
    for (const at::Tensor& buffer : buffers_) {
      const auto found = all().find(buffer.unsafeGetTensorImpl());
      if (--found->second.num_runs > 0) continue;
      // variable_data() has a version of its own: a batch norm elsewhere has saved these tensors for
      // backward.
      buffer.variable_data().copy_(found->second.value);
      all().erase(found);
    }
  }
  ScopedBuffers(const ScopedBuffers&) = delete;
  ScopedBuffers& operator=(const ScopedBuffers&) = delete;

 private:
  ScopedBuffers() = default;

  struct Saved {
    at::Tensor value;
    int num_runs = 0;
  };
  static std::mutex& mutex() {
    static std::mutex& instance = *new std::mutex;
    return instance;
  }
  static std::unordered_map<const at::TensorImpl*, Saved>& all() {  // under mutex()
    static auto& instance = *new std::unordered_map<const at::TensorImpl*, Saved>;
    return instance;
  }

  Tensors buffers_;
};

std::string describe(const at::Tensor& tensor) {
  return tensor.defined() ? base::concat(tensor.scalar_type(), tensor.sizes()) : "undefined";
}

}  // namespace

struct Runs::State : SecondRun {
  struct Result {
    bool needs_gradient = false;
    std::string text;
  };

  State(RecomputeOptions with, Tensors of)
      : options(std::move(with)),
        inputs(std::move(of)),
        first(inputs, kWords),
        handed(non_leaf_proxies(first.leaves())) {
    if (const auto take = take_run_state.load()) of_thread = take();
    for (const at::Tensor& input : inputs) {
      versions.push_back(version_of(input));
      requires_grad.push_back(input.defined() && input.requires_grad());
      defined.push_back(input.defined());
    }
    if (options.preserve_rng_state) {
      generators = core::GeneratorStates(core::generators_of_gpus(devices_of(inputs)));
    }
  }

  void check_second(const Tensors& again) const;
  std::vector<std::size_t> places_of(const Tensors& captured_again) const;
  // The graph of a second run.
  struct Graph {
    DetachedGraph part;
    Tensors roots = {};  // besides the results: gradients at which its backward begins too
  };
  std::optional<Graph> run_again(const Tensors& full, core::GeneratorStates::Global global,
                                 const core::GlobalGeneratorAsFound* found);
  bool draws_elsewhere(const After& before, const After& after,
                       const core::GlobalGeneratorAsFound& found) const;
  std::size_t num_edges() const override {
    return static_cast<std::size_t>(std::count(requires_grad.begin(), requires_grad.end(), true)) +
           first.captured().size();
  }
  Tensors backward(const Tensors& saved, const Tensors& gradients, const std::vector<bool>& wanted) override;

  RecomputeOptions options;
  Tensors inputs;       // of the first run; empty after it
  DetachedGraph first;  // its graph, dropped at once; the parameters that fn used are inputs of the node
  Tensors handed;  // to the first run, where an operator in place gets as far as attach(), which names it
  std::vector<bool> defined, requires_grad;
  std::vector<std::uint32_t> versions;
  core::GeneratorStates generators;  // before the first run
  After after_first;
  AutocastState autocast;
  std::unique_ptr<RunState> of_thread;  // null: no module has any
  Run again;
  std::vector<Result> results;
};

Runs::Runs(RecomputeOptions options, Tensors inputs)
    : state_(c10::make_intrusive<State>(std::move(options), std::move(inputs))) {
  if (state_->of_thread) first_run_ = state_->of_thread->begin_first_run(state_->handed);
}
Runs::~Runs() = default;

const Tensors& Runs::leaves() const {
  return state_->handed;
}

Tensors Runs::attach(const Tensors& results, Run again) {
  State& state = *state_;
  if (state.options.preserve_rng_state) state.after_first = After::now();
  // Their graph goes with that of this run. The parameters that it leads to are inputs of the node.
  const Tensors roots = first_run_ ? first_run_->end() : Tensors();
  first_run_.reset();
  for (std::size_t i = 0; i < state.inputs.size(); ++i) {
    if (version_of(state.inputs[i]) == state.versions[i]) continue;
    throw UsageError(kWhere,
                     base::concat("fn changed its input ", i, " ", describe(state.inputs[i]),
                                  " in place, which its second run would start from"),
                     "the operator that does not work in place");
  }
  // Results that are inputs, or views of them, are just that in the end: who writes to either changes both.
  struct OfInput {
    std::size_t result;
    at::Tensor input;
    bool is_input;
  };
  std::vector<OfInput> of_inputs;
  for (std::size_t k = 0; k < results.size(); ++k) {
    for (std::size_t i = 0; i < state.inputs.size(); ++i) {
      if (!is_writable_view(results[k], state.handed[i])) continue;
      of_inputs.push_back({k, state.inputs[i], results[k].is_same(state.handed[i])});
    }
  }
  OutputAliases views;
  Tensors attached = results, ends;
  views.detach(attached, state.handed);
  const std::size_t num_attached = attached.size();  // with what results are views of
  attached.insert(attached.end(), roots.begin(), roots.end());
  attached = state.first.end(attached);
  attached.resize(num_attached);
  for (std::size_t i = 0; i < attached.size(); ++i) {
    const bool needs = state.first.needs_gradient()[i];
    state.results.push_back({needs, describe(attached[i])});
    if (needs) ends.push_back(attached[i]);
  }
  state.first.release();
  Tensors edges, to_save;
  for (const at::Tensor& input : state.inputs) {
    if (input.defined()) to_save.push_back(input);
    if (input.defined() && input.requires_grad()) edges.push_back(input);
  }
  state.again = std::move(again);
  state.inputs.clear();
  state.handed.clear();
  if (!ends.empty()) {
    for (const at::Tensor& tensor : state.first.captured()) edges.push_back(tensor);
    ends = attach_recompute_node(edges, ends, to_save, state_);
  }
  for (std::size_t i = 0, end = 0; i < attached.size(); ++i) {
    if (state.results[i].needs_gradient) attached[i] = ends[end++];
  }
  views.restore(attached);
  for (const auto& [result, input, is_input] : of_inputs) {
    attached[result] = is_input ? input : view_like(input, attached[result]);
  }
  return attached;
}

void Runs::State::check_second(const Tensors& second) const {
  if (second.size() != results.size()) {
    throw UsageError(kWhere, base::concat("fn returned ", results.size(), " tensors, and ", second.size(),
                                          " when it ran again in backward"));
  }
  for (std::size_t i = 0; i < second.size(); ++i) {
    if (!results[i].needs_gradient) continue;
    const std::string text = describe(second[i]);
    if (text == results[i].text && second[i].requires_grad()) continue;
    throw UsageError(
        kWhere,
        base::concat("result ", i, " of fn was ", results[i].text, ", and when it ran again in backward ",
                     text, second[i].defined() && !second[i].requires_grad() ? " without gradient" : ""),
        "an fn that depends on its inputs and on nothing that changes until backward");
  }
}

// Where the parameters of the second run stand among those of the first.
std::vector<std::size_t> Runs::State::places_of(const Tensors& captured_again) const {
  std::unordered_map<const at::TensorImpl*, std::size_t> known;
  for (std::size_t i = 0; i < first.captured().size(); ++i) {
    known[first.captured()[i].unsafeGetTensorImpl()] = i;
  }
  std::vector<std::size_t> places;
  for (const at::Tensor& tensor : captured_again) {
    const auto found = known.find(tensor.unsafeGetTensorImpl());
    if (found == known.end()) {
      throw UsageError(kWhere,
                       base::concat("fn uses a parameter ", describe(tensor),
                                    " when it runs again in backward that it did not use before"),
                       "an fn that depends on its inputs and on nothing that changes until backward");
    }
    places.push_back(found->second);
  }
  // Its gradient would be lost without a word.
  for (std::size_t i = 0; i < first.captured().size(); ++i) {
    if (std::ranges::find(places, i) != places.end()) continue;
    throw UsageError(kWhere,
                     base::concat("fn does not use a parameter ", describe(first.captured()[i]),
                                  " when it runs again in backward that it used before"),
                     "an fn that depends on its inputs and on nothing that changes until backward");
  }
  return places;
}

// Whether a second run on copies of the generators drew something else than the first run, or may have.
bool Runs::State::draws_elsewhere(const After& before, const After& after,
                                  const core::GlobalGeneratorAsFound& found) const {
  // An fn that seeds at its end leads to the same state whatever it drew before.
  if (!same(after.scope, after_first.scope) || (found.is_seeded() && !found.holds())) return true;
  if (same(after.global, after_first.global)) return false;
  // Not if other threads alone drew from the global generator in the first run.
  return !same(before.global, after.global) || found.is_seeded() ||
         (!after.scope.defined() && (!found.holds() || found.stands_at(after_first.global)));
}

// The graph of a second run; none where fn needs the global generator itself to draw what it drew.
std::optional<Runs::State::Graph> Runs::State::run_again(const Tensors& full,
                                                         core::GeneratorStates::Global global,
                                                         const core::GlobalGeneratorAsFound* found) {
  std::optional<Graph> graph(Graph{DetachedGraph(full)});
  DetachedGraph& part = graph->part;
  const at::AutoGradMode gradients_on(true);
  const AutocastScope autocast_as_before(autocast);
  const core::GeneratorStates::Again draws_again(generators, global);
  const std::unique_ptr<RunScope> scope = of_thread ? of_thread->begin_second_run(part.leaves()) : nullptr;
  const After before = draws_again.after();
  Tensors kept = again(part.leaves());
  const After after = draws_again.after();
  if (global == core::GeneratorStates::Global::kCopy) {
    if (draws_elsewhere(before, after, *found)) return std::nullopt;
  } else if (!same(after.scope, after_first.scope) || !same(after.global, after_first.global)) {
    base::warn_once(
        kWhere, base::concat(kWhere,
                             ": fn drew other random numbers when it ran again in backward. It depends on "
                             "what has changed, or other threads draw from its generator. Try: "
                             "core::RandomScope around the call"));
  }
  OutputAliases().detach(kept, part.leaves());
  check_second(kept);
  // Only those that had a gradient have one to go back from.
  for (std::size_t i = 0; i < kept.size(); ++i) {
    if (!results[i].needs_gradient) kept[i].reset();
  }
  if (scope) {
    for (at::Tensor& root : scope->end()) {
      graph->roots.push_back(at::zeros_like(root.detach()));
      kept.push_back(std::move(root));
    }
  }
  part.end(kept);
  return graph;
}

// `wanted` and what is returned: the inputs that need a gradient, then the parameters.
Tensors Runs::State::backward(const Tensors& saved, const Tensors& gradients,
                              const std::vector<bool>& wanted) {
  if (std::ranges::none_of(gradients, [](const at::Tensor& gradient) { return gradient.defined(); })) {
    return Tensors(num_edges());  // nothing follows from no gradient
  }
  first.check_captured();
  Tensors full(defined.size());
  for (std::size_t i = 0, place = 0; i < full.size(); ++i) {
    // An input that was made a leaf since, or lost its gradient, is still what it was.
    if (defined[i]) full[i] = saved[place++].detach().requires_grad_(requires_grad[i]);
  }
  const ScopedBuffers keep(options.buffers);
  std::optional<Graph> graph;
  if (!options.preserve_rng_state) {
    graph = run_again(full, core::GeneratorStates::Global::kItself, nullptr);
  } else {
    core::GlobalGeneratorAsFound found;
    graph = run_again(full, core::GeneratorStates::Global::kCopy, &found);
    if (!graph) {
      found.restore_at_end();
      graph = run_again(full, core::GeneratorStates::Global::kItself, nullptr);
    }
  }
  const std::vector<std::size_t> places = places_of(graph->part.captured());
  std::size_t num_inputs = 0;
  std::vector<bool> wanted_of_part(full.size());
  for (std::size_t i = 0; i < full.size(); ++i) {
    if (requires_grad[i]) wanted_of_part[i] = wanted[num_inputs++];
  }
  for (const std::size_t place : places) wanted_of_part.push_back(wanted[num_inputs + place]);
  Tensors of_results = gradients;
  of_results.insert(of_results.end(), graph->roots.begin(), graph->roots.end());
  Tensors found = graph->part.backward(of_results, /*keep_graph=*/false, wanted_of_part);
  Tensors result(num_inputs + first.captured().size());
  for (std::size_t i = 0, place = 0; i < full.size(); ++i) {
    if (requires_grad[i]) result[place++] = std::move(found[i]);
  }
  for (std::size_t i = 0; i < places.size(); ++i) {
    result[num_inputs + places[i]] = std::move(found[full.size() + i]);
  }
  return result;
}

}  // namespace cohort::autograd::recompute_detail
