// The steps of a plan become instructions: the call, its modes, and the values that it lets go. Modes are the
// thread-local switches that kernels read (gradients, autocast). They are kept as bits, so that a run changes
// only what differs from the instruction before. Calls with a common signature get an unboxed form. Always:
// instruction i comes from step i of its part, so regions keep their numbers. Surprising: the shared_ptr to a
// call owns nothing here, because the Program holds the tape.
#include "cohort/script/internal/execute/compiled_phase.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <iterator>

namespace cohort::script {
namespace {

constexpr ModeBits kGradients = 1;

constexpr ModeBits below_bit(std::size_t device) {
  return static_cast<ModeBits>(2U << device);
}

}  // namespace

ModeBits modes_now() {
  ModeBits modes = at::GradMode::is_enabled() ? kGradients : 0;
  for (std::size_t i = 0; i < kAutocastKeys.size(); ++i) {
    if (c10::impl::tls_is_dispatch_key_excluded(kAutocastKeys[i])) modes |= below_bit(i);
  }
  return modes;
}

// A call that is dispatched anew would meet autocast itself: its casts are calls of their own.
ModeBits modes_of(const OperatorCall& call) {
  ModeBits modes = call.grad_mode ? kGradients : 0;
  for (std::size_t i = 0; i < kAutocastKeys.size(); ++i) {
    if (call.below_autocast[i] || call.keys.empty()) modes |= below_bit(i);
  }
  return modes;
}

void change_modes(ModeBits now, ModeBits modes) {
  const auto is_on = [=](ModeBits bit) { return (modes & bit) != 0; };
  const auto changes = [=](ModeBits bit) { return ((now ^ modes) & bit) != 0; };
  if (changes(kGradients)) at::GradMode::set_enabled(is_on(kGradients));
  for (std::size_t i = 0; i < kAutocastKeys.size(); ++i) {
    const ModeBits bit = below_bit(i);
    if (changes(bit)) c10::impl::tls_set_dispatch_key_excluded(kAutocastKeys[i], is_on(bit));
  }
}

int result_of(const OperatorCall& call, const Trace& trace, const ExecutionPlan& plan) {
  if (call.results.size() != 1 || call.results.front().kind != TensorPlace::ArgumentType::kTensor)
    return kUndefined;
  const int slot = call.results.front().slots.front();
  const bool is_made =
      slot >= 0 && !plan.hoisted[at_slot(slot)] && trace.tape.values()[at_slot(slot)].source == Source::kMade;
  return is_made ? slot : kUndefined;
}

CompiledPhase compile_plain(const Trace& trace, const ExecutionPlan& plan, Phase phase) {
  CompiledPhase compiled;
  if (phase == Phase::kForward) {
    compiled.regions = plan.regions;
    compiled.releases_at_end = plan.releases_at_end;
  }
  for (std::size_t i = plan.begin(phase); i < plan.end(phase); ++i) {
    const PlannedStep& step = plan.steps[i];
    Instruction& instruction = compiled.instructions.emplace_back();
    instruction.number = step.call;
    instruction.releases = step.releases;
    // A view runs no kernel: with the modes before it, nothing is switched for it.
    if (compiled.instructions.size() > 1)
      instruction.modes = std::prev(compiled.instructions.end(), 2)->modes;
    if (step.view != kUndefined) {
      instruction.view = step.view;
      instruction.view_of = step.view_of;
      instruction.offset = step.offset;
      continue;
    }
    const OperatorCall& call = trace.tape.calls()[step.call];
    instruction.call = std::shared_ptr<const OperatorCall>(std::shared_ptr<void>(), &call);  // the tape's
    instruction.modes = modes_of(call);
    if (!call.is_custom_op)
      instruction.unboxed = unbox(call, result_of(call, trace, plan));  // else sizes are checked
  }
  return compiled;
}

}  // namespace cohort::script
