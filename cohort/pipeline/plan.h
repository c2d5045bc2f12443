#pragma once

#include <string>
#include <vector>

#include "cohort/pipeline/schedule.h"

/// What each placement of a pipeline does, and in which order: a plan. Without LibTorch.
///
///     const auto plan = pipeline::make_plan({.schedule = pipeline::Schedule::kZeroBubble,
///                                            .num_stages = 4, .num_micro_batches = 8});
///     std::cout << plan.text();
///     const auto simulation = pipeline::simulate(plan);   // simulate.h: time, memory, deadlock
///     simulation.bubble;
///     pipeline::draw_svg({{"plan", simulation.actions, ""}}, plan.num_placements(), plan.num_stages());
///
/// Sources: Huang et al., "GPipe", NeurIPS 2019 (fill-drain); Narayanan et al., "Efficient Large-Scale
/// Language Model Training on GPU Clusters", SC 2021 (1F1B with flush, interleaved); Qi et al., "Zero Bubble
/// Pipeline Parallelism", ICLR 2024 (ZB-H1). They differ from those in one point: the backwards of a stage
/// run in the order of the micro-batches in every schedule, so gradients have the same bits in all of them.
namespace cohort::pipeline {

/// What a stage does: four kinds compute, four hand over.
enum class ActionKind {
  kForward,
  kBackward,        ///< gradients of inputs and of weights
  kInputGradient,   ///< of the inputs alone: what the stage before waits for
  kWeightGradient,  ///< the rest of that micro-batch's backward
  kSendActivation,
  kReceiveActivation,
  kSendGradient,
  kReceiveGradient,
};

/// One thing that one stage does for one micro-batch.
struct Action {
  ActionKind kind = ActionKind::kForward;
  int stage = 0;
  int micro_batch = 0;
  bool operator==(const Action&) const = default;
  /// The stage computes, it does not hand over.
  bool computes() const { return kind <= ActionKind::kWeightGradient; }
};

/// "F1.3": forward of micro-batch 3 in stage 1. B: backward; I, W: gradients of inputs, of weights; sA, rA,
/// sG, rG: sends and receives an activation, a gradient.
std::string to_string(const Action& action);
/// "forward", "weight gradient" and so on.
const char* name_of(ActionKind kind);

/// What a plan is made for.
struct PlanOptions {
  /// The order of the computations.
  Schedule schedule = Schedule::kOneFOneB;
  int num_stages = 1;
  /// Placements; 0: one per stage. Stage s is on placement s % num_placements.
  int num_placements = 0;
  int num_micro_batches = 1;
};

/// Returns the place for which a schedule says its order.
/// Throws: UsageError for no micro-batch, or for fewer stages than placements.
PlaceInPipeline place_in(const PlanOptions& options, int placement);
/// Returns the order that `schedule`, the type of options.schedule, says for a placement.
/// Throws: UsageError for numbers that no order can have.
ActionOrder action_order(const PlanOptions& options, const ScheduleType& schedule, int placement);

/// What each placement does in one step, action after action.
struct Plan {
  PlanOptions options;                       ///< with num_placements set
  std::vector<std::vector<Action>> actions;  ///< of each placement, in order
  bool splits_backward = false;              ///< ScheduleType::splits_backward

  int num_placements() const { return options.num_placements; }
  int num_stages() const { return options.num_stages; }
  int num_micro_batches() const { return options.num_micro_batches; }
  /// Stages per placement.
  int num_chunks() const { return options.num_stages / options.num_placements; }
  /// The placement of a stage: stages go round the placements.
  int placement_of(int stage) const { return stage % options.num_placements; }
  /// One line per placement.
  std::string text() const;
};

/// Returns the plan of one step. What stages of one placement hand to each other needs no send or receive.
/// Throws: UsageError for an unknown schedule, and where the numbers do not go together: 1f1b and zb_h1 have
/// one stage per placement, interleaved_1f1b two or more.
Plan make_plan(const PlanOptions& options);

/// Returns a plan's forwards alone, or its backwards alone: a pipeline that is used as a module does the
/// first when it is called, and the second when backward comes to it.
Plan forward_part(const Plan& plan);
/// The other half: its backwards, with the gradients that they hand over.
Plan backward_part(const Plan& plan);

}  // namespace cohort::pipeline
