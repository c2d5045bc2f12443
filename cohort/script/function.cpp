// A call finds its entry by the guards. The entry says: record, replay, verify, or run the function as it is.
// To record with gradients, the function runs on input proxies in a detached graph, while the recorder writes
// its operators down. The results become those of one node, whose first backward is recorded too. A replay
// runs the program's forward, and attaches a node that replays backward. Always: whatever is rejected, the
// caller gets the values, shapes and graph of the plain function. Reasons to stay eager are marked on the
// tape, and the call continues. Surprising: if a result needs a gradient, the recording is not complete
// before its backward.
#include "cohort/script/function.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/graph_walk.h"
#include "cohort/autograd/input_proxies.h"
#include "cohort/autograd/scoped_version_counter.h"
#include "cohort/base/error.h"
#include "cohort/script/internal/execute/replay.h"
#include "cohort/script/internal/passes/backward.h"
#include "cohort/script/internal/record/cache.h"
#include "cohort/script/internal/record/recorder.h"
#include "cohort/script/internal/record/verify.h"

namespace cohort::script {
namespace {

using base::concat;

const autograd::DetachedGraph::Words kWords{.where = "script.function",
                                            .as_input = "hand it over as an input"};

// `slot`: of the result with this number.
Handle handle_of(const Trace& trace, const Tensors& inputs, const Tensors& results, std::size_t number,
                 int slot) {
  const at::Tensor& result = results[number];
  const auto& values = trace.tape.values();
  const Value& value = values[at_slot(slot)];
  const auto is_it = [&](const at::Tensor& other) { return other.is_same(result); };
  // The very handle that came in, or that was captured, goes out: a replay returns it too.
  if (std::any_of(inputs.begin(), inputs.end(), is_it) || is_it(value.tensor)) return {};
  bool is_outside = false;  // its memory
  for (std::size_t base = 0; base < values.size(); ++base) {
    if (values[base].storage != value.storage || values[base].source == Source::kMade) continue;
    is_outside = true;
    const auto as_input = std::find(trace.inputs.begin(), trace.inputs.end(), static_cast<int>(base));
    const at::Tensor& outside = as_input == trace.inputs.end()
                                    ? values[base].tensor
                                    : inputs[static_cast<std::size_t>(as_input - trace.inputs.begin())];
    if (result.is_view() && result._base().is_same(outside) && autograd::can_be_viewed(outside, result)) {
      return {Handle::AliasType::kView, static_cast<int>(base)};
    }
  }
  const auto before = results.begin() + static_cast<std::ptrdiff_t>(number);
  const bool is_first = std::find(trace.outputs.begin(), trace.outputs.end(), slot) == trace.outputs.end();
  if (!is_outside && (is_first || std::any_of(results.begin(), before, is_it))) return {};
  return {Handle::AliasType::kDetached};
}

void find_outputs(Trace& trace, const Tensors& inputs, const Tensors& results) {
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (trace.inputs[i] >= 0 && trace.tape.find(inputs[i]) != trace.inputs[i]) {
      trace.tape.mark_unsupported("an input was given other memory or sizes by no operator (set_data)");
    }
  }
  trace.tape.check_versions();
  for (std::size_t i = 0; i < results.size(); ++i) {
    const at::Tensor& result = results[i];
    const int slot = trace.tape.find_result(result);
    if (slot == kUnknown) trace.tape.mark_unsupported("the function returns a tensor that no operator made");
    if (!at::GradMode::is_enabled() && slot >= 0 && result.grad_fn() != nullptr &&
        trace.tape.values()[at_slot(slot)].source == Source::kMade) {
      trace.tape.mark_unsupported(
          "the function switches gradients on itself, and returns a result that has a graph");
    }
    trace.handles.push_back(slot < 0 ? Handle() : handle_of(trace, inputs, results, i, slot));
    trace.outputs.push_back(slot);
    trace.needs_gradient.push_back(at::GradMode::is_enabled() && autograd::needs_gradient(result));
  }
}

// Cohort's own make zeros of zeros too, as a backward of an operator of ops::define() has to.
bool is_cohorts(const std::string& node) {
  for (const char* module :
       {"CppNode<cohort::ops::", "CppNode<cohort::autograd::", "CppNode<cohort::parallel::"}) {
    if (node.find(module) != std::string::npos) return true;
  }
  return false;
}

// The nodes in the graph of a result that run code of the user's own (torch::autograd::Function), by name.
std::map<const torch::autograd::Node*, std::string> own_nodes_of(const at::Tensor& result) {
  std::map<const torch::autograd::Node*, std::string> own;
  autograd::GraphWalk walk;
  walk.add(result.grad_fn().get());
  while (const torch::autograd::Node* const node = walk.next()) {
    const std::string name = node->name();
    if (name.find("CppNode<") != std::string::npos && !is_cohorts(name)) own.emplace(node, name);
    walk.add_next_nodes(*node);
  }
  return own;
}

// A backward of some results replays with zeros for the gradients of the others. LibTorch's nodes make zeros
// of zeros. A node of the user's own may not (a penalty, a counter), and eager mode would not run it.
void reject_own_nodes_of_some(Trace& trace, const Tensors& results) {
  if (results.size() < 2) return;
  std::optional<std::map<const torch::autograd::Node*, std::string>> of_first;
  for (const at::Tensor& result : results) {
    if (!result.defined() || result.grad_fn() == nullptr) continue;
    const auto own = own_nodes_of(result);
    if (!of_first) of_first = own;
    if (own == *of_first) continue;
    trace.tape.mark_unsupported(
        concat("some of its results, and not others, have a backward of the user's own (",
               own.empty() ? of_first->begin()->second : own.begin()->second, ")"));
    return;
  }
}

// What autograd would have to know of memory that comes from outside, and a node of ours does not tell it.
void reject_effects_under_autograd(Trace& trace) {
  const auto& values = trace.tape.values();
  std::vector<bool> is_outside(trace.tape.num_storages());
  for (const Value& value : values) {
    if (value.source == Source::kMade) continue;
    is_outside[value.storage] = true;
    if (value.source == Source::kInput && trace.tape.is_written(value.storage)) {
      trace.tape.mark_unsupported(
          concat("an input ", value.layout.str(), " is changed in place with gradients on"));
    }
    if (value.source == Source::kCaptured && value.tensor.grad_fn() != nullptr) {
      trace.tape.mark_unsupported(
          concat("a captured tensor ", value.layout.str(), " has a graph of its own"));
    }
  }
  for (std::size_t i = 0; i < trace.outputs.size(); ++i) {
    const int slot = trace.outputs[i];
    if (slot >= 0 && trace.needs_gradient[i] && is_outside[values[at_slot(slot)].storage]) {
      trace.tape.mark_unsupported(
          concat("result ", i, " is an input, a parameter, or a view of one, with gradients on"));
    }
  }
}

// Note [Gradients that do not fit]
// A backward that was recorded with a gradient whose elements share memory (that of sum() is one number,
// expanded) cannot be replayed with one whose elements do not: there is no tensor of the recorded strides
// that holds it. Nor can it begin at a result that had no gradient when it was recorded. Then the function
// runs once more, from the inputs and generators that forward had, and nothing of that run stays but its
// gradients. The program ends: later ones are recorded with gradients that any other can be copied to, and
// with zeros for those that are missing.
// Where zeros stand for a gradient that is missing, 0 * inf is NaN: gradients that come out finite are right,
// and for others the function runs once more. It is the same for a sparse gradient that is spread out. The
// first that comes to a program of one result, whose replays keep no inputs, is an error there.
// Functions that may not run again (their forward writes to what it may read, or ran under autocast, which
// has ended when backward runs) are recorded in that way from the beginning, and keep what zeros give, as
// torch::autograd::Function does.
bool may_run_again(const Trace& trace, const Environment& environment) {
  if (environment.autocast[0] || environment.autocast[1]) return false;
  return std::ranges::none_of(trace.tape.values(), [&](const Value& value) {
    return value.source != Source::kMade && trace.tape.is_written(value.storage);
  });
}

bool needs_rerun(const Program& program) {
  const Trace& trace = program.trace();
  return trace.may_run_again &&
         (trace.grad_outputs_overlap || trace.grad_outputs.size() > 1 || program.has_met_zeros());
}

Rerun make_rerun(std::shared_ptr<const Function::Run> run, Tensors inputs,
                 std::shared_ptr<const Program> program, std::shared_ptr<CacheEntry> entry,
                 std::shared_ptr<GradOutputWants> wants) {
  const auto generators = std::make_shared<const GeneratorStates>(program->trace().tape);
  Tensors read = inputs;
  for (const Value& value : program->trace().tape.values()) {
    if (value.source == Source::kCaptured) read.push_back(value.tensor);
  }
  const auto versions_of = [](const Tensors& tensors) {
    std::vector<std::uint32_t> found;
    for (const at::Tensor& tensor : tensors) found.push_back(autograd::version_of(tensor));
    return found;
  };
  return [=, versions = versions_of(read)](const Tensors& grad_outputs, Misfit why) {
    if (versions_of(read) != versions || !entry->modules_hold()) {
      const char* const reason =
          why == Misfit::kLayout       ? "a gradient has a layout that the recorded backward cannot take"
          : why == Misfit::kWasMissing ? "a backward begins at other results than the recorded one"
                                       : "a backward begins at some of the results, whose gradients are not "
                                         "finite, or what it needs was changed in place";
      throw UsageError("script.backward",
                       concat(reason,
                              ", and the function cannot run again: an input, a parameter, a buffer or a "
                              "module's mode was changed since forward"),
                       "the change after backward");
    }
    GivenTensors given(*program, *program->borrow(inputs));
    const at::AutoGradMode with_graph(true);
    const GeneratorStates::Again draws_again(*generators);
    autograd::DetachedGraph graph(inputs, kWords);
    autograd::InputProxies input_proxies("script.function", inputs, graph.leaves());
    Tensors results = (*run)(input_proxies.tensors());
    input_proxies.observe(results);
    results = graph.end(results);
    const at::NoGradGuard no_grad;
    Tensors found = graph.backward(grad_outputs, /*keep_graph=*/false);
    // What the function wrote was written by forward already.
    given.restore();
    // Such gradients will come again, so the next recordings are made for them.
    if (why == Misfit::kLayout) wants->plain = true;
    if (why == Misfit::kWasMissing) wants->all = true;
    if (why != Misfit::kZeros) entry->retire();
    return found;
  };
}

}  // namespace

