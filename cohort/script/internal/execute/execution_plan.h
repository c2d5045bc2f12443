#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "cohort/script/internal/ir/trace.h"
#include "cohort/script/internal/passes/parallel_regions.h"

namespace cohort::script {

/// An operator to run, or a view to make.
struct PlannedStep {
  std::size_t call = 0;       ///< of the tape
  int view = kUndefined;      ///< slot of the view to make; kUndefined: an operator runs
  int view_of = kUndefined;   ///< the base of a view, which needs no operator
  std::int64_t offset = 0;    ///< from the base's
  std::vector<int> releases;  ///< values that nobody uses afterwards
};

/// The two parts of a program.
enum class Phase : std::uint8_t { kForward, kBackward };

/// What is to be run of a tape, in which order, and how long its values live.
struct ExecutionPlan {
  explicit ExecutionPlan(const Trace& trace);

  std::vector<PlannedStep> steps;       ///< forward's, then backward's
  std::size_t split = 0;                ///< of steps: where backward begins
  std::vector<ParallelRegion> regions;  ///< of forward
  std::vector<int> releases_at_end;     ///< values that forward lets go at its end
  Tensors fixed;                        ///< captured tensors, constants and their views, by slot
  std::vector<bool> hoisted;            ///< slots of those
  std::vector<int> hoisted_from;        ///< the captured tensor or constant that a hoisted slot is a view of
  std::vector<int> saved;               ///< slots that forward makes and backward reads
  std::vector<bool> saved_is_written;   ///< of each of these: whether backward writes to its memory
  std::vector<int> read_by_backward;    ///< captured tensors and inputs that backward reads, by slot
  std::vector<std::size_t> last_read_by_backward;  ///< by slot: the last call that does, views included
  /// By part: inputs and captured tensors, by slot, that it writes to.
  std::array<std::vector<int>, 2> written;

  /// The steps of a part: [begin(phase), end(phase)).
  std::size_t begin(Phase phase) const { return phase == Phase::kForward ? 0 : split; }
  std::size_t end(Phase phase) const { return phase == Phase::kForward ? split : steps.size(); }
  /// Which values outlive a part, by slot: what is handed out, and what backward reads of forward's.
  std::vector<bool> kept(Phase phase, const Trace& trace) const;

 private:
  void find_steps(const Trace& trace);
  bool add_views(const Trace& trace, std::size_t call);
  void find_effects(const Trace& trace);
  void find_written(const Trace& trace);
  void plan_lives(const Trace& trace, Phase phase);
};

/// Returns a view of `base` that lies `offset` elements after where it begins.
at::Tensor view_of(const at::Tensor& base, const Layout& layout, std::int64_t offset);

/// Calls fn(slot) for each value of these places.
template <typename Fn>
void each_slot(const std::vector<TensorPlace>& places, const Fn& fn) {
  for (const TensorPlace& place : places) {
    for (const int slot : place.slots) {
      if (slot >= 0) fn(slot);
    }
  }
}

}  // namespace cohort::script
