// Nodes that replay the backward of a program. ReplayedBackward keeps what backward reads, with its version.
// When gradients come, it compares versions, lays the gradients out as recorded, and runs the first segment.
// Further segments are nodes of their own: Note [A chain of nodes]. The function itself runs once more
// (`rerun`) where a gradient does not fit, or where zeros for a missing one give inf or NaN. Always: backward
// uses values as forward left them, or throws. Surprising: the last backward moves what is kept into its
// frame, so memory goes value by value, as in eager mode.
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <functional>

#include "cohort/autograd/scoped_version_counter.h"
#include "cohort/autograd/tensor_box.h"
#include "cohort/base/error.h"
#include "cohort/core/torch_compat.h"
#include "cohort/script/internal/passes/backward.h"
#include "cohort/script/internal/passes/gradients.h"
#include "cohort/script/internal/passes/joint.h"

namespace cohort::script {
namespace {

using base::concat;
using torch::autograd::Edge;
using torch::autograd::Node;

constexpr const char* kWhereReplayed = "script.backward";

// Note [A chain of nodes]
// Autograd takes a node's gradients when the node is done. So that those which are final early are taken
// early, with the hooks of their parameters, the backward of a program is a chain of nodes, one for each
// segment. The next one is ready as soon as the one before is done, but what accumulates gradients goes first
// in autograd's queue. A run belongs to one backward: it travels from node to node in a tensor without
// elements, and ends with it.
struct BackwardRun {
  // What backward reads and a hook may have changed since forward: parameters, as a rule.
  struct Watched {
    c10::VariableVersion counter;
    std::uint32_t version;
    int slot;
  };
  std::shared_ptr<const Program> program;
  std::vector<bool> is_given;  // grad_outputs
  std::unique_ptr<Frame> frame = nullptr;
  Tensors found = {};  // all gradients, where the function ran again instead
  std::vector<Watched> watched = {};
  // Runs the function again, for where zeros stand for grad_outputs: Note [Gradients that do not fit]
  std::function<Tensors()> again = nullptr;
};

[[noreturn]] void throw_changed(const std::string& what) {
  throw UsageError(kWhereReplayed,
                   concat("a tensor ", what, " that backward needs was changed in place since forward"),
                   "the operator that does not work in place, and the optimizer's step after backward");
}

[[noreturn]] void throw_filled() {
  throw UsageError(kWhereReplayed,
                   "a sparse gradient, or zeros without memory, came to a program that had met none, and "
                   "gradients computed from it are not finite",
                   "the step once more: from now on the function runs again where that happens");
}

// Hooks of the gradients that went before may have stepped a parameter that a segment still reads.
void check_watched(const BackwardRun& run, std::size_t first_call) {
  for (const BackwardRun::Watched& each : run.watched) {
    if (each.counter.current_version() == each.version) continue;
    if (run.program->last_read_by_backward(each.slot) < first_call) continue;
    throw_changed(run.program->trace().tape.values()[at_slot(each.slot)].layout.str());
  }
}

// Where the backward begins.
c10::Device device_of(const Trace& trace) {
  for (const int slot : trace.grad_outputs) {
    if (slot >= 0) return trace.tape.values()[at_slot(slot)].layout.device;
  }
  return c10::kCPU;
}

// Runs a segment, and returns the gradients that are final after it.
Tensors run_segment(BackwardRun& run, std::size_t number) {
  const Program& program = *run.program;
  const Trace& trace = program.trace();
  const Segment& segment = trace.segments[number];
  // The function ran again and all gradients are there: each segment hands on its own.
  if (run.frame == nullptr) {
    Tensors found;
    for (const std::size_t i : segment.gradients) found.push_back(std::move(run.found[i]));
    return found;
  }
  const std::size_t first_call = number == 0 ? trace.split : trace.segments[number - 1].end;
  if (number > 0) check_watched(run, first_call);
  program.backward(*run.frame, first_call, segment.end);
  Tensors found;
  std::vector<int> slots;
  for (const std::size_t i : segment.gradients) {
    const int slot = trace.gradients[i];
    const bool is_there = slot != kUndefined && is_reached(trace.reached_from[i], run.is_given);
    found.push_back(is_there ? run.frame->values[at_slot(slot)] : at::Tensor());
    slots.push_back(slot);
  }
  // Gradients of earlier segments were finite, hence right. The others come from the second run.
  if (run.again != nullptr && !all_finite(found)) {
    run.frame.reset();
    run.found = run.again();
    return run_segment(run, number);
  }
  if (number + 1 == trace.segments.size()) {
    program.bump_versions(*run.frame, Phase::kBackward);
    program.release(*run.frame, slots);
    program.give_back(std::move(run.frame));
  } else {
    program.release(*run.frame, slots);
  }
  return found;
}

class ReplayedBackward : public Node {
 public:
  struct Kept {
    at::Tensor tensor;
    std::uint32_t version;
    int slot;
    bool is_captured = false;  // in every frame
    bool is_written = false;   // by backward: each run but the last gets a copy
  };
  std::shared_ptr<const Program> program;
  std::vector<Kept> kept;
  Rerun rerun;
  std::vector<std::size_t> places;  // of gradients, among inputs and captured tensors
  bool is_whole = false;            // no other node runs the segments after the first