Function::Function(Run run, ScriptOptions options)
    : run_(std::make_shared<const Run>(std::move(run))),
      cache_(std::make_unique<Cache>(options.name(), options)),
      wants_(std::make_shared<GradOutputWants>()) {}

Function::~Function() = default;

Tensors Function::operator()(const Tensors& inputs) {
  const auto entry = find(inputs);
  return entry == nullptr ? (*run_)(inputs) : call(inputs, entry);
}

std::string Function::explain() const {
  return cache_->explain();
}

void Function::clear() {
  cache_->clear();
}

std::shared_ptr<CacheEntry> Function::find(std::span<const at::Tensor> inputs) {
  if (Recording::is_active()) return nullptr;  // a part of what is being recorded
  if (std::ranges::any_of(inputs, has_tangent)) return nullptr;
  auto entry = cache_->find(inputs);
  return entry == nullptr || entry->runs_body() ? nullptr : entry;
}

Function::Output Function::call(std::span<const at::Tensor> inputs,
                                const std::shared_ptr<CacheEntry>& entry) {
  const auto& program = entry->program();
  if (program != nullptr && !entry->is_verification_due(inputs)) {
    Rerun rerun;
    if (needs_rerun(*program)) {
      rerun = make_rerun(run_, Tensors(inputs.begin(), inputs.end()), program, entry, wants_);
    }
    return {replay(inputs, program, std::move(rerun)), program->trace().structure};
  }
  const Tensors tensors(inputs.begin(), inputs.end());
  // A parameter or buffer is an input here: what is written to one of the two must be seen in the other.
  if (entry->has_module_memory(inputs)) return (*run_)(tensors);
  if (program != nullptr) return record(tensors, entry, program);
  return entry->start_recording() ? record(tensors, entry, nullptr) : (*run_)(tensors);
}

