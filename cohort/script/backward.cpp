#include "cohort/script/backward.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/zeros.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <functional>
#include <map>
#include <mutex>
#include <unordered_set>

#include "cohort/core/carried.h"
#include "cohort/core/error.h"
#include "cohort/core/graph_part.h"
#include "cohort/core/torch_compat.h"
#include "cohort/script/recheck.h"
#include "cohort/script/recorder.h"

namespace cohort::script {
namespace {

using core::concat;
using torch::autograd::Edge;
using torch::autograd::Node;

constexpr const char* kWhere = "script.backward";
constexpr const char* kWhat = "a scripted function";

void set_histories(Tensors& results, const std::vector<bool>& needs_gradient, const auto& node) {
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (needs_gradient[i]) torch::autograd::set_history(results[i], node);
  }
}

// A gradient that no tangent leads to is none, though zeros stand for the tangents that are missing.
bool is_reached(const std::vector<bool>& reached_from, const std::vector<bool>& is_given) {
  for (std::size_t i = 0; i < is_given.size(); ++i) {
    if (is_given[i] && reached_from[i]) return true;
  }
  return false;
}

std::vector<bool> defined(const Tensors& tensors) {
  std::vector<bool> result;
  for (const at::Tensor& tensor : tensors) result.push_back(tensor.defined());
  return result;
}

class RecordedBackward : public Node {
 public:
  RecordedForward forward;
  std::vector<at::TensorOptions> options;  // of the outputs that need a gradient
  std::vector<std::vector<std::int64_t>> sizes;
  std::vector<std::size_t> places;
  std::vector<std::vector<bool>> reached_from;

  Tensors apply(Tensors&& gradients) override;
  std::string name() const override { return "cohort::script::RecordedBackward"; }
  void will_release_variables() override { is_last_ = true; }
  void release_variables() override { forward.graph->release(); }

