#include "cohort/script/stage.h"

namespace cohort::script {

int result_of(const Call& call, const Recorded& recorded, const Plan& plan) {
  if (call.results.size() != 1 || call.results.front().kind != TensorPlace::Kind::kTensor) return kUndefined;
  const int slot = call.results.front().slots.front();
  const bool is_made = slot >= 0 && !plan.hoisted[at_slot(slot)] &&
                       recorded.tape.values()[at_slot(slot)].source == Source::kMade;
  return is_made ? slot : kUndefined;
}

Stage plain_stage(const Recorded& recorded, const Plan& plan, Part part) {
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
    if (step.view != kUndefined) {
      action.view = step.view;
      action.view_of = step.view_of;
      action.offset = step.offset;
      continue;
    }
    const Call& call = recorded.tape.calls()[step.call];
    action.call = std::shared_ptr<const Call>(std::shared_ptr<void>(), &call);  // the tape's
    if (!call.is_foreign)
      action.unboxed = unbox(call, result_of(call, recorded, plan));  // else sizes are checked
  }
  return stage;
}

}  // namespace cohort::script
