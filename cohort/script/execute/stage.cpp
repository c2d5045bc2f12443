#include "cohort/script/execute/stage.h"

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
ModeBits modes_of(const Call& call) {
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

int result_of(const Call& call, const Trace& recorded, const Plan& plan) {
  if (call.results.size() != 1 || call.results.front().kind != TensorPlace::Kind::kTensor) return kUndefined;
  const int slot = call.results.front().slots.front();
  const bool is_made = slot >= 0 && !plan.hoisted[at_slot(slot)] &&
                       recorded.tape.values()[at_slot(slot)].source == Source::kMade;
  return is_made ? slot : kUndefined;
}

Stage plain_stage(const Trace& recorded, const Plan& plan, Part part) {
  Stage stage;
  if (part == Part::kForward) {
    stage.lanes = plan.lanes;
    stage.drop_last = plan.drop_last;
  }
  for (std::size_t i = plan.begin(part); i < plan.end(part); ++i) {
    const Step& step = plan.steps[i];
    Action& action = stage.actions.emplace_back();
    action.number = step.call;
    action.drop = step.drop;
    if (stage.actions.size() > 1) action.modes = std::prev(stage.actions.end(), 2)->modes;
    if (step.view != kUndefined) {
      action.view = step.view;
      action.view_of = step.view_of;
      action.offset = step.offset;
      continue;
    }
    const Call& call = recorded.tape.calls()[step.call];
    action.call = std::shared_ptr<const Call>(std::shared_ptr<void>(), &call);  // the tape's
    action.modes = modes_of(call);
    if (!call.is_custom_op)
      action.unboxed = unbox(call, result_of(call, recorded, plan));  // else sizes are checked
  }
  return stage;
}

}  // namespace cohort::script
