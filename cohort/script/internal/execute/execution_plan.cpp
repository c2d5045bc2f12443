// From a tape to the steps of a run. (1) detach() and the like are left out. Views become steps without an
// operator, and views of captured tensors are made here, once (hoisted). (2) What backward reads of forward's
// values is saved. (3) Each part is put into an order that needs less memory, if nothing is forked in it and
// backward is not cut. (4) The last step that uses a value releases it. Always: a step runs after the steps
// whose results it reads. Surprising: a hoisted value is never released, and reads of it are counted at its
// captured tensor.
#include "cohort/script/internal/execute/execution_plan.h"

#include <algorithm>
#include <unordered_set>

#include "cohort/script/internal/passes/memory_schedule.h"

namespace cohort::script {
namespace {

// A view that is the same value as what it is a view of: detach().
bool is_elided(const OperatorCall& call) {
  return call.is_view && call.inputs.size() == 1 && call.results.size() == 1 &&
         call.inputs.front().slots == call.results.front().slots;
}

}  // namespace

// By hand, since dispatch costs more than the view itself. As autograd does it, view and base count together.
at::Tensor view_of(const at::Tensor& base, const Layout& layout, std::int64_t offset) {
  c10::TensorImpl* const from = base.unsafeGetTensorImpl();
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(from->storage()),
                                                   from->key_set(), from->dtype());
  impl->set_sizes_and_strides(layout.sizes, layout.strides, from->storage_offset() + offset);
  if (!from->is_inference()) impl->set_version_counter(from->version_counter());
  return at::Tensor(std::move(impl));
}

ExecutionPlan::ExecutionPlan(const Trace& trace) {
  const auto& values = trace.tape.values();
  fixed.resize(values.size());
  hoisted.resize(values.size());
  hoisted_from.assign(values.size(), kUndefined);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].source != Source::kCaptured && values[i].source != Source::kConstant) continue;
    fixed[i] = values[i].tensor;
    hoisted[i] = true;
    hoisted_from[i] = static_cast<int>(i);
  }
  find_steps(trace);
  find_effects(trace);
  find_written(trace);
  const std::span<PlannedStep> forward(steps.data(), split);
  regions = find_regions(trace.tape, forward);
  for (const Phase phase : {Phase::kForward, Phase::kBackward}) {
    const std::span<PlannedStep> own(steps.data() + begin(phase), end(phase) - begin(phase));
    // Segments are cut where gradients are final in the tape's order, regions where they were forked.
    if (phase == Phase::kForward ? regions.empty() : trace.segments.size() <= 1) {
      order_for_memory(trace.tape, kept(phase, trace), own);
    }
    plan_lives(trace, phase);
  }
  releases_at_end = defer_release(trace.tape, regions, forward);
}

void ExecutionPlan::find_steps(const Trace& trace) {
  const auto& calls = trace.tape.calls();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    if (i == trace.split) split = steps.size();
    if (is_elided(calls[i]) || add_views(trace, i)) continue;
    steps.push_back({.call = i, .releases = {}});
  }
  // Without a backward the loop does not come to the split.
  if (trace.split >= calls.size()) split = steps.size();
}

bool ExecutionPlan::add_views(const Trace& trace, std::size_t number) {
  const auto& values = trace.tape.values();
  const OperatorCall& call = trace.tape.calls()[number];
  // Where a view of the user's own lies may depend on values.
  if (!call.is_view || call.is_custom_op || call.inputs.empty() || call.inputs.front().slots.size() != 1)
    return false;
  const int base = call.inputs.front().slots.front();
  if (base < 0) return false;
  const Value& from = values[at_slot(base)];
  // view_of() keeps the type and the keys of the base: other views need their operator.
  bool plain = true;
  each_slot(call.results, [&](int slot) {
    const Value& to = values[at_slot(slot)];
    plain &= to.source == Source::kMade && to.storage == from.storage &&
             to.layout.dtype == from.layout.dtype && !to.layout.conjugate && !to.layout.negative &&
             !from.layout.conjugate && !from.layout.negative;
  });
  if (!plain) return false;
  each_slot(call.results, [&](int slot) {
    if (slot == base || hoisted[at_slot(slot)]) return;
    const Layout& to = values[at_slot(slot)].layout;
    const std::int64_t offset = to.offset - from.layout.offset;
    if (hoisted[at_slot(base)]) {
      fixed[at_slot(slot)] = view_of(fixed[at_slot(base)], to, offset);
      hoisted[at_slot(slot)] = true;
      hoisted_from[at_slot(slot)] = hoisted_from[at_slot(base)];
      return;
    }
    steps.push_back({.call = number, .view = slot, .view_of = base, .offset = offset, .releases = {}});
  });
  return true;
}