 private:
  Tensors run(const Tensors& tangents);
  bool is_last_ = false;
  bool is_recorded_ = false;
};

Tensors RecordedBackward::run(const Tensors& tangents) {
  if (is_recorded_ || Recording::is_active()) return forward.graph->backward(tangents, !is_last_);
  is_recorded_ = true;
  Recorded& recorded = *forward.recorded;
  recorded.split = recorded.tape.calls().size();
  recorded.has_backward = true;
  Tensors starts = tangents;
  for (at::Tensor& tangent : starts) {
    tangent = tangent.resolve_conj().resolve_neg();  // lazy ones may come to replays, or not
    if (recorded.tape.knows_storage(tangent)) tangent = tangent.clone();
    if (forward.has_plain_tangents && Layout::of(tangent).may_overlap()) {
      tangent = tangent.clone(at::MemoryFormat::Contiguous);
    }
    recorded.tangents.push_back(recorded.tape.add_input(tangent));
    recorded.tangents_overlap |= Layout::of(tangent).may_overlap();
  }
  Tensors found;
  {
    const Recording recording(recorded.tape);
    found = forward.graph->backward(starts, !is_last_);
  }
  Tensors gradients;
  for (const std::size_t place : places) {
    const int slot = recorded.tape.find(found[place]);
    if (slot == kUnknown) recorded.tape.refuse("backward returns a tensor that no operator made");
    recorded.gradients.push_back(slot);
    gradients.push_back(found[place]);
  }
  recorded.tape.check_versions();
  std::vector<int> leaves;
  for (const std::size_t place : places) {
    const bool is_input = place < recorded.inputs.size();
    leaves.push_back(is_input ? recorded.inputs[place]
                              : recorded.tape.find(recorded.leaves[place - recorded.inputs.size()]));
  }
  recorded.segments = cut_backward(recorded, leaves, forward.gradient_chunk_bytes);
  if (forward.recheck != nullptr) {
    forward.variant->compare(forward.recheck->difference_in_backward(starts, gradients),
                             forward.recheck->drew_alone());
    if (forward.recheck->takes(starts)) forward.variant->recheck(std::move(recorded));
  } else if (!recorded.tangents_overlap || !*forward.wants_plain_tangents) {
    forward.variant->offer(std::move(recorded));
  }
  forward.recheck.reset();
  forward.recorded.reset();
  forward.variant.reset();
  return found;
}

Tensors RecordedBackward::apply(Tensors&& gradients) {
  check_no_graph(kWhat);
  const std::vector<bool> is_given = defined(gradients);
  Tensors tangents = std::move(gradients);
  for (std::size_t i = 0; i < tangents.size(); ++i) {
    if (!tangents[i].defined()) tangents[i] = at::zeros(sizes[i], options[i]);
  }
  Tensors found = run(tangents), result;
  for (std::size_t i = 0; i < places.size(); ++i) {
    result.push_back(is_reached(reached_from[i], is_given) ? std::move(found[places[i]]) : at::Tensor());
  }
  return result;
}

// Note [A chain of nodes]
// Autograd takes a node's gradients when the node is done. So that those which are final early are taken
// early, with the hooks of their parameters, the backward of a program is a chain of nodes, one for each
// segment. The next one is ready as soon as the one before is done, but what accumulates gradients goes first
// in autograd's queue. A run belongs to one backward: it travels from node to node in a tensor without
// elements, and ends with it.
struct BackwardRun {
  std::shared_ptr<const Program> program;
  std::vector<bool> is_given;  // tangents
  std::unique_ptr<Frame> frame;
  Tensors found;  // all gradients, where the function ran again instead
};

// Where the backward begins.
c10::Device device_of(const Recorded& recorded) {
  return recorded.tangents.empty() ? c10::Device(c10::kCPU)
                                   : recorded.tape.values()[at_slot(recorded.tangents.front())].layout.device;
}

// Runs a segment, and returns the gradients that are final after it.
Tensors run_segment(BackwardRun& run, std::size_t number) {
  const Program& program = *run.program;
  const Recorded& recorded = program.recorded();
  const Segment& segment = recorded.segments[number];
  if (run.frame == nullptr) {
    Tensors found;
    for (const std::size_t i : segment.gradients) found.push_back(std::move(run.found[i]));
    return found;
  }
  program.backward(*run.frame, number == 0 ? recorded.split : recorded.segments[number - 1].end, segment.end);
  Tensors found;
  std::vector<int> slots;
  for (const std::size_t i : segment.gradients) {
    const int slot = recorded.gradients[i];
    const bool is_there = slot != kUndefined && is_reached(recorded.reached_from[i], run.is_given);
    found.push_back(is_there ? run.frame->values[at_slot(slot)] : at::Tensor());
    slots.push_back(slot);
  }
  if (number + 1 == recorded.segments.size()) {
    program.bump_versions(*run.frame, Part::kBackward);
    program.let_go(*run.frame, slots);
    program.give_back(std::move(run.frame));
  } else {
    program.let_go(*run.frame, slots);
  }
  return found;
}

class ReplayedBackward : public Node {
 public:
  struct Kept {
    at::Tensor tensor;
    std::int64_t version;
    int slot;
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
  void check() const;
  at::Tensor tangent(at::Tensor gradient, int slot) const;
  bool takes(const Tensors& gradients) const;
  Tensors begin(std::unique_ptr<BackwardRun> run);