  Tensors apply(Tensors&& gradients) override;
  std::string name() const override { return "cohort::script::ReplayedBackward"; }
  void will_release_variables() override { is_last_ = true; }
  void release_variables() override {
    kept.clear();
    rerun = nullptr;
    is_released_ = true;
  }

 private:
  void check_unreleased() const;
  const Kept* first_changed() const;
  at::Tensor grad_output(at::Tensor gradient, int slot) const;
  Misfit misfit_of(const Tensors& gradients) const;
  Tensors begin(std::unique_ptr<BackwardRun> run);

  bool is_last_ = false;
  bool is_released_ = false;
};

void ReplayedBackward::check_unreleased() const {
  if (is_released_) {
    throw UsageError(kWhereReplayed,
                     "a second backward goes through a scripted function whose values have been freed",
                     "backward() with retain_graph the first time");
  }
}

const ReplayedBackward::Kept* ReplayedBackward::first_changed() const {
  const auto found = std::ranges::find_if(
      kept, [](const Kept& each) { return autograd::version_of(each.tensor) != each.version; });
  return found == kept.end() ? nullptr : &*found;
}

// What the recording started from: a gradient of these strides, zeros where there is none.
at::Tensor ReplayedBackward::grad_output(at::Tensor gradient, int slot) const {
  const Layout& layout = program->trace().tape.values()[at_slot(slot)].layout;
  if (gradient.defined() && gradient.strides() == layout.strides && gradient.scalar_type() == layout.dtype) {
    return gradient;
  }
  const auto options = at::TensorOptions().dtype(layout.dtype).device(layout.device);
  // zero_() rejects elements that share memory, so the zeros are made first and laid out then.
  if (!gradient.defined() && layout.may_overlap()) {
    std::int64_t extent = 1;
    for (std::size_t i = 0; i < layout.sizes.size(); ++i) extent += (layout.sizes[i] - 1) * layout.strides[i];
    return at::zeros({extent}, options).as_strided(layout.sizes, layout.strides);
  }
  at::Tensor fitted = at::empty_strided(layout.sizes, layout.strides, options);
  return gradient.defined() ? fitted.copy_(gradient) : fitted.zero_();
}

Misfit ReplayedBackward::misfit_of(const Tensors& gradients) const {
  if (rerun == nullptr) return Misfit::kNone;
  const Trace& trace = program->trace();
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const int slot = trace.grad_outputs[i];
    if (gradients[i].defined() && slot == kUndefined) return Misfit::kWasMissing;
    if (!trace.grad_outputs_overlap || !gradients[i].defined()) continue;
    const Layout& layout = trace.tape.values()[at_slot(slot)].layout;
    if (layout.may_overlap() && gradients[i].strides() != layout.strides) return Misfit::kLayout;
  }
  return Misfit::kNone;
}

bool misses_one(const std::vector<bool>& is_given, const std::vector<int>& grad_outputs) {
  for (std::size_t i = 0; i < grad_outputs.size(); ++i) {
    if (!is_given[i] && grad_outputs[i] != kUndefined) return true;
  }
  return false;
}

Tensors at_places(const Tensors& all, const std::vector<std::size_t>& places) {
  Tensors found;
  for (const std::size_t place : places) found.push_back(all.at(place));
  return found;
}

Tensors ReplayedBackward::apply(Tensors&& gradients) {
  check_no_graph("a scripted function");
  check_unreleased();
  const Trace& trace = program->trace();
  const bool is_filled = has_implicit_zeros(gradients);
  // A second run of the function takes sparse gradients as they came.
  const Tensors as_given = is_filled ? gradients : Tensors();
  if (is_filled) program->meet_zeros();
  for (at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient = materialized(gradient);
  }
  auto run = std::make_unique<BackwardRun>(BackwardRun{.program = program, .is_given = defined(gradients)});
  if (is_none(run->is_given)) {
    run->found.resize(places.size());
    return begin(std::move(run));
  }
  const bool has_zeros = rerun != nullptr && (is_filled || misses_one(run->is_given, trace.grad_outputs));
  Misfit why = misfit_of(gradients);
  if (why == Misfit::kNone && has_zeros && first_changed() != nullptr) why = Misfit::kZeros;
  const Tensors& given = is_filled ? as_given : gradients;
  if (why != Misfit::kNone) {
    run->found = at_places(rerun(given, why), places);
    return begin(std::move(run));
  }
  if (const Kept* changed = first_changed()) throw_changed(Layout::of(changed->tensor).str());
  if (has_zeros) {
    run->again = [given, rerun = rerun, places = places] {
      return at_places(rerun(given, Misfit::kZeros), places);
    };
  } else if (is_filled && trace.may_run_again) {
    run->again = []() -> Tensors { throw_filled(); };
  }
  // Only between the nodes of a chain do hooks run that may change what backward still reads.
  if (trace.segments.size() > 1 && !is_whole) {
    for (const Kept& each : kept) {
      if (each.tensor.is_inference()) continue;
      run->watched.push_back({each.tensor.unsafeGetTensorImpl()->version_counter(), each.version, each.slot});
    }
  }
  run->frame = program->borrow();
  Frame& frame = *run->frame;
  for (std::size_t i = 0; i < trace.grad_outputs.size(); ++i) {
    if (trace.grad_outputs[i] == kUndefined) continue;
    frame.values[at_slot(trace.grad_outputs[i])] =
        grad_output(std::move(gradients[i]), trace.grad_outputs[i]);
  }
  for (Kept& each : kept) {
    if (each.is_captured) continue;
    at::Tensor& value = frame.values[at_slot(each.slot)];
    value = is_last_ ? std::move(each.tensor) : each.is_written ? each.tensor.clone() : each.tensor;
  }
  return begin(std::move(run));
}

// Returns the gradients of the first segment, and the run for the next node; or all gradients, in order.
Tensors ReplayedBackward::begin(std::unique_ptr<BackwardRun> run) {
  // The frame holds all by now, and drops each value after its last use.
  if (is_last_) release_variables();
  const Trace& trace = run->program->trace();
  if (is_whole) {
    Tensors all(places.size());
    for (std::size_t number = 0; number < trace.segments.size(); ++number) {
      Tensors found = run_segment(*run, number);
      const auto& gradients = trace.segments[number].gradients;
      for (std::size_t i = 0; i < gradients.size(); ++i) all[gradients[i]] = std::move(found[i]);
    }
    return all;
  }
  Tensors found = run_segment(*run, 0);
  if (trace.segments.size() > 1) found.push_back(autograd::box_in_tensor(std::move(run), device_of(trace)));
  return found;
}

// A segment after the first.
class ReplayedSegment : public Node {
 public:
  std::size_t number = 0;

