#pragma once

#include <optional>
#include <unordered_map>
#include <vector>

#include "cohort/script/internal/execute/compiled_phase.h"
#include "cohort/script/internal/passes/out_variant.h"
#include "cohort/script/internal/passes/packing.h"

namespace cohort::script {

/// Watches one plain run of a part: what each operator allocates and for how long, and which operators give
/// the same bits by their out-variant. Then it says how the part runs without allocating.
class WarmUp {
 public:
  WarmUp(const Trace& trace, const ExecutionPlan& plan, Phase phase, const CompiledPhase& plain);

  AllocationLog& log() { return log_; }
  /// Called before an instruction, and after it, before it releases values.
  void before(std::size_t instruction) { begins_[instruction] = log_.begin_step(instruction); }
  void after(std::size_t instruction, const Tensors& values);
  /// Called between the segments of a part: what dies until the next instruction is nobody's work space.
  void pause(std::size_t last_action) { pauses_.emplace(last_action, log_.begin_step(last_action)); }
  /// Returns the phase as it runs in an arena, when all instructions have run.
  CompiledPhase finish() const;

 private:
  static constexpr std::size_t kNone = SIZE_MAX;
  // What is known of a storage of the tape.
  struct Memory {
    bool is_ours = false;       // made in this part, by LibTorch's operators, dense
    bool is_internal = false;   // and gone when the part ends
    std::size_t first = kNone;  // instructions
    std::size_t last = 0;
    std::size_t entry = kNone;  // of the log
    std::size_t piece = kNone;  // of what is placed
  };
  struct Out {
    OperatorCall call;
    int over = kUndefined;
    std::vector<AllocationLog::Allocation> scratch;
  };

  void find_memory();
  void leave_out_regions();
  void find_kept();
  std::size_t most_arena_bytes() const;
  CompiledPhase build(std::size_t most_piece_bytes);
  void take_instructions();
  void leave_out(std::size_t most_piece_bytes);
  int argument_to_write_over(std::size_t instruction, int result) const;
  void add_residents();
  void add_blocks();
  void add_block(std::size_t instruction, const AllocationLog::Allocation& entry, std::size_t piece);
  std::size_t end_of(std::size_t instruction) const;
  std::size_t new_piece(std::size_t bytes, std::size_t first, std::size_t last);
  Memory& memory_of(int slot);
  const Memory& memory_of(int slot) const { return const_cast<WarmUp*>(this)->memory_of(slot); }
  bool is_concurrent(std::size_t instruction) const;
  const Layout& layout(int slot) const { return trace_.tape.values()[at_slot(slot)].layout; }

  const Trace& trace_;
  const ExecutionPlan& plan_;
  const Phase phase_;
  const CompiledPhase& plain_;
  const std::vector<Concurrent> concurrent_;  // instructions
  AllocationLog log_;
  std::vector<Memory> memory_;  // by storage
  std::unordered_map<std::size_t, Out> outs_;
  std::vector<bool> is_resident_;                        // by slot
  std::vector<bool> is_dropped_;                         // instructions that residents make needless
  std::vector<std::size_t> begins_;                      // moments of the log, by instruction
  std::unordered_map<std::size_t, std::size_t> pauses_;  // the same
  std::vector<Lifetime> pieces_;
  // By instruction and block: the piece that it is, and until when the operator held it.
  struct Held {
    std::size_t piece;
    std::size_t died;
  };
  std::vector<std::vector<Held>> held_;
  std::size_t most_piece_bytes_ = SIZE_MAX;
  CompiledPhase compiled_;
};

}  // namespace cohort::script