  bool is_last_ = false;
  bool is_released_ = false;
};

void ReplayedBackward::check() const {
  check_no_graph(kWhat);
  if (is_released_) {
    throw UsageError(kWhere,
                     "a second backward goes through a scripted function whose values have been freed",
                     "backward() with retain_graph the first time");
  }
  for (const Kept& each : kept) {
    if (each.tensor.is_inference() || each.tensor._version() == each.version) continue;
    throw UsageError(kWhere,
                     concat("a tensor ", each.tensor.scalar_type(), each.tensor.sizes(),
                            " that backward needs was changed in place since forward"),
                     "the operator that does not work in place, and the optimizer's step after backward");
  }
}

// What the recording started from: a gradient of these strides, zeros where there is none.
at::Tensor ReplayedBackward::tangent(at::Tensor gradient, int slot) const {
  const Layout& layout = program->recorded().tape.values()[at_slot(slot)].layout;
  if (gradient.defined() && gradient.strides() == layout.strides && gradient.scalar_type() == layout.dtype) {
    return gradient;
  }
  const auto options = at::TensorOptions().dtype(layout.dtype).device(layout.device);
  if (!gradient.defined() && layout.may_overlap()) {
    std::int64_t extent = 1;
    for (std::size_t i = 0; i < layout.sizes.size(); ++i) extent += (layout.sizes[i] - 1) * layout.strides[i];
    return at::zeros({extent}, options).as_strided(layout.sizes, layout.strides);
  }
  at::Tensor fitted = at::empty_strided(layout.sizes, layout.strides, options);
  return gradient.defined() ? fitted.copy_(gradient) : fitted.zero_();
}

// False where a gradient cannot be laid out as the recorded one.
bool ReplayedBackward::takes(const Tensors& gradients) const {
  const Recorded& recorded = program->recorded();
  if (!recorded.tangents_overlap) return true;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    const Layout& layout = recorded.tape.values()[at_slot(recorded.tangents[i])].layout;
    if (gradients[i].defined() && layout.may_overlap() && gradients[i].strides() != layout.strides)
      return false;
  }
  return true;
}

Tensors ReplayedBackward::apply(Tensors&& gradients) {
  check();
  const Recorded& recorded = program->recorded();
  for (at::Tensor& gradient : gradients) {
    if (gradient.defined()) gradient = gradient.resolve_conj().resolve_neg();
  }
  auto run = std::make_unique<BackwardRun>(BackwardRun{program, defined(gradients), nullptr, {}});
  if (!takes(gradients)) {
    const Tensors all = rerun(gradients);
    for (const std::size_t place : places) run->found.push_back(all.at(place));
    return begin(std::move(run));
  }
  run->frame = program->borrow();
  Frame& frame = *run->frame;
  for (std::size_t i = 0; i < recorded.tangents.size(); ++i) {
    frame.values[at_slot(recorded.tangents[i])] = tangent(std::move(gradients[i]), recorded.tangents[i]);
  }
  for (Kept& each : kept) {
    if (each.slot == kUndefined) continue;
    frame.values[at_slot(each.slot)] = is_last_ ? std::move(each.tensor) : each.tensor;
  }
  return begin(std::move(run));
}

// Returns the gradients of the first segment, and the run for the node behind; or all gradients, in order.
Tensors ReplayedBackward::begin(std::unique_ptr<BackwardRun> run) {
  if (is_last_) release_variables();
  const Recorded& recorded = run->program->recorded();
  if (is_whole) {
    Tensors all(places.size());
    for (std::size_t number = 0; number < recorded.segments.size(); ++number) {
      Tensors found = run_segment(*run, number);
      const auto& gradients = recorded.segments[number].gradients;
      for (std::size_t i = 0; i < gradients.size(); ++i) all[gradients[i]] = std::move(found[i]);
    }
    return all;
  }
  Tensors found = run_segment(*run, 0);
  if (recorded.segments.size() > 1) found.push_back(core::carry(std::move(run), device_of(recorded)));
  return found;
}

// A segment after the first.
class ReplayedSegment : public Node {
 public:
  std::size_t number = 0;

  Tensors apply(Tensors&& before) override {
    BackwardRun& run = core::carried<BackwardRun>(before.front());
    Tensors found = run_segment(run, number);
    if (number + 1 < run.program->recorded().segments.size()) found.push_back(std::move(before.front()));
    return found;
  }
  std::string name() const override { return "cohort::script::ReplayedSegment"; }
};

// Gives `first` the edges of the first segment, and puts the nodes of the others behind it, which run on the
// thread and the stream of `device`, as forward did.
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
    node->add_input_metadata(core::carry(std::unique_ptr<BackwardRun>(), device));
    node->set_next_edges(std::move(own));
    next = Edge(std::move(node), 0);
  }
}

