#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "cohort/base/error.h"
#include "cohort/base/placement.h"
#include "cohort/comm/group.h"
#include "cohort/pipeline/simulate.h"
#include "cohort/pipeline/stage.h"

/// What a pipeline is told, and what it says of a run.
namespace cohort::pipeline {

/// Output `output` of stage `from` goes to stage `to`, past those between them, as an input after the
/// others (in the order in which skips are listed); the next stage does not see it.
struct Skip {
  int from = 0;    ///< stage that makes the output
  int output = 1;  ///< its place among the outputs of that stage
  int to = 2;      ///< stage that takes it
};

/// How a pipeline cuts a batch, where its stages run, and what goes between them.
struct PipelineOptions {
  /// As of base::parse_placements("cpu:0,cpu:1"). Stage s is on placement s % placements.size().
  std::vector<base::Placement> placements;
  /// How many; a batch with fewer samples has one each. Sizes differ by one at most. Or:
  int num_micro_batches = 0;
  /// Samples in each; the last has what is left.
  std::int64_t split_size = 0;
  /// The order in which stages work on micro-batches.
  Schedule schedule = Schedule::kOneFOneB;
  /// Outputs that do not go to the next stage.
  std::vector<Skip> skips = {};
  /// For one step, from the call to the end; over ranks with the hand-over of the loss.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  /// With a group, stages are on its ranks: rank r is placement r, and runs its own stages alone. Every rank
  /// makes the same calls, with batches of the same length: the first stage's rank uses the input, the last
  /// one's the target. Gradients have the bits that threads give. step() only.
  comm::Group group = {};
  /// step() keeps the outputs of the last stage: Pipeline::outputs().
  bool keep_outputs = false;
  /// Called on a placement's thread when one of its actions that compute has ended.
  std::function<void(const Action&)> on_action = {};
  /// step() lets one placement compute at a time, in serialized_order(): this placement runs ahead of the
  /// others. The order is the same in each run, and results keep their bits. For debugging, and for measuring
  /// the most memory that a placement may hold. Not over ranks. -1: all compute at once.
  int run_ahead = -1;
};

/// What a stage threw: message, stage and micro-batch; the exception itself is nested in it.
class StageError : public Error {
 public:
  StageError(const std::string& what, int stage, int micro_batch)
      : Error("pipeline.step", what), stage_(stage), micro_batch_(micro_batch) {}
  /// Number of the stage that threw.
  int stage() const { return stage_; }
  /// Number of the micro-batch that it computed.
  int micro_batch() const { return micro_batch_; }

 private:
  int stage_, micro_batch_;
};

/// The mean over the samples of a micro-batch: outputs of the last stage, and targets.
using Loss = std::function<at::Tensor(const Tensors& outputs, const Tensors& targets)>;

/// What a run did. Times in milliseconds from its begin.
struct RunTimes {
  std::vector<std::vector<TimedAction>> actions;  ///< of each placement: what computes
  std::vector<int> peak_live;  ///< of each placement: micro-batches (of all its stages) held at once, at most
  double time = 0;             ///< of the whole run

  /// What is idle of the time of all placements.
  double bubble() const;
};

}  // namespace cohort::pipeline
