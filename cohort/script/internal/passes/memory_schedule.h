#pragma once

#include <span>
#include <vector>

#include "cohort/script/internal/execute/execution_plan.h"

namespace cohort::script {

/// True if `call` has no effect but its one new result, and reads nothing but its arguments: it may run at
/// any time between what it needs and what needs it.
bool is_pure(const OperatorCall& call);

/// Puts the steps of a part into an order that holds fewer bytes at once, where one is found: gradients of
/// large weights are taken when what their computation needs is about to be released. Only pure operators
/// move, and none before a write to what it reads or after the next one; values stay what they are, bit for
/// bit. `kept`: the values, by slot, that outlive the part.
void order_for_memory(const Tape& tape, const std::vector<bool>& kept, std::span<PlannedStep> steps);

}  // namespace cohort::script