// Note [Leaves of some results]
// A leaf that only one of two results leads to is no part of a backward that begins at the other: its hooks
// do not run, and who looks for unused parameters does not find it. With one node for all results it would
// be. Where results lead to different leaves, each result has a node, and each set of results that lead to
// the same leaves has one that hands their gradients on. The first of those runs the whole backward, with all
// gradients that have come. On one device these are all, as autograd takes the node that was made last first;
// if another comes after it, the backward runs again for those whom it concerns. What backward needs goes
// when each result has been in a backward that frees its graph: until then another loss may begin at another
// one.
class Joint {
 public:
  explicit Joint(std::size_t num_results) : num_results_(num_results), is_freed_(num_results) {}

  std::function<Tensors(Tensors)> backward;  // all gradients, in order
  std::function<void()> release;

  void take(std::size_t result, const at::Tensor& tangent, const std::shared_ptr<Joint>& self) {
    const std::lock_guard lock(mutex_);
    const int task = torch::autograd::get_current_graph_task_id();
    const auto [run, is_new] = runs_.try_emplace(task, Run{Tensors(num_results_), {}, {}});
    run->second.tangents[result] = tangent;
    if (!torch::autograd::get_current_graph_task_keep_graph()) is_freed_[result] = true;
    if (!is_new) return;
    torch::autograd::Engine::get_default_engine().queue_callback([self, task] {
      bool is_last = false;
      {
        const std::lock_guard ends(self->mutex_);
        self->runs_.erase(task);
        is_last = std::ranges::all_of(self->is_freed_, std::identity());
      }
      if (is_last) self->release();
    });
  }
  Tensors gradients(const std::vector<std::size_t>& of, const std::vector<bool>& reached_from) {
    std::unique_lock lock(mutex_);
    Run& run = runs_.at(torch::autograd::get_current_graph_task_id());  // until the task ends
    bool is_found = !run.found.empty();
    for (std::size_t i = 0; is_found && i < num_results_; ++i) {
      is_found = !reached_from[i] || run.is_used[i] == run.tangents[i].defined();
    }
    if (!is_found) {
      const Tensors tangents = run.tangents;
      lock.unlock();  // a thread of another device may wait in take() that this backward needs
      Tensors all = backward(tangents);
      lock.lock();
      run.is_used = defined(tangents);
      run.found = std::move(all);
    }
    Tensors found;
    for (const std::size_t gradient : of) found.push_back(std::move(run.found[gradient]));
    return found;
  }

 private:
  struct Run {
    Tensors tangents;
    std::vector<bool> is_used;
    Tensors found;
  };
  const std::size_t num_results_;
  std::mutex mutex_;
  std::vector<bool> is_freed_;  // results
  std::map<int, Run> runs_;     // by the number of autograd's task
};

class ResultNode : public Node {
 public:
  std::shared_ptr<Joint> joint;
  std::size_t result = 0;

  Tensors apply(Tensors&& gradients) override {
    joint->take(result, gradients.front(), joint);
    return {num_outputs(), gradients.front()};
  }
  std::string name() const override { return "cohort::script::ResultNode"; }
};

class GradientsNode : public Node {
 public:
  std::shared_ptr<Joint> joint;
  std::vector<std::size_t> gradients;
  std::vector<bool> reached_from;

  Tensors apply(Tensors&& /*tangents*/) override { return joint->gradients(gradients, reached_from); }
  std::string name() const override { return "cohort::script::GradientsNode"; }
};