  Tensors apply(Tensors&& before) override {
    BackwardRun& run = autograd::unbox<BackwardRun>(before.front());
    Tensors found = run_segment(run, number);
    if (number + 1 < run.program->trace().segments.size()) found.push_back(std::move(before.front()));
    return found;
  }
  std::string name() const override { return "cohort::script::ReplayedSegment"; }
};

// Gives `first` the edges of the first segment, and appends a node for each other segment. These nodes run on
// the thread and the stream of `device`, as forward did.
void chain(Node& first, const torch::autograd::edge_list& edges, const std::vector<Segment>& segments,
           c10::Device device) {
  Edge next;
  for (std::size_t i = segments.size(); i-- > 0;) {  // each node after those that its edges lead to
    torch::autograd::edge_list own;
    for (const std::size_t gradient : segments[i].gradients) own.push_back(edges[gradient]);
    if (next.is_valid()) own.push_back(next);
    if (i == 0) return first.set_next_edges(std::move(own));
    auto node = COHORT_MAKE_NODE(ReplayedSegment);
    node->number = i;
    node->add_input_metadata(autograd::box_in_tensor(std::unique_ptr<BackwardRun>(), device));
    node->set_next_edges(std::move(own));
    next = Edge(std::move(node), 0);
  }
}

// A handle without a graph that counts its changes together with `counts`.
at::Tensor with_its_counter(const at::Tensor& tensor, const at::Tensor& counts) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      counts.unsafeGetTensorImpl()->version_counter(), /*allow_tensor_metadata_change=*/true));
}

}  // namespace

