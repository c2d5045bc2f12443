#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "cohort/pipeline/profile.h"

/// Where to cut a model, and into how many micro-batches a batch: by measuring.
namespace cohort::pipeline {

/// What balance() cuts for, and what it must keep to.
struct BalanceOptions {
  int num_stages = 2;
  int num_placements = 0;  ///< 0: one per stage
  int num_micro_batches = 8;
  /// Whose idle time and activations are counted.
  Schedule schedule = Schedule::kOneFOneB;
  /// What one placement may hold: parameters with their gradients and `optimizer_factor` times the
  /// parameters, and the activations that the schedule keeps. 0: any.
  std::int64_t max_bytes = 0;
  /// Times the parameters' bytes that the optimizer's state takes: 1 for SGD with momentum, 2 for Adam.
  double optimizer_factor = 1;
  /// Evens out bytes instead of time: for layers that run one after the other (docs/guide/parallel.md).
  bool by_bytes = false;
};

/// A model's cut, and what it is predicted to cost.
struct Balance {
  std::vector<std::size_t> cuts;        ///< stage s has layers [cuts[s], cuts[s + 1])
  std::vector<StageCosts> costs;        ///< of each stage, milliseconds and bytes
  std::vector<double> placement_bytes;  ///< parameters, gradients, optimizer's state and activations
  double step = 0;                      ///< milliseconds, as predicted
  double bubble = 0;                    ///< as predicted
  double evenness = 0;                  ///< mean over slowest placement: 1 is even

  /// Returns the parts of `model`, a list of layers, by `cuts`. Throws: as Stage::part().
  std::vector<Stage> stages(const Stage& model) const;
  /// A line per stage, and the step time.
  std::string text() const;
};

/// Cuts the layers where the slowest stage is fastest (by_bytes: the largest smallest), among cuts that fit
/// into max_bytes.
/// Throws: UsageError where there are fewer layers than stages, or no cut fits, naming the least that would.
Balance balance(const std::vector<LayerProfile>& layers, const BalanceOptions& options);

/// Which split sizes tune() runs.
struct TuneOptions {
  std::vector<std::int64_t> split_sizes = {};  ///< empty: powers of two up to the batch
  int repeats = 3;                             ///< steps that are timed for each split size
};
/// One split size that was run.
struct TunePoint {
  std::int64_t split_size = 0;
  double milliseconds = 0;  ///< median of the repeats
};
/// What tune() measured.
struct TuneResult {
  std::vector<TunePoint> points;  ///< in the order in which split sizes were given
  std::int64_t best = 0;          ///< the split size of the shortest step
  /// A line for each split size, the best one marked.
  std::string text() const;
};

/// Runs steps with each split size, and returns what they took. Buffers and gradients are afterwards what
/// they were. Throws: as Pipeline::step(), when late stages have ended; it waits for them as long as a step.
TuneResult tune(const std::vector<Stage>& stages, PipelineOptions pipeline, const Tensors& inputs,
                const Tensors& targets, const Loss& loss, const TuneOptions& options = {});

}  // namespace cohort::pipeline
