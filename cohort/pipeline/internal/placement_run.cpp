// A placement does its actions in the plan's order; results wait in a queue for each edge until an action
// takes them. Tensors are cut off from their graph at each hand-over, and tensors that skip stages lie after
// the regular ones. A tensor that stands twice is a single tensor in the next stage too. On each edge the
// micro-batches come in the plan's order, which is checked. A change in place that another stage's graph
// would not see is rejected, as autograd cannot notice it.
#include "cohort/pipeline/internal/placement_run.h"

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "cohort/autograd/detached_graph.h"
#include "cohort/autograd/graph_walk.h"
#include "cohort/base/exception_text.h"
#include "cohort/base/text/format_list.h"
#include "cohort/base/timeline.h"
#include "cohort/core/overlap.h"

namespace cohort::pipeline {
namespace {

using base::concat;
using Clock = std::chrono::steady_clock;

std::string describe(const Tensors& tensors) {
  base::TextList list;
  for (const at::Tensor& tensor : tensors) {
    list.add(tensor.defined() ? concat(tensor.scalar_type(), tensor.sizes()) : "undefined");
  }
  return list.text();
}

// Whether the graph of `tensor` has nodes that this thread made before its node number `first`.
bool reaches_nodes_before(const at::Tensor& tensor, std::uint64_t first) {
  autograd::GraphWalk walk;
  walk.add(tensor.grad_fn().get());
  while (const torch::autograd::Node* const node = walk.next()) {
    if (node->sequence_nr() < first) return true;  // leaves have the largest number
    walk.add_next_nodes(*node);
  }
  return false;
}

}  // namespace

PlacementRun::PlacementRun(Run& run, int placement)
    : run_(run),
      setup_(*run.setup_),
      batch_(*run.batch_),
      placement_(placement),
      own_(run.placements_[static_cast<std::size_t>(placement)]) {}

void PlacementRun::work() {
  const auto& actions = run_.plan.actions[static_cast<std::size_t>(placement_)];
  // A failed run ends between two actions: an action is not interrupted.
  for (std::size_t i = 0; i < actions.size() && !run_.failed(); ++i) {
    own_.current.store(static_cast<int>(i), std::memory_order_release);
    act(actions[i]);
  }
}

void PlacementRun::act(const Action& action) {
  switch (action.kind) {
    case ActionKind::kSendActivation:
      return send({action.stage + 1, false}, action);
    case ActionKind::kSendGradient:
      return send({action.stage - 1, true}, action);
    case ActionKind::kReceiveActivation:
      return receive({action.stage, false}, action);
    case ActionKind::kReceiveGradient:
      return receive({action.stage, true}, action);
    default:
      break;
  }
  if (run_.serialized) run_.serialized->wait(placement_, run_.deadline);
  const auto begin = Clock::now();
  try {
    compute(action);
  } catch (const ChannelClosed&) {
    throw;
  } catch (const std::exception& error) {
    std::throw_with_nested(
        StageError(message(action, base::message_of(error)), action.stage, action.micro_batch));
  }
  const auto ms = [&](Clock::time_point time) {
    return std::chrono::duration<double, std::milli>(time - run_.begin_).count();
  };
  // Sends and receives have no times of their own, since they wait for others.
  own_.times.push_back({action, ms(begin), ms(Clock::now())});
  if (base::Timeline::enabled()) base::Timeline::complete(base::Timeline::intern(to_string(action)), begin);
  // A caller's function sees no action of a run that has failed.
  if (run_.on_action) {
    run_.throw_if_failed();
    run_.on_action(action);
  }
  if (run_.serialized) run_.serialized->end();
}

std::string PlacementRun::message(const Action& action, const std::string& what) const {
  const std::string inputs =
      action.kind == ActionKind::kForward && action.stage > 0 && !inputs_.empty()
          ? concat(" (its inputs, of stage ", action.stage - 1, ": ", describe(inputs_), ")")
          : "";
  return concat("stage ", action.stage, " (", setup_.stages[static_cast<std::size_t>(action.stage)].name(),
                ") on ", setup_.placements[static_cast<std::size_t>(placement_)], ", ", name_of(action.kind),
                " of micro-batch ", action.micro_batch, ": ", what, inputs);
}

void PlacementRun::send(Run::Edge to, const Action& action) {
  run_.channels.at(to)->send(take(to, action.micro_batch), run_.deadline);
}

void PlacementRun::receive(Run::Edge at, const Action& action) {
  Message message = run_.channels.at(at)->receive(run_.deadline);
  if (message.micro_batch != action.micro_batch) {
    throw UsageError("pipeline.step", concat(to_string(action), " got micro-batch ", message.micro_batch));
  }
  waiting_[at].push_back(std::move(message));
}

Message PlacementRun::take(Run::Edge at, int micro_batch) {
  auto& queue = waiting_[at];
  if (queue.empty() || queue.front().micro_batch != micro_batch) {
    throw UsageError("pipeline.step", concat("nothing there for micro-batch ", micro_batch));
  }
  Message message = std::move(queue.front());
  queue.pop_front();
  return message;
}

Batch::Held& PlacementRun::held(const Action& action) {
  return batch_.held[static_cast<std::size_t>(action.stage)][static_cast<std::size_t>(action.micro_batch)];
}

at::Tensor PlacementRun::here(const at::Tensor& tensor) const {
  const c10::Device device = setup_.devices[static_cast<std::size_t>(placement_)];
  return tensor.defined() && tensor.device() != device ? tensor.to(device) : tensor;
}

void PlacementRun::release(const Action& action) {
  // `live` counts the micro-batches whose graphs this placement holds.
  if (std::exchange(held(action).run, nullptr) != nullptr) --own_.live;
}

void PlacementRun::compute(const Action& action) {
  switch (action.kind) {
    case ActionKind::kForward:
      return forward(action);
    case ActionKind::kWeightGradient:
      held(action).run->weight_gradients();
      return release(action);
    default:
      return backward(action);
  }
}

void PlacementRun::forward(const Action& action) {
  const int stage = action.stage, m = action.micro_batch;
  const auto micro_batch = static_cast<std::size_t>(m);
  Message in{m, batch_.inputs[micro_batch], batch_.requires_grad};
  if (stage > 0) in = take({stage, false}, m);
  // The batch's own handles would keep the views alive during the step.
  batch_.inputs[micro_batch].clear();
  // Of what came, those that pass lie after the others.
  const auto came = setup_.passing(stage - 1), passing = setup_.passing(stage);
  const std::size_t regular = in.tensors.size() - came.size();
  Tensors inputs(in.tensors.begin(), in.tensors.begin() + static_cast<std::ptrdiff_t>(regular));
  std::vector<bool> wanted(in.requires_grad.begin(),
                           in.requires_grad.begin() + static_cast<std::ptrdiff_t>(regular));
  std::map<int, std::pair<at::Tensor, bool>> carried;
  for (std::size_t i = 0; i < came.size(); ++i) {
    const std::pair<at::Tensor, bool> value(in.tensors[regular + i], in.requires_grad[regular + i]);
    if (setup_.skips[static_cast<std::size_t>(came[i])].to == stage) {
      inputs.push_back(value.first);
      wanted.push_back(value.second);
    } else {
      carried[came[i]] = value;
    }
  }
  const Tensors given = inputs;
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    // One tensor that stands twice is copied to the device once, and stays one tensor.
    const std::size_t first = core::first_place(given, i);
    inputs[i] = first < i ? inputs[first] : here(given[i]);
  }
  inputs_ = inputs;
  // By micro-batch and layer: numbers depend neither on the cut nor on threads.
  auto random = batch_.random;
  if (random) {
    random->part = micro_batch;
    random->layer = setup_.first_layers[static_cast<std::size_t>(stage)];
  }
  auto run = std::make_unique<StageRun>(setup_.stages[static_cast<std::size_t>(stage)], inputs, wanted,
                                        batch_.split, random);
  for (auto& [skip, value] : carried) {
    inputs.push_back(value.first);
    wanted.push_back(value.second);
  }
  check_written(run->written(), inputs, wanted, stage);
  inputs_.clear();
  const Tensors outputs = run->outputs();
  if (at::GradMode::is_enabled()) {
    // Without gradients no backward will ask for the run, and it is freed at once.
    held(action).run = std::move(run);
    own_.peak_live = std::max(own_.peak_live, ++own_.live);
  }
  if (is_last(stage)) return loss(action, outputs);