void attach_replay(std::shared_ptr<const Program> program, std::span<const at::Tensor> inputs,
                   Tensors& results, const Frame& frame, Rerun rerun) {
  const Trace& trace = program->trace();
  const auto& values = trace.tape.values();
  std::vector<std::size_t> places;
  const auto edges = edges_to(inputs, trace.leaves, places);
  auto node = COHORT_MAKE_NODE(ReplayedBackward);
  for (std::size_t i = 0; i < program->saved().size(); ++i) {
    const int slot = program->saved()[i];
    const at::Tensor& tensor = frame.values[at_slot(slot)];
    node->kept.push_back({.tensor = tensor,
                          .version = autograd::version_of(tensor),
                          .slot = slot,
                          .is_written = program->saved_is_written()[i]});
  }
  const std::size_t num_saved = node->kept.size();
  for (const int slot : program->read_by_backward()) {
    const at::Tensor& tensor = frame.values[at_slot(slot)];
    const bool is_input = values[at_slot(slot)].source == Source::kInput;
    // The handle of an input has no graph: the node would keep the graph before it alive.
    node->kept.push_back({is_input ? with_its_counter(tensor, tensor) : tensor, autograd::version_of(tensor),
                          slot, !is_input});
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (trace.outputs[i] == kUndefined) continue;
    const std::size_t storage = values[at_slot(trace.outputs[i])].storage;
    const at::Tensor* counts = nullptr;  // a saved value of this memory counts changes of the result
    for (std::size_t k = 0; k < num_saved; ++k) {
      if (values[at_slot(node->kept[k].slot)].storage == storage) counts = &node->kept[k].tensor;
    }
    const bool is_made = trace.handles[i].kind == Handle::AliasType::kItself &&
                         values[at_slot(trace.outputs[i])].source == Source::kMade;
    if (trace.needs_gradient[i]) {
      results[i] = with_its_counter(results[i], counts == nullptr ? results[i] : *counts);
    } else if (counts != nullptr && is_made) {
      results[i] = with_its_counter(results[i], *counts);
    }
  }
  node->program = program;
  node->rerun = std::move(rerun);
  node->places = std::move(places);
  node->is_whole = trace.reach_differs;
  if (node->is_whole) {
    return join(whole(node), edges, trace.reached_from, trace.needs_gradient, results);
  }
  chain(*node, edges, trace.segments, device_of(trace));
  set_histories(results, trace.needs_gradient, node);
}

}  // namespace cohort::script