// Makes `results` those of nodes around `backward`, which is in no graph. Note [Leaves of some results]
void join(const auto& backward, const torch::autograd::edge_list& edges,
          const std::vector<std::vector<bool>>& reached_from, Tensors& results,
          const std::vector<bool>& needs_gradient) {
  Tensors ends;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (needs_gradient[i]) ends.push_back(results[i]);
  }
  const auto joint = std::make_shared<Joint>(ends.size());
  joint->backward = [backward](Tensors tangents) { return (*backward)(std::move(tangents)); };
  joint->release = [backward] { backward->release_variables(); };
  std::map<std::vector<bool>, std::vector<std::size_t>> sets;
  for (std::size_t i = 0; i < edges.size(); ++i) sets[reached_from[i]].push_back(i);
  std::vector<torch::autograd::edge_list> next(ends.size());
  for (const auto& [from, gradients] : sets) {
    auto node = COHORT_MAKE_NODE(GradientsNode);
    torch::autograd::edge_list own;
    for (const std::size_t gradient : gradients) own.push_back(edges[gradient]);
    node->set_next_edges(std::move(own));
    node->joint = joint;
    node->gradients = gradients;
    node->reached_from = from;
    for (std::size_t i = 0; i < ends.size(); ++i) {
      if (from[i]) next[i].emplace_back(node, node->add_input_metadata(ends[i]));
    }
  }
  for (std::size_t i = 0, number = 0; i < results.size(); ++i) {
    if (!needs_gradient[i]) continue;
    auto node = COHORT_MAKE_NODE(ResultNode);
    node->set_next_edges(std::move(next[number]));
    node->joint = joint;
    node->result = number++;
    torch::autograd::set_history(results[i], node);
  }
}

// A node that calls a function.
class FunctionNode : public Node {
 public:
  std::function<void()> fn;

  Tensors apply(Tensors&& /*gradients*/) override {
    fn();
    return {};
  }
  std::string name() const override { return "cohort::script::FunctionNode"; }
};

// A handle without a graph that counts its changes together with `counts`.
at::Tensor with_its_counter(const at::Tensor& tensor, const at::Tensor& counts) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      counts.unsafeGetTensorImpl()->version_counter(), /*allow_tensor_metadata_change=*/true));
}

// Behind an AccumulateGrad there is nothing of the function's: one that stands for an input leads on.
template <typename Fn>
void each_node(Node* first, const Fn& fn) {
  std::unordered_set<const Node*> seen{first};
  std::vector<Node*> open{first};
  while (!open.empty()) {
    Node* const node = open.back();
    open.pop_back();
    fn(*node);
    if (dynamic_cast<const torch::autograd::AccumulateGrad*>(node) != nullptr) continue;
    for (const Edge& edge : node->next_edges()) {
      if (edge.is_valid() && seen.insert(edge.function.get()).second) open.push_back(edge.function.get());
    }
  }
}

}  // namespace

void run_where_backward_runs(c10::Device device, std::function<void()> fn) {
  if (device.is_cpu()) return fn();
  auto node = COHORT_MAKE_NODE(FunctionNode);
  node->fn = std::move(fn);
  at::Tensor behind = at::empty({}, at::TensorOptions(device));
  const at::Tensor gradient = behind.detach();
  torch::autograd::set_history(behind, node);
  torch::autograd::backward({behind}, {gradient});
}

void check_no_graph(const char* what) {
  if (!at::GradMode::is_enabled()) return;
  throw UsageError(kWhere,
                   concat("backward with create_graph goes through ", what, ", which is cut off there"),
                   "the plain function where second derivatives are taken");
}

// Edges to what needs a gradient, inputs before captured tensors; `places` says which those are.
torch::autograd::edge_list edges_to(std::span<const at::Tensor> inputs, const Tensors& captured,
                                    std::vector<std::size_t>& places) {
  torch::autograd::edge_list edges;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (!inputs[i].defined() || !inputs[i].requires_grad()) continue;
    edges.push_back(torch::autograd::impl::gradient_edge(inputs[i]));
    places.push_back(i);
  }
  for (std::size_t i = 0; i < captured.size(); ++i) {
    edges.push_back(torch::autograd::impl::gradient_edge(captured[i]));
    places.push_back(inputs.size() + i);
  }
  return edges;
}

