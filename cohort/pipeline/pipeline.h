#pragma once

#include <ATen/core/Tensor.h>

#include <chrono>
#include <concepts>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cohort/comm/group.h"
#include "cohort/core/error.h"
#include "cohort/pipeline/simulate.h"
#include "cohort/pipeline/stage.h"

/// A model in stages on several placements of this process: docs/pipeline.md.
///
///     pipeline::Pipeline pipe({first_half, second_half},
///                             {.placements = {"cpu:0", "cpu:1"}, .num_micro_batches = 8});
///     optimizer.zero_grad();
///     auto loss = pipe.step(images, labels, [](const auto& out, const auto& label) {
///       return torch::cross_entropy_loss(out, label);
///     });
///     optimizer.step();
namespace cohort::pipeline {

/// Output `output` of stage `from` goes to stage `to`, past those between them, as an input behind the
/// others (in the order in which skips are listed); the next stage does not see it.
struct Skip {
  int from = 0;
  int output = 1;
  int to = 2;
};

struct PipelineOptions {
  /// core/placement.h: "cpu:0", "cpu:2-3", "cuda:1". Stage s is on placement s % placements.size().
  std::vector<std::string> placements;
  /// How many; a batch with fewer samples has one each. Sizes differ by one at most. Or:
  int num_micro_batches = 0;
  /// Samples in each; the last has what is left.
  std::int64_t split_size = 0;
  Schedule schedule = Schedule::kOneFOneB;
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
  /// step() has one placement compute at a time, and this one whenever it can (turns_with_ahead()): to
  /// measure the most that it may hold. -1: all at once.
  int ahead = -1;
};

/// What a stage threw: message, stage and micro-batch; the exception itself is nested in it.
class StageError : public Error {
 public:
  StageError(const std::string& what, int stage, int micro_batch)
      : Error("pipeline.step", what), stage_(stage), micro_batch_(micro_batch) {}
  int stage() const { return stage_; }
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
  double time = 0;

  /// What is idle of the time of all placements.
  double bubble() const;
};

/// Ownership: shares the stages' modules. Threads: one caller at a time; stages run on their placements'
/// threads, whose gradient mode and autocast state are the caller's.
class Pipeline {
 public:
  /// Moves the stages to their placements' devices.
  /// Throws: ConfigError for a placement that is none, naming the stage; UsageError where numbers do not go
  /// together, or where zb_h1 gets a stage that is recomputed, naming it.
  Pipeline(std::vector<Stage> stages, PipelineOptions options);
  ~Pipeline();
  Pipeline(Pipeline&&) noexcept;

  /// Forward, loss and backward of each micro-batch, as the schedule says; adds to the parameters' grad(),
  /// and returns the loss: the mean over the samples of the batch, times `scale`. Gradients have the bits of
  ///     for (m = 0; m < M; ++m) (loss(model(x[m]), y[m]) * (scale * n[m] / N)).backward();
  /// with the random numbers of each micro-batch and layer from a generator of their own
  /// (core/random_scope.h), whose seed is drawn from the caller's. Micro-batches share no history: where x
  /// needs no gradient, x[m] is x.narrow(0, first[m], n[m]).detach().
  /// Shapes: inputs and targets [N, ...], cut along dimension 0. An input that requires a gradient gets one.
  /// Throws: StageError; TimeoutError naming who was in what; UsageError. Parameters may have part of
  /// their gradients then. Stages that still run add to gradients and write to buffers: call
  /// wait_for_late_stages(), then zero_grad() and what else is put back, then step(). A call without that
  /// waits for them too, within its own timeout, and then throws UsageError once, as they may have added to
  /// gradients since.
  /// Ownership: copies `loss`. It is not called after a step has failed; what it refers to must outlive a
  /// call that had begun.
  at::Tensor step(const Tensors& inputs, const Tensors& targets, const Loss& loss, double scale = 1);
  template <typename Fn>
    requires std::invocable<const std::decay_t<Fn>&, const at::Tensor&, const at::Tensor&>
  at::Tensor step(const at::Tensor& input, const at::Tensor& target, Fn&& loss, double scale = 1) {
    const auto own = std::make_shared<const std::decay_t<Fn>>(std::forward<Fn>(loss));
    return step(Tensors{input}, Tensors{target}, Loss([own](const Tensors& outputs, const Tensors& targets) {
                  return (*own)(outputs.at(0), targets.at(0));
                }),
                scale);
  }

  /// Returns the outputs for the whole batch, [N, ...] each, as a part of the caller's graph: when backward
  /// comes to it, each micro-batch goes back through the stages on their threads. Forwards of a call come
  /// before its backwards, whatever the schedule; with gradients off nothing is kept. In training random
  /// operators draw as in step(); in evaluation what the calling thread would draw, in its core::RandomScope
  /// too. Throws: as step(); in
  /// backward UsageError for torch::autograd::grad(), backward(inputs) and create_graph.
  Tensors forward(const Tensors& inputs);
  at::Tensor forward(const at::Tensor& input);

  /// Returns when no stage of a call that threw runs any more: what is cleared or put back from then on stays
  /// so.
  /// Blocking: until then, for options().timeout at most. Throws: TimeoutError naming the stage.
  void wait_for_late_stages();

  /// Of all stages, each once.
  Tensors parameters() const;
  /// Sets every module of every stage to training, or to evaluation.
  void train(bool on = true);
  void eval() { train(false); }

  /// The plan of a step with this many micro-batches.
  const Plan& plan(int num_micro_batches) const;
  /// How many micro-batches a batch of `num_samples` is cut into.
  int num_micro_batches(std::int64_t num_samples) const;
  const std::vector<Stage>& stages() const;
  const PipelineOptions& options() const;
  /// Of the last step, forward or backward of this pipeline.
  const RunTimes& last_run() const;
  /// Of the last step, without graph; with options().keep_outputs.
  const Tensors& outputs() const;

 private:
  struct Impl;
  std::shared_ptr<Impl> impl_;
};

}  // namespace cohort::pipeline
