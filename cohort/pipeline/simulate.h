#pragma once

#include <vector>

#include "cohort/pipeline/plan.h"

/// What a plan costs, before it is run: time, idle time, memory, and whether it can end at all.
namespace cohort::pipeline {

/// A computation, and when it runs.
struct TimedAction {
  Action action;
  double begin = 0, end = 0;  ///< in the unit of StageCosts, from the step's begin
};

/// What a run of a plan would do and take.
struct Simulation {
  std::vector<std::vector<TimedAction>> actions;  ///< of each placement: what computes, in order
  double time = 0;                                ///< from the first action's begin to the last one's end
  double bubble = 0;                              ///< idle time of all placements over time * placements
  std::vector<double> peak_memory;                ///< of each placement
  int max_queued = 0;                             ///< the most micro-batches that waited between two stages
};

/// What the stages of a plan cost, and what they may hold.
struct SimulateOptions {
  /// One per stage, or one for all; empty: StageCosts().
  std::vector<StageCosts> costs = {};
  /// Micro-batches that may wait between two stages, for each direction; who sends one more waits. 0: any.
  int channel_capacity = 0;
};

/// Runs the plan on a clock of its own.
/// Throws: UsageError where a placement waits for ever, saying at which action each one does; where a
/// micro-batch comes that was not expected, or is computed twice, never, or before what it needs.
Simulation simulate(const Plan& plan, const SimulateOptions& options = {});

/// Returns the least capacity with which no placement ever waits to send, at equal costs.
int channel_capacity(const Plan& plan);

/// Returns the order in which placements compute when one computes at a time, and placement `run_ahead`
/// whenever it can: the others do what it waits for and no more. So what passes between it and them lives as
/// long as it may. `plan` is one that simulate() runs to its end with this capacity.
std::vector<int> serialized_order(const Plan& plan, int run_ahead, int channel_capacity);

/// What is idle of the whole, by the formula of the schedule's paper: with P placements, M micro-batches, V
/// stages per placement and times F, I, W of all of a placement's stages, the idle time of each placement is
/// (P - 1)(F + I + W) for fill_drain and 1f1b, that over V for interleaved_1f1b, and (P - 1)(F + I - W) for
/// zb_h1. For equal stages, M >= P (a multiple of P where interleaved), and for zb_h1 W not above F or I.
/// Throws: UsageError for a schedule without a formula, no micro-batch, or fewer stages than placements.
double bubble_formula(const PlanOptions& options, const StageCosts& costs = {});

/// The most memory of a placement by the formula: activations of M, P - p, 2(P - p - 1) + (V - 1) P + 1, and
/// P - p with p weight parts, for placement p, in the order of Schedule. For M large enough.
/// Throws: UsageError for no micro-batch, or fewer stages than placements.
double memory_formula(const PlanOptions& options, int placement, const StageCosts& costs = {});
/// The same with `schedule`, the type of options.schedule, for a caller that asks often.
double memory_formula(const PlanOptions& options, const ScheduleType& schedule, int placement,
                      const StageCosts& costs);

}  // namespace cohort::pipeline
