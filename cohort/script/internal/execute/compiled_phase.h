#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "cohort/script/internal/execute/arena.h"
#include "cohort/script/internal/execute/execution_plan.h"
#include "cohort/script/internal/ir/unboxed.h"

namespace cohort::script {

/// Modes that kernels may ask for, in bits: whether gradients are on, and of each key of kAutocastKeys
/// whether calls are below autocast there.
using ModeBits = std::uint8_t;
/// The calling thread's modes.
ModeBits modes_now();
/// The modes that a call runs in.
ModeBits modes_of(const OperatorCall& call);
/// Sets the calling thread's modes, which are `now`.
void change_modes(ModeBits now, ModeBits modes);

/// A step as it is run.
struct Instruction {
  std::size_t number = 0;                    ///< of the tape's call that it comes from
  std::shared_ptr<const OperatorCall> call;  ///< null: a view
  std::shared_ptr<const Unboxed> unboxed;    ///< of the call, where its signature is a common one
  /// Slot of the view that it makes, and of its base; kUndefined for an operator.
  int view = kUndefined, view_of = kUndefined;
  ModeBits modes = 0;                                ///< a view's are those of the step before it
  std::int64_t offset = 0;                           ///< of a view, from the base's
  std::vector<int> releases;                         ///< slots whose values go afterwards
  std::vector<PlannedBlock> blocks;                  ///< what the operator allocates, in order
  std::vector<std::pair<int, std::int64_t>> placed;  ///< results, by slot, that these blocks hold
};

/// A value that stays in its frame: a tensor in the arena that operators write into, or a view of one.
struct Resident {
  int slot = kUndefined;     ///< where the frame has it
  int view_of = kUndefined;  ///< slot of its base; kUndefined: a tensor in the arena
  std::int64_t offset = 0;   ///< bytes in the arena; elements from the base of a view
  std::size_t bytes = 0;     ///< of a tensor in the arena
};

/// One part of a program, ready to run.
struct CompiledPhase {
  std::vector<Instruction> instructions;  ///< in the order in which they run
  std::vector<ParallelRegion> regions;    ///< of instructions
  std::vector<int> releases_at_end;       ///< values that go when all instructions have run
  std::vector<Resident> residents;        ///< what stays in the frame between runs
  std::size_t arena_bytes = 0;            ///< size that a frame's arena must have
  std::size_t num_outs = 0;               ///< operators that write into residents
};

/// Returns a part of a plan whose operators allocate for themselves.
CompiledPhase compile_plain(const Trace& trace, const ExecutionPlan& plan, Phase phase);

/// The slot that a call's only new result goes to; kUndefined: there is none, or it stays where it is.
int result_of(const OperatorCall& call, const Trace& trace, const ExecutionPlan& plan);

}  // namespace cohort::script