void ExecutionPlan::find_effects(const Trace& trace) {
  const auto& values = trace.tape.values();
  const auto& calls = trace.tape.calls();
  std::vector<bool> made_by_forward(values.size()), read(values.size());
  for (std::size_t i = 0; i < std::min(trace.split, calls.size()); ++i) {
    each_slot(calls[i].results, [&](int slot) {
      made_by_forward[at_slot(slot)] =
          values[at_slot(slot)].source == Source::kMade && !hoisted[at_slot(slot)];
    });
  }
  last_read_by_backward.resize(values.size());
  const auto reads = [&](int slot, std::size_t call) {
    const int hoisted = hoisted_from[at_slot(slot)];  // its changes are counted there
    const std::size_t from = at_slot(hoisted == kUndefined ? slot : hoisted);
    read[from] = true;
    last_read_by_backward[from] = call;
  };
  for (std::size_t i = trace.split; i < calls.size(); ++i) {
    each_slot(calls[i].inputs, [&](int slot) { reads(slot, i); });
  }
  for (const int slot : trace.gradients) {
    // A gradient may be a value of forward, which is handed on after the last call.
    if (slot >= 0) reads(slot, calls.size());
  }
  const std::unordered_set<int> grad_outputs(trace.grad_outputs.begin(), trace.grad_outputs.end());
  for (std::size_t i = 0; i < values.size(); ++i) {
    // Gradients of results come with each backward, so nobody saves them.
    if (!read[i] || grad_outputs.count(static_cast<int>(i)) != 0) continue;
    if (made_by_forward[i]) {
      saved.push_back(static_cast<int>(i));
    } else if (values[i].source == Source::kInput || values[i].source == Source::kCaptured) {
      read_by_backward.push_back(static_cast<int>(i));
    }
  }
}

// By each part, as autograd counts what it changes when it has ended.
void ExecutionPlan::find_written(const Trace& trace) {
  const auto& values = trace.tape.values();
  const auto& calls = trace.tape.calls();
  std::array<std::vector<bool>, 2> storages;  // by part
  for (auto& each : storages) each.resize(trace.tape.num_storages());
  for (std::size_t i = 0; i < calls.size(); ++i) {
    auto& own = storages[trace.has_backward && i >= trace.split ? 1 : 0];
    each_written(calls[i], [&](int slot) { own[values[at_slot(slot)].storage] = true; });
  }
  for (const int slot : saved) saved_is_written.push_back(storages[1][values[at_slot(slot)].storage]);
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (values[i].source != Source::kInput && values[i].source != Source::kCaptured) continue;
    for (std::size_t phase = 0; phase < storages.size(); ++phase) {
      if (storages[phase][values[i].storage]) written[phase].push_back(static_cast<int>(i));
    }
  }
}

std::vector<bool> ExecutionPlan::kept(Phase phase, const Trace& trace) const {
  std::vector<bool> result(trace.tape.values().size());
  const auto keep = [&](const std::vector<int>& slots) {
    for (const int slot : slots) {
      if (slot >= 0) result[at_slot(slot)] = true;
    }
  };
  if (phase == Phase::kBackward || !trace.has_backward) keep(trace.gradients);
  if (phase == Phase::kForward) {
    keep(trace.outputs);
    keep(trace.inputs);
    keep(saved);
  }
  return result;
}

// The last step of a part that uses a value releases it, but for what is kept.
void ExecutionPlan::plan_lives(const Trace& trace, Phase phase) {
  const std::vector<bool> kept = this->kept(phase, trace);
  std::vector<bool> seen(kept.size());
  // From the back, so the first step that uses a value here is its last one.
  for (std::size_t i = end(phase); i-- > begin(phase);) {
    PlannedStep& step = steps[i];
    const auto last = [&](int slot) {
      if (hoisted[at_slot(slot)] || seen[at_slot(slot)]) return;
      seen[at_slot(slot)] = true;
      if (!kept[at_slot(slot)]) step.releases.push_back(slot);
    };
    if (step.view != kUndefined) {
      last(step.view);
      last(step.view_of);
    } else {
      each_slot(trace.tape.calls()[step.call].inputs, last);
      each_slot(trace.tape.calls()[step.call].results, last);
    }
  }
}

}  // namespace cohort::script