  std::vector<bool> leaves(outputs.size(), false);
  for (const int i : passing) {
    const Skip& skip = setup_.skips[static_cast<std::size_t>(i)];
    if (skip.from != stage) continue;
    if (skip.output >= static_cast<int>(outputs.size())) {
      throw UsageError("pipeline.skip", concat("output ", skip.output, " is to go to stage ", skip.to,
                                               ", but the stage returned ", outputs.size(), " tensors"));
    }
    const at::Tensor& output = outputs[static_cast<std::size_t>(skip.output)];
    carried[i] = {output, autograd::needs_gradient(output)};
    leaves[static_cast<std::size_t>(skip.output)] = true;
  }
  Message out{m, {}, {}};
  const auto cut_off = [](const at::Tensor& tensor) { return tensor.defined() ? tensor.detach() : tensor; };
  const auto add = [&](const at::Tensor& tensor, bool requires_grad) {
    out.tensors.push_back(tensor);
    out.requires_grad.push_back(requires_grad);
  };
  Tensors cut;
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const std::size_t first = core::first_place(outputs, i);
    cut.push_back(first < i ? cut[first] : cut_off(outputs[i]));
    if (!leaves[i]) add(cut[i], autograd::needs_gradient(outputs[i]));
  }
  for (const int i : passing) add(cut_off(carried[i].first), carried[i].second);
  waiting_[{stage + 1, false}].push_back(std::move(out));
}