Function::Output Function::record(const Tensors& inputs, const std::shared_ptr<CacheEntry>& entry,
                                  const std::shared_ptr<const Program>& verified) {
  // The program runs first and its effects are undone, so what remains is what the function does.
  const auto verify = verified == nullptr ? nullptr : std::make_shared<Verification>(verified, inputs);
  const bool is_verification = verify != nullptr;
  auto trace = std::make_shared<Trace>();
  const auto finish = [&] {
    trace->split = trace->tape.calls().size();
    is_verification ? entry->verify(std::move(*trace)) : entry->add_trace(std::move(*trace));
  };
  Output results;
  const auto compare = [&] {
    const std::string difference = verify->difference(results);
    trace->tape.check_versions();
    entry->verify_forward(*trace);
    entry->compare(difference, verify->is_alone(trace->tape));
  };
  entry->begin(*trace, inputs);
  if (!at::GradMode::is_enabled()) {
    {
      const Recording recording(trace->tape);
      results = (*run_)(inputs);
    }
    trace->structure = results.structure;
    if (is_verification) compare();
    find_outputs(*trace, inputs, results);
    finish();
    return results;
  }
  using autograd::DetachedGraph;
  auto graph = std::make_shared<DetachedGraph>(inputs, kWords, DetachedGraph::ForeignBackward::kContinues);
  const Tensors leaves = graph->leaves();
  autograd::InputProxies input_proxies("script.function", inputs, leaves);
  {
    const Recording recording(trace->tape);
    results = (*run_)(input_proxies.tensors());
  }
  trace->structure = results.structure;
  input_proxies.observe(results);
  trace->views = input_proxies.output_aliases();
  if (is_verification) compare();
  find_outputs(*trace, input_proxies.tensors(), results);
  reject_effects_under_autograd(*trace);
  reject_own_nodes_of_some(*trace, results);
  if (const std::string reason = unrecordable_within(results); !reason.empty())
    trace->tape.mark_unsupported(reason);
  if (trace->views.misses_one_of(results)) {
    trace->tape.mark_unsupported("results share memory, and are no views of one tensor by as_strided()");
  }
  if (const std::string node = graph->outside(results); !node.empty()) {
    trace->tape.mark_unsupported(concat("the function uses a tensor with a graph of its own (", node, ")"));
  }
  if (!trace->tape.unsupported_reason().empty()) {  // then the call is one without a cut
    finish();
    input_proxies.write_back(results);
    for (at::Tensor& result : results) {
      const auto leaf =
          std::ranges::find_if(leaves, [&](const at::Tensor& each) { return each.is_same(result); });
      if (result.defined() && leaf != leaves.end()) {
        result = inputs[static_cast<std::size_t>(leaf - leaves.begin())];
      }
    }
    return results;
  }
  const auto reached = leaves_reached_from(results);
  results = Output(graph->end(results), results.structure);
  // No result needs a gradient, so no backward will end this recording.
  if (reached.empty()) {
    finish();
    input_proxies.write_back(results);
    return results;
  }
  trace->leaves = graph->captured();
  const auto add_reached = [&](const at::Tensor& leaf) {
    auto& from = trace->reached_from.emplace_back();
    for (const auto& each : reached) from.push_back(each.count(leaf.unsafeGetTensorImpl()) != 0);
  };
  for (const at::Tensor& leaf : leaves) {
    if (autograd::needs_gradient(leaf)) add_reached(leaf);
  }
  for (const at::Tensor& leaf : trace->leaves) add_reached(leaf);
  trace->reach_differs = !std::ranges::all_of(trace->reached_from, [](const std::vector<bool>& from) {
    return std::ranges::all_of(from, std::identity());
  });
  trace->may_run_again = may_run_again(*trace, entry->environment());
  // Shares ownership of wants_, since a program in a graph may outlive the Function.
  trace->has_met_zeros = std::shared_ptr<std::atomic<bool>>(wants_, &wants_->zeros);
  attach_recording({graph, trace, entry, cache_->options().gradient_chunk_bytes(), verify, wants_}, inputs,
                   results);
  input_proxies.write_back(results);
  return results;
}

}  // namespace cohort::script