void attach_recording(RecordedForward forward, const Tensors& inputs, Tensors& results) {
  auto node = COHORT_MAKE_NODE(RecordedBackward);
  auto edges = edges_to(inputs, forward.graph->captured(), node->places);
  node->reached_from = forward.recorded->reached_from;
  const auto needs_gradient = forward.recorded->needs_gradient;
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (!needs_gradient[i]) continue;
    node->options.push_back(results[i].options());
    node->sizes.push_back(results[i].sizes().vec());
  }
  node->forward = std::move(forward);
  if (node->forward.recorded->reach_differs) {
    return join(node, edges, node->reached_from, results, needs_gradient);
  }
  node->set_next_edges(std::move(edges));
  set_histories(results, needs_gradient, node);
}

void attach_replay(std::shared_ptr<const Program> program, std::span<const at::Tensor> inputs,
                   Tensors& results, const Frame& frame, Rerun rerun) {
  const Recorded& recorded = program->recorded();
  const auto& values = recorded.tape.values();
  std::vector<std::size_t> places;
  const auto edges = edges_to(inputs, recorded.leaves, places);
  auto node = COHORT_MAKE_NODE(ReplayedBackward);
  for (const int slot : program->saved()) {
    const at::Tensor& tensor = frame.values[at_slot(slot)];
    node->kept.push_back({tensor, tensor.is_inference() ? 0 : tensor._version(), slot});
  }
  const std::size_t num_saved = node->kept.size();
  for (const int slot : program->read_by_backward()) {
    const at::Tensor& tensor = frame.values[at_slot(slot)];
    const bool is_input = values[at_slot(slot)].source == Source::kInput;
    node->kept.push_back({is_input ? with_its_counter(tensor, tensor) : tensor,
                          tensor.is_inference() ? 0 : tensor._version(), is_input ? slot : kUndefined});
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (recorded.outputs[i] == kUndefined) continue;
    const std::size_t storage = values[at_slot(recorded.outputs[i])].storage;
    const at::Tensor* counts = nullptr;  // a saved value of this memory counts changes of the result
    for (std::size_t k = 0; k < num_saved; ++k) {
      if (values[at_slot(node->kept[k].slot)].storage == storage) counts = &node->kept[k].tensor;
    }
    const bool is_made = recorded.handles[i].kind == Handle::Kind::kItself &&
                         values[at_slot(recorded.outputs[i])].source == Source::kMade;
    if (recorded.needs_gradient[i]) {
      results[i] = with_its_counter(results[i], counts == nullptr ? results[i] : *counts);
    } else if (counts != nullptr && is_made) {
      results[i] = with_its_counter(results[i], *counts);
    }
  }
  node->program = program;
  node->rerun = std::move(rerun);
  node->places = std::move(places);
  node->is_whole = recorded.reach_differs;
  if (node->is_whole) return join(node, edges, recorded.reached_from, results, recorded.needs_gradient);
  chain(*node, edges, recorded.segments, device_of(recorded));
  set_histories(results, recorded.needs_gradient, node);
}

std::vector<std::unordered_set<const c10::TensorImpl*>> leaves_behind(const Tensors& results) {
  std::vector<std::unordered_set<const c10::TensorImpl*>> found;
  for (const at::Tensor& result : results) {
    if (!core::needs_gradient(result)) continue;
    auto& leaves = found.emplace_back();
    each_node(torch::autograd::impl::gradient_edge(result).function.get(), [&](Node& node) {
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(&node)) {
        leaves.insert(leaf->variable.unsafeGetTensorImpl());
      }
    });
  }
  return found;
}

std::string unrecordable_within(const Tensors& results) {
  std::string reason;
  for (const at::Tensor& result : results) {
    if (!core::needs_gradient(result)) continue;
    each_node(torch::autograd::impl::gradient_edge(result).function.get(), [&](Node& node) {
      if (dynamic_cast<const torch::autograd::AccumulateGrad*>(&node) != nullptr || !reason.empty()) return;
      if (node.name().find("Checkpoint") != std::string::npos) {
        reason = "core::checkpoint within the function sets the random generator, which is no operator";
        return;
      }
      if (node.tensor_pre_hooks().empty() && node.pre_hooks().empty() && node.post_hooks().empty()) return;
      reason = concat("a hook within the function (on a result of ", node.name(), ") would not run");
    });
  }
  return reason;
}

}  // namespace cohort::script