// What is cut off has no part in a change of another's graph. `tensors`: inputs, and what passes by.
void PlacementRun::check_written(const std::vector<std::size_t>& written, const Tensors& tensors,
                                 const std::vector<bool>& wanted, int stage) {
  for (const std::size_t i : written) {
    if (stage == 0 && (wanted[i] || !batch_.loss)) {  // else nobody asks for its graph
      throw UsageError("pipeline.stage",
                       concat("input ", i,
                              wanted[i] ? " needs a gradient and is changed in place"
                                        : " is changed in place by what needs a gradient"),
                       "begin the stage with a clone() of it");
    }
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      const bool is_other = tensors[k].defined() && !tensors[k].is_same(tensors[i]);
      const bool sees_it = is_other && (wanted[k] || !wanted[i]);
      if (!sees_it || !core::may_overlap(tensors[k], tensors[i])) continue;
      throw UsageError("pipeline.stage",
                       concat("input ", i, " is changed in place, and another ",
                              stage == 0 ? "input" : concat("tensor of stage ", stage - 1, " or before"),
                              " shares its memory"),
                       "hand over a clone() of one of them");
    }
  }
}

// Backward begins here: with the loss, or with what the caller of forward() has computed from the outputs.
void PlacementRun::loss(const Action& action, const Tensors& outputs) {
  const auto micro_batch = static_cast<std::size_t>(action.micro_batch);
  Tensors leaves = autograd::leaf_inputs(outputs);
  if (!batch_.loss || batch_.keep_outputs) {
    for (const at::Tensor& leaf : leaves) {
      batch_.outputs[micro_batch].push_back(leaf.defined() && batch_.loss ? leaf.detach() : leaf);
    }
  }
  if (!batch_.loss) return;
  Tensors targets;
  for (const at::Tensor& target : batch_.targets[micro_batch]) targets.push_back(here(target));
  std::optional<core::RandomScope> random;
  if (batch_.random) {
    core::RandomKey key = *batch_.random;
    key.part = micro_batch;
    key.layer = setup_.num_layers();
    random.emplace(key, setup_.devices[static_cast<std::size_t>(placement_)]);
  }
  for (std::size_t i = 0; i < leaves.size(); ++i) leaves[i] = leaves[core::first_place(outputs, i)];
  run_.throw_if_failed();
  Batch::Held& held_state = held(action);
  held_state.first_of_loss = at::sequence_number::peek();
  const at::Tensor value = batch_.loss(held_state.loss_gate.attach(leaves), targets);
  if (!value.defined() || value.numel() != 1) {
    throw UsageError("pipeline.loss", concat("the loss is ", describe({value}), ", expected one number"),
                     "the mean over the samples of a micro-batch");
  }
  // By its share of the samples, so that micro-batches add up to the mean of the batch.
  held_state.loss = value * batch_.weights[micro_batch];
  for (std::size_t i = leaves.size(); i-- > 0;) {
    if (core::first_place(leaves, i) < i) leaves[i].reset();  // its gradient comes at the first place
  }
  held_state.loss_leaves = std::move(leaves);
  batch_.losses[micro_batch] = held_state.loss.detach();
}

