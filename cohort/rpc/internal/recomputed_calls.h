#pragma once

#include <memory>

#include "cohort/autograd/run_state.h"

namespace cohort::rpc {

/// Of this thread, for a recompute() that begins now: both of its runs make the same calls, in the same
/// context, with the same places and seeds.
std::unique_ptr<autograd::RunState> take_state_of_calls();

}  // namespace cohort::rpc
