#pragma once

#include <ATen/core/Tensor.h>

#include <concepts>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include "cohort/pipeline/options.h"
#include "cohort/pipeline/stage.h"

/// A model in stages on several placements of this process: docs/guide/pipeline.md.
///
///     pipeline::Pipeline pipe({first_half, second_half},
///                             {.placements = base::parse_placements("cpu:0,cpu:1"),
///                              .num_micro_batches = 8});
///     optimizer.zero_grad();
///     auto loss = pipe.step(images, labels, [](const auto& out, const auto& label) {
///       return torch::cross_entropy_loss(out, label);
///     });
///     optimizer.step();
namespace cohort::pipeline {

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
  /// wait_for_late_stages(), then zero_grad() and what else is restored, then step(). A call without that
  /// waits for them too, within its own timeout, and then throws UsageError once, as they may have added to
  /// gradients since.
  /// Ownership: copies `loss`. It is not called after a step has failed; what it refers to must outlive a
  /// call that had begun.
  at::Tensor step(const Tensors& inputs, const Tensors& targets, const Loss& loss, double scale = 1);
  /// The same for a model of one tensor, with a loss of one output and one target.
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
  /// The same for a model of one tensor to one tensor. Throws: UsageError too where the last stage returns
  /// several.
  at::Tensor forward(const at::Tensor& input);

  /// Returns when no stage of a call that threw runs any more: what is cleared or restored from then on stays
  /// so.
  /// Blocking: until then, for options().timeout at most. Throws: TimeoutError naming the stage.
  void wait_for_late_stages();

  /// Of all stages, each once.
  Tensors parameters() const;
  /// Sets every module of every stage to training, or to evaluation.
  void train(bool on = true);
  /// Sets every module of every stage to evaluation.
  void eval() { train(false); }

  /// The plan of a step with this many micro-batches.
  const Plan& plan(int num_micro_batches) const;
  /// How many micro-batches a batch of `num_samples` is cut into.
  int num_micro_batches(std::int64_t num_samples) const;
  /// The stages, in order; under several ranks those of others are remote().
  const std::vector<Stage>& stages() const;
  /// Options as they were given.
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