// Of the stage's outputs; `carried`: of what passes by, in the order of passing().
Tensors PlacementRun::gradients_of_outputs(const Action& action, Tensors& carried) {
  const int stage = action.stage;
  const auto micro_batch = static_cast<std::size_t>(action.micro_batch);
  Batch::Held& held_state = held(action);
  if (is_last(stage)) {
    if (!batch_.loss) return std::exchange(batch_.output_gradients[micro_batch], {});
    const BackwardGate::Open open(held_state.loss_gate);
    // The loss may go back through the stage by another way too: an auxiliary loss that the stage has kept.
    // Where the backward is split, gradients that come by that way would be among those of the weights.
    std::optional<BackwardGate::Open> open_of_stage;
    if (action.kind == ActionKind::kBackward) open_of_stage.emplace(held_state.run->gate());
    if (held_state.loss.requires_grad()) {
      const at::Tensor loss = std::exchange(held_state.loss, {});
      // What of the stage it went through, the outputs will go through again.
      const bool keeps_graph = open_of_stage && reaches_nodes_before(loss, held_state.first_of_loss);
      torch::autograd::backward({loss}, {}, keeps_graph);
    }
    Tensors gradients;
    for (const at::Tensor& leaf : held_state.loss_leaves)
      gradients.push_back(leaf.defined() ? leaf.grad() : leaf);
    held_state.loss_leaves.clear();
    return gradients;
  }
  Message in = take({stage, true}, action.micro_batch);
  const auto passing = setup_.passing(stage);
  const std::size_t regular = in.tensors.size() - passing.size();
  Tensors gradients(held_state.run->outputs().size());
  std::vector<bool> leaves(gradients.size(), false);
  for (std::size_t i = 0; i < passing.size(); ++i) {
    const Skip& skip = setup_.skips[static_cast<std::size_t>(passing[i])];
    const at::Tensor& gradient = in.tensors[regular + i];
    if (skip.from != stage) {
      carried.push_back(gradient);
      continue;
    }
    const auto output = static_cast<std::size_t>(skip.output);
    leaves[output] = true;
    const at::Tensor mine_now = here(gradient);
    if (!mine_now.defined()) continue;
    gradients[output] = gradients[output].defined() ? gradients[output] + mine_now : mine_now;
  }
  std::size_t next = 0;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (!leaves[i]) gradients[i] = here(in.tensors[next++]);
  }
  return gradients;
}

void PlacementRun::backward(const Action& action) {
  const int stage = action.stage;
  Batch::Held& held_state = held(action);
  Tensors carried;
  Tensors gradients = gradients_of_outputs(action, carried);
  Tensors of_inputs;
  if (action.kind == ActionKind::kInputGradient) {
    of_inputs = held_state.run->input_gradients(std::move(gradients));
  } else {
    of_inputs = held_state.run->backward(gradients);
    release(action);
  }
  if (stage == 0) {
    batch_.input_gradients[static_cast<std::size_t>(action.micro_batch)] = std::move(of_inputs);
    return;
  }
  // Inputs that were skips lie after the regular ones, in the order of the skips.
  const auto came = setup_.passing(stage - 1);
  const auto ends_here = [&](int i) { return setup_.skips[static_cast<std::size_t>(i)].to == stage; };
  const auto ending = static_cast<std::size_t>(std::count_if(came.begin(), came.end(), ends_here));
  std::size_t next_ending = of_inputs.size() - ending, next_carried = 0;
  Message out{action.micro_batch,
              {of_inputs.begin(), of_inputs.begin() + static_cast<std::ptrdiff_t>(next_ending)},
              {}};
  for (const int i : came)
    out.tensors.push_back(ends_here(i) ? of_inputs[next_ending++] : carried[next_carried++]);
  out.requires_grad.resize(out.tensors.size());
  waiting_[{stage - 1, true}].push_back(std::move(out));
}

void run_placement(Run& run, int placement) {
  try {
    PlacementRun(run, placement).work();
    if (!run.failed()) {
      // Sends to other ranks may be under way, and hold their tensors.
      for (const auto& [edge, channel] : run.channels) channel->flush();
    }
  } catch (const ChannelClosed&) {  // whoever closed it says why
  } catch (const ChannelTimeout&) {
    run.time_out();
  } catch (...) {
    run.fail(std::current_exception());
  }
  run.placements_[static_cast<std::size_t>(placement)].current.store(-1, std::memory_order_release);
}

}  // namespace cohort::pipeline
